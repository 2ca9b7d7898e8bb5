"""Threads that compute the batches of one training step side by side.

The products of a small model are too short for several cores, whose threads wait for each other after each of them:
with the waits that the command line sets, 1.0M parameters train 1.1 to 1.8 times as fast with a batch on each of two
cores (docs/log.md). PyTorch's operators give the interpreter's lock back while they compute, and a backward pass runs
in the thread that asks for it.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import torch

from sportsllm.errors import UsageError
from sportsllm.models.language_model import SportsLLM

# Seconds after which a thread that waits asks for the interpreter's lock; Python's own 5 ms are many operators long.
# Sampling 3.1M parameters in two threads: 5,270 to 5,430 tokens/s with those, 5,970 with these, 5,660 with 5 us.
_SWITCH_S = 5e-4


@contextmanager
def batch_threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """`count` threads, each with its share of the CPU's; None for 1, which is the caller's own thread.

    The caller's thread keeps all of them for the optimizer and for validation.
    """
    if count == 1:
        yield None
        return
    available, switch_s = torch.get_num_threads(), sys.getswitchinterval()
    ready = Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread's first call takes the number last set anywhere; later ones keep its own
        torch.set_num_threads(max(1, available // count))
        ready.wait()

    with ThreadPoolExecutor(count, thread_name_prefix="batch", initializer=start) as pool:
        for _ in range(count):  # a thread is started for each, since those before it still wait
            pool.submit(int)
        ready.wait()
        torch.set_num_threads(available)
        sys.setswitchinterval(_SWITCH_S)
        try:
            yield pool
        finally:
            sys.setswitchinterval(switch_s)


def check_parallel(model: SportsLLM, device: torch.device) -> None:
    """Whether batches can be computed side by side.

    Raises:
        UsageError: not on a CPU, or random numbers are drawn, whose order the threads would change.
    """
    if device.type != "cpu":
        raise UsageError(f"parallel_batches is for a CPU, the model is on {device.type}; leave it out")
    if model.config.dropout:
        raise UsageError("parallel_batches would draw dropout in another order each time; leave one of the two out")
    if model.config.experts is not None or model.config.selection is not None:
        what = "experts add" if model.config.experts is not None else "selection adds"
        raise UsageError(f"parallel_batches: {what} a loss of one batch at a time; leave it out")
