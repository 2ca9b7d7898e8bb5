"""An indexer made of a model's own queries and keys, in closed form, so that it chooses well before it has learned.

For the normed inputs x of a layer, over calibration text:

    key         the one rotated key that all of the layer's key heads are best linear functions of, as latent attention
                has it (`compress.pruning.latent`)
    queries     each index head the mean of its share of the query heads, as they read that key
    weights     w(x) = J^(-1/2) a.x with a.x as near to 1 as least squares makes it: the score then is the mean of the
                index heads' relu(q.k) / sqrt(E), as attention's own

Shape suffixes: J index heads, H query heads, K key/value heads, E head_dim, D hidden_size, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from compress.pruning.activations import second_moment, summed
from compress.pruning.heads import as_real
from compress.pruning.latent import shared_rotated_key
from compress.pruning.refit import RIDGE
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import Half, SportsLLM
from sportsllm.models.selected import INDEX


@torch.no_grad()
def start_index(student: SportsLLM, model: SportsLLM, samples: Sequence[Tensor]) -> None:
    """Set the indexer of `student`, which has the weights of `model`.

    Args:
        student: whose indexer is replaced, in place; queries and keys have neither norms nor biases.
        model: the same with full attention.
        samples: calibration token ids, (1, T) each.
    """
    halves = [cast(Half, block.self_attn) for block in model.model.layers]
    squares = {layer: (half, lambda x, _: second_moment(x).double()) for layer, half in enumerate(halves)}
    sums = {layer: (half, lambda x, _: x.flatten(0, -2).double().sum(dim=0)) for layer, half in enumerate(halves)}
    with summed(squares) as moments, summed(sums) as totals:
        for tokens_1T in samples:
            model.hidden(tokens_1T)
    count = sum(tokens_1T.numel() for tokens_1T in samples)
    for layer, block in enumerate(student.model.layers):
        found = _indexer(halves[layer], moments[layer] / count, totals[layer] / count, student.config)
        for name, weight in zip(INDEX, found, strict=True):
            cast(Half, block.self_attn).get_submodule(name).weight.data = weight.float().contiguous()


def _indexer(half: Any, moment_DD: Tensor, mean_D: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of one layer's index queries (J E, D), key (E, D) and weights (J, D), in the order of `INDEX`."""

    def rows(name: str) -> Tensor:
        weight = cast(Tensor, half.get_parameter(f"{name}.weight")).detach().double()
        return weight.view(-1, config.head_dim, config.hidden_size)

    heads = config.chosen_selection.heads
    rotated_PD, _, turned_HED = shared_rotated_key(rows("q_proj"), rows("k_proj"), moment_DD)
    shares = torch.arange(len(turned_HED)) * heads // len(turned_HED)
    queries_JED = torch.stack([turned_HED[shares == head].mean(dim=0) for head in sorted(set(shares.tolist()))])
    queries_JED = queries_JED[torch.arange(heads) * len(queries_JED) // heads]  # repeated where there are more
    damped_DD = moment_DD + RIDGE * moment_DD.diagonal().mean() * torch.eye(len(moment_DD)).double()
    one_D = torch.linalg.solve(damped_DD, mean_D)
    return queries_JED.flatten(0, 1), as_real(rotated_PD), (heads**-0.5 * one_D).expand(heads, -1)
