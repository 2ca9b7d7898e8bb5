"""Quantized matrices as PyTorch modules: the reference that an exported graph is compared with.

They hold the packed bytes, which are saved, and for speed the dequantized float32 matrix.
The memory saving is the exported model's; these modules exist to be exact.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sportsllm.formats.packed_weights import QuantizedWeight

SUFFIXES = ("_packed", "_scale", "_zero_point")


class QuantizedMatrix(nn.Module):
    """Packed bytes as buffers named like a checkpoint's tensors, plus the dequantized matrix."""

    weight: Tensor

    def __init__(self, quantized: QuantizedWeight) -> None:
        super().__init__()
        self.bits, self.block_size, self.in_features = quantized.bits, quantized.block_size, quantized.in_features
        self.register_buffer("weight_packed", torch.from_numpy(quantized.packed))
        self.register_buffer("weight_scale", torch.from_numpy(quantized.scales))
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
