"""The layers of a LLaMA model: norms, cached attention over grouped heads with rotary positions, and feed-forward.

Shape suffixes: B sequences, T tokens, D hidden_size, H query heads, K key/value heads, G heads of a group, E head_dim,
L tokens with the cached ones.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sportsllm.models.config import ModelConfig
from sportsllm.models.description import block_state, cached_shape

Rope = tuple[Tensor, ...]
"""Cosine and sine tables, each (T, E / 2) or (B, T, E / 2); then those of sliding layers, if they have their own."""
_GROWTH = 64  # tokens
_LEAST_WIDTH = 16  # channels that the CPU's kernel gets: in training it takes a third longer for 8


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight, in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) in, the same shape out, in the dtype of `_compute_dtype`."""
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
    """A norm of the residual stream's width."""
    return (RMSNorm if config.norm_kind == "rms" else LayerNorm)(config.hidden_size, config.rms_norm_eps)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype, so that a norm's output is cast once for all its readers."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rotate(x_BTHE: Tensor, rope: Sequence[Tensor]) -> Tensor:
    """Rotary embedding of half-split pairs of the first 2 X channels; `rope` is cosine and sine, each (..., T, X)."""
    cos, sin = (table.unsqueeze(-2) for table in rope)
    size = 2 * cos.shape[-1]
    first, second = x_BTHE[..., :size].float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHE.dtype)
    return turned if size == x_BTHE.shape[-1] else torch.cat([turned, x_BTHE[..., size:]], dim=-1)


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


