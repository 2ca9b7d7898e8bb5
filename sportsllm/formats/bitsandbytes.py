"""Reads matrices that bitsandbytes packed (NF4, FP4, LLM.int8, as `transformers` saves them) as dense ones.

Plain torch: the library checks nothing, reads past the end of a damaged tensor, and its AVX512 kernel (0.50) is wrong
where a block runs from one row into the next.

    4 bits   w[i] = quant_map[code[i]] * absmax[i // blocksize], row after row, the high nibble first, then rounded to
             the type that the model had; with double quantization
             absmax[j] = nested_quant_map[code[j]] * nested_absmax[j // nested_blocksize] + nested_offset
    8 bits   w[n, k] = q[n, k] * SCB[n] / 127

Sources: bitsandbytes' QuantState, arXiv 2305.14314 (NF4), 2208.07339 (LLM.int8).
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sportsllm.errors import ArtifactError

# Values of the 16 codes, as shares of a block's largest number; NF4's are quantiles of a normal distribution.
TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(sign * twelfths / 12 for sign in (1, -1) for twelfths in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}  # fmt: skip
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = "quant_state."
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_EIGHT_BIT_STEP = 0.007874015718698502  # 1 / 127 in float32, as the library multiplies

Read = Callable[[str], Tensor]


def companions(names: Iterable[str]) -> frozenset[str]:
    """Names of the tensors that only say how to read a packed matrix."""
    there = set(names)
    found = set()
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
        The tensor itself where it is not packed; else (N, K): of 4 bits in the type that the model had, of 8 bits in
        float32.

    Raises:
        ArtifactError: a part is missing, of the wrong kind, or does not fit the others.
    """
    tensor = read(name)
    states = sorted(other for other in beside if other.startswith(f"{name}.{_STATE}"))
    if tensor.dtype == torch.int8:
        return _eight_bits(name, tensor, beside, read, where)
    if states or f"{name}.absmax" in beside or tensor.dtype == torch.uint8:
        return _four_bits(name, tensor, states, beside, read, where)
    return tensor


def _eight_bits(name: str, matrix_NK: Tensor, beside: frozenset[str], read: Read, where: str) -> Tensor:
    module = name.removesuffix(".weight")
    layout = int(read(f"{module}.weight_format").flatten()[0]) if f"{module}.weight_format" in beside else 0
    if layout != 0:
        raise ArtifactError(
            f"{where}: {name!r} is laid out for one kind of GPU (weight_format {layout}); save it again"
        )
    scale_N = _part(f"{module}.SCB", beside, read, where)
    if matrix_NK.ndim != 2 or scale_N.numel() != len(matrix_NK):
        raise ArtifactError(
            f"{where}: '{module}.SCB' has {scale_N.numel()} numbers for a matrix of shape {tuple(matrix_NK.shape)}, "
            "not one a row; save it again"
        )
    return matrix_NK * scale_N.float().view(-1, 1) * _EIGHT_BIT_STEP


def _four_bits(name: str, packed: Tensor, states: list[str], beside: frozenset[str], read: Read, where: str) -> Tensor:
    if len(states) != 1:
        raise ArtifactError(f"{where}: {name!r} is packed but has {len(states)} quant_state beside it; save it again")
    state = _parse(states[0], read(states[0]), where)
    kind, shape, nested_blocksize = state["quant_type"], state["shape"], state["nested_blocksize"]
    absmax = _part(f"{name}.absmax", beside, read, where)
    if absmax.dtype == torch.uint8:
        if nested_blocksize is None:
            raise ArtifactError(f"{where}: '{name}.absmax' is quantized, but the quant_state does not say how")
        largest = _part(f"{name}.nested_absmax", beside, read, where)
        table = _part(f"{name}.nested_quant_map", beside, read, where)
        if table.numel() != 256:
            raise ArtifactError(f"{where}: '{name}.nested_quant_map' has {table.numel()} numbers instead of 256")
        _check_blocks(f"{name}.nested_absmax", absmax.numel(), nested_blocksize, largest, where)
        absmax = _scaled(table.float()[absmax.flatten().int()], largest, nested_blocksize) + state["nested_offset"]
    map_16 = _part(f"{name}.quant_map", beside, read, where).float()
    known_16 = torch.tensor(TABLES[kind])
    # The library ignores the stored table, so another one would be read as something else there than here.
    if map_16.shape != known_16.shape or not torch.allclose(map_16, known_16, rtol=0, atol=1e-5):
        raise ArtifactError(f"{where}: '{name}.quant_map' is not {kind.upper()}'s table; save it again")
    count = shape[0] * shape[1]
    pairs = packed.contiguous().flatten().view(torch.uint8)  # some are stored under a float type
    if pairs.numel() != -(-count // 2):
        raise ArtifactError(
            f"{where}: {name!r} has {pairs.numel()} bytes, not {-(-count // 2)} for shape {shape}; save it again"
        )
    _check_blocks(f"{name}.absmax", count, state["blocksize"], absmax, where)
    both = torch.stack([map_16.repeat_interleave(16), map_16.repeat(16)], dim=1)  # of the 256 bytes
    numbers = both.index_select(0, pairs.int()).flatten()[:count]
    return _scaled(numbers, absmax, state["blocksize"]).view(shape).to(_DTYPES[state["dtype"]])


def _scaled(numbers: Tensor, absmax: Tensor, blocksize: int) -> Tensor:
    """Each block of a flat tensor times its own number, in place; the last block may be short."""
    blocks = numbers.numel() // blocksize
    absmax = absmax.flatten().float()
    numbers[: blocks * blocksize].view(-1, blocksize).mul_(absmax[:blocks, None])
    numbers[blocks * blocksize :].mul_(absmax[blocks:])
    return numbers


def _part(name: str, beside: frozenset[str], read: Read, where: str) -> Tensor:
    if name not in beside:
        raise ArtifactError(f"{where}: tensor {name!r} is missing beside the packed matrix; copy or save it again")
    return read(name)


def _check_blocks(name: str, count: int, blocksize: int, absmax: Tensor, where: str) -> None:
    if absmax.numel() != -(-count // blocksize):
        raise ArtifactError(
            f"{where}: {name!r} has {absmax.numel()} numbers, not {-(-count // blocksize)} for {count} in blocks "
            f"of {blocksize}; save it again"
        )


def _parse(name: str, stored: Tensor, where: str) -> dict[str, Any]:
    """A quant_state, its fields checked; `nested_blocksize` is None without double quantization."""
    try:
        data = json.loads(stored.numpy().tobytes())
    except ValueError:
        raise ArtifactError(f"{where}: tensor {name!r} is not JSON; copy or save it again") from None
    if not isinstance(data, dict):
        raise ArtifactError(f"{where}: tensor {name!r} is not a JSON object; copy or save it again")

    def positive(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0

    state = {"nested_blocksize": None} | data
    shape, nested = data.get("shape"), state["nested_blocksize"]
    checks = {
        "quant_type": str(data.get("quant_type")) in TABLES,
        "dtype": str(data.get("dtype")) in _DTYPES,
        "blocksize": positive(data.get("blocksize")),
        "shape": isinstance(shape, list) and len(shape) == 2 and all(map(positive, shape)),
        "nested_blocksize": nested is None or positive(nested),
        "nested_offset": nested is None or isinstance(data.get("nested_offset"), int | float),
    }
    for field, good in checks.items():
        if not good:
            raise ArtifactError(f"{where}: {name!r} has {field} {data.get(field)!r}, which is not supported")
    return state | {"shape": tuple(data["shape"])}
