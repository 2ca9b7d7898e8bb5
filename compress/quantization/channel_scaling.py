"""Channel scaling before rounding: move range from strong inputs into their weights, at no cost at runtime.

Column k of a matrix is multiplied by s[k], and the producer of that input divides by s[k], so the layer computes the
same. The producer is the norm for matrices that read the residual stream, else the matrix's `scale_source`; matrices
with neither stay as they are. s = rms(x)**alpha / rms(w)**0.5, since the inputs of a block share a scale too: alpha is
0.5 for 8-bit weights and 0.25 for 4-bit weights, which lose more. After SmoothQuant (https://arxiv.org/abs/2211.10438).

Shape suffixes: K inputs of a matrix, N its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from compress.layerwise import input_squares, summed
from compress.quantization.config import GridSpec, QuantizationConfig
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import NORMS, block_matrices, block_units, input_groups
from sportsllm.models.language_model import Block, first_positions
from sportsllm.models.layers import Rope
from sportsllm.models.sublayer import HIDDEN, Matrix

_BALANCED = {4: 0.25, 8: 0.5}
_BALANCE_SAMPLES = 16  # enough for the rms of each channel


@torch.no_grad()
def scale_block(
    block: Block, states_BTD: Sequence[Tensor], rope: Rope, config: QuantizationConfig, prefix: str
) -> None:
    """Scale a float32 layer's matrices for rounding, in place; the layer computes what it computed before.

    `states_BTD` is the residual stream before it, for every sample; `prefix` begins its names, such as
    `model.layers.0`.
    """
    model = block.config
    normed = HIDDEN if model.input_norms else None
    groups = [group for group in input_groups(model) if group[0].column_unit == normed or group[0].scale_source]
    firsts = [group[0].name for group in groups]
    with summed({name: (block.get_submodule(name), input_squares) for name in firsts}) as squares_K:
        for x_BTD in states_BTD[:_BALANCE_SAMPLES]:
            block(x_BTD, first_positions(rope, x_BTD))
    for group in groups:
        linears = [cast(nn.Linear, block.get_submodule(matrix.name)) for matrix in group]
        first, rows_K = group[0], source_rows(model, group[0]).to(linears[0].weight.device)
        specs = [config.grid_for(f"{prefix}.{matrix.name}") for matrix in group]
        scale_K = balanced_scale(squares_K[first.name], [linear.weight for linear in linears], rows_K, specs)
        for linear in linears:
            linear.weight.data = linear.weight * scale_K
        _divide(block, first, scale_K, rows_K)


def balanced_scale(squares_K: Tensor, weights: Sequence[Tensor], rows_K: Tensor, specs: Sequence[GridSpec]) -> Tensor:
    """(K,) the scale of matrices that read inputs with the sums of squares `squares_K`; the fewest bits decide alpha.

    `rows_K` as `source_rows` gives them.
    """
    weight_K = torch.stack([weight.double().square().sum(dim=0) for weight in weights]).sum(dim=0)
    alpha = _BALANCED[min(spec.bits for spec in specs)]
    log_K = alpha * _log_size(squares_K, rows_K) - 0.5 * _log_size(weight_K, rows_K)
    return (log_K - log_K.mean()).exp().float()


def _log_size(squares_K: Tensor, rows_K: Tensor) -> Tensor:
    """Logarithm of the size of columns, up to a constant; those that share a row of the source count together."""
    shared_K = squares_K.new_zeros(len(rows_K)).index_add_(0, rows_K, squares_K)[rows_K]
    return 0.5 * shared_K.clamp(min=max(1e-8 * float(shared_K.mean()), 1e-30)).log()


def source_rows(model: ModelConfig, reader: Matrix) -> Tensor:
    """(K,) the row of the reader's scale source, or the norm's channel, that makes each of its columns.

    Query heads read the values of their group's key/value head, so that several columns share a row.
    """
    if reader.scale_source is None:
        return torch.arange(reader.columns)
    units = block_units(model)
    (source,) = (matrix for matrix in block_matrices(model) if matrix.name == reader.scale_source)
    unit = units[reader.column_unit]
    if source.row_unit == reader.column_unit:
        return torch.arange(reader.columns)
    assert unit.group == source.row_unit, f"{reader.name} reads {source.name}, whose units do not group its own"
    members = unit.count // units[source.row_unit].count
    return torch.arange(source.rows).view(-1, 1, unit.size).expand(-1, members, -1).reshape(-1)


def _divide(block: Block, reader: Matrix, scale_K: Tensor, rows_K: Tensor) -> None:
    """Take the scale out of what makes the reader's inputs."""
    if reader.scale_source is None:
        norm = block.get_submodule(NORMS[reader.name.partition(".")[0]])
        for parameter in norm.parameters(recurse=False):  # LayerNorm has a bias too
            parameter.data = parameter / scale_K
        return
    source = cast(nn.Linear, block.get_submodule(reader.scale_source))
    scale_R = scale_K.new_ones(source.out_features).index_copy_(0, rows_K, scale_K)
    source.weight.data = source.weight / scale_R[:, None]
    if source.bias is not None:
        source.bias.data = source.bias / scale_R
