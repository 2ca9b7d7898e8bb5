"""An indexer made of a model's own queries and keys, in closed form, so that it chooses well before it has learned.

For the normed inputs x of a layer, over calibration text, and each rotary pair that the index key has:

    key         the `parts` pairs that those of the layer's key heads are best linear functions of
    queries     each query head as it reads these; where there are fewer index heads, means of a share of them

so that an index head's scores are as near to attention's own as so small a key can have them. One head for each query
head is worth its price: the mean of two heads finds what neither looks for.
Shape suffixes: J index heads, H query heads, K key/value heads, E head_dim, P rotary pairs, C `parts`,
D hidden_size, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from compress.pruning.activations import second_moment, summed
from compress.pruning.heads import as_complex, as_real, shared_pairs
from compress.pruning.latent import weighted_pairs
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import Half, SportsLLM
from sportsllm.models.selected import INDEX, index_pairs


@torch.no_grad()
def start_index(student: SportsLLM, model: SportsLLM, samples: Sequence[Tensor]) -> None:
    """Set the indexer of `student`, which has the weights of `model`.

    Args:
        student: whose indexer is replaced, in place; queries and keys have neither norms nor biases.
        model: the same with full attention.
        samples: calibration token ids, (1, T) each.
    """
    halves = [cast(Half, block.self_attn) for block in model.model.layers]
    watched = {layer: (half, lambda x, _: second_moment(x).double()) for layer, half in enumerate(halves)}
    with summed(watched) as moments:
        for tokens_1T in samples:
            model.hidden(tokens_1T)
    for layer, block in enumerate(student.model.layers):
        found = _indexer(halves[layer], moments[layer], student.config)
        for name, weight in zip(INDEX, found, strict=True):
            cast(Half, block.self_attn).get_submodule(name).weight.data = weight.float().contiguous()


def _indexer(half: Any, moment_DD: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Weights of one layer's index queries (J I, D) and key (I, D), in the order of `INDEX`."""

    def heads(name: str) -> Tensor:
        weight = cast(Tensor, half.get_parameter(f"{name}.weight")).detach().double()
        return as_complex(weight.view(-1, config.head_dim, config.hidden_size))[:, -index_pairs(config) :]

    selection, query_HPD, key_KPD = config.chosen_selection, heads("q_proj"), heads("k_proj")
    pairs = [shared_pairs(*pair, selection.parts) for pair in weighted_pairs(query_HPD, key_KPD, moment_DD)]
    read_CKP, into_KCP = (torch.stack(parts, dim=-1) for parts in zip(*pairs, strict=True))
    key_CPD = torch.einsum("ckp,kpd->cpd", read_CKP, key_KPD)
    of_heads_HCP = into_KCP.conj().repeat_interleave(len(query_HPD) // len(key_KPD), dim=0)
    query_HCPD = of_heads_HCP[..., None] * query_HPD[:, None]
    shares = torch.arange(len(query_HCPD)) * selection.heads // len(query_HCPD)
    query_JCPD = torch.stack([query_HCPD[shares == head].mean(dim=0) for head in sorted(set(shares.tolist()))])
    query_JCPD = query_JCPD[torch.arange(selection.heads) * len(query_JCPD) // selection.heads]  # repeated if more
    return as_real(query_JCPD).flatten(0, 2), as_real(key_CPD).flatten(0, 1)
