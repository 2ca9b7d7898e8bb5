"""Fewer key/value heads with every query head kept: MHA to GQA, or GQA with fewer groups.

Neighbouring key/value heads i of a new group are replaced by one shared head, and each query head's q_proj and
o_proj are rewritten so that they read it. The shared head is the one that the group's heads are best linear functions
of, over calibration text:

    keys    a map that commutes with the rotary embedding turns and scales each rotary pair p, one complex number.
            With c_i[p] = k_i[p] + j k_i[p + E/2], weighted by its queries' size w_i[p] = rms(q of head i's queries),
            u[p] is the leading eigenvector of E[(w_i c_i)(w_j c_j)*]. The shared key is sum_i u_i* w_i c_i, and
            each query pair is multiplied by the conjugate of u_i / w_i, since c_i ~ (u_i / w_i) shared.
    values  with M_i = sum over its query heads of O_h^T O_h (what o_proj reads), the leading E principal directions P
            of the stacked M_i^(1/2) v_i: shared = P^T stacked, and o_proj reads v_i ~ M_i^(-1/2) P_i shared.

For attention of grouped queries alone: other kinds have no key/value heads, and q/k norms do not commute with the map.
Shape suffixes: N tokens, G old heads of one new group, E head_dim, P rotary pairs (E / 2), D hidden_size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from compress.pruning.activations import second_moment, summed
from compress.pruning.shapes import Shape
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM

_DAMPING = 1e-6
_READ = ("q_proj", "k_proj", "v_proj")


@torch.no_grad()
def merge_kv_heads(model: SportsLLM, kv_heads: int, samples: Sequence[Tensor]) -> SportsLLM:
    """A float32 model with `kv_heads` key/value heads, a divisor of its own, and all query heads.

    Raises:
        UsageError: not a divisor, or attention whose key/value heads cannot be merged.
    """
    config = model.config
    smaller = SportsLLM(dataclasses.replace(Shape.of(config), kv_heads=kv_heads).applied_to(config))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer, moments in enumerate(_moments(model, samples)):
        prefix = f"model.layers.{layer}.self_attn."
        weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        merged = _Heads(weights, config, moments).merged(kv_heads)
        state |= {prefix + name: tensor for name, tensor in merged.items()}
    smaller.load_state_dict(state)
    return smaller.eval()


def _moments(model: SportsLLM, samples: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """E[x x^T] of the outputs of q_proj, k_proj and v_proj (before rotation) of each layer, float64."""

    def moment(_input: Tensor, output: Tensor) -> Tensor:
        return second_moment(output).double()

    layers = range(model.config.num_hidden_layers)
    names = {(layer, name): f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in _READ}
    with summed({key: (model.get_submodule(name), moment) for key, name in names.items()}) as sums:
        for tokens in samples:
            model.hidden(tokens)
    count = sum(tokens.numel() for tokens in samples)
    return [{name: sums[layer, name] / count for name in _READ} for layer in layers]


class _Heads:
    """The attention weights of one layer, by head; a bias is one more column."""

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig, moments: Mapping[str, Tensor]) -> None:
        self.head_dim, self.groups = config.head_dim, config.num_key_value_heads
        self.per_group = config.num_attention_heads // self.groups
        self.biased = {name for name in _READ if f"{name}.bias" in weights}
        self.moments = moments

        def rows(name: str) -> Tensor:
            weight = weights[f"{name}.weight"].double()
            if name in self.biased:
                weight = torch.cat([weight, weights[f"{name}.bias"].double()[:, None]], dim=1)
            return weight.view(-1, self.head_dim, weight.shape[1])

        self.q, self.k, self.v = (rows(name) for name in _READ)
        output = weights["o_proj.weight"].double()
        self.o = output.view(output.shape[0], -1, self.head_dim).transpose(0, 1)

    def merged(self, kv_heads: int) -> dict[str, Tensor]:
        """The new tensors of q, k, v and o by their names in the half."""
        size = self.groups // kv_heads
        groups = [list(range(start, start + size)) for start in range(0, self.groups, size)]
        keys = torch.stack([self._shared_key(group) for group in groups])
        values = torch.stack([self._shared_value(group) for group in groups])
        result = {}
        for name, heads in zip(_READ, (self.q, keys, values), strict=True):
            weight = heads.flatten(0, 1)
            if name in self.biased:
                weight, result[f"{name}.bias"] = weight[:, :-1], weight[:, -1].float().clone()
            result[f"{name}.weight"] = weight.float().contiguous()
        result["o_proj.weight"] = self.o.transpose(0, 1).flatten(1).float().contiguous()
        return result

    def _queries(self, group: int) -> range:
        return range(group * self.per_group, (group + 1) * self.per_group)

    def _query_rms(self, group: int) -> Tensor:
        """(P,) root mean square of the rotary pairs of a group's queries."""
        energy = self.moments["q_proj"].diagonal().view(-1, 2, self.head_dim // 2)
        return energy[list(self._queries(group))].sum(dim=(0, 1)).clamp(min=_DAMPING).sqrt()

    def _shared_key(self, group: list[int]) -> Tensor:
        """(E, D) rows of the shared key head; rewrites the group's queries to match."""
        half = self.head_dim // 2
        blocks = self.moments["k_proj"].view(self.groups, 2, half, self.groups, 2, half)
        own = blocks[group][:, :, :, group].diagonal(dim1=2, dim2=5)  # (G, 2, G, 2, P)
        real = own[:, 0, :, 0] + own[:, 1, :, 1]
        imaginary = own[:, 1, :, 0] - own[:, 0, :, 1]
        weight_GP = torch.stack([self._query_rms(i) for i in group])
        weight_PGG = weight_GP.T[:, :, None] * weight_GP.T[:, None]
        covariance_PGG = torch.complex(real, imaginary).permute(2, 0, 1) * weight_PGG
        u_PG = torch.linalg.eigh(covariance_PGG).eigenvectors[..., -1]
        shared = torch.zeros_like(_as_complex(self.k[0]))
        for place, i in enumerate(group):
            u, w = u_PG[:, place, None], weight_GP[place][:, None]
            shared += u.conj() * w * _as_complex(self.k[i])
            for head in self._queries(i):
                self.q[head] = _as_real((u / w).conj() * _as_complex(self.q[head]))
        return _as_real(shared)

    def _shared_value(self, group: list[int]) -> Tensor:
        """(E, D) rows of the shared value head; rewrites the columns of o_proj that read the group's to match."""
        roots, inverses = [], []
        for i in group:
            read = sum(self.o[head].T @ self.o[head] for head in self._queries(i))
            scale, basis = torch.linalg.eigh(cast(Tensor, read))
            scale = scale.clamp(min=_DAMPING * float(scale.max())).sqrt()
            roots.append(basis * scale @ basis.T)
            inverses.append(basis / scale @ basis.T)
        root = cast(Tensor, cast(Any, torch).block_diag(*roots))
        index = [i * self.head_dim + e for i in group for e in range(self.head_dim)]
        covariance = root @ self.moments["v_proj"][index][:, index] @ root
        basis = torch.linalg.eigh(covariance).eigenvectors[:, -self.head_dim :]
        for place, i in enumerate(group):
            part = inverses[place] @ basis[place * self.head_dim : (place + 1) * self.head_dim]
            for head in self._queries(i):
                self.o[head] = self.o[head] @ part
        return cast(Tensor, basis.T @ root @ torch.cat([self.v[i] for i in group]))


def _as_complex(rows_ED: Tensor) -> Tensor:
    """(E, D) rows of a head as (P, D): rotary pair p is rows p and p + E / 2."""
    first, second = rows_ED.chunk(2)
    return torch.complex(first, second)


def _as_real(rows_PD: Tensor) -> Tensor:
    return torch.cat([rows_PD.real, rows_PD.imag])
