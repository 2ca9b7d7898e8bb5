"""How much each unit of a model matters, from one forward pass over calibration text.

Score of a unit = sqrt(sum over samples of (mean over tokens of |a|) ** 2), Minitron (https://arxiv.org/abs/2407.14679):
    hidden channel  a = the outputs of every RMSNorm, scores added up
    FFN neuron      a = the input of down_proj
    query head      a = the input of o_proj, its L2 norm over head_dim
Distance of a run of layers = 1 - E[cos(x before, x after)], ShortGPT's block influence (https://arxiv.org/abs/2403.03853)
for one layer, and its form for several (https://arxiv.org/abs/2403.17887).
Shape suffixes: B samples, T tokens, D hidden_size, F intermediate_size, H query heads, E head_dim, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.model import Block, SportsLLM


@dataclass(frozen=True)
class Scores:
    """Importance of every unit.

    Attributes:
        hidden: (D,) of the residual stream's channels.
        intermediate: (F,) a layer.
        heads: (H,) a layer.
        layer_distance: (L + 1, L + 1); [i, j] is how far layers i..j-1 together move the residual stream.
    """

    hidden: Tensor
    intermediate: list[Tensor]
    heads: list[Tensor]
    layer_distance: Tensor


@torch.no_grad()
def importance_scores(model: SportsLLM, samples: Sequence[Tensor]) -> Scores:
    """Run calibration samples through the model and score its units.

    Args:
        model: read, never changed.
        samples: token ids, each (B, T); every row is a sample.

    Raises:
        ArtifactError: there are no samples.
    """
    if not samples:
        raise ArtifactError("there is no calibration text; give --calibration FILE with text in it")
    config = model.config
    squares: dict[str, Tensor] = {}
    layers = config.num_hidden_layers
    cosines = torch.zeros(layers + 1, layers + 1)
    stream: list[Tensor] = []

    def add(key: str, activations_BTU: Tensor) -> None:
        value = activations_BTU.float().abs().mean(dim=1).square().sum(dim=0)
        squares[key] = squares[key] + value if key in squares else value

    def norm_output(_module: nn.Module, _args: Any, output: Tensor) -> None:
        add(f"hidden.{id(_module)}", output)

    def neuron_input(layer: int) -> Callable[..., None]:
        return lambda _module, args: add(f"intermediate.{layer}", args[0])

    def head_input(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any) -> None:
            add(f"heads.{layer}", args[0].unflatten(-1, (-1, config.head_dim)).float().norm(dim=-1))

        return hook

    def block_input(_module: nn.Module, args: Any) -> None:
        stream.append(args[0])

    def last_output(_module: nn.Module, _args: Any, output: Tensor) -> None:
        stream.append(output)

    with ExitStack() as hooks, progress_bar("importance", len(samples)) as bar:

        def keep(handle: Any) -> None:
            hooks.callback(handle.remove)

        backbone = model.model
        keep(backbone.norm.register_forward_hook(norm_output))
        for number, block in enumerate(cast("list[Block]", list(backbone.layers))):
            keep(block.input_layernorm.register_forward_hook(norm_output))
            keep(block.post_attention_layernorm.register_forward_hook(norm_output))
            keep(block.mlp.down_proj.register_forward_pre_hook(neuron_input(number)))
            keep(block.self_attn.o_proj.register_forward_pre_hook(head_input(number)))
            keep(block.register_forward_pre_hook(block_input))
        keep(backbone.layers[-1].register_forward_hook(last_output))
        for tokens_BT in samples:
            stream.clear()
            model.hidden(tokens_BT)
            states = torch.nn.functional.normalize(torch.stack(stream).flatten(1, 2).float(), dim=-1)
            cosines += torch.einsum("itd,jtd->ij", states, states) / states.shape[1]
            bar.advance()
    hidden = torch.stack([value.sqrt() for key, value in squares.items() if key.startswith("hidden.")]).sum(dim=0)
    return Scores(
        hidden=hidden,
        intermediate=[squares[f"intermediate.{layer}"].sqrt() for layer in range(layers)],
        heads=[squares[f"heads.{layer}"].sqrt() for layer in range(layers)],
        layer_distance=1 - cosines / len(samples),
    )
