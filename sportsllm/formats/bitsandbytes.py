"""Reads matrices that bitsandbytes packed (NF4, FP4, LLM.int8, as `transformers` saves them) as dense ones.

The library dequantizes. It reads past the end of a damaged tensor, so sizes are checked first.
Sources: bitsandbytes' QuantState, arXiv 2305.14314 (NF4), 2208.07339 (LLM.int8).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sportsllm.errors import ArtifactError
from sportsllm.files import clip

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = "quant_state."

Read = Callable[[str], Tensor]
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it asks for a package that it does without


def companions(names: Iterable[str]) -> frozenset[str]:
    """Names of the tensors that only say how to read a packed matrix."""
    there, found = set(names), set[str]()
    for name in there:
        matrix, _, part = name.rpartition(".weight.")
        if matrix and f"{matrix}.weight" in there and (part in _PARTS or part.startswith(_STATE)):
            found.add(name)
        module, _, last = name.rpartition(".")
        if last in ("SCB", "weight_format") and f"{module}.weight" in there:
            found.add(name)
    return frozenset(found)


def read_dense(name: str, beside: frozenset[str], read: Read, where: str) -> Tensor:
    """The tensor `name` of such a checkpoint, dequantized if it is packed.

    `beside` are the checkpoint's `companions`, `read` gives a stored tensor, and `where` is the file, for messages.

    Returns:
        The tensor itself if it is not packed; else (N, K): of 4 bits in the type that the model had, of 8 bits in
        float32.

    Raises:
        ArtifactError: a part is missing, of the wrong kind, or does not fit the others.
    """
    tensor = read(name)
    if tensor.dtype == torch.int8:
        return _eight_bits(name.removesuffix(".weight"), tensor, beside, read, where)
    parts = {part: read(part) for part in sorted(beside) if part.startswith(f"{name}.")}
    if not parts and tensor.dtype != torch.uint8:
        return tensor
    from bitsandbytes.functional import QuantState, dequantize_4bit

    pairs = tensor.contiguous().flatten().view(torch.uint8)  # some are stored under a float type
    try:
        state = QuantState.from_dict(dict(parts), torch.device("cpu"))
        shape = state.shape
        _check_state(state, pairs)
        # As one row: the library's AVX512 kernel (0.50) is wrong where a block runs from one row into the next.
        state.shape = torch.Size([shape.numel()])
        dense: Tensor = dequantize_4bit(pairs.view(-1, 1), state)
    except (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"({type(error).__name__}: {clip(error, 150)}); copy or save it again"
        raise ArtifactError(f"{where}: {name!r} cannot be unpacked by its quant_state {problem}") from None
    return dense.reshape(shape)


def _check_state(state: QuantState, pairs: Tensor) -> None:
    """Raise ValueError for tensors that are not of the sizes that the state says, or another table of values."""
    from bitsandbytes.functional import get_4bit_type

    if len(state.shape) != 2 or min(state.shape) < 1 or state.quant_type not in ("nf4", "fp4"):
        raise ValueError(f"shape {list(state.shape)} of {state.quant_type}, which is not supported")
    count = state.shape.numel()
    # The library ignores the stored table, so another one would be read as something else there than here.
    table = get_4bit_type(state.quant_type, device="cpu")
    if state.code.shape != table.shape or not torch.allclose(state.code.float(), table, rtol=0, atol=1e-5):
        raise ValueError(f"quant_map is not {state.quant_type.upper()}'s table")
    sizes = [("weight", pairs, -(-count // 2)), ("absmax", state.absmax, -(-count // state.blocksize))]
    if state.nested:
        blocks = -(-state.absmax.numel() // state.state2.blocksize)
        sizes += [("nested_absmax", state.state2.absmax, blocks), ("nested_quant_map", state.state2.code, 256)]
    elif not state.absmax.is_floating_point():
        raise ValueError("absmax is quantized, but nested_absmax is missing")
    for part, tensor, wanted in sizes:
        if tensor.numel() != wanted:
            raise ValueError(f"{part} has {tensor.numel()} values, not {wanted}")


def _eight_bits(module: str, matrix_NK: Tensor, beside: frozenset[str], read: Read, where: str) -> Tensor:
    """q[n, k] * SCB[n] / 127."""
    layout = int(read(f"{module}.weight_format").flatten()[0]) if f"{module}.weight_format" in beside else 0
    if layout != 0:
        raise ArtifactError(
            f"{where}: '{module}.weight' is laid out for one kind of GPU (weight_format {layout}); save it again"
        )
    if f"{module}.SCB" not in beside:
        raise ArtifactError(f"{where}: tensor '{module}.SCB' is missing beside the packed matrix; save it again")
    scale_N = read(f"{module}.SCB").float().flatten()
    if matrix_NK.ndim != 2 or len(scale_N) != len(matrix_NK):
        raise ArtifactError(
            f"{where}: '{module}.SCB' has {len(scale_N)} values for a matrix of shape {tuple(matrix_NK.shape)}, "
            "not one per row; save it again"
        )
    from bitsandbytes.functional import int8_vectorwise_dequant

    dense: Tensor = int8_vectorwise_dequant(matrix_NK, scale_N)
    return dense
