"""Packed matrices of a checkpoint: from its tensors to `sportsllm.storage.packed_weights`'s forms."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sportsllm.errors import ArtifactError
from sportsllm.models.size import BLOCK_SIZES
from sportsllm.storage.packed_weights import BITS, ROW_BITS, Nf4Weight, QuantizedWeight, stored_bits
from sportsllm.storage.safetensors_files import check_shape, quantization_config

NF4_CODES = "nf4"  # a matrix's `codes` in quantization_config; plain whole numbers where it has none


def read_packed(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], directory: Path
) -> QuantizedWeight | Nf4Weight:
    """One packed matrix of a checkpoint; bits and block size follow from the tensors' shapes, or are NF4's as recorded.

    Args:
        tensors: the checkpoint's tensors.
        name: the module's name; its tensors are `name`.weight_packed, _scale and _zero_point.
        shape: (N, K) that the config asks for.
        directory: for messages.
    """
    packed = tensors[f"{name}.weight_packed"]
    if f"{name}.weight_scale" not in tensors:
        raise ArtifactError(f"{directory}: {name}.weight_scale is missing beside the packed matrix")
    scales = tensors[f"{name}.weight_scale"]
    record = _module_record(directory, name)
    if record.get("codes") == NF4_CODES:
        return _read_nf4(packed, scales, name, shape, record.get("block_size"), directory)
    zero = tensors.get(f"{name}.weight_zero_point")
    recorded = record.get("bits")
    for bits in (*BITS, ROW_BITS):
        if recorded not in (None, bits):
            continue
        block = packed.shape[-1] * 8 // stored_bits(bits)
        groups = -(-shape[1] // block)
        known = block in BLOCK_SIZES if bits in BITS else block == shape[1] and zero is None and recorded == bits
        fits = known and tuple(packed.shape[:2]) == (shape[0], groups)
        if fits and tuple(scales.shape) == (shape[0], groups) and packed.dtype == torch.uint8:
            if bits == ROW_BITS and int(packed.max()) >= 2**ROW_BITS:
                raise ArtifactError(
                    f"{directory}: packed tensor of {name!r} holds numbers beyond 7 bits; make it again"
                )
            if zero is not None:
                check_shape(zero, (shape[0], -(-groups * bits // 8)), f"{name}.weight_zero_point", directory)
            return QuantizedWeight(
                packed=packed.numpy(),
                scales=scales.float().numpy(),
                zero_points=None if zero is None else zero.numpy(),
                bits=bits,
                block_size=block,
                in_features=shape[1],
            )
    raise ArtifactError(f"{directory}: packed tensor of {name!r} does not fit shape {shape}; make it again")


def _read_nf4(
    packed: Tensor, scales: Tensor, name: str, shape: tuple[int, ...], block_size: Any, directory: Path
) -> Nf4Weight:
    if block_size not in BLOCK_SIZES:
        raise ArtifactError(f"{directory / 'config.json'}: NF4 block_size of {name!r} is {block_size!r}; make it again")
    block, count = int(block_size), shape[0] * shape[1]
    check_shape(packed, (-(-count // 2),), f"{name}.weight_packed", directory)
    check_shape(scales, (-(-count // block),), f"{name}.weight_scale", directory)
    if packed.dtype != torch.uint8:
        raise ArtifactError(f"{directory}: tensor '{name}.weight_packed' holds {packed.dtype}, not bytes")
    return Nf4Weight(packed.numpy(), scales.float().numpy(), block, *shape)


def _module_record(directory: Path, name: str) -> dict[str, Any]:
    """One matrix's entry in config.json's quantization_config: `bits`, `block_size`, `codes` for NF4."""
    data = quantization_config(directory) or {}
    return cast("dict[str, Any]", data.get("modules", {}).get(name, {}))
