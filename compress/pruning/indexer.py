"""Token selection: an indexer made of a model's own queries and keys, in closed form, before any training.

For the normed inputs x of a layer, over calibration text, and each rotary pair that the index key has:

    key         the `parts` pairs that those of the layer's key heads are best linear functions of
    queries     each query head as it reads these; where there are fewer index heads, means of a share of them

so that an index head's scores are as near to attention's own as so small a key can have them. One head for each query
head is worth its price: the mean of two heads finds what neither looks for. Biases are one more input that is always 1.
Heads that are normalised are no linear functions of x; linear functions of least squared error replace them.
Shape suffixes: J index heads, H query heads, K key/value heads, E head_dim, P rotary pairs, C `parts`,
D hidden_size, A the inputs of queries and keys: D, and 1 where they have biases, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from compress.layerwise import blocks_of, run_layer, summed
from compress.least_squares import LeastSquares
from compress.pruning.heads import as_complex, as_real, shared_pairs
from compress.pruning.latent import weighted_pairs
from sportsllm.models.attention_kinds import index_pairs
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.layers import GroupedQueryAttention
from sportsllm.models.selection import selected_attention


@torch.no_grad()
def start_index(student: SportsLLM, model: SportsLLM, samples: Sequence[Tensor]) -> None:
    """Set the indexer of `student`, which has the weights of `model`.

    Args:
        student: whose indexer is replaced, in place.
        model: the same with full attention.
        samples: calibration token ids, (1, T) each.
    """
    states_BTD = [model.embedded(tokens) for tokens in samples]
    for block, ours in zip(blocks_of(model), selected_attention(student), strict=True):
        attention = block.self_attn
        assert isinstance(attention, GroupedQueryAttention)
        with summed({0: (attention, partial(_sums, attention))}) as sums:
            states_BTD = run_layer(block, states_BTD, model.rope)
        found = _indexer(attention, sums[0], student.config)
        for linear, weight_IA in zip((ours.index_q_proj, ours.index_k_proj), found, strict=True):
            linear.weight.data = weight_IA[:, : linear.in_features].float().contiguous()
            if linear.bias is not None:
                linear.bias.data = weight_IA[:, -1].float()


def _inputs(x_BTD: Tensor, config: ModelConfig) -> Tensor:
    """(B, T, A)."""
    return nn.functional.pad(x_BTD, (0, 1), value=1.0) if config.attention_bias else x_BTD


def _sums(attention: GroupedQueryAttention, x_BTD: Tensor, _output: Tensor) -> Tensor:
    """Over all tokens of x, float64: a a^T of the inputs, (A, A); below it, of normalised heads, [q; k] a^T."""
    config = attention.config
    read = [inputs := _inputs(x_BTD, config)]
    if config.qk_norm:
        for linear, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
            read.append(norm(linear(x_BTD).unflatten(-1, (-1, config.head_dim))).flatten(2))
    return (torch.cat(read, dim=-1).flatten(0, 1).T @ inputs.flatten(0, 1)).double()


def _heads(attention: GroupedQueryAttention, sums: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads (H, E, A) and key heads (K, E, A) as linear functions of the inputs, and these' moment (A, A)."""
    linears = attention.q_proj, attention.k_proj
    moment_AA = sums[: sums.shape[1]]
    if config.qk_norm:
        rows = sums[sums.shape[1] :]
        both = LeastSquares(moment_AA, rows).solve(torch.zeros_like(rows)).double()
        found = list(torch.split(both, [linear.out_features for linear in linears]))
    else:
        columns = [[linear.weight, *([linear.bias[:, None]] if config.attention_bias else [])] for linear in linears]
        found = [torch.cat(parts, dim=1).detach().double() for parts in columns]
    queries, keys = (rows.view(-1, config.head_dim, rows.shape[1]) for rows in found)
    return queries, keys, moment_AA


def _indexer(attention: GroupedQueryAttention, sums: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """One layer's index queries (J I, A) and key (I, A), as `SelectedAttention` has them."""
    selection, (query_HEA, key_KEA, moment_AA) = config.chosen_selection, _heads(attention, sums, config)
    query_HPA, key_KPA = (as_complex(heads)[:, -index_pairs(config) :] for heads in (query_HEA, key_KEA))
    pairs = [shared_pairs(*pair, selection.parts) for pair in weighted_pairs(query_HPA, key_KPA, moment_AA)]
    read_CKP, into_KCP = (torch.stack(parts, dim=-1) for parts in zip(*pairs, strict=True))
    key_CPA = torch.einsum("ckp,kpa->cpa", read_CKP, key_KPA)
    of_heads_HCP = into_KCP.conj().repeat_interleave(len(query_HPA) // len(key_KPA), dim=0)
    query_HCPA = of_heads_HCP[..., None] * query_HPA[:, None]
    shares = torch.arange(len(query_HCPA)) * selection.heads // len(query_HCPA)
    query_JCPA = torch.stack([query_HCPA[shares == head].mean(dim=0) for head in sorted(set(shares.tolist()))])
    query_JCPA = query_JCPA[torch.arange(selection.heads) * len(query_JCPA) // selection.heads]  # repeated if more
    return as_real(query_JCPA).flatten(0, 2), as_real(key_CPA).flatten(0, 1)
