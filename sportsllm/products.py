"""Float32 matrix products by oneDNN on AMD processors with AVX-512.

PyTorch multiplies float32 matrices with Intel's MKL, which uses AVX2 on these processors. oneDNN, which PyTorch uses
for other types, is 1.5 times as fast for 8 rows and twice as fast from 64 rows on. With AVX2 alone the two are level.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LEAST_OPERATIONS = 2**20  # the call from Python costs 9 microseconds


def _suits(left_MK: Tensor, right_KN: Tensor) -> bool:
    """Whether oneDNN is faster: it has no fast product if the right matrix is a part of another one."""
    (rows, inner), columns = left_MK.shape, right_KN.shape[1]
    return (
        left_MK.dtype is torch.float32 is right_KN.dtype
        and inner == len(right_KN)
        and min(rows, columns) > 3
        and rows * inner * columns > _LEAST_OPERATIONS
        and min(left_MK.stride()) == 1
        and (right_KN.is_contiguous() or right_KN.t().is_contiguous())
    )


def _replace(library: torch.library.Library) -> None:
    """Override the CPU's `mm` and `addmm` in `library`. Products that do not suit oneDNN go to PyTorch's own."""
    product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    mm: Callable[..., Tensor] = torch.library.get_kernel("aten::mm", "CPU").call_boxed
    addmm: Callable[..., Tensor] = torch.library.get_kernel("aten::addmm", "CPU").call_boxed

    def multiply(keys: Any, left_MK: Tensor, right_KN: Tensor) -> Tensor:
        if _suits(left_MK, right_KN):
            return product(left_MK, right_KN.t(), None, "none", [], "")
        return mm(keys, left_MK, right_KN)

    def multiply_and_add(
        keys: Any, bias: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        whole = bias.shape == right_KN.shape[1:] and bias.is_contiguous()  # oneDNN reads it without strides
        if beta == 1 == alpha and whole and _suits(left_MK, right_KN):
            return product(left_MK, right_KN.t(), bias, "none", [], "")
        return addmm(keys, bias, left_MK, right_KN, beta=beta, alpha=alpha)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # about the override
        for name, operator in (("mm", multiply), ("addmm", multiply_and_add)):
            library.impl(name, operator, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]


@cache
def use_fast_products(vendor: str) -> torch.library.Library | None:
    """Override them in this process if its processor is an AMD with AVX-512."""
    if "AuthenticAMD" not in vendor or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _replace(library)
    return library
