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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from compress.prune import Kept, unit_rows
from sportsllm.console import progress_bar
from sportsllm.model import Block, SportsLLM

RIDGE = 1e-3
_INPUT_SIDE = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass
class _Fit:
    """Sums of a regression; float32 products, summed in float64."""

    gram_II: Tensor
    cross_OI: Tensor

    @staticmethod
    def of(linear: nn.Linear) -> _Fit:
        outputs, inputs = linear.weight.shape
        zeros = torch.zeros(inputs + outputs, inputs, dtype=torch.float64)
        return _Fit(zeros[:inputs], zeros[inputs:])

    def add(self, inputs_NI: Tensor, targets_NO: Tensor) -> None:
        self.gram_II += (inputs_NI.T @ inputs_NI).double()
        self.cross_OI += (targets_NO.T @ inputs_NI).double()

    def solve_into(self, linear: nn.Linear, ridge: float) -> None:
        weight = linear.weight.detach().double()
        damped = self.gram_II + ridge * self.gram_II.diagonal().mean() * torch.eye(len(self.gram_II)).double()
        change = torch.linalg.solve(damped, (self.cross_OI - weight @ self.gram_II).T).T
        linear.weight.data += change.to(linear.weight.dtype)


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
    full_BTD = [model.model.embed_tokens(tokens) for tokens in samples]
    cut_BTD = [pruned.model.embed_tokens(tokens) for tokens in samples]
    old = 0
    with progress_bar("reconstruct", len(kept.layers)) as bar:
        for new, layer in enumerate(kept.layers):
            full_BTD = _through(model, full_BTD, range(old, layer))
            after = kept.layers[new + 1] if new + 1 < len(kept.layers) else model.config.num_hidden_layers
            following = _through(model, full_BTD, range(layer, after))
            _fit_layer(pruned, model, new, kept, full_BTD, cut_BTD, following, ridge)
            cut_BTD = _through(pruned, cut_BTD, range(new, new + 1))
            full_BTD, old = following, after
            bar.advance()


def _through(model: SportsLLM, states_BTD: list[Tensor], layers: range) -> list[Tensor]:
    for layer in layers:
        block = cast(Block, model.model.layers[layer])
        states_BTD = [block(x, _rope(model, x), None, None) for x in states_BTD]
    return states_BTD


def _rope(model: SportsLLM, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    length = x_BTD.shape[1]
    return model.rope_cos[:length], model.rope_sin[:length]


def _fit_layer(
    pruned: SportsLLM,
    model: SportsLLM,
    new: int,
    kept: Kept,
    full_BTD: list[Tensor],
    cut_BTD: list[Tensor],
    following_BTD: list[Tensor],
    ridge: float,
) -> None:
    block, source = cast(Block, pruned.model.layers[new]), cast(Block, model.model.layers[kept.layers[new]])
    rows, _ = unit_rows(kept, new, model.config.head_dim)
    hidden = kept.hidden

    def fit(linears: Sequence[nn.Linear], values: Callable[[int], tuple[Tensor, list[Tensor]]]) -> None:
        """`values` gives for a sample the linears' common input and the outputs wanted, one for each."""
        fits = [_Fit.of(linear) for linear in linears]
        for number in range(len(cut_BTD)):
            inputs, targets = values(number)
            for linear, sums, target in zip(linears, fits, targets, strict=True):
                if linear.bias is not None:
                    target = target - linear.bias
                sums.add(inputs.flatten(0, 1), target.flatten(0, 1))
        for linear, sums in zip(linears, fits, strict=True):
            sums.solve_into(linear, ridge)

    attention, mlp = (cast(dict[str, nn.Linear], part._modules) for part in (block.self_attn, block.mlp))
    full_attention, full_mlp = (cast(dict[str, nn.Linear], part._modules) for part in (source.self_attn, source.mlp))

    def attention_inputs(number: int) -> tuple[Tensor, list[Tensor]]:
        normed = source.input_layernorm(full_BTD[number])
        wanted = [full_attention[name](normed)[..., rows[name]] for name in _INPUT_SIDE[0]]
        return block.input_layernorm(cut_BTD[number]), wanted

    def mixed_values(owner: Block, x_BTD: Tensor, of: SportsLLM) -> Tensor:
        """The input of o_proj."""
        caught: list[Tensor] = []
        handle = owner.self_attn.o_proj.register_forward_pre_hook(lambda _module, args: caught.append(args[0]))
        owner.self_attn(owner.input_layernorm(x_BTD), _rope(of, x_BTD), None, None)
        handle.remove()
        return caught[0]

    middle_BTD = [x + source.self_attn(source.input_layernorm(x), _rope(model, x), None, None) for x in full_BTD]
    fit([attention[name] for name in _INPUT_SIDE[0]], attention_inputs)
    fit(
        [attention["o_proj"]],
        lambda number: (
            mixed_values(block, cut_BTD[number], pruned),
            [middle_BTD[number][..., hidden] - cut_BTD[number]],
        ),
    )
    cut_middle = [x + block.self_attn(block.input_layernorm(x), _rope(pruned, x), None, None) for x in cut_BTD]

    def mlp_inputs(number: int) -> tuple[Tensor, list[Tensor]]:
        normed = source.post_attention_layernorm(middle_BTD[number])
        wanted = [full_mlp[name](normed)[..., rows[name]] for name in _INPUT_SIDE[1]]
        return block.post_attention_layernorm(cut_middle[number]), wanted

    fit([mlp[name] for name in _INPUT_SIDE[1]], mlp_inputs)

    def neurons(number: int) -> tuple[Tensor, list[Tensor]]:
        normed = block.post_attention_layernorm(cut_middle[number])
        inner = nn.functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed)
        return inner, [following_BTD[number][..., hidden] - cut_middle[number]]

    fit([mlp["down_proj"]], neurons)
