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

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sportsllm.errors import UsageError
from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, Processor, State, Unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sportsllm.models.attention import KVCache
    from sportsllm.models.config import ModelConfig

GATES = ("i", "f", "g", "o")
READ = "last_hidden"
"""What the recurrent matrices read: h of the token before."""
HIDDEN_STATE, CELL_STATE = "hidden", "cell"


class LSTM(Kind):
    """Four matrices from the input, four from the last state, one to the residual stream; see `Kind`."""

    def check(self, config: ModelConfig) -> None:
        one_head = ("num_attention_heads", "num_key_value_heads")
        others = ("rope_scaling", "qk_norm", "attention_bias", "attention_output_bias", "layer_types")
        for name in (*one_head, *others):
            allowed = (1,) if name in one_head else (False, None)
            if getattr(config, name) not in allowed:
                raise UsageError(f"config: {name} is {getattr(config, name)!r}; an LSTM has {allowed[-1] or 'none'}")

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        hidden, cells = config.hidden_size, config.cells
        return (
            *(Matrix(f"{gate}_proj", cells, hidden, "cell", HIDDEN, HIDDEN, bias=True) for gate in GATES),
            *(Matrix(f"h{gate}_proj", cells, cells, "cell", "cell", READ, stepwise=True) for gate in GATES),
            Matrix("out_proj", hidden, cells, HIDDEN, "cell", "mixed", True),
        )

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        """Cells, which pruning leaves whole: each is read by all others at the next token."""
        return (Unit("cell", "cells", config.cells),)

    def state(self, config: ModelConfig) -> tuple[State, ...]:
        return State(HIDDEN_STATE, (config.cells,), False), State(CELL_STATE, (config.cells,), False)

    def mixing_macs(self, config: ModelConfig, depth: int) -> int:
        """The three products of gates and states, at any depth."""
        return 3 * config.cells

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """In float32: x, gates, both states, tanh(c), and h a second time in the order of tokens; 16 bits of it too."""
        return 4 * config.hidden_size + 4 * 8 * config.cells + (2 * config.cells if mixed else 0)

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        *gates, out_proj = self.matrices(config)
        cells = (config.cells,)
        return (
            *gates,
            Activation("gates", (len(GATES), config.cells)),
            Activation("hidden state, kept", cells, "state"),
            Activation("cell state, kept", cells, "state"),
            Activation("hidden states", cells),
            out_proj,
        )

    def initialize(self, half: Any) -> None:
        """Forget gates start open: their bias is 1 (Jozefowicz et al. 2015, http://proceedings.mlr.press/v37)."""
        half.f_proj.bias.fill_(1.0)

    def forward(
        self, half: Any, x_BTD: Tensor, rope: Any, documents: Sequence[int] | None, cache: KVCache | None
    ) -> Tensor:
        import torch

        kept = () if cache is None else cache.read(half.layer)
        # In float32: autocast has no LSTM on a CPU, and a state that is rounded at every token drifts.
        with torch.autocast(x_BTD.device.type, enabled=False):
            weights = _weights(half)
            if documents is None:
                h_BTH, kept = _read_rows(weights, x_BTD.float(), kept)
            else:
                h_BTH = _read_documents(weights, x_BTD.float(), documents)
        if cache is not None:
            cache.replace(half.layer, *kept)
        _show_inputs(half, x_BTD, h_BTH)
        return cast("Tensor", half.out_proj(h_BTH.to(x_BTD.dtype)))


class Layout(NamedTuple):
    """Documents side by side, the longest first, as in torch.nn.utils.rnn.PackedSequence.

    Attributes:
        order_X: the tokens, all documents' first ones, then the second ones.
        sizes_T: how many documents have a token number t.
    """

    order_X: Tensor
    sizes_T: Tensor


