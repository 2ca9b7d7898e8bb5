"""The LLaMA-family decoder: pre-norm, RMSNorm, rotary positions, grouped key/value heads, SwiGLU.

Shape suffixes: B sequences, T tokens, N = B * T tokens in one row, D hidden_size, F intermediate_size,
H query heads, K key/value heads, E head_dim, V vocabulary, L cache length.
Module names are Hugging Face's, so a state dict is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sportsllm.models.config import ModelConfig
from sportsllm.models.rope import rope_tables


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight, in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any (..., size) in, the same shape out; in autocast's type, so that it is cast once for all its readers."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(dtype)


class KVCache:
    """Keys and values of the tokens read so far, (B, K, L, E) a layer, allocated once."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values after the `length` old ones; returns all of them."""
        end = self.length + k_BKTE.shape[2]
        if end > self.keys.shape[3]:
            raise ValueError(f"cache holds {self.keys.shape[3]} tokens, {end} are needed")
        self.keys[layer, :, :, self.length : end] = k_BKTE
        self.values[layer, :, :, self.length : end] = v_BKTE
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Causal attention with grouped key/value heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        hidden, queries, keys = config.hidden_size, config.query_size, config.key_value_size
        self.q_proj: nn.Module = nn.Linear(hidden, queries, bias=config.attention_bias)
        self.k_proj: nn.Module = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.v_proj: nn.Module = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.o_proj: nn.Module = nn.Linear(queries, hidden, bias=config.attention_output_bias)
        self.q_norm: nn.Module | None = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm: nn.Module | None = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor],
        documents: Sequence[int] | None,
        cache: KVCache | None,
    ) -> Tensor:
        batch, length, _ = x_BTD.shape
        q_BTHE = self.q_proj(x_BTD).view(batch, length, -1, self.head_dim)
        k_BTKE = self.k_proj(x_BTD).view(batch, length, -1, self.head_dim)
        v_BTKE = self.v_proj(x_BTD).view(batch, length, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        q_BTHE, k_BTKE = rotate(q_BTHE, rope), rotate(k_BTKE, rope)
        if documents is not None:
            y_BTHE = attend_documents(q_BTHE, k_BTKE, v_BTKE, documents)
        else:
            q, k, v = (t.transpose(1, 2) for t in (q_BTHE, k_BTKE, v_BTKE))
            causal, mask = True, None
            if cache is not None:
                past = cache.length
                k, v = cache.append(self.layer, k, v)
                if past:  # row t sees the cache and the new tokens up to itself
                    causal = False
                    if length > 1:
                        mask = torch.ones(length, past + length, dtype=torch.bool, device=q.device).tril(past)
            y_BTHE = attend(q, k, v, causal, mask).transpose(1, 2)
        return cast(Tensor, self.o_proj(y_BTHE.reshape(batch, length, -1)))


def attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention with grouped heads, (B, H, T, E), in v's type.

    On a CPU it computes in float32: the kernel's bfloat16 backward is slower (62 against 49 ms with head_dim 32), and
    for every new document length it keeps compiled code, tens of MB a training step.
    """
    dtype, device = v_BKTE.dtype, q_BHTE.device.type
    if device != "cpu":
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=causal, enable_gqa=True)
    with torch.autocast(device, enabled=False):
        q, k, v = q_BHTE.float(), k_BKTE.float(), v_BKTE.float()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return y.to(dtype)


def attend_documents(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, documents: Sequence[int]) -> Tensor:
    """Causal attention inside each document of a packed batch, never across.

    One attention call a document: no mask of (T, T) exists, and the work is that of the documents alone,
    not of the whole row.

    Args:
        documents: ends of the documents in the batch read as one row of B * T tokens, rising, the last B * T.

    Returns:
        (B, T, H, E).
    """
    # `split`, not slices: the backward of n slices fills n tensors of the whole batch's size.
    lengths = [end - start for start, end in zip((0, *documents), documents, strict=False)]
    parts = [torch.split(t.flatten(0, 1), lengths) for t in (q_BTHE, k_BTKE, v_BTKE)]
    outputs = []
    for rows in zip(*parts, strict=True):
        q, k, v = (row.transpose(0, 1)[None] for row in rows)
        outputs.append(attend(q, k, v, causal=True)[0].transpose(0, 1))
    return torch.cat(outputs).view(q_BTHE.shape)


def rotate(x_BTHE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, half-split pairs; `rope` is cosine and sine, each (T, E / 2) or (B, T, E / 2)."""
    cos, sin = (table.unsqueeze(-2) for table in rope)
    first, second = x_BTHE.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHE.dtype)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj: nn.Module = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj: nn.Module = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj: nn.Module = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)))


