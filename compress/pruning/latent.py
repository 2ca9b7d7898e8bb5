"""Latent attention: heads converted to a layout whose cache is one small vector a token and layer.

For the normed inputs x of a layer, C = E[x x^T] over calibration text, keys and values are split and compressed:

    rotated     the key head that all of the model's key heads are best linear functions of, pair by pair, as
                `compress.pruning.heads` merges heads; each query head reads it in place of its own
    unrotated   what is left of the keys, k_i - (share of the rotated key), and the values v_i, as functions of one
                latent c: with G = [M_k^(1/2) K; M_v^(1/2) V] the R leading principal directions U of G x,
                c = L^(-1/2) U^T G x and [k; v] ~ M^(-1/2) U L^(1/2) c, L their variances
    metrics     M_v = sum over a head's readers of O_h^T O_h (what o_proj reads); M_k = that of the queries,
                E[q_h q_h^T] / E, times the size of what a score moves, tr(O_h V O_h^T), and `_KEYS`

so that the latent is white and the layout's norm changes it least. Then, layer by layer, kv_b_proj and o_proj are
fitted by least squares to the full model's keys, values and residual stream, from their new inputs. Unrotated keys lose
their positions, which a recovery mends. At an equal cache, merged heads (`compress.pruning.heads`) are better on deep
models of few tokens, latent attention on models trained for long (docs/log.md).
Covariance-aware factors: CARE (https://arxiv.org/abs/2603.17946); rotary part apart: TransMLA
(https://arxiv.org/abs/2502.07864). The layout has one rank for all layers.
Shape suffixes: D hidden_size, H query heads, K key/value heads, E head_dim, P rotary pairs (E / 2), R kv_lora_rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.layerwise import (
    LayerStates,
    after_sublayer,
    blocks_of,
    input_moment,
    matrix_input,
    run_layer,
    summed,
)
from compress.least_squares import LeastSquares
from compress.pruning.heads import as_complex, as_real, roots_of, shared_pair
from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import NORMS
from sportsllm.models.language_model import Block, SportsLLM

_KEYS = 0.1
"""Weight of keys relative to values: errors of scores partly cancel in a sum over tokens. 0.03 to 0.3 measure alike."""
_ATTENTION, _FEED_FORWARD = NORMS
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")


def latent_config(config: ModelConfig, rank: int) -> ModelConfig:
    """The config with latent attention of `rank`; the key that stays rotated is as wide as a head.

    Raises:
        UsageError: the model's attention cannot be written that way, or a size is impossible.
    """
    if config.attention_kind != "grouped_query":
        raise UsageError(f"--latent: the model's attention is of kind {config.attention_kind!r} already; leave it out")
    for found, what in (
        (config.qk_norm, "norms of queries and keys"),
        (config.attention_bias or config.attention_output_bias, "biases in attention"),
        (config.layer_types is not None, "layers that see or rotate otherwise than the rest"),
        (config.position_kind != "rotary", "learned positions"),
        (config.rope_scaling is not None, "a stretched rotary table"),
        (config.attention_scale is not None, "an attention scale of its own"),
        (config.output_norms, "norms after attention"),
    ):
        if found:
            raise UsageError(f"--latent: the model has {what}, unknown to latent attention; merge --kv-heads instead")
    before = 2 * config.key_value_size
    most = min(config.hidden_size, before - config.head_dim - 1)
    if not 1 <= rank <= most:
        raise UsageError(
            f"--latent is {rank}; with a rotated key of {config.head_dim} channels, and for fewer than the {before} "
            f"values that the model caches for a token and layer, choose 1 to {most}"
        )
    return config.with_changes(
        attention_kind="latent",
        num_key_value_heads=1,
        kv_lora_rank=rank,
        qk_nope_head_dim=config.head_dim,
        v_head_dim=config.head_dim,
    )


@torch.no_grad()
def to_latent(model: SportsLLM, smaller: ModelConfig, samples: Sequence[Tensor], refit: bool = True) -> SportsLLM:
    """A float32 model with the attention of `smaller`, which `latent_config` made from the model's own.

    Args:
        model: read, never changed.
        smaller: the new config.
        samples: calibration token ids, (B, T) each.
        refit: fit kv_b_proj and o_proj to the full model afterwards.
    """
    count = sum(tokens.numel() for tokens in samples)
    state = {name: tensor for name, tensor in model.state_dict().items() if f".{_ATTENTION}." not in name}
    wanted = []
    states_BTD = [model.embedded(tokens) for tokens in samples]
    for layer, block in enumerate(blocks_of(model)):
        attention = block.get_submodule(_ATTENTION)
        with summed({layer: (attention, lambda x, y: input_moment(x, y).double())}) as moments:
            states_BTD = run_layer(block, states_BTD, model.rope)
        found = _factored(attention, moments[layer] / count, model.config, smaller)
        state |= {f"model.layers.{layer}.{_ATTENTION}.{name}": tensor for name, tensor in found.tensors.items()}
        wanted.append(found.wanted)
    reduced = SportsLLM(smaller)
    reduced.load_state_dict(state)
    if refit:
        _refit(reduced.eval(), model, wanted, samples)
    return reduced.eval()


class _Factored(NamedTuple):
    """One layer's tensors by their names in attention; and keys and values as functions of x, (O, D), for kv_b_proj."""

    tensors: dict[str, Tensor]
    wanted: Tensor


