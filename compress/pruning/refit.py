"""Repair after a cut, without gradients: each matrix is fitted anew to what the full model computes.

Layer by layer both models read the calibration text. For each projection of the cut model, with its own inputs a
(drifted by every cut before it) and the values t that it should give, the weights become

    argmin_W  sum over tokens |t - W a|^2 + ridge * mean(|a|^2) * |W - W_cut|^2

    q, k, v, gate, up   t = the full model's values of the rows that stay
    o_proj              t = the full model's residual stream after attention, less the cut model's before it
    down_proj           t = the full model's residual stream at the next kept layer, less the cut model's before it

so each layer also takes back what the layers before it lost, and the layer before a dropped one stands in for it.
The structured form of optimal brain compression's update (https://arxiv.org/abs/2208.11580).
Shape suffixes: N tokens, I inputs, O outputs, B samples, T tokens of one, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from compress.pruning.slicing import Kept, unit_rows
from sportsllm.console import progress_bar
from sportsllm.models.language_model import Block, SportsLLM

RIDGE = 1e-3
Rope = tuple[Tensor, Tensor]
_INPUT_SIDE = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass
class Fit:
    """Sums of a regression; float32 products, summed in float64."""

    gram_II: Tensor
    cross_OI: Tensor

    @staticmethod
    def over(samples: Iterable[tuple[Tensor, Tensor]]) -> Fit:
        """Sums over pairs of inputs (..., I) and targets (..., O)."""
        sums: Fit | None = None
        for inputs, targets in samples:
            inputs_NI, targets_NO = inputs.flatten(0, -2), targets.flatten(0, -2)
            gram, cross = (inputs_NI.T @ inputs_NI).double(), (targets_NO.T @ inputs_NI).double()
            sums = Fit(gram, cross) if sums is None else Fit(sums.gram_II.add_(gram), sums.cross_OI.add_(cross))
        assert sums is not None, "there are samples"
        return sums

    def solve(self, weight_OI: Tensor, ridge: float) -> Tensor:
        """The weights of least squared error, pulled towards the given ones; float32, (O, I)."""
        weight = weight_OI.detach().double()
        damped = self.gram_II + ridge * self.gram_II.diagonal().mean() * torch.eye(len(self.gram_II)).double()
        change = torch.linalg.solve(damped, (self.cross_OI - weight @ self.gram_II).T).T
        return cast(Tensor, weight + change).float()


Solve = Callable[[str, nn.Linear, Fit], None]


@torch.no_grad()
def reconstruct(
    pruned: SportsLLM, model: SportsLLM, kept: Kept, samples: Sequence[Tensor], ridge: float = RIDGE
) -> None:
    """Fit the cut model's matrices to the full model, in place.

    Args:
        pruned: from `cut(model, kept)`; its embedding, norms and biases stay as they are.
        model: the full one; read only.
        kept: what stayed.
        samples: calibration token ids, each (B, T); several times more tokens than the widest input.
        ridge: pull towards the cut weights, as a share of the inputs' mean square.
    """

    def solve(_name: str, linear: nn.Linear, sums: Fit) -> None:
        linear.weight.data = sums.solve(linear.weight, ridge)

    full_BTD = [model.model.embed_tokens(tokens) for tokens in samples]
    cut_BTD = [pruned.model.embed_tokens(tokens) for tokens in samples]
    old = 0
    with progress_bar("reconstruct", len(kept.layers)) as bar:
        for new, layer in enumerate(kept.layers):
            full_BTD = _through(model, full_BTD, range(old, layer))
            after = kept.layers[new + 1] if new + 1 < len(kept.layers) else model.config.num_hidden_layers
            following = _through(model, full_BTD, range(layer, after))
            pair = cast(Block, pruned.model.layers[new]), cast(Block, model.model.layers[layer])
            rows, _ = unit_rows(kept, new, model.config.head_dim)
            fit_layer(*pair, (model.rope_cos, model.rope_sin), (full_BTD, cut_BTD, following), solve, rows, kept.hidden)
            cut_BTD = _through(pruned, cut_BTD, range(new, new + 1))
            full_BTD, old = following, after
            bar.advance()


def _through(model: SportsLLM, states_BTD: list[Tensor], layers: range) -> list[Tensor]:
    for layer in layers:
        states_BTD = through(cast(Block, model.model.layers[layer]), states_BTD, (model.rope_cos, model.rope_sin))
    return states_BTD


def through(block: Block, states_BTD: Sequence[Tensor], rope: Rope) -> list[Tensor]:
    """A layer's outputs."""
    return [block(x, first_positions(rope, x), None, None) for x in states_BTD]


