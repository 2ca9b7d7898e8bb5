"""Hidden channels: the residual stream cut to its principal directions.

The weights are written in another basis of the residual stream, x' = Q^T S x, whose first directions are kept
(SliceGPT, https://arxiv.org/abs/2401.15024). Q are the principal directions of the normalised states before every norm,
scaled by S. The norms' weights are folded into the matrices that read them, and one factor replaces each.

An untied head takes the last norm's weight g too, and S = 1: with all directions kept, nothing changes. A tied table
cannot, since it also writes the stream. With S = diag(g^(1/2)) both uses agree; only RMSNorm's divisor changes.
Shape suffixes: D hidden_size, K kept directions, M norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.layerwise import Statistic, second_moment
from sportsllm.models.kinds import EMBEDDING, HEAD, LAST_NORM, NORMS, block_matrices
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.parts import HIDDEN

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


def watched_norms(model: SportsLLM) -> dict[str, tuple[nn.Module, Statistic]]:
    """For `summed`, by a norm's name: the second moment of its normalised input, (D, D)."""

    def moment(given: Tensor, _output: Tensor) -> Tensor:
        return second_moment(F.rms_norm(given.float(), given.shape[-1:]))

    return {name: (model.get_submodule(name), moment) for name in _norms(model)}


def directions_from(model: SportsLLM, moments: Mapping[str, Tensor]) -> Directions:
    """The basis whose first directions hold most of the states, from the sums over `watched_norms`."""
    scale = torch.ones(model.config.hidden_size, dtype=torch.float64)
    if model.config.tie_word_embeddings:
        weight = model.get_parameter(f"{LAST_NORM}.weight").detach().double()
        scale = (weight / weight.mean()).clamp(min=_LEAST).sqrt()
    # The mean square of a normalised state is 1, so the trace counts the tokens.
    scaled = [
        moments[name].double() * len(scale) / moments[name].trace() * scale[:, None] * scale for name in _norms(model)
    ]
    basis = torch.linalg.eigh(torch.stack(scaled).sum(dim=0)).eigenvectors.flip(1)
    squares = torch.stack([(basis * (moment @ basis)).sum(dim=0) for moment in scaled])
    return Directions(scale.float(), basis.float(), squares.float())


@torch.no_grad()
def rotate(model: SportsLLM, directions: Directions, kept: int) -> SportsLLM:
    """The float32 model in a basis of which the first `kept` directions will stay, its norms scaled for these."""
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    scale, basis = directions.scale.double(), directions.basis.double()
    write, read = scale[:, None] * basis, basis / scale[:, None]  # x' = x @ write, and w @ x is (w @ read) @ x'
    sizes = (directions.squares[:, :kept].sum(dim=1) / kept).sqrt().tolist()
    norms = {name: state[f"{name}.weight"] for name in _norms(model)}
    state |= {f"{name}.weight": torch.full_like(norms[name], size) for name, size in zip(norms, sizes, strict=True)}
    state[f"{EMBEDDING}.weight"] @= write
    if model.config.tie_word_embeddings:
        state[f"{LAST_NORM}.weight"] *= norms[LAST_NORM].mean()
    else:
        state[f"{HEAD}.weight"] = state[f"{HEAD}.weight"] * norms[LAST_NORM] @ read
    for layer in range(model.config.num_hidden_layers):
        for matrix in block_matrices(model.config.of_layer(layer)):
            name = f"model.layers.{layer}.{matrix.name}"
            if matrix.column_unit == HIDDEN:
                norm = norms[f"model.layers.{layer}.{NORMS[matrix.name.partition('.')[0]]}"]
                state[f"{name}.weight"] = state[f"{name}.weight"] * norm @ read
            if matrix.row_unit == HIDDEN:
                for part in [f"{name}.weight", f"{name}.bias"][: 1 + matrix.bias]:
                    state[part] = write.T @ state[part]
    rotated = SportsLLM(model.config)
    rotated.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return rotated.eval()


def _norms(model: SportsLLM) -> list[str]:
    """The names of all norms that read the residual stream, in order."""
    layers = range(model.config.num_hidden_layers)
    return [*(f"model.layers.{layer}.{norm}" for layer in layers for norm in NORMS.values()), LAST_NORM]
