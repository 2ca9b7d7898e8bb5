"""Quantized matrices as PyTorch modules: the reference that an exported graph is compared with.

They hold the packed bytes, which are saved, and for speed the dequantized float32 matrix.
The memory saving is the exported model's; these modules exist to be exact.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sportsllm.errors import ArtifactError
from sportsllm.formats.packed import BITS, ROW_BITS, QuantizedWeight, stored_bits
from sportsllm.formats.safetensors import check_shape, quantization_config
from sportsllm.models.memory import BLOCK_SIZES

SUFFIXES = ("_packed", "_scale", "_zero_point")


class QuantizedMatrix(nn.Module):
    """Packed bytes as buffers named like a checkpoint's tensors, plus the dequantized matrix."""

    weight: Tensor

    def __init__(self, quantized: QuantizedWeight) -> None:
        super().__init__()
        self.bits, self.block_size, self.in_features = quantized.bits, quantized.block_size, quantized.in_features
        self.register_buffer("weight_packed", torch.from_numpy(quantized.packed))
        self.register_buffer("weight_scale", torch.from_numpy(quantized.scales).half())
        if quantized.zero_points is not None:
            self.register_buffer("weight_zero_point", torch.from_numpy(quantized.zero_points))
        self.register_buffer("weight", torch.from_numpy(quantized.dequantize()), persistent=False)


class QuantizedLinear(QuantizedMatrix):
    """y = x W^T + b with a packed W; (..., K) to (..., N)."""

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__(quantized)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class QuantizedEmbedding(QuantizedMatrix):
    """Rows of a packed table by token id; (B, T) to (B, T, K)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


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
            if scales.dtype != torch.float16:
                raise ArtifactError(
                    f"{directory}: {name}.weight_scale is {str(scales.dtype).removeprefix('torch.')}, scales are "
                    "float16; quantize the checkpoint again"
                )
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
