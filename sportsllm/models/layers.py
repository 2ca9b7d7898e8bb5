"""The layers of a LLaMA model: norms, grouped-query attention with rotary positions, and feed-forward.

Shape suffixes: B sequences, T tokens, D hidden_size, H query heads, K key/value heads, E head_dim.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sportsllm.models.attention import KVCache, Scores, attend_cached, attend_documents
from sportsllm.models.config import ModelConfig

Rope = tuple[Tensor, ...]
"""Cosine and sine tables, each (T, E / 2) or (B, T, E / 2); then those of sliding layers, if they have their own."""
gelu_tanh = partial(F.gelu, approximate="tanh")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight, in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any (..., size) in, the same shape out, in the dtype of `_compute_dtype`."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(_compute_dtype(x))


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, in float32 (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """As `RMSNorm.forward`."""
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), (x.shape[-1],), weight, bias, self.eps).to(_compute_dtype(x))


ResidualNorm = RMSNorm | LayerNorm


def residual_norm(config: ModelConfig) -> ResidualNorm:
    """A norm of the residual stream."""
    return (RMSNorm if config.norm_kind == "rms" else LayerNorm)(config.hidden_size, config.rms_norm_eps)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype, so that a norm's output is cast once for all its readers."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rotate(x_BTHE: Tensor, rope: Sequence[Tensor]) -> Tensor:
    """Rotary embedding of half-split pairs; `rope` is cosine and sine, each (T, E / 2) or (B, T, E / 2)."""
    cos, sin = (table.unsqueeze(-2) for table in rope)
    first, second = x_BTHE.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHE.dtype)


class GroupedQueryAttention(nn.Module):
    """Causal attention whose query heads share key/value heads in groups (https://arxiv.org/abs/2305.13245)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.query_size, bias)
        self.k_proj = nn.Linear(hidden, config.key_value_size, bias)
        self.v_proj = nn.Linear(hidden, config.key_value_size, bias)
        self.add_indexer()
        self.o_proj = nn.Linear(config.query_size, hidden, config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def add_indexer(self) -> None:
        """Hook for `SelectedAttention`, whose indexer stands before o_proj in the order of parameters."""

    def forward(
        self, x_BTD: Tensor, rope: Rope, documents: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """(B, T, D) to (B, T, D); `documents` as in `attend_documents`, not together with a cache."""
        heads = self.heads(x_BTD, rope)
        scores = Scores(self.config.attention_scale, self.config.window(self.layer))
        if documents is not None:
            y_BTHE = attend_documents(*heads, documents, scores)
        else:
            y_BTHE = attend_cached(*heads, self.layer, cache, scores)
        y_BTD: Tensor = self.o_proj(y_BTHE.flatten(2))
        return y_BTD

    def heads(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, H, E), keys and values (B, T, K, E); queries and keys normed and rotated."""
        config, shape = self.config, (*x_BTD.shape[:2], -1, self.config.head_dim)
        q_BTHE: Tensor = self.q_proj(x_BTD).view(shape)
        k_BTKE: Tensor = self.k_proj(x_BTD).view(shape)
        v_BTKE: Tensor = self.v_proj(x_BTD).view(shape)
        if config.qk_norm:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        if config.rotates(self.layer):
            tables = rope[-2:] if config.window(self.layer) is not None else rope[:2]
            q_BTHE, k_BTKE = rotate(q_BTHE, tables), rotate(k_BTKE, tables)
        return q_BTHE, k_BTKE, v_BTKE


class GatedMLP(nn.Module):
    """down(f(gate(x)) * up(x)): SwiGLU with f = silu, GeGLU with f = gelu (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden: int, inner: int, activation: Callable[[Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden, inner, bias)
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, hidden, bias)

    def neurons(self, x: Tensor) -> Tensor:
        """The input of down_proj, (..., intermediate_size)."""
        up: Tensor = self.up_proj(x)
        return self.activation(self.gate_proj(x)) * up

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        y: Tensor = self.down_proj(self.neurons(x))
        return y


class PlainMLP(nn.Module):
    """down(f(up(x))), in GPT-2 with f = gelu (https://arxiv.org/abs/1606.08415)."""

    def __init__(self, hidden: int, inner: int, activation: Callable[[Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, hidden, bias)

    def neurons(self, x: Tensor) -> Tensor:
        """As `GatedMLP.neurons`."""
        return self.activation(self.up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        y: Tensor = self.down_proj(self.neurons(x))
        return y
