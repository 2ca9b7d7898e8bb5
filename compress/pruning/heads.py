"""Heads: fewer query heads, key/value heads merged, heads of fewer channels, another rotary table.

A new key/value head c is read by query heads that are kept from the full model, and stands for the old key/value heads
i that these read. Over calibration text the old heads are best linear functions of c. q_proj and o_proj are rewritten
so that the kept query heads read it:

    keys    a map that commutes with the rotary embedding turns and scales rotary pairs, one complex number each. Pair r
            of the new head stands for the old pairs p whose frequency is nearest to its own. With
            c_ip = k_i[p] + j k_i[p + E/2], weighted by its queries' size w_ip = rms(q[p] of head i's kept queries),
            u is the leading eigenvector of E[(w_ip c_ip)(w_jq c_jq)*]. The shared pair is sum u_ip* w_ip c_ip, and
            a query's is sum (u_ip / w_ip)* q_p, since c_ip ~ (u_ip / w_ip) shared.
    values  with M_i = sum over its kept query heads of O_h^T O_h (what o_proj reads), the leading principal directions
            P of the stacked M_i^(1/2) v_i: shared = P^T stacked, and o_proj reads v_i ~ M_i^(-1/2) P_i shared.

If heads are normalised (q/k norms), which does not commute with such maps, a new pair is one old pair, the same for all
heads of a layer, and heads are not merged.
Shape suffixes: E head_dim, P rotary pairs (E / 2), D hidden_size, U pairs that one new pair stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from compress import layerwise
from compress.pruning.scores import Scores, choose_in_layer, top_indices
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import Block, SportsLLM
from sportsllm.models.rope import inverse_frequencies

_DAMPING = 1e-6
_READ = ("q_proj", "k_proj", "v_proj")
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling")


@torch.no_grad()
def reduce_heads(model: SportsLLM, smaller: ModelConfig, scores: Scores, samples: Sequence[Tensor]) -> SportsLLM:
    """A float32 model with the heads and the rotary table of `smaller`, and all other dimensions of `model`.

    `Shape.applied_to` says which configs are possible. `scores` choose query heads; `samples` are calibration token
    ids, (B, T) each.
    """
    config = model.config
    made = config.with_changes(**{name: getattr(smaller, name) for name in HEADS})
    moments, prefix = _moments(model, samples), "self_attn."

    def with_heads(layer: int) -> Block:
        state = layerwise.block_of(model, layer).state_dict()
        weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        kept = _kept_queries(config.of_layer(layer), smaller.of_layer(layer), scores.of_layer(layer))
        new = _Heads(weights, config, next(moments)).reduced(smaller, kept)
        return layerwise.block_from(made, layer, state | {prefix + name: tensor for name, tensor in new.items()})

    return layerwise.derived(model, made, layerwise.ends_of(model), with_heads, once=True)


def nearest_pairs(full: ModelConfig, smaller: ModelConfig) -> list[list[int]]:
    """For each rotary pair of the smaller head the full head's pairs that it stands for, at least one.

    These are the pairs that no other new pair is nearer to in frequency, or the nearest one if there are none.
    """
    old, new = (torch.from_numpy(inverse_frequencies(config)).double() for config in (full, smaller))
    distance = (old[:, None] - new).abs()
    nearest = distance.argmin(dim=1).tolist()
    found = [[p for p, near in enumerate(nearest) if near == r] for r in range(len(new))]
    return [pairs or [int(distance[:, r].argmin())] for r, pairs in enumerate(found)]


def _kept_queries(full: ModelConfig, smaller: ModelConfig, scores: Mapping[str, Tensor]) -> list[list[int]]:
    """The query heads of one layer that stay, by the new key/value head: of the strongest groups, or if groups are
    merged the strongest of an even share of all heads.
    """
    heads, groups = full.num_attention_heads, smaller.num_key_value_heads
    each = smaller.num_attention_heads // groups
    if each <= heads // full.num_key_value_heads:
        chosen: list[list[int]] = choose_in_layer(full, smaller, scores)["query_head"].view(groups, each).tolist()
        return chosen
    score = scores["query_head"]
    bounds = [number * heads // groups for number in range(groups + 1)]
    shares = [torch.arange(start, stop) for start, stop in pairwise(bounds)]
    return [share[top_indices(score[share], each)].tolist() for share in shares]


def _moments(model: SportsLLM, samples: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
    """E[x x^T] of each layer's queries, keys (both before rotation) and values, float64, one layer at a time."""

    def moment(_input: Tensor, output: Tensor) -> Tensor:
        return layerwise.second_moment(output.flatten(2)).double()

    names = dict(zip(_READ, ("q_norm", "k_norm", "v_proj") if model.config.qk_norm else _READ, strict=True))
    count = sum(tokens.numel() for tokens in samples)
    states_BTD = layerwise.embedded(model, samples)
    for block in layerwise.blocks_of(model):
        watched = {key: (block.get_submodule(f"self_attn.{name}"), moment) for key, name in names.items()}
        with layerwise.summed(watched) as sums:
            states_BTD = layerwise.run_layer(block, states_BTD, model.rope)
        yield {key: sums[key] / count for key in _READ}


