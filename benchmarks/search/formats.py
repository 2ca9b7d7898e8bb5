"""The formats that a candidate can have, what rounding to each costs, and which of them are worth considering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.predict.model_size import ModelFormat, file_bytes
from sportsllm.models.config import ModelConfig
from sportsllm.models.memory import BLOCK_SIZES

FINEST, FINEST_SMALL_HEAD = ModelFormat("int4", 32), ModelFormat("int4", 32, head_bits=4)
"""The formats at which calibrated rounding is measured beside plain rounding, by the bits of their head."""
# Percent of bits per byte, calibrated, as measured on a teacher of 1M parameters (docs/log.md); a search that may
# train measures its own.
_LAYERS = {16: 0.45, 32: 0.6, 64: 0.7, 128: 0.8, 256: 1.0}
_SMALL_HEAD = {16: 0.5, 32: 0.8, 64: 1.0, 128: 1.3, 256: 1.6}
_INT8, _INT8_ROWS = 0.02, 0.12
_ACTIVATIONS = 0.2  # of 8-bit activations, which exports have and PyTorch has not: +0.06% there, +0.26% exported
_CACHE_LOSS = {"fp32": 0.0, "int8": 0.01}


def weight_formats(teacher: ModelConfig, zero_points: bool = True) -> list[ModelFormat]:
    """float32, INT8 by rows and blocks, INT4 of every block size with a head of 8 or 4 bits, and with zero points too.

    Rows are filled up to whole blocks: a larger block that saves a teacher no bytes is left out.
    """
    found = [ModelFormat("fp32"), ModelFormat("int8", per_row=True)]
    kinds = [ModelFormat("int8")]
    grids = (False, True) if zero_points else (False,)
    kinds += [ModelFormat("int4", head_bits=bits, zero_points=zero) for bits in (8, 4) for zero in grids]
    for kind in kinds:
        least = float("inf")
        for block_size in BLOCK_SIZES[kind.precision == "int8" :]:
            each = replace(kind, block_size=block_size)
            if (size := file_bytes(teacher, each)) < least:
                found.append(each)
                least = size
    return found


def on_gpu(losses: Mapping[ModelFormat, float]) -> dict[ModelFormat, float]:
    """The formats that a GPU runs: exported in float16, unrounded weights and cache included."""
    return {
        replace(each, precision=each.precision if each.quantized else "fp16", cache="fp16"): loss
        for each, loss in losses.items()
        if each.cache == "fp32" and not each.per_row
    }


def activation_kind(weights: ModelFormat) -> tuple[str, bool]:
    """Formats of one kind lose the same by 8-bit activations."""
    return weights.precision, weights.per_row


def usual_loss(weights: ModelFormat) -> float:
    """Percent of bits per byte that rounding to a symmetric grid costs an export, where nothing was measured."""
    if not weights.quantized:
        return 0.0
    if weights.precision == "int4":
        small = _SMALL_HEAD[weights.block_size] * (weights.head_bits == 4)
        return _LAYERS[weights.block_size] + small + _ACTIVATIONS
    return (_INT8_ROWS if weights.per_row else _INT8) + _ACTIVATIONS


def format_losses(teacher: ModelConfig, rounding: Mapping[ModelFormat, float]) -> dict[ModelFormat, float]:
    """Percent of bits per byte of every format to consider, caches included.

    Args:
        teacher: its bytes decide; of two formats of one precision the one that is larger and no better is left out.
        rounding: percent by format of the weights.
    """
    sizes = {each: file_bytes(teacher, each) for each in rounding}

    def beaten(each: ModelFormat) -> bool:
        return any(
            (sizes[other], rounding[other]) != (sizes[each], rounding[each])
            and sizes[other] <= sizes[each]
            and rounding[other] <= rounding[each]
            for other in rounding
            if (other.precision, other.per_row) == (each.precision, each.per_row)
        )

    return dict(pair for each, loss in rounding.items() if not beaten(each) for pair in _variants(each, loss))


def _variants(weights: ModelFormat, loss: float) -> Iterator[tuple[ModelFormat, float]]:
    for cache, more in _CACHE_LOSS.items():
        yield replace(weights, cache=cache), loss + more
