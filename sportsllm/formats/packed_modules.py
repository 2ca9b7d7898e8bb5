"""Packed matrices of a checkpoint: read from its tensors, and as modules.

A module holds the packed bytes, which are saved, and for speed the dequantized float32 matrix: the reference that an
exported graph is compared with.
"""

from collections.abc import Callable
from itertools import product
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sportsllm.errors import ArtifactError
from sportsllm.formats.packed import BITS, QuantizedWeight
from sportsllm.formats.safetensors import TensorFiles, check_shape
from sportsllm.models.memory import BLOCK_SIZES


class QuantizedMatrix(nn.Module):
    """Packed bytes as buffers named like a checkpoint's tensors, and the dequantized matrix, empty if not `dense`."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, quantized: QuantizedWeight, dense: bool = True) -> None:
        super().__init__()
        self.bits, self.block_size, self.in_features = quantized.bits, quantized.block_size, quantized.in_features
        self.register_buffer("weight_packed", torch.from_numpy(quantized.packed))
        self.register_buffer("weight_scale", torch.from_numpy(quantized.scales).half())
        if quantized.zero_points is not None:
            self.register_buffer("weight_zero_point", torch.from_numpy(quantized.zero_points))
        weight = torch.from_numpy(quantized.dequantize()) if dense else torch.empty(0, self.in_features)
        self.register_buffer("weight", weight, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Scales stay float16; only `weight` has the compute dtype."""
        scale = self.weight_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight_scale = scale.to(self.weight.device)
        return self

    def quantized(self, rows_N: slice | Tensor = slice(None)) -> QuantizedWeight:
        """The packed matrix, or rows of it."""
        state = {name: tensor[rows_N].cpu() for name, tensor in self.state_dict().items() if name != "bias"}
        zero = state.get("weight_zero_point")
        return QuantizedWeight(
            packed=state["weight_packed"].numpy(),
            scales=state["weight_scale"].float().numpy(),
            zero_points=None if zero is None else zero.numpy(),
            bits=self.bits,
            block_size=self.block_size,
            in_features=self.in_features,
        )


class QuantizedLinear(QuantizedMatrix):
    """y = x W^T + b with a packed W; (..., K) to (..., N)."""

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__(quantized)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class QuantizedEmbedding(QuantizedMatrix):
    """Rows of a packed table by token id, (B, T) to (B, T, K). Only a table that is the head too is dense in memory."""

    def __init__(self, quantized: QuantizedWeight, tied: bool) -> None:
        super().__init__(quantized, dense=tied)
        self.tied = tied

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tied:
            return F.embedding(tokens, self.weight)
        rows = self.quantized(tokens.flatten()).dequantize()
        return torch.from_numpy(rows).view(*tokens.shape, self.in_features).to(self.weight)


def read_packed(tensors: TensorFiles, name: str, shape: tuple[int, ...]) -> QuantizedWeight:
    """The packed matrix of the module `name`, of the shape (N, K) that the config asks for.

    Bits and block size follow from the shapes of its tensors weight_packed, weight_scale and weight_zero_point.
    """
    directory, record = tensors.directory, tensors.quantization
    packed = tensors[f"{name}.weight_packed"]
    if f"{name}.weight_scale" not in tensors:
        raise ArtifactError(f"{directory}: {name}.weight_scale is missing beside the packed matrix; copy it again")
    scales = tensors[f"{name}.weight_scale"]
    zero = tensors.get(f"{name}.weight_zero_point")
    if record is None:
        raise ArtifactError(f"{directory}: {name} is packed but config.json has no quantization_config; copy it again")
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_zero_point": zero}
    for part, tensor in parts.items():
        kind = torch.float16 if part == "weight_scale" else torch.uint8
        if tensor is not None and tensor.dtype != kind:
            found, wanted = (str(each).removeprefix("torch.") for each in (tensor.dtype, kind))
            raise ArtifactError(f"{directory}: {name}.{part} is {found}, not {wanted}; quantize the checkpoint again")
    rows, columns = shape
    known = [record.modules[name].bits] if name in record.modules else BITS
    for bits, block in product(known, BLOCK_SIZES):
        groups = -(-columns // block)
        if packed.shape == (rows, groups, block * bits // 8) and scales.shape == (rows, groups):
            if zero is not None:
                check_shape(zero, (rows, -(-groups * bits // 8)), f"{name}.weight_zero_point", directory)
            zeros = None if zero is None else zero.numpy()
            return QuantizedWeight(packed.numpy(), scales.float().numpy(), zeros, bits, block, columns)
    raise ArtifactError(f"{directory}: packed tensor of {name!r} does not fit shape {shape}; make it again")
