"""Quantization-aware training: train the quantized model on the runtime's exact grid.

Every matrix of a layer has a full-precision master weight. The forward pass multiplies by its rounding to the grid. The
gradient passes through the rounding unchanged, and is 0 for values beyond the ends of the grid (straight-through
estimation, https://arxiv.org/abs/1308.3432). Scales, zero points, embedding and head are not trained; learned scales
(https://arxiv.org/abs/1902.08153) gained nothing (docs/results).
Shape suffixes: N rows (outputs), K columns (inputs), G blocks per row.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.quantization.grid import Grid, nearest
from compress.quantization.packed_checkpoint import PackedCheckpoint
from sportsllm.formats.packed import QuantizedWeight
from sportsllm.formats.packed_modules import QuantizedLinear
from sportsllm.models.language_model import SportsLLM

# Each master weight starts at the quantized value, moved towards the original one by less than half a quantization
# step: the first forward pass is that of the packed model.
_HALF_STEP = 0.45


class _GridProduct(torch.autograd.Function):
    """x Q(W)^T with straight-through gradients.

    Under bfloat16 autocast an INT8 Q(W) is the sum of two bfloat16 terms, so the product is that of the exact grid:
    casting alone moves a weight by up to a quarter of a quantization step. At 4 bits that is a sixtieth of a step.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, scale_NK: Tensor, zero_NK: Tensor, bits: int, dtype: torch.dtype
    ) -> Tensor:
        steps = weight_NK / scale_NK
        inside = (steps >= -zero_NK - 0.5) & (steps <= 2.0**bits - 0.5 - zero_NK)
        grid_NK = (nearest(weight_NK, scale_NK, zero_NK, bits) - zero_NK) * scale_NK
        x, first_NK = x.to(dtype), grid_NK.to(dtype)
        ctx.save_for_backward(x, first_NK, inside)
        result = F.linear(x, first_NK)
        if bits > 4 and dtype != torch.float32:
            result = result + F.linear(x, (grid_NK - first_NK).to(dtype))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, first_NK, inside), (gradient,) = ctx.saved_tensors, gradients
        weight_gradient = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        return gradient @ first_NK, weight_gradient.float() * inside, None, None, None, None


class FakeQuantLinear(nn.Module):
    """y = x Q(W)^T + b; Q rounds W to the grid of a packed matrix."""

    scales_NG: Tensor
    zeros_NG: Tensor

    def __init__(self, packed: QuantizedWeight, bias: Tensor | None, full_NK: Tensor) -> None:
        """Start at a packed matrix, the master weights moved towards the original one, `full_NK`."""
        super().__init__()
        self.bits, self.block_size = packed.bits, packed.block_size
        self.symmetric, self.in_features = packed.zero_points is None, packed.in_features
        scales = torch.from_numpy(packed.scales)
        self.register_buffer("scales_NG", torch.where(scales == 0, 1.0, scales))
        self.register_buffer("zeros_NG", torch.from_numpy(packed.zero_point_values()))
        start = torch.from_numpy(packed.dequantize())
        reach = _HALF_STEP * self.grid.by_column(self.in_features)[0].abs()
        self.weight = nn.Parameter(start + torch.clamp(full_NK - start, -reach, reach))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @property
    def grid(self) -> Grid:
        """The grid of the packed matrix, on the device of the weights."""
        return Grid(self.scales_NG, self.zeros_NG, self.bits, self.block_size, self.symmetric)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        scale, zero = self.grid.by_column(self.in_features)
        with torch.autocast(device, enabled=False):
            y = cast(Tensor, cast(Any, _GridProduct).apply(x, self.weight, scale, zero, self.bits, dtype))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def pack(self) -> QuantizedWeight:
        """The matrix that the forward pass multiplies by."""
        return self.grid.pack(self.grid.round(self.weight.detach()))


def make_trainable(model: SportsLLM, originals: MutableMapping[str, Tensor]) -> None:
    """Make the packed matrices of a model's layers trainable in place.

    `originals` are those before rounding; each is removed when it has been used, since training needs the memory.
    """
    model.requires_grad_(False)
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, QuantizedLinear):
            parent, _, leaf = name.rpartition(".")
            trained = FakeQuantLinear(module.quantized(), module.bias, originals.pop(f"model.layers.{name}"))
            setattr(model.model.layers.get_submodule(parent), leaf, trained)
    model.model.layers.requires_grad_(True)
    model.model.norm.requires_grad_(True)


def pack_trained(model: SportsLLM, packed: PackedCheckpoint) -> None:
    """Replace the tensors of a checkpoint by the trained ones."""
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantLinear):
            packed.add_packed(name, module.pack())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            packed.add_vector(name, parameter.cpu())
