"""Long short-term memory in attention's place (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al.,
https://doi.org/10.1162/089976600300015015): what was read is kept in two vectors, not in a cache that grows.

    i = sigmoid(i_proj(x) + hi_proj(h));  f = sigmoid(f_proj(x) + hf_proj(h))     input and forget gate
    g = tanh(g_proj(x) + hg_proj(h));     o = sigmoid(o_proj(x) + ho_proj(h))     candidate and output gate
    c = f * c + i * g;                    h = o * tanh(c)                         state: c and h, zeros at first
    y = out_proj(h)

The mathematics of `torch.nn.LSTM`, in whose order of gates the matrices are, with one bias in place of its two. y is
added to the residual stream, whose norm comes before x. `head_dim` counts the cells, in one head. There are no
positions: the order of tokens is in the state.
Shape suffixes: B sequences, T tokens, D hidden_size, H cells, G = 4 H, N documents, X tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from sportsllm.models.config import ModelConfig
from sportsllm.models.layers import KVCache, Rope


class LSTMLayer(nn.Module):
    """Four matrices from the input, four from the last state, one to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, cells = config.hidden_size, config.cells
        self.i_proj, self.f_proj = nn.Linear(hidden, cells), nn.Linear(hidden, cells)
        self.g_proj, self.o_proj = nn.Linear(hidden, cells), nn.Linear(hidden, cells)
        self.hi_proj, self.hf_proj = nn.Linear(cells, cells, bias=False), nn.Linear(cells, cells, bias=False)
        self.hg_proj, self.ho_proj = nn.Linear(cells, cells, bias=False), nn.Linear(cells, cells, bias=False)
        self.out_proj = nn.Linear(cells, hidden, bias=False)

    def initialize(self, generator: torch.Generator) -> None:
        """Recurrent matrices start orthogonal, so that a state keeps its size (https://arxiv.org/abs/1312.6120).

        Forget gates start open: their bias is 1 (Jozefowicz et al. 2015, http://proceedings.mlr.press/v37).
        """
        self.f_proj.bias.fill_(1.0)
        for module in self.state_matrices:
            nn.init.orthogonal_(module.weight, generator=generator)

    def forward(
        self, x_BTD: Tensor, rope: Rope = (), documents: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """(B, T, D) to (B, T, D); arguments as in `GroupedQueryAttention.forward`."""
        kept = () if cache is None else cache.read(self.layer)
        # In float32: autocast has no LSTM on a CPU, and a state that is rounded at every token drifts.
        with torch.autocast(x_BTD.device.type, enabled=False):
            weights = self._weights()
            if documents is None:
                h_BTH, kept = _read_rows(weights, x_BTD.float(), kept)
            else:
                h_BTH = _read_documents(weights, x_BTD.float(), documents)
        if cache is not None:
            cache.replace(self.layer, *kept)
        self._show_inputs(x_BTD, h_BTH)
        y_BTD: Tensor = self.out_proj(h_BTH.to(x_BTD.dtype))
        return y_BTD

    @property
    def input_matrices(self) -> tuple[nn.Linear, ...]:
        """What multiplies x, in the order of `GATES`."""
        return self.i_proj, self.f_proj, self.g_proj, self.o_proj

    @property
    def state_matrices(self) -> tuple[nn.Linear, ...]:
        """What multiplies h, in the order of `GATES`."""
        return self.hi_proj, self.hf_proj, self.hg_proj, self.ho_proj

    def _weights(self) -> list[Tensor]:
        """As torch.nn.LSTM has them, float32: W (G, D), U (G, H), the bias (G,) and the zeros of a second one."""
        bias_G = torch.cat([module.bias for module in self.input_matrices]).float()
        read = (self.input_matrices, self.config.hidden_size), (self.state_matrices, self.config.cells)
        stacked = [torch.cat([multiplied_by(module, size) for module in modules]).float() for modules, size in read]
        return [*stacked, bias_G, torch.zeros_like(bias_G)]

    def _show_inputs(self, x_BTD: Tensor, h_BTH: Tensor) -> None:
        """Call the gates' modules that have hooks with all that they read: the fused operator calls none."""
        for modules, read in ((self.input_matrices, x_BTD), (self.state_matrices, None)):
            for module in modules:
                if module._forward_hooks or module._forward_pre_hooks:
                    module(F.pad(h_BTH, (0, 0, 1, 0))[:, :-1] if read is None else read)


def _read_documents(weights: list[Tensor], x_BTD: Tensor, documents: Sequence[int]) -> Tensor:
    """h of every token, (B, T, H), each document from a state of zeros. Every token is read once: no padding.

    One call for as many tokens as the same documents have. torch's own operator for packed sequences computes the same,
    but on a CPU the backward pass of 26 documents of 20 to 512 tokens took 350 us a token, 20 times that of equal ones.
    """
    lengths = [end - start for start, end in zip((0, *documents), documents, strict=False)]
    # All documents' first tokens, the longest document's first, then the second ones; how many there are of each.
    order_X, sizes_T, *_ = pack_sequence(list(torch.split(torch.arange(documents[-1]), lengths)), enforce_sorted=False)
    order_X = order_X.to(x_BTD.device)
    sizes, steps = (found.tolist() for found in torch.unique_consecutive(sizes_T, return_counts=True))
    pieces = torch.split(x_BTD.flatten(0, 1)[order_X], [n * t for n, t in zip(sizes, steps, strict=True)])
    states, made = _zeros(x_BTD, sizes[0], weights), []
    for count, piece in zip(sizes, pieces, strict=True):
        states = [state[:, :count].contiguous() for state in states]
        h_TNH, *states = _lstm(weights, piece.view(-1, count, piece.shape[-1]), states, batch_first=False)
        made.append(h_TNH.flatten(0, 1))
    h_XH = torch.cat(made)
    return torch.empty_like(h_XH).index_copy(0, order_X, h_XH).view(*x_BTD.shape[:2], -1)


def _read_rows(weights: list[Tensor], x_BTD: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h of every token, (B, T, H), after the states (B, H) of `kept`, zeros if there are none; and the new states."""
    states = [state[None].to(x_BTD.dtype) for state in kept] or _zeros(x_BTD, len(x_BTD), weights)
    h_BTH, *last = _lstm(weights, x_BTD, states, batch_first=True)
    return h_BTH, tuple(state[0] for state in last)


def _lstm(weights: list[Tensor], x: Tensor, states: list[Tensor], batch_first: bool) -> tuple[Tensor, ...]:
    """h of every token, and both states after the last."""
    trains = torch.is_grad_enabled()  # else cuDNN does not keep what its backward pass needs; dropout is 0
    found: tuple[Tensor, ...] = torch._VF.lstm(x, states, weights, True, 1, 0.0, trains, False, batch_first)
    return found


def _zeros(x: Tensor, batch: int, weights: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_zeros(1, batch, weights[1].shape[1]) for _ in range(2)]


def multiplied_by(module: nn.Module, size: int) -> Tensor:
    """The matrix (N, K = `size`) that a linear module multiplies by, without its bias.

    A plain or packed module holds it. A module with an adapter, or that rounds in training, is asked for its product
    with the unit matrix.
    """
    if type(module) is nn.Linear or "weight" in dict(module.named_buffers(recurse=False)):
        weight_NK: Tensor = getattr(module, "weight")  # noqa: B009
        return weight_NK
    inputs = torch.eye(size, device=next(module.parameters()).device)
    product_KN: Tensor = module(inputs) - module(inputs[:1] * 0.0)
    return product_KN.T
