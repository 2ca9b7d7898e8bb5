"""Processors: the device to compute on, threads that compute batches side by side, and the size of a loss's chunks.

torch is imported inside functions, so that sizes can be planned without it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING

from sportsllm import processes
from sportsllm.errors import ResourceError, UsageError

if TYPE_CHECKING:
    import torch

# Seconds after which a waiting thread asks for the interpreter's lock. Sampling with 3.1M parameters in two threads:
# 5,270 to 5,430 tokens/s with Python's own 5 ms, 5,970 with 500 us, 5,660 with 5 us.
_SWITCH_S = 5e-4
CPUINFO = Path("/proc/cpuinfo")
DEVICES = ("auto", "cpu", "cuda")
LOSS_CHUNK_TOKENS = 1_024
"""The most tokens of a chunk of the loss, on any processor."""
_CPU_CHUNK_TOKENS, _CPU_CHUNK_LOGITS = (128, 512), 8 * 2**20
_device = "auto"


def cpuinfo(*keys: str) -> str | None:
    """The value of the first line of /proc/cpuinfo with one of these keys; None without one, as on other systems."""
    if CPUINFO.exists():
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return None


def use_processor(threads: int | None = None, device: str = "auto") -> None:
    """Compute with this many CPU threads, and train on this device; by default all, and a CUDA GPU if there is one."""
    global _device
    find_device(device)
    _device = device
    set_threads(threads)
    processes.join(training_device(quiet=True))


def find_device(name: str, flag: str = "--device") -> torch.device:
    """The device that one of `DEVICES` or `cuda:N` names; `auto` is a CUDA GPU if there is one.

    Raises:
        UsageError: an unknown device, or a GPU that is not there.
        ResourceError: fewer GPUs than processes.
    """
    import torch

    kind, _, number = name.partition(":")
    if name not in DEVICES and not (kind == "cuda" and number.isdecimal()):
        raise UsageError(f"{flag} {name}: use {', '.join(DEVICES)} or cuda:N")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and not gpus:
        raise UsageError(f"{flag} {name}: this PyTorch finds no CUDA GPU; use cpu")
    if kind == "cpu" or not gpus:
        return torch.device("cpu")
    if number and processes.count() > 1:
        raise UsageError(f"{flag} {name}: each process has a GPU of its own; use cuda")
    place = int(number or processes.local_rank())
    if place >= gpus:
        error = UsageError if number else ResourceError  # every process prints the latter: others have a GPU
        raise error(f"{flag} {name}: there is no GPU {place}; CUDA GPUs here are 0 to {gpus - 1}")
    return torch.device("cuda", place)


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads in torch, by default all, and the fastest matrix products."""
    import torch

    from sportsllm.products import use_fast_products

    use_fast_products(cpuinfo("vendor_id") or platform.processor())
    if threads:
        torch.set_num_threads(threads)


def training_device(quiet: bool = False) -> torch.device:
    """The device of `use_processor`; a CUDA GPU is logged unless `quiet`."""
    import torch

    device = find_device(_device)
    if device.type == "cuda" and not quiet:
        from sportsllm.console import log

        log(f"training on {torch.cuda.get_device_name(device)}")
    return device


@contextmanager
def batch_threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """`count` threads, each with its share of the CPU's; None for 1, which is the caller's own thread.

    For models too small to keep all cores busy with one batch: PyTorch's operators release the interpreter's lock as
    they compute. The caller's thread keeps all of the CPU's threads.
    """
    if count == 1:
        yield None
        return
    import torch

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


def loss_chunk_tokens(vocab_size: int, device: str = "cpu") -> int:
    """Tokens whose logits `sportsllm.training.loss` makes at once.

    On a CPU 256 to 512 were fastest at vocabularies of 2,048 and of 32,000: with fewer the products and the sum of the
    head's gradient slow down, with more the passes over the logits leave the cache. Larger vocabularies get fewer, so
    that a buffer stays near 32 MiB. A GPU needs long products.
    """
    if device != "cpu":
        return LOSS_CHUNK_TOKENS
    least, most = _CPU_CHUNK_TOKENS
    return max(least, min(most, _CPU_CHUNK_LOGITS // vocab_size))
