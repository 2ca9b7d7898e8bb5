"""Packed matrices of a checkpoint: from its tensors to `sportsllm.formats.packed_weights`'s forms."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sportsllm.errors import ArtifactError
from sportsllm.formats.packed_weights import BITS, ROW_BITS, QuantizedWeight, stored_bits
from sportsllm.formats.safetensors_files import check_shape, quantization_config
from sportsllm.models.size import BLOCK_SIZES


def read_packed(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], directory: Path) -> QuantizedWeight:
    """The packed matrix of the module `name`, of the shape (N, K) that the config asks for.

    Bits and block size follow from the shapes of its tensors weight_packed, weight_scale and weight_zero_point.
    """
    packed = tensors[f"{name}.weight_packed"]
    if f"{name}.weight_scale" not in tensors:
        raise ArtifactError(f"{directory}: {name}.weight_scale is missing beside the packed matrix")
    scales = tensors[f"{name}.weight_scale"]
    zero = tensors.get(f"{name}.weight_zero_point")
    record = quantization_config(directory)
    if record is None:
        raise ArtifactError(f"{directory}: {name} is packed but config.json has no quantization_config")
    recorded = record.get("modules", {}).get(name, {}).get("bits")
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
