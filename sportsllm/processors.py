"""Processors: the device to compute on, and threads that compute batches side by side."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import torch

from sportsllm.console import log
from sportsllm.errors import UsageError

# Seconds after which a waiting thread asks for the interpreter's lock. Sampling with 3.1M parameters in two threads:
# 5,270 to 5,430 tokens/s with Python's own 5 ms, 5,970 with 500 us, 5,660 with 5 us.
_SWITCH_S = 5e-4
DEVICES = ("auto", "cpu", "cuda")
_device = "auto"


def use_processor(threads: int | None = None, device: str = "auto") -> None:
    """Compute with this many CPU threads, and train on this device; by default all, and a CUDA GPU if there is one.

    Raises:
        UsageError: an unknown device, or cuda without one.
    """
    global _device
    if device not in DEVICES:
        raise UsageError(f"--device {device}: use {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch finds no CUDA GPU; use cpu")
    _device = device
    if threads:
        torch.set_num_threads(threads)


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads in torch."""
    if threads:
        torch.set_num_threads(threads)


def training_device() -> torch.device:
    """The device of `use_processor`; a CUDA GPU is logged."""
    if _device != "cpu" and torch.cuda.is_available():
        log(f"training on {torch.cuda.get_device_name()}")
        return torch.device("cuda")
    return torch.device("cpu")


@contextmanager
def batch_threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """`count` threads, each with its share of the CPU's; None for 1, which is the caller's own thread.

    For models too small to keep all cores busy with one batch: with a batch on each of two cores, 1.0M parameters train
    1.1 to 1.8 times as fast (docs/results). PyTorch's operators release the interpreter's lock as they compute, and a
    backward pass runs in the thread that asks for it. The caller's thread keeps all of the CPU's threads.
    """
    if count == 1:
        yield None
        return
    available, switch_s = torch.get_num_threads(), sys.getswitchinterval()
    ready = Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread's first call takes the number last set anywhere; later calls keep it
        torch.set_num_threads(max(1, available // count))
        ready.wait()

    with ThreadPoolExecutor(count, thread_name_prefix="batch", initializer=start) as pool:
        for _ in range(count):  # each starts a thread, since earlier ones still wait
            pool.submit(int)
        ready.wait()
        torch.set_num_threads(available)
        sys.setswitchinterval(_SWITCH_S)
        try:
            yield pool
        finally:
            sys.setswitchinterval(switch_s)