def _factored(attention: nn.Module, moment_DD: Tensor, config: ModelConfig, smaller: ModelConfig) -> _Factored:
    """The closed form for one layer; `moment_DD` is E[x x^T] of its inputs."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shared = heads // groups

    q, k, v, output = (attention.get_parameter(f"{name}.weight").detach() for name in _MATRICES)
    q_HED, k_KED, v_KED = (weight.double().view(-1, size, config.hidden_size) for weight in (q, k, v))
    o_HDE = output.double().view(-1, heads, size).transpose(0, 1)
    rotated_PD, left_KED, turned_HED = shared_rotated_key(q_HED, k_KED, moment_DD)
    read_HEE = o_HDE.mT @ o_HDE
    v_moment_KEE = v_KED @ moment_DD @ v_KED.mT
    moved_H = (read_HEE * v_moment_KEE.repeat_interleave(shared, dim=0)).sum(dim=(1, 2))
    q_moment_HEE = q_HED @ moment_DD @ q_HED.mT * (_KEYS / size)

    def by_group(metric_HEE: Tensor) -> Tensor:
        return metric_HEE.view(groups, shared, size, size).sum(dim=1)

    metrics = by_group(moved_H[:, None, None] * q_moment_HEE), by_group(read_HEE)
    roots, inverses = (torch.cat(both) for both in zip(*map(roots_of, metrics), strict=True))
    plain = torch.cat([left_KED, v_KED])
    weighted = (roots @ plain).flatten(0, 1)
    variances, directions = torch.linalg.eigh(weighted @ moment_DD @ weighted.T)
    directions = directions[:, -smaller.kv_rank :]
    deviations_R = variances[-smaller.kv_rank :].clamp(min=1e-9 * float(variances[-1])).sqrt()
    into_RD = (directions / deviations_R).T @ weighted
    made = inverses @ (directions * deviations_R).view(2 * groups, size, -1)

    def per_query_head(keys_and_values: Tensor) -> Tensor:
        """Rows of kv_b_proj: unrotated key and value of each query head."""
        parts = (part.repeat_interleave(shared, dim=0) for part in keys_and_values.chunk(2))
        return torch.cat(list(parts), dim=1).flatten(0, 1)

    scale = ((size + smaller.head_dim) / size) ** 0.5  # scores are divided by the root of all channels
    tensors = {
        "q_proj.weight": scale * torch.cat([q_HED, turned_HED], dim=1).flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat([into_RD, as_real(rotated_PD)]),
        "kv_a_layernorm.weight": torch.ones(smaller.kv_rank),
        "kv_b_proj.weight": per_query_head(made),
        "o_proj.weight": output,
    }
    found = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    return _Factored(found, per_query_head(plain))


def shared_rotated_key(q_HED: Tensor, k_KED: Tensor, moment_DD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The key that stays rotated, what is left of the keys, and the queries that read the first.

    Returns:
        (P, D) complex rows of the key; (K, E, D) rows of the keys without it; (H, E, D) rows of queries.
    """
    queries_HPD, keys_KPD = as_complex(q_HED), as_complex(k_KED)
    groups = len(keys_KPD)
    pairs = [shared_pair(*pair) for pair in weighted_pairs(queries_HPD, keys_KPD, moment_DD)]
    read_KP, into_KP = (torch.stack(parts, dim=1) for parts in zip(*pairs, strict=True))
    rotated_PD = torch.einsum("kp,kpd->pd", read_KP, keys_KPD)
    left_KPD = keys_KPD - into_KP[..., None] * rotated_PD
    of_heads_HP = into_KP.conj().repeat_interleave(len(q_HED) // groups, dim=0)
    return rotated_PD, as_real(left_KPD), as_real(of_heads_HP[..., None] * queries_HPD)


def weighted_pairs(queries_HPD: Tensor, keys_KPD: Tensor, moment_DD: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each rotary pair the key heads' covariance, (K, K), and how much their queries count, (K,)."""
    moment = moment_DD.to(keys_KPD.dtype)
    energy_HP = ((queries_HPD @ moment) * queries_HPD.conj()).real.sum(dim=-1).clamp(min=0.0)
    weight_KP = energy_HP.view(len(keys_KPD), -1, energy_HP.shape[1]).sum(dim=1).sqrt()
    weight_KP = weight_KP.clamp(min=1e-6 * float(weight_KP.max()) or 1.0)
    for own_KD, w_K in zip(keys_KPD.unbind(dim=1), weight_KP.unbind(dim=1), strict=True):
        yield own_KD @ moment @ own_KD.mH, w_K


def _refit(reduced: SportsLLM, model: SportsLLM, wanted: Sequence[Tensor], samples: Sequence[Tensor]) -> None:
    """Fit kv_b_proj to the full model's keys and values, `wanted` of its inputs, and o_proj to its residual stream."""
    full_BTD = [model.embedded(tokens) for tokens in samples]
    ours_BTD: list[Tensor] = full_BTD
    layers = zip(blocks_of(model), blocks_of(reduced), wanted, strict=True)
    with progress_bar("refit", len(wanted)) as bar:
        for block, ours, wanted_OD in layers:

            def inputs(name: str, ours: Block = ours, states: Sequence[Tensor] = ours_BTD) -> Iterator[Tensor]:
                return (matrix_input(ours, _ATTENTION, f"{_ATTENTION}.{name}", x, reduced.rope) for x in states)

            theirs = (block.get_submodule(NORMS[_ATTENTION])(x) for x in full_BTD)
            sums = LeastSquares.over(zip(inputs("kv_b_proj"), theirs, strict=True))
            _solve(ours, "kv_b_proj", LeastSquares(sums.gram_II, wanted_OD @ sums.cross_OI))
            between_BTD, full_BTD = LayerStates.of(block, full_BTD, model.rope)
            targets = (after - x for after, x in zip(between_BTD, ours_BTD, strict=True))
            read = list(inputs("o_proj"))  # attention is not computed again
            _solve(ours, "o_proj", LeastSquares.over(zip(read, targets, strict=True)))
            o_proj = ours.get_submodule(f"{_ATTENTION}.o_proj")
            ours_BTD = [x + o_proj(one) for x, one in zip(ours_BTD, read, strict=True)]
            ours_BTD = after_sublayer(ours, _FEED_FORWARD, ours_BTD, reduced.rope)
            bar.advance()


def _solve(block: Block, name: str, sums: LeastSquares) -> None:
    weight = block.get_parameter(f"{_ATTENTION}.{name}.weight")
    weight.data = sums.solve(weight)