class _Heads:
    """The attention weights of one layer, by head; a bias is one more column."""

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig, moments: Mapping[str, Tensor]) -> None:
        self.config, self.weights, self.moments = config, weights, moments
        self.size, self.groups = config.head_dim, config.num_key_value_heads
        self.biased = {name for name in _READ if f"{name}.bias" in weights}

        def rows(name: str) -> Tensor:
            weight = weights[f"{name}.weight"].double()
            if name in self.biased:
                weight = torch.cat([weight, weights[f"{name}.bias"].double()[:, None]], dim=1)
            return weight.view(-1, self.size, weight.shape[1])

        self.q, self.k, self.v = (rows(name) for name in _READ)
        output = weights["o_proj.weight"].double()
        self.o = output.view(output.shape[0], -1, self.size).transpose(0, 1)

    def reduced(self, smaller: ModelConfig, kept: list[list[int]]) -> dict[str, Tensor]:
        """The new tensors of attention by their names in it; `kept` are the query heads of each new group."""
        pairs = nearest_pairs(self.config, smaller)
        scale = 1.0 if self.config.attention_scale else (smaller.head_dim / self.size) ** 0.5  # sqrt(E) divides scores
        result: dict[str, Tensor] = {}
        if self.config.qk_norm:
            pairs = [[max(near, key=self._pair_weights(kept).__getitem__)] for near in pairs]
            result = self._norms([p for (p,) in pairs], scale)
            scale = 1.0
        keys, all_queries = zip(*(self._shared_key(heads, pairs) for heads in kept), strict=True)
        values, all_outputs = zip(*(self._shared_value(heads, smaller.head_dim) for heads in kept), strict=True)
        queries = [scale * query for of_key in all_queries for query in of_key]
        result["o_proj.weight"] = torch.cat([output for of_value in all_outputs for output in of_value], dim=1)
        for name, rows in zip(_READ, (queries, keys, values), strict=True):
            weight = torch.cat(list(rows))
            if name in self.biased:
                weight, result[f"{name}.bias"] = weight[:, :-1], weight[:, -1].clone()
            result[f"{name}.weight"] = weight
        return {name: tensor.float().contiguous() for name, tensor in result.items()}

    def _group(self, head: int) -> int:
        return head * self.groups // len(self.q)

    def _by_group(self, of_heads: Tensor, heads: Sequence[int], groups: Sequence[int]) -> Tensor:
        """Sums over those of `heads` that read each of the old groups."""
        return torch.stack([of_heads[[h for h in heads if self._group(h) == g]].sum(dim=0) for g in groups])

    def _energy(self, name: str) -> Tensor:
        """(heads, P) mean squares of rotary pairs of queries or keys."""
        return self.moments[name].diagonal().view(-1, 2, self.size // 2).sum(dim=1).clamp(min=_DAMPING)

    def _pair_weights(self, kept: list[list[int]]) -> list[float]:
        """How much each pair moves the scores of all kept query heads."""
        heads = [head for group in kept for head in group]
        keys = self._energy("k_proj")[[self._group(head) for head in heads]]
        return list((self._energy("q_proj")[heads] * keys).sum(dim=0).tolist())

    def _norms(self, pairs: list[int], scale: float) -> dict[str, Tensor]:
        """The q/k norms' weights of the pairs that stay; queries and keys keep their mean size, scores their scale."""
        kept = torch.tensor(pairs + [p + self.size // 2 for p in pairs])
        result = {}
        for name, read, factor in (("q_norm", "q_proj", scale), ("k_norm", "k_proj", 1.0)):
            weight = self.weights[f"{name}.weight"].double()
            normed = self.moments[read].diagonal().view(-1, self.size).mean(dim=0) / weight.square().clamp(min=_DAMPING)
            result[f"{name}.weight"] = factor * normed[kept].mean().sqrt() * weight[kept]
        return result

    def _shared_key(self, heads: list[int], pairs: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
        """(E, D) rows of the key head that `heads` share, and of each of their queries."""
        old = sorted({self._group(head) for head in heads})
        weight = self._by_group(self._energy("q_proj"), heads, old).sqrt()
        half = self.size // 2
        moments = self.moments["k_proj"].view(self.groups, 2, half, self.groups, 2, half)[old][:, :, :, old]
        keys, turned = as_complex(self.k[old]), as_complex(self.q[heads])
        shared, read = [], []
        for near in pairs:
            own = moments[:, :, near][:, :, :, :, :, near]
            real = own[:, 0, :, :, 0] + own[:, 1, :, :, 1]
            imaginary = own[:, 1, :, :, 0] - own[:, 0, :, :, 1]
            covariance_UU = torch.complex(real, imaginary).flatten(2, 3).flatten(0, 1)
            pair = shared_pair(covariance_UU, weight[:, near].flatten())
            shared.append(torch.einsum("u,ud->d", pair.read_U, keys[:, near].flatten(0, 1)))
            into = pair.into_U.conj().view(len(old), len(near))
            places = [old.index(self._group(head)) for head in heads]
            read.append(torch.einsum("hu,hud->hd", into[places], turned[:, near]))
        return as_real(torch.stack(shared)), list(as_real(torch.stack(read, dim=1)))

    def _shared_value(self, heads: list[int], size: int) -> tuple[Tensor, list[Tensor]]:
        """(size, D) rows of the value head that `heads` share, and the (D, size) columns of o_proj of each."""
        old = sorted({self._group(head) for head in heads})
        if len(old) == 1 and size == self.size:
            return self.v[old[0]], [self.o[head] for head in heads]
        roots, inverses = roots_of(self._by_group(self.o.mT @ self.o, heads, old))
        root: Tensor = torch.block_diag(*roots)  # type: ignore[no-untyped-call]
        index = [i * self.size + e for i in old for e in range(self.size)]
        covariance = root @ self.moments["v_proj"][index][:, index] @ root
        basis = torch.linalg.eigh(covariance).eigenvectors[:, -size:]
        mean = root.diagonal().mean()  # values keep their size
        parts = {i: mean * inverses[place] @ basis.split(self.size)[place] for place, i in enumerate(old)}
        value = basis.T @ root @ torch.cat([self.v[i] for i in old]) / mean
        return value, [self.o[head] @ parts[self._group(head)] for head in heads]


class SharedPair(NamedTuple):
    """A pair s = sum read_u c_u that stands for several, c_u ~ into_u s; both (U,) complex."""

    read_U: Tensor
    into_U: Tensor


def shared_pair(covariance_UU: Tensor, w_U: Tensor) -> SharedPair:
    """The pair that several are best multiples of, given E[c c*] of these and the weight of each."""
    u_U = torch.linalg.eigh(covariance_UU * w_U[:, None] * w_U).eigenvectors[:, -1]
    largest = u_U[u_U.abs().argmax()]
    u_U = u_U * largest.conj() / largest.abs()  # its largest entry is real and positive
    mean = (u_U.abs().square() * w_U.square()).sum().sqrt()  # so that one pair alone stays as it is
    return SharedPair(u_U.conj() * w_U / mean, u_U * mean / w_U)


def shared_pairs(covariance_UU: Tensor, w_U: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` pairs that several are best linear functions of: (`count`, U) these as functions of the several, and
    (U, `count`) the several as functions of these. Arguments are those of `shared_pair`.
    """
    u_UC = torch.linalg.eigh(covariance_UU * w_U[:, None] * w_U).eigenvectors[:, -count:]
    return u_UC.mH * w_U, u_UC / w_U[:, None]


def roots_of(moments_XEE: Tensor) -> tuple[Tensor, Tensor]:
    """The square roots of positive semidefinite matrices, damped, and their inverses."""
    scale, basis = torch.linalg.eigh(moments_XEE)
    scale = scale.clamp(min=_DAMPING * float(scale.max().clamp(min=_DAMPING))).sqrt()[:, None]
    return basis * scale @ basis.mT, basis / scale @ basis.mT


def as_complex(rows_XED: Tensor) -> Tensor:
    """Rows of heads, (..., E, D), as (..., P, D): rotary pair p is rows p and p + E / 2."""
    first, second = rows_XED.chunk(2, dim=-2)
    return torch.complex(first, second)


def as_real(rows_XPD: Tensor) -> Tensor:
    """The inverse of `as_complex`."""
    return torch.cat([rows_XPD.real, rows_XPD.imag], dim=-2)
