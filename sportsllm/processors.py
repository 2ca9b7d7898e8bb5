"""Processors: the device to compute on, fast products, threads side by side, and the size of a loss's chunks.

torch is imported inside functions, so that sizes can be planned without it.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

from sportsllm import processes
from sportsllm.errors import ResourceError, UsageError
from sportsllm.process_memory import cpu_limit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Seconds after which a waiting thread asks for the interpreter's lock. Sampling with 3.1M parameters in two threads:
# 5,270 to 5,430 tokens/s with Python's own 5 ms, 5,970 with 500 us, 5,660 with 5 us.
_SWITCH_S = 5e-4
CPUINFO = Path("/proc/cpuinfo")
DEVICES = ("auto", "cpu", "cuda")
LOSS_CHUNK_TOKENS = 1_024
"""The most tokens of a chunk of the loss, on any processor."""
_LEAST_OPERATIONS = 2**20  # of a product that oneDNN computes: the call from Python costs 9 microseconds
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
    place = int(number or (os.environ["LOCAL_RANK"] if processes.count() > 1 else 0))
    if place >= gpus:
        error = UsageError if number else ResourceError  # every process prints the latter: others have a GPU
        raise error(f"{flag} {name}: there is no GPU {place}; CUDA GPUs here are 0 to {gpus - 1}")
    return torch.device("cuda", place)


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads in torch, by default all that a container has, and the fastest matrix products."""
    import torch

    use_fast_products(cpuinfo("vendor_id") or platform.processor())
    if most := threads or cpu_limit():
        torch.set_num_threads(threads or min(most, torch.get_num_threads()))


@cache
def use_fast_products(vendor: str) -> torch.library.Library | None:
    """Compute float32 products by oneDNN in this process if its processor is an AMD with AVX-512.

    PyTorch computes them with Intel's MKL, which uses AVX2 on these processors. oneDNN, which PyTorch uses for other
    types, is 1.5 times as fast for 8 rows and twice as fast from 64 rows on. With AVX2 alone the two are level.
    """
    import torch

    if "AuthenticAMD" not in vendor or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    replace_products(library)
    return library


def replace_products(library: torch.library.Library) -> None:
    """Override the CPU's `mm` and `addmm` in `library`. Products that do not suit oneDNN go to PyTorch's own."""
    import torch

    product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    mm: Callable[..., Tensor] = torch.library.get_kernel("aten::mm", "CPU").call_boxed
    addmm: Callable[..., Tensor] = torch.library.get_kernel("aten::addmm", "CPU").call_boxed
    float32 = torch.float32

    def suits(left_MK: Tensor, right_KN: Tensor) -> bool:
        """Whether oneDNN is faster: it has no fast product if the right matrix is a part of another one."""
        (rows, inner), columns = left_MK.shape, right_KN.shape[1]
        return (
            left_MK.dtype is float32 is right_KN.dtype
            and inner == len(right_KN)
            and min(rows, columns) > 3
            and rows * inner * columns > _LEAST_OPERATIONS
            and min(left_MK.stride()) == 1
            and (right_KN.is_contiguous() or right_KN.t().is_contiguous())
        )

    def multiply(keys: Any, left_MK: Tensor, right_KN: Tensor) -> Tensor:
        if suits(left_MK, right_KN):
            return product(left_MK, right_KN.t(), None, "none", [], "")
        return mm(keys, left_MK, right_KN)

    def multiply_and_add(
        keys: Any, bias: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        whole = bias.shape == right_KN.shape[1:] and bias.is_contiguous()  # oneDNN reads it without strides
        if beta == 1 == alpha and whole and suits(left_MK, right_KN):
            return product(left_MK, right_KN.t(), bias, "none", [], "")
        return addmm(keys, bias, left_MK, right_KN, beta=beta, alpha=alpha)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # about the override
        for name, operator in (("mm", multiply), ("addmm", multiply_and_add)):
            library.impl(name, operator, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]


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
