"""Fewer key/value heads with every query head kept: MHA to GQA, or GQA with fewer groups.

Neighbouring key/value heads i of a new group are replaced by one shared head, and each query head's q_proj and
o_proj are rewritten so that they read it. Three ways:

`mean`    keys and values averaged (GQA, https://arxiv.org/abs/2305.13245).
`select`  those of the group's strongest head.
`pca`     the shared head that the group's heads are best linear functions of, over calibration text:
    keys    a map that commutes with the rotary embedding turns and scales each rotary pair p, one complex number.
            With c_i[p] = k_i[p] + j k_i[p + E/2], weighted by its queries' size w_i[p] = rms(q of head i's queries),
            u[p] is the leading eigenvector of E[(w_i c_i)(w_j c_j)*]. The shared key is sum_i u_i* w_i c_i, and
            each query pair is multiplied by the conjugate of u_i / w_i, since c_i ~ (u_i / w_i) shared.
    values  with M_i = sum over its query heads of O_h^T O_h (what o_proj reads), the leading E principal directions P
            of the stacked M_i^(1/2) v_i: shared = P^T stacked, and o_proj reads v_i ~ M_i^(-1/2) P_i shared.

Shape suffixes: N tokens, G old heads of one new group, E head_dim, P rotary pairs (E / 2), D hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from sportsllm.errors import UsageError
from sportsllm.models.language_model import Block, SportsLLM

KV_MERGES = ("pca", "mean", "select")
_DAMPING = 1e-6


@torch.no_grad()
def convert_kv_heads(model: SportsLLM, kv_heads: int, samples: Sequence[Tensor], how: str = "pca") -> SportsLLM:
    """A model with `kv_heads` key/value heads and all query heads.

    Args:
        model: float32 and unquantized; read, never changed.
        kv_heads: a divisor of the model's.
        samples: calibration token ids, each (B, T); not read by `mean`.
        how: `pca`, `mean` or `select`.

    Raises:
        UsageError: no divisor, an unknown way, or `pca` for a model with q/k norms, which do not commute with it.
    """
    config = model.config
    old = config.num_key_value_heads
    if how not in KV_MERGES:
        raise UsageError(f"--kv-merge {how!r} is not known; use one of {', '.join(KV_MERGES)}")
    if kv_heads < 1 or old % kv_heads:
        raise UsageError(f"--kv-heads {kv_heads} must divide the model's {old} where all query heads stay")
    if config.qk_norm and how == "pca":
        raise UsageError("--kv-merge pca cannot see through q/k norms; use --kv-merge mean or select")
    smaller = SportsLLM(config.with_changes(num_key_value_heads=kv_heads))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = _moments(model, samples) if how != "mean" else [{}] * config.num_hidden_layers
    for layer, moment in enumerate(moments):
        weights = _Heads(state, layer, config.head_dim, old, config.num_attention_heads)
        for name, parts in weights.merged(kv_heads, how, moment).items():
            state[name] = parts
    smaller.load_state_dict(state)
    return smaller.eval()


def _moments(model: SportsLLM, samples: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """E[x x^T] of the outputs of q_proj, k_proj and v_proj (before rotation) of each layer, float64."""
    sums: list[dict[str, Tensor]] = [{} for _ in model.model.layers]
    count = 0
    handles = []
    for number, block in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):

            def hook(_module: nn.Module, _args: Any, output: Tensor, number: int = number, name: str = name) -> None:
                x_NE = output.flatten(0, 1).float()
                sums[number][name] = sums[number].get(name, 0.0) + (x_NE.T @ x_NE).double()

            handles.append(getattr(cast(Block, block).self_attn, name).register_forward_hook(hook))
    try:
        for tokens in samples:
            model.hidden(tokens)
            count += tokens.numel()
    finally:
        for handle in handles:
            handle.remove()
    return [{name: value / count for name, value in layer.items()} for layer in sums]


class _Heads:
    """The attention weights of one layer, taken apart by head; biases ride along as one more column."""

    def __init__(self, state: dict[str, Tensor], layer: int, head_dim: int, groups: int, heads: int) -> None:
        self.prefix, self.head_dim, self.groups, self.per_group = (
            f"model.layers.{layer}.self_attn.",
            head_dim,
            groups,
            heads // groups,
        )
        self.state = state

        def rows(name: str) -> Tensor:
            weight = state[f"{self.prefix}{name}.weight"].double()
            bias = state.get(f"{self.prefix}{name}.bias")
            if bias is not None:
                weight = torch.cat([weight, bias.double()[:, None]], dim=1)
            return weight.view(-1, head_dim, weight.shape[1])

        self.q, self.k, self.v = rows("q_proj"), rows("k_proj"), rows("v_proj")
        output = state[f"{self.prefix}o_proj.weight"].double()
        self.o = output.view(output.shape[0], -1, head_dim).transpose(0, 1)

    def merged(self, kv_heads: int, how: str, moment: dict[str, Tensor]) -> dict[str, Tensor]:
        """The new q, k, v and o tensors by their names in the state dict."""
        size = self.groups // kv_heads
        keys, values = [], []
        for start in range(0, self.groups, size):
            group = list(range(start, start + size))
            if how == "pca":
                keys.append(self._shared_key(group, moment))
                values.append(self._shared_value(group, moment))
            elif how == "mean":
                keys.append(self.k[group].mean(dim=0))
                values.append(self.v[group].mean(dim=0))
            else:
                energy = [float(self._key_energy(i, moment)) for i in group]
                best = group[energy.index(max(energy))]
                keys.append(self.k[best])
                values.append(self.v[best])
        result = {}
        for name, parts in (("q_proj", self.q), ("k_proj", torch.stack(keys)), ("v_proj", torch.stack(values))):
            weight = parts.flatten(0, 1)
            if f"{self.prefix}{name}.bias" in self.state:
                weight, result[f"{self.prefix}{name}.bias"] = weight[:, :-1], weight[:, -1].float().clone()
            result[f"{self.prefix}{name}.weight"] = weight.float().contiguous()
        result[f"{self.prefix}o_proj.weight"] = self.o.transpose(0, 1).flatten(1).float().contiguous()
        return result

    def _queries(self, group: int) -> range:
        return range(group * self.per_group, (group + 1) * self.per_group)

    def _query_rms(self, group: int, moment: dict[str, Tensor]) -> Tensor:
        """(P,) root mean square of the rotary pairs of a group's queries."""
        energy = moment["q_proj"].diagonal().view(-1, 2, self.head_dim // 2)
        return energy[list(self._queries(group))].sum(dim=(0, 1)).clamp(min=_DAMPING).sqrt()

    def _key_energy(self, group: int, moment: dict[str, Tensor]) -> Tensor:
        """How much a head's keys and queries move attention together: sum of E|q|^2 E|k|^2 over rotary pairs."""
        energy = moment["k_proj"].diagonal().view(-1, 2, self.head_dim // 2)[group].sum(dim=0)
        return (energy * self._query_rms(group, moment) ** 2).sum()

    def _shared_key(self, group: list[int], moment: dict[str, Tensor]) -> Tensor:
        half = self.head_dim // 2
        blocks = moment["k_proj"].view(self.groups, 2, half, self.groups, 2, half)
        own = blocks[group][:, :, :, group].diagonal(dim1=2, dim2=5)  # (G, 2, G, 2, P)
        real = own[:, 0, :, 0] + own[:, 1, :, 1]
        imaginary = own[:, 1, :, 0] - own[:, 0, :, 1]
        weight_GP = torch.stack([self._query_rms(i, moment) for i in group])
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

    def _shared_value(self, group: list[int], moment: dict[str, Tensor]) -> Tensor:
        roots, inverses = [], []
        for i in group:
            read = sum(self.o[head].T @ self.o[head] for head in self._queries(i))
            scale, basis = torch.linalg.eigh(cast(Tensor, read))
            scale = scale.clamp(min=_DAMPING * float(scale.max())).sqrt()
            roots.append(basis * scale @ basis.T)
            inverses.append(basis / scale @ basis.T)
        root = cast(Tensor, cast(Any, torch).block_diag(*roots))
        index = [i * self.head_dim + e for i in group for e in range(self.head_dim)]
        covariance = root @ moment["v_proj"][index][:, index] @ root
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
