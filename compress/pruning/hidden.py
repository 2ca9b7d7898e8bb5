"""Hidden channels: the residual stream cut to its principal directions.

The weights are written in another basis of the residual stream, x' = Q^T S x, whose first directions are kept
(SliceGPT, https://arxiv.org/abs/2401.15024). Q are the principal directions of the normalised states before every norm,
scaled by S. The norms' weights are folded into the matrices that read them, and one factor replaces each.

An untied head takes the last norm's weight g too, and S = 1: with all directions kept, nothing changes. A tied table
cannot, since it also writes the stream. With S = diag(g^(1/2)) both uses agree; only RMSNorm's divisor changes.
Shape suffixes: D hidden_size, K kept directions, M norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.layerwise import block_from, block_of, derived, ends_of, second_moment
from sportsllm.models.description import EMBEDDING, HEAD, LAST_NORM, NORMS, block_matrices
from sportsllm.models.language_model import Block, SportsLLM
from sportsllm.models.sublayer import HIDDEN

_ROWS = 256  # of every norm's moments, in memory together
_LEAST = 1e-2  # of the last norm's mean weight; smaller or negative weights are raised to it


class Directions(NamedTuple):
    """A basis of the residual stream.

    Attributes:
        scale: (D,) S.
        basis: (D, D) Q, the strongest direction first.
        squares: (M, D) mean squares of the scaled normalised states before each norm in each direction.
    """

    scale: Tensor
    basis: Tensor
    squares: Tensor

    def into(self, kept: int) -> Tensor:
        """(D, K) the map x' = x @ into of the first directions."""
        return self.scale[:, None] * self.basis[:, :kept]


def norm_moment(given: Tensor, _output: Tensor) -> Tensor:
    """Statistic: the second moment of a norm's normalised input, (D, D)."""
    return second_moment(F.rms_norm(given.float(), given.shape[-1:]))


def directions_from(model: SportsLLM, moments: Sequence[Tensor]) -> Directions:
    """The basis whose first directions hold most of the states, from the sums of `norm_moment` over every norm that
    reads the residual stream, in their order.
    """
    scale = torch.ones(model.config.hidden_size, dtype=torch.float64, device=model.head_weight.device)
    if model.config.tie_word_embeddings:
        weight = model.get_parameter(f"{LAST_NORM}.weight").detach().double()
        scale = (weight / weight.mean()).clamp(min=_LEAST).sqrt()
    # The mean square of a normalised state is 1, so the trace counts the tokens.
    traces = [moment.trace() for moment in moments]

    def scaled(norm: int, rows: slice) -> Tensor:
        return moments[norm][rows].double() * len(scale) / traces[norm] * scale[rows, None] * scale

    parts = [slice(start, start + _ROWS) for start in range(0, len(scale), _ROWS)]  # of all norms at once
    mean_DD = torch.cat([torch.stack([scaled(norm, part) for norm in range(len(traces))]).sum(dim=0) for part in parts])
    basis = torch.linalg.eigh(mean_DD).eigenvectors.flip(1)
    squares = [(basis * (scaled(norm, slice(None)) @ basis)).sum(dim=0) for norm in range(len(traces))]
    return Directions(*(tensor.float().cpu() for tensor in (scale, basis, torch.stack(squares))))


@torch.no_grad()
def rotate(model: SportsLLM, directions: Directions, kept: int) -> SportsLLM:
    """The float32 model in a basis of which the first `kept` directions will stay, its norms scaled for these."""
    device = model.head_weight.device
    scale, basis = directions.scale.to(device).double(), directions.basis.to(device).double()
    write, read = scale[:, None] * basis, basis / scale[:, None]  # x' = x @ write, and w @ x is (w @ read) @ x'
    sizes = (directions.squares[:, :kept].sum(dim=1) / kept).sqrt().tolist()
    ends = {name: tensor.double() for name, tensor in ends_of(model).items()}
    embedding, head, last = (f"{name}.weight" for name in (EMBEDDING, HEAD, LAST_NORM))
    given, ends[last] = ends[last], torch.full_like(ends[last], sizes[-1])
    ends[embedding] = ends[embedding] @ write
    if model.config.tie_word_embeddings:
        ends[last] *= given.mean()
    else:
        ends[head] = ends[head] * given @ read

    def rotated(layer: int) -> Block:
        full, matrices = block_of(model, layer).state_dict(), block_matrices(model.config.of_layer(layer))
        weights = {f"{matrix.name}.weight" for matrix in matrices}
        state = {name: tensor.double() for name, tensor in full.items() if name not in weights}
        norms = {norm: state[f"{norm}.weight"] for norm in NORMS.values()}
        for (norm, weight), size in zip(norms.items(), sizes[len(NORMS) * layer :], strict=False):
            state[f"{norm}.weight"] = torch.full_like(weight, size)
        for matrix in matrices:
            weight = full[f"{matrix.name}.weight"].double()
            if matrix.column_unit == HIDDEN:
                weight = weight * norms[NORMS[matrix.name.partition(".")[0]]] @ read
            if matrix.row_unit == HIDDEN:
                weight = write.T @ weight
                if matrix.bias:
                    state[f"{matrix.name}.bias"] = write.T @ state[f"{matrix.name}.bias"]
            state[f"{matrix.name}.weight"] = weight.float()
        return block_from(model.config, layer, {name: tensor.float() for name, tensor in state.items()})

    return derived(model, model.config, {name: tensor.float() for name, tensor in ends.items()}, rotated)
