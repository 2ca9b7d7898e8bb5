"""Multi-head latent attention: keys and values of all heads come from one small vector a token
(DeepSeek-V2, https://arxiv.org/abs/2405.04434).

    c, k_r = split(kv_a(x));  c = RMSNorm(c);  k_r = rotate(k_r)          cached: c and k_r, nothing else
    q_n, q_r = split(q_b(RMSNorm(q_a(x))) or q(x));  q_r = rotate(q_r)
    scores = (q_n . (W_k c) + q_r . k_r) / sqrt(N + E)                    kv_b = [W_k; W_v] a head; times YaRN's factor
    y      = o(softmax(scores) W_v c)

For single tokens the matrices are absorbed, so that no key or value is made: q_n . (W_k c) = (W_k^T q_n) . c, and the
weighted sum is taken over c before W_v.
Shape suffixes: B sequences, T new tokens, L tokens with the cached ones, H heads, R kv_lora_rank, E head_dim (the
rotated part), N qk_nope_head_dim, V v_head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import LATENT_EPS
from sportsllm.models.layers import KVCache, RMSNorm, Rope, attend, in_documents, rotate


class LatentAttention(nn.Module):
    """Low-rank queries if `q_lora_rank` is set, low-rank keys and values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_rank
        queries = heads * (config.unrotated_dim + config.head_dim)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_b_proj = nn.Linear(config.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, rank + config.head_dim, bias=False)
        self.kv_b_proj = nn.Linear(rank, heads * (config.unrotated_dim + config.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.value_dim, hidden, bias=False)
        if config.q_lora_rank is not None:
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
        self.kv_a_layernorm = RMSNorm(rank, LATENT_EPS)

    def forward(
        self, x_BTD: Tensor, rope: Rope, documents: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """(B, T, D) to (B, T, D); arguments as in `GroupedQueryAttention.forward`."""
        config, past = self.config, 0
        plain_BTHN, turned_BTHE = self._queries(x_BTD, rope)
        state_BLS = self._state(x_BTD, rope)
        if cache is not None:
            past = cache.length
            (state_BLS,) = cache.append(self.layer, state_BLS)
        if cache is not None and x_BTD.shape[1] == 1:
            y_BTHV = self._attend_absorbed(plain_BTHN, turned_BTHE, state_BLS)
        else:
            q_BTHE = torch.cat([plain_BTHN, turned_BTHE], dim=-1)
            k_BLHE, v_BLHV = self._keys_values(state_BLS)
            spare = max(q_BTHE.shape[-1] - config.value_dim, 0)  # heads of two widths take 1.6 times as long on a CPU
            v_BLHV = nn.functional.pad(v_BLHV, (0, spare))
            attended = partial(attend, past=past, scale=config.score_scale)
            if documents is not None:
                y_BTHV = in_documents(documents, attended, q_BTHE, k_BLHE, v_BLHV)
            else:
                y_BTHV = attended(q_BTHE, k_BLHE, v_BLHV)
            y_BTHV = y_BTHV[..., : config.value_dim]
        y_BTD: Tensor = self.o_proj(y_BTHV.flatten(2))
        return y_BTD

    def _queries(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """The unrotated part (B, T, H, N) and the rotated part (B, T, H, E)."""
        sizes = [self.config.unrotated_dim, self.config.head_dim]
        if self.config.q_lora_rank is None:
            q_BTD = self.q_proj(x_BTD)
        else:
            q_BTD = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        q_BTHE: Tensor = q_BTD.view(*x_BTD.shape[:2], -1, sum(sizes))
        plain_BTHN, turned_BTHE = torch.split(q_BTHE, sizes, dim=-1)
        return plain_BTHN, rotate(turned_BTHE, rope[:2])

    def _state(self, x_BTD: Tensor, rope: Rope) -> Tensor:
        """The cached vector of each token: its normed latent and its rotated key, (B, T, R + E)."""
        latent_BTR, key_BTE = self.kv_a_proj_with_mqa(x_BTD).split([self.config.kv_rank, self.config.head_dim], dim=-1)
        key_BTE = rotate(key_BTE.unsqueeze(2), rope[:2]).squeeze(2)
        return torch.cat([self.kv_a_layernorm(latent_BTR), key_BTE.to(latent_BTR.dtype)], dim=-1)

    def _keys_values(self, state_BLS: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, L, H, N + E) and values (B, L, H, V)."""
        rank, sizes = self.config.kv_rank, [self.config.unrotated_dim, self.config.value_dim]
        made_BLHS = self.kv_b_proj(state_BLS[..., :rank]).view(*state_BLS.shape[:2], -1, sum(sizes))
        k_BLHN, v_BLHV = made_BLHS.split(sizes, dim=-1)
        shared_BLHE = state_BLS[..., None, rank:].expand(*k_BLHN.shape[:3], -1).to(k_BLHN.dtype)
        return torch.cat([k_BLHN, shared_BLHE], dim=-1), v_BLHV

    def _attend_absorbed(self, plain_BTHN: Tensor, turned_BTHE: Tensor, state_BLS: Tensor) -> Tensor:
        """Attention of one token a sequence over the cached vectors, (B, 1, H, V)."""
        config = self.config
        into_HSR: Tensor = self.kv_b_proj.weight.float().view(config.num_attention_heads, -1, config.kv_rank)
        keys_HNR, values_HVR = torch.split(into_HSR, [config.unrotated_dim, config.value_dim], dim=1)
        q_BHR = torch.einsum("bhn,hnr->bhr", plain_BTHN[:, 0].float(), keys_HNR)
        q_BHS = torch.cat([q_BHR, turned_BTHE[:, 0].float()], dim=-1) * config.score_scale
        weights_BHL = torch.softmax(q_BHS @ state_BLS.float().transpose(1, 2), dim=-1)
        mixed_BHR = weights_BHL @ state_BLS[..., : config.kv_rank].float()
        return torch.einsum("bhr,hvr->bhv", mixed_BHR, values_HVR)[:, None].to(state_BLS.dtype)