def side_by_side(documents: Sequence[int]) -> Layout:
    """The layout of documents, given by their ends in one row of tokens. Every token is read once: no padding."""
    import torch

    ends_N = torch.tensor(documents)
    lengths_N = torch.diff(ends_N, prepend=ends_N.new_zeros(1))
    longest_N = torch.argsort(lengths_N, descending=True, stable=True)
    lengths_N, starts_N = lengths_N[longest_N], (ends_N - lengths_N)[longest_N]
    steps_T = torch.arange(int(lengths_N[0]))
    there_TN = steps_T[:, None] < lengths_N
    return Layout((starts_N + steps_T[:, None])[there_TN], there_TN.sum(dim=1))


def _read_documents(weights: list[Tensor], x_BTD: Tensor, documents: Sequence[int]) -> Tensor:
    """h of every token, (B, T, H), each document from a state of zeros.

    One call for as many tokens as the same documents have. torch's own operator for packed sequences computes the same,
    but on a CPU the backward pass of 26 documents of 20 to 512 tokens took 350 us a token, 20 times that of equal ones.
    """
    import torch

    order_X, sizes_T = side_by_side(documents)
    order_X = order_X.to(x_BTD.device)
    sizes, steps = (found.tolist() for found in torch.unique_consecutive(sizes_T, return_counts=True))
    pieces = torch.split(x_BTD.flatten(0, 1)[order_X], [n * t for n, t in zip(sizes, steps, strict=True)])
    states, made = _zeros(x_BTD, sizes[0], weights), []
    for count, piece in zip(sizes, pieces, strict=True):
        states = [state[:, :count].contiguous() for state in states]
        rows_TND = piece.view(-1, count, piece.shape[-1])
        h_TNH, *states = torch._VF.lstm(rows_TND, states, weights, True, 1, 0.0, False, False, False)
        made.append(h_TNH.flatten(0, 1))
    h_XH = torch.cat(made)
    return torch.empty_like(h_XH).index_copy(0, order_X, h_XH).view(*x_BTD.shape[:2], -1)


def _read_rows(weights: list[Tensor], x_BTD: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h of every token, (B, T, H), after the states (B, H) of `kept`, zeros if there are none; and the new states."""
    import torch

    states = [state[None].to(x_BTD.dtype) for state in kept] or _zeros(x_BTD, len(x_BTD), weights)
    h_BTH, *last = torch._VF.lstm(x_BTD, states, weights, True, 1, 0.0, False, False, True)
    return h_BTH, tuple(state[0] for state in last)


def _zeros(x: Tensor, batch: int, weights: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_zeros(1, batch, weights[1].shape[1]) for _ in range(2)]


def _weights(half: Any) -> list[Tensor]:
    """As torch.nn.LSTM has them, float32: W (G, D), U (G, H), the bias (G,) and the zeros of a second one."""
    import torch

    inputs, states = ([half.get_submodule(f"{h}{gate}_proj") for gate in GATES] for h in ("", "h"))
    bias_G = torch.cat([module.bias for module in inputs]).float()
    stacked = [torch.cat([multiplied_by(module) for module in modules]).float() for modules in (inputs, states)]
    return [*stacked, bias_G, torch.zeros_like(bias_G)]


def multiplied_by(module: Any) -> Tensor:
    """The matrix (N, K) that a linear module multiplies by, without its bias.

    A plain or packed one holds it; one with an adapter, or that rounds in training, is asked for its product with the
    unit matrix.
    """
    import torch

    if type(module) is torch.nn.Linear or "weight" in dict(module.named_buffers(recurse=False)):
        return cast("Tensor", module.weight)
    base = getattr(module, "base", module)
    unit_KK = torch.eye(base.in_features, device=next(module.parameters()).device)
    product_KN = module(unit_KK)
    return cast("Tensor", (product_KN if base.bias is None else product_KN - base.bias).T)


def _show_inputs(half: Any, x_BTD: Tensor, h_BTH: Tensor) -> None:
    """Call the gates' modules that somebody watches with all that they read: the fused operator calls none."""
    import torch.nn.functional as F

    for gate in GATES:
        for name in (f"{gate}_proj", f"h{gate}_proj"):
            module = half.get_submodule(name)
            if module._forward_hooks or module._forward_pre_hooks:
                module(x_BTD if name == f"{gate}_proj" else F.pad(h_BTH, (0, 0, 1, 0))[:, :-1])