def first_positions(rope: Rope, x_BTD: Tensor) -> Rope:
    """The tables of the first T positions, for x (B, T, D)."""
    length = x_BTD.shape[1]
    return rope[0][:length], rope[1][:length]


def fit_layer(
    block: Block,
    source: Block,
    rope: Rope,
    states_BTD: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    solve: Solve,
    rows: Mapping[str, Tensor] | None = None,
    hidden: Tensor | slice = slice(None),
) -> None:
    """Fit the matrices of one layer to what the full model computes, those that read the same input together.

    Args:
        block: changed in place by `solve`; later matrices see what earlier ones became.
        source: the full model's layer.
        rope: cosine and sine tables, (context, E / 2) each.
        states_BTD: for every sample the full model's residual stream before the layer, the changed model's before
            it, and the full model's where the changed layer should lead.
        solve: is given a projection's name, its matrix and the sums, and sets the matrix's weight.
        rows: of each projection that stay; all if not given.
        hidden: channels of the residual stream that stay.
    """
    full_BTD, cut_BTD, following_BTD = states_BTD

    def stay(name: str) -> Tensor | slice:
        return slice(None) if rows is None else rows[name]

    projections = cast(dict[str, nn.Linear], {**block.self_attn._modules, **block.mlp._modules})
    wanted = cast(dict[str, nn.Linear], {**source.self_attn._modules, **source.mlp._modules})

    def fit_readers(names: Sequence[str], pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Matrices that read the same input; a pair is the changed model's and the full one's.

        What the full model gives is W times its input, so that one sum of products of inputs serves them all. Biases
        are the same on both sides.
        """
        sums = Fit.over(pairs)
        for name in names:
            cross_OI = wanted[name].weight.double() @ sums.cross_OI
            solve(name, projections[name], Fit(sums.gram_II, cross_OI[stay(name)]))

    def fit_writer(
        name: str, inputs: Callable[[int], Tensor], after: Sequence[Tensor], before: Sequence[Tensor]
    ) -> None:
        """The matrix that leads the residual stream from `before` to `after`."""
        bias = projections[name].bias
        solve(
            name,
            projections[name],
            Fit.over(
                (inputs(number), after[number][..., hidden] - before[number] - (0.0 if bias is None else bias))
                for number in range(len(before))
            ),
        )

    def mixed_values(x_BTD: Tensor) -> Tensor:
        """The input of o_proj."""
        caught: list[Tensor] = []
        handle = block.self_attn.o_proj.register_forward_pre_hook(lambda _module, args: caught.append(args[0]))
        block.self_attn(block.input_layernorm(x_BTD), first_positions(rope, x_BTD), None, None)
        handle.remove()
        return caught[0]

    def after_attention(owner: Block, x_BTD: Tensor) -> Tensor:
        attended = owner.self_attn(owner.input_layernorm(x_BTD), first_positions(rope, x_BTD), None, None)
        return cast(Tensor, x_BTD + attended)

    middle_BTD = [after_attention(source, x) for x in full_BTD]
    attention_inputs = zip(map(block.input_layernorm, cut_BTD), map(source.input_layernorm, full_BTD), strict=True)
    fit_readers(_INPUT_SIDE[0], attention_inputs)
    fit_writer("o_proj", lambda number: mixed_values(cut_BTD[number]), middle_BTD, cut_BTD)
    cut_middle = [after_attention(block, x) for x in cut_BTD]
    norms = block.post_attention_layernorm, source.post_attention_layernorm
    fit_readers(_INPUT_SIDE[1], zip(map(norms[0], cut_middle), map(norms[1], middle_BTD), strict=True))

    def neurons(number: int) -> Tensor:
        normed = block.post_attention_layernorm(cut_middle[number])
        return cast(Tensor, nn.functional.silu(projections["gate_proj"](normed)) * projections["up_proj"](normed))

    fit_writer("down_proj", neurons, following_BTD, cut_middle)
