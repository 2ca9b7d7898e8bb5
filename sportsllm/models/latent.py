"""Multi-head latent attention: keys and values of all heads come from one small vector a token
(DeepSeek-V2, https://arxiv.org/abs/2405.04434).

    c, k_r = split(kv_a(x));  c = RMSNorm(c);  k_r = rotate(k_r)          cached: c and k_r, nothing else
    q_n, q_r = split(q_b(RMSNorm(q_a(x))) or q(x));  q_r = rotate(q_r)
    scores = (q_n . (W_k c) + q_r . k_r) / sqrt(N + E)                    kv_b = [W_k; W_v] a head
    y      = o(softmax(scores) W_v c)

For single tokens the matrices are absorbed, so that no key or value is made: q_n . (W_k c) = (W_k^T q_n) . c, and the
weighted sum is taken over c before W_v.
Shape suffixes: B sequences, T new tokens, L tokens with the cached ones, H heads, R kv_lora_rank, E head_dim (the
rotated part), N qk_nope_head_dim, V v_head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sportsllm.errors import UsageError
from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, Processor, State, Unit, Vector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sportsllm.models.attention import KVCache
    from sportsllm.models.config import ModelConfig


class Latent(Kind):
    """Low-rank queries if `q_lora_rank` is set, low-rank keys and values; see `sportsllm.models.parts.Kind`."""

    def check(self, config: ModelConfig) -> None:
        if config.position_kind != "rotary":
            raise UsageError(f"config: position_kind is {config.position_kind!r}; latent attention is rotary")
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            value = getattr(config, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (value is None and name == "q_lora_rank"):
                raise UsageError(f"config: {name} is {value!r}; latent attention needs at least 1")
        for name in ("num_key_value_heads", "qk_norm", "attention_bias", "attention_output_bias", "layer_types"):
            if getattr(config, name) not in (1, False, None):
                raise UsageError(f"config: {name} is {getattr(config, name)!r}; latent attention has none")

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        hidden, heads, rank, rotated = config.hidden_size, config.num_attention_heads, config.kv_rank, config.head_dim
        queries, values = heads * (config.unrotated_dim + rotated), heads * config.value_dim
        if config.q_lora_rank is None:
            query: tuple[Matrix, ...] = (Matrix("q_proj", queries, hidden, "query_head", HIDDEN, HIDDEN),)
        else:
            query = (
                Matrix("q_a_proj", config.q_lora_rank, hidden, "query_latent", HIDDEN, HIDDEN),
                Matrix("q_b_proj", queries, config.q_lora_rank, "query_head", "query_latent", "query_latent"),
            )
        return (
            *query,
            Matrix("kv_a_proj_with_mqa", rank + rotated, hidden, "cached", HIDDEN, HIDDEN),
            Matrix("kv_b_proj", heads * config.unrotated_dim + values, rank, "query_head", "latent", "latent"),
            Matrix("o_proj", hidden, values, HIDDEN, "query_head", "mixed", True),
        )

    def vectors(self, config: ModelConfig) -> tuple[Vector, ...]:
        query = () if config.q_lora_rank is None else (Vector("q_a_layernorm", config.q_lora_rank, _EPS),)
        return (*query, Vector("kv_a_layernorm", config.kv_rank, _EPS))

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        """Heads; they have rows of other sizes in other matrices. The ranks stay whole."""
        query = () if config.q_lora_rank is None else (Unit("query_latent", "q_lora_rank", config.q_lora_rank),)
        return (
            *query,
            Unit("latent", "kv_lora_rank", config.kv_rank),
            Unit("cached", "kv_lora_rank", config.kv_rank + config.head_dim),
            Unit("query_head", "num_attention_heads", config.num_attention_heads, config.value_dim),
        )

    def state(self, config: ModelConfig) -> tuple[State, ...]:
        return (State("latent", (config.kv_rank + config.head_dim,)),)

    def mixing_macs(self, config: ModelConfig, depth: int) -> int:
        """Scores and the weighted sum over the latent vectors, and the absorbed matrices, which are kv_b_proj's own."""
        return config.num_attention_heads * depth * (2 * config.kv_rank + config.head_dim)

    def prompt_macs(self, config: ModelConfig, depth: int) -> int:
        """Scores and the weighted sum over keys and values that kv_b_proj makes once a token."""
        return config.num_attention_heads * depth * (config.unrotated_dim + config.head_dim + config.value_dim)

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """Latents and what their norms keep; queries, keys, values and output in float32, a log-sum for each head."""
        a, heads = (2 if mixed else 4), config.num_attention_heads
        ranks = config.kv_rank + (config.q_lora_rank or 0)
        scored = heads * (config.unrotated_dim + config.head_dim)
        total = ranks * (2 * 4 + a) + 4 * (2 * scored + 2 * heads * config.value_dim) + 4 * heads
        return total + (2 * heads * config.value_dim if mixed else 0)

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        heads, scored = config.num_attention_heads, config.unrotated_dim + config.head_dim
        *made, o_proj = self.matrices(config)
        return (
            *made,
            Activation("q", (heads, scored)),
            Activation("latent and rotated key, cached", (config.kv_rank + config.head_dim,), "cache"),
            Activation("k", (heads, scored)),
            Activation("v", (heads, config.value_dim)),
            Activation("attention scores", (heads,), "scores", held=False),
            Activation("attention output", (heads, config.value_dim)),
            o_proj,
        )

    def forward(
        self,
        half: Any,
        x_BTD: Tensor,
        rope: Sequence[Tensor],
        documents: Sequence[int] | None,
        cache: KVCache | None,
    ) -> Tensor:
        import torch

        from sportsllm.models.attention import attend, attend_documents, rotate

        config, (batch, new, _) = half.config, x_BTD.shape
        unrotated, rotated, rank = config.unrotated_dim, config.head_dim, config.kv_rank
        low_BTR = x_BTD if config.q_lora_rank is None else half.q_a_layernorm(half.q_a_proj(x_BTD))
        q_BTHE = (half.q_proj if config.q_lora_rank is None else half.q_b_proj)(low_BTR).view(
            batch, new, -1, unrotated + rotated
        )
        plain_BTHN, turned_BTHE = q_BTHE.split([unrotated, rotated], dim=-1)
        turned_BTHE = rotate(turned_BTHE, rope[:2])
        latent_BTR, key_BTE = half.kv_a_proj_with_mqa(x_BTD).split([rank, rotated], dim=-1)
        key_BTE = rotate(key_BTE.unsqueeze(2), rope[:2]).squeeze(2)
        state_BLS = torch.cat([half.kv_a_layernorm(latent_BTR), key_BTE.to(latent_BTR.dtype)], dim=-1)
        past = 0
        if cache is not None:
            past = cache.length
            (state_BLS,) = cache.append(half.layer, state_BLS)
            if new == 1:
                y_BTHV = _absorbed(half, plain_BTHN, turned_BTHE, state_BLS)
                return cast("Tensor", half.o_proj(y_BTHV.flatten(2)))
        made_BLHS = half.kv_b_proj(state_BLS[..., :rank]).view(*state_BLS.shape[:2], -1, unrotated + config.value_dim)
        k_BLHN, v_BLHV = made_BLHS.split([unrotated, config.value_dim], dim=-1)
        shared_BLHE = state_BLS[..., None, rank:].expand(*k_BLHN.shape[:3], -1).to(k_BLHN.dtype)
        q_BTHE, k_BLHE = torch.cat([plain_BTHN, turned_BTHE], dim=-1), torch.cat([k_BLHN, shared_BLHE], dim=-1)
        spare = max(q_BTHE.shape[-1] - config.value_dim, 0)  # heads of two widths take 1.6 times as long on a CPU
        v_BLHV = torch.nn.functional.pad(v_BLHV, (0, spare))
        if documents is not None:
            y_BTHV = attend_documents(q_BTHE, k_BLHE, v_BLHV, documents)
        else:
            q_BHTE, k_BHLE, v_BHLV = (t.transpose(1, 2) for t in (q_BTHE, k_BLHE, v_BLHV))
            y_BTHV = attend(q_BHTE, k_BHLE, v_BHLV, past).transpose(1, 2)
        return cast("Tensor", half.o_proj(y_BTHV[..., : config.value_dim].flatten(2)))


_EPS = 1e-6
"""Of the norms of latents, whatever the model's own is: so `transformers` has it."""


def _absorbed(half: Any, plain_BTHN: Tensor, turned_BTHE: Tensor, state_BLS: Tensor) -> Tensor:
    """Attention of one token a sequence over the cached vectors, (B, 1, H, V)."""
    import torch

    config = half.config
    into_HSR = half.kv_b_proj.weight.float().view(config.num_attention_heads, -1, config.kv_rank)
    keys_HNR, values_HVR = into_HSR.split([config.unrotated_dim, config.value_dim], dim=1)
    q_BHR = torch.einsum("bhn,hnr->bhr", plain_BTHN[:, 0].float(), keys_HNR)
    q_BHS = torch.cat([q_BHR, turned_BTHE[:, 0].float()], dim=-1) * (config.unrotated_dim + config.head_dim) ** -0.5
    weights_BHL = torch.softmax(q_BHS @ state_BLS.float().transpose(1, 2), dim=-1)
    mixed_BHR = weights_BHL @ state_BLS[..., : config.kv_rank].float()
    return torch.einsum("bhr,hvr->bhv", mixed_BHR, values_HVR)[:, None].to(state_BLS.dtype)