class Block(nn.Module):
    """One layer: attention and feed-forward, each after its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)
        self.dropout = config.dropout

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor],
        documents: Sequence[int] | None,
        cache: KVCache | None,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x_BTD), rope, documents, cache)
        x_BTD = x_BTD + F.dropout(attended, self.dropout, self.training)
        fed = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + F.dropout(fed, self.dropout, self.training)


class Backbone(nn.Module):
    """Embedding, blocks and final norm; the `model.` of a Hugging Face checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # From a table that is there: drawing one at random on the meta device imports torch's compiler, a second long.
        sizes = config.vocab_size, config.hidden_size
        self.embed_tokens: nn.Module = nn.Embedding(*sizes, _weight=torch.empty(sizes))
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class SportsLLM(nn.Module):
    """The whole model. `hidden` and `head_weight` are for training, `forward` for everything else."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cos, sin = rope_tables(config, config.max_position_embeddings)
        self.register_buffer("rope_cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("rope_sin", torch.from_numpy(sin), persistent=False)
        self.checkpoint_activations = False

    def initialize(self, seed: int, std: float = 0.02) -> None:
        """Draw fresh weights: N(0, std), the two projections into the residual stream scaled by 1 / sqrt(2 L).

        Source: GPT-2's report for the residual scaling.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = std / (2 * self.config.num_hidden_layers) ** 0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    last = name.endswith(("o_proj.weight", "down_proj.weight"))
                    parameter.normal_(0.0, residual_std if last else std, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()
                else:
                    parameter.fill_(1.0)

    @property
    def head_weight(self) -> Tensor:
        """The (V, D) matrix that turns hidden states into logits."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return cast(Tensor, head.weight)

    def hidden(
        self,
        tokens_BT: Tensor,
        documents: Sequence[int] | None = None,
        cache: KVCache | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Final hidden states, (B, T, D), after the last norm.

        Args:
            tokens_BT: token ids.
            documents: ends of packed documents, see `attend_documents`; positions start again in each.
            cache: read before and extended by these tokens; not together with `documents`.
            states: where given, gets the residual stream (B, T, D) after the embedding and after each layer.
        """
        x_BTD = self.model.embed_tokens(tokens_BT)
        rope = self._rope(tokens_BT, documents, cache)
        for layer in self.model.layers:
            if states is not None:
                states.append(x_BTD)
            if self.checkpoint_activations and self.training:
                x_BTD = cast(Tensor, checkpoint(layer, x_BTD, rope, documents, cache, use_reentrant=False))
            else:
                x_BTD = layer(x_BTD, rope, documents, cache)
        if states is not None:
            states.append(x_BTD)
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        return cast(Tensor, self.model.norm(x_BTD))

    def forward(
        self, tokens_BT: Tensor, cache: KVCache | None = None, documents: Sequence[int] | None = None
    ) -> Tensor:
        """Logits of every position, (B, T, V). Training uses `hidden` and a chunked loss instead."""
        return self.logits(self.hidden(tokens_BT, documents, cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) to logits (..., V)."""
        return F.linear(hidden, self.head_weight)

    def auxiliary_loss(self) -> Tensor | None:
        """Sum of the losses that blocks add of their own (load balancing of experts); None where there are none."""
        losses = [block.auxiliary_loss for block in self.model.layers if hasattr(block, "auxiliary_loss")]
        return cast(Tensor, sum(losses)) if losses else None

    def _rope(self, tokens_BT: Tensor, documents: Sequence[int] | None, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        batch, length = tokens_BT.shape
        start = cache.length if cache is not None else 0
        if documents is None:
            if start + length > self.config.max_position_embeddings:
                raise ValueError(f"{start + length} tokens; the context is {self.config.max_position_embeddings}")
            return self.rope_cos[start : start + length], self.rope_sin[start : start + length]
        ends = torch.as_tensor(documents, device=tokens_BT.device)
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        starts = torch.repeat_interleave(ends - lengths, lengths)
        positions = (torch.arange(batch * length, device=tokens_BT.device) - starts).view(batch, length)
        return self.rope_cos[positions], self.rope_sin[positions]