class KVCache:
    """Keys and values, or other states, of the tokens read so far; grows with them, up to a limit.

    One tensor a `State` of the attention's kind, in its order: (layers, B, ..., L, E), the tokens before the last
    axis of the shape that a single token has. L is at most `_GROWTH` above what is filled: half-filled rows are read
    at a third of the speed. Of a `State` that is not kept for each token: (layers, B, ...), zeros before the first.
    """

    def __init__(self, config: ModelConfig, batch: int, length: int, device: torch.device | None = None) -> None:
        self.room, self.length = length, 0
        first = min(length, _GROWTH)
        rows, self.tensors = (config.num_hidden_layers, batch), list[Tensor]()
        for state in block_state(config):
            make = torch.empty if state.per_token else torch.zeros
            self.tensors.append(make((*rows, *cached_shape(state, first)), dtype=torch.float32, device=device))

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Write one layer's new states, tokens on the last axis but one, after the `length` old ones; returns all."""
        end = self.length + new[0].shape[-2]
        if end > self.room:
            raise ValueError(f"cache holds {self.room} tokens, {end} are needed")
        if (more := min(self.room, -(-end // _GROWTH) * _GROWTH) - self.tensors[0].shape[-2]) > 0:
            for place, old in enumerate(self.tensors):
                self.tensors[place] = F.pad(old, (0, 0, 0, more))
        for tensor, state in zip(self.tensors, new, strict=True):
            tensor[layer][..., self.length : end, :] = state
        return tuple(tensor[layer][..., :end, :] for tensor in self.tensors)

    def read(self, layer: int) -> tuple[Tensor, ...]:
        """One layer's states that are not kept for each token, (B, ...) each."""
        return tuple(tensor[layer] for tensor in self.tensors)

    def replace(self, layer: int, *new: Tensor) -> None:
        """Put others in their place."""
        for tensor, state in zip(self.tensors, new, strict=True):
            tensor[layer] = state

    def keep(self, rows_B: Tensor) -> None:
        """Drop all sequences but these, in this order; copies those that change their place."""
        places_B = torch.arange(len(rows_B), device=rows_B.device)
        moved_B = rows_B != places_B
        for tensor in self.tensors:
            tensor[:, places_B[moved_B]] = tensor[:, rows_B[moved_B]]
        self.tensors = [tensor[:, : len(rows_B)] for tensor in self.tensors]


def attend(
    q_BTHE: Tensor,
    k_BLKE: Tensor,
    v_BLKE: Tensor,
    past: int = 0,
    scale: float | None = None,
    window: int | None = None,
    seen_B1TL: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention with grouped heads, (B, T, H, E), in v's type.

    On a CPU it computes in float32: the kernel's bfloat16 backward is slower (62 against 49 ms with head_dim 32), and
    for every new document length it keeps compiled code, tens of MB a training step.

    Args:
        past: tokens that come before the new ones.
        scale: of the scores; E ** -0.5 if None.
        window: tokens that count, the newest included; all if None.
        seen_B1TL: which tokens each query attends to, instead of all up to its own.
        softcap: see `softcapped`, of the scores, which are then made whole.
    """
    q, k, v = (t.transpose(1, 2) for t in (q_BTHE, k_BLKE, v_BLKE))
    device, (new, length), mask = v.device.type, (q.shape[2], k.shape[2]), seen_B1TL
    width, scale = v.shape[-1], q.shape[-1] ** -0.5 if scale is None else scale
    if mask is None and (
        past or softcap is not None or (window is not None and length > window)
    ):  # row t sees the past and itself
        mask = torch.ones(new, length, dtype=torch.bool, device=v.device).tril(past)
        if window is not None:
            mask = mask.triu(past - window + 1)
    if softcap is not None and mask is not None:  # scores as the mask, beside others of 0
        with torch.autocast(device, enabled=False):
            k_BHLE = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            scores_BHTL = q.float() @ k_BHLE.mT * scale
        mask, scale = softcapped(scores_BHTL, softcap).masked_fill(~mask, -torch.inf), 0.0
    attended = partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=mask is None, scale=scale)
    if device != "cpu" and softcap is None:
        return attended(q, k, v, enable_gqa=True).transpose(1, 2)
    with torch.autocast(device, enabled=False):
        parts = [part.float() for part in (q, k, v)]
        if width < _LEAST_WIDTH:  # zeros change no score
            parts = [F.pad(part, (0, _LEAST_WIDTH - width)) for part in parts]
        return attended(*parts, enable_gqa=True)[..., :width].to(v.dtype).transpose(1, 2)


def attend_last(
    q_B1HE: Tensor, k_BLKE: Tensor, v_BLKE: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Attention of one token a sequence to all L, (B, 1, H, E); a group's heads are multiplied together."""
    batch, _, heads, size = q_B1HE.shape
    k_BKLE, v_BKLE = k_BLKE.transpose(1, 2), v_BLKE.transpose(1, 2)
    if window is not None:
        k_BKLE, v_BKLE = k_BKLE[:, :, -window:], v_BKLE[:, :, -window:]
    q_BKGE = q_B1HE.float().reshape(batch, k_BKLE.shape[1], -1, size) * (size**-0.5 if scale is None else scale)
    weights_BKGL = torch.softmax(q_BKGE @ k_BKLE.float().transpose(2, 3), dim=-1)
    return (weights_BKGL @ v_BKLE.float()).view(batch, 1, heads, -1).to(v_BKLE.dtype)


def in_documents(documents: Sequence[int], attend_one: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """A function of each document of a packed batch, never across, joined to (B, T, H, E).

    One call a document: no mask of (T, T) exists, and the work is that of the documents alone, not of the whole row.

    Args:
        documents: their ends in the batch read as one row of B * T tokens, rising, the last B * T.
        attend_one: gets the document's (1, n, ...) of each part and returns (1, n, H, E).
        parts: (B, T, ...) each.
    """
    # `split`, not slices: the backward of n slices fills n tensors of the whole batch's size.
    lengths = [end - start for start, end in zip((0, *documents), documents, strict=False)]
    rows = zip(*(torch.split(part.flatten(0, 1), lengths) for part in parts), strict=True)
    joined = torch.cat([attend_one(*(part[None] for part in document))[0] for document in rows])
    return joined.view(*parts[0].shape[:2], *joined.shape[1:])


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
            together, size = config.joint_qk_norm, config.head_dim
            self.q_norm = RMSNorm(config.query_size if together else size, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.key_value_size if together else size, config.rms_norm_eps)

    def add_indexer(self) -> None:
        """Hook for `SelectedAttention`, whose indexer stands before o_proj in the order of parameters."""

    def forward(
        self, x_BTD: Tensor, rope: Rope, documents: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """(B, T, D) to (B, T, D); `documents` as in `in_documents`, not together with a cache."""
        q_BTHE, k_BTKE, v_BTKE = heads = self.heads(x_BTD, rope)
        scale, window, past = self.config.attention_scale, self.config.window(self.layer), 0
        cap = self.config.attention_softcap
        if documents is not None:
            y_BTHE = in_documents(documents, partial(attend, scale=scale, window=window, softcap=cap), *heads)
        else:
            if cache is not None:
                past, states = cache.length, (t.transpose(1, 2) for t in (k_BTKE, v_BTKE))
                k_BTKE, v_BTKE = (t.transpose(1, 2) for t in cache.append(self.layer, *states))
            if cache is not None and x_BTD.shape[1] == 1 and cap is None:
                y_BTHE = attend_last(q_BTHE, k_BTKE, v_BTKE, scale, window)
            else:
                y_BTHE = attend(q_BTHE, k_BTKE, v_BTKE, past, scale, window, softcap=cap)
        y_BTD: Tensor = self.o_proj(y_BTHE.flatten(2))
        return y_BTD

    def heads(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, H, E), keys and values (B, T, K, E); queries and keys normed and rotated."""
        config, shape = self.config, (*x_BTD.shape[:2], -1, self.config.head_dim)
        q_BTD, k_BTD = self.q_proj(x_BTD), self.k_proj(x_BTD)
        if config.joint_qk_norm:
            q_BTD, k_BTD = self.q_norm(q_BTD), self.k_norm(k_BTD)
        q_BTHE: Tensor = q_BTD.view(shape)
        k_BTKE: Tensor = k_BTD.view(shape)
        v_BTKE: Tensor = self.v_proj(x_BTD).view(shape)
        if config.qk_norm and not config.joint_qk_norm:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        if config.rotates(self.layer):
            tables = rope[-2:] if config.window(self.layer) is not None else rope[:2]
            q_BTHE, k_BTKE = rotate(q_BTHE, tables), rotate(k_BTKE, tables)
        return q_BTHE, k_BTKE, v_BTKE


class FeedForward(nn.Module):
    """down(f(gate(x)) * up(x)): SwiGLU with f = silu, GeGLU with f = gelu (https://arxiv.org/abs/2002.05202).

    Not `gated`, it is down(f(up(x))), in GPT-2 with f = gelu (https://arxiv.org/abs/1606.08415), in OPT with f = relu.
    """

    def __init__(
        self, hidden: int, inner: int, activation: Callable[[Tensor], Tensor], bias: bool = False, gated: bool = True
    ) -> None:
        super().__init__()
        self.activation, self.gated = activation, gated
        if gated:
            self.gate_proj = nn.Linear(hidden, inner, bias)
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, hidden, bias)

    def neurons(self, x: Tensor) -> Tensor:
        """The input of down_proj, (..., intermediate_size)."""
        inner: Tensor = self.activation(self.gate_proj(x)) if self.gated else self.activation(self.up_proj(x))
        return inner * self.up_proj(x) if self.gated else inner

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        y: Tensor = self.down_proj(self.neurons(x))
        return y
