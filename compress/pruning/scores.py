"""How much each unit of a model matters: from one forward pass over calibration text, or from plain baselines.

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
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import Block, SportsLLM
from sportsllm.storage.checkpoint import save_tensors

IMPORTANCES = ("output", "activation", "magnitude", "random")
MEASURED = ("output", "activation")  # on calibration text
SCORES_FILE = "importance.safetensors"


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


@torch.no_grad()
def magnitude_scores(model: SportsLLM) -> Scores:
    """The plain baseline: a unit's score is the L2 norm of all the weights it owns; no text is read.

    `layer_distance` of a run of layers is the norm of its matrices' weights.
    """
    blocks = cast("list[Block]", list(model.model.layers))
    config = model.config
    hidden = cast(Tensor, model.model.embed_tokens.weight).square().sum(dim=0)
    intermediate, heads, sizes = [], [], [torch.zeros(())]
    for block in blocks:
        weights = {name: module.weight for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        rows = [weights[f"self_attn.{name}"] for name in ("q_proj", "k_proj", "v_proj")]
        rows += [weights["mlp.gate_proj"], weights["mlp.up_proj"]]
        columns = [weights["self_attn.o_proj"], weights["mlp.down_proj"]]
        hidden = hidden + sum(w.square().sum(dim=0) for w in rows) + sum(w.square().sum(dim=1) for w in columns)
        neurons = sum(w.square().sum(dim=1) for w in rows[3:]) + columns[1].square().sum(dim=0)
        queries = rows[0].square().sum(dim=1) + columns[0].square().sum(dim=0)
        intermediate.append(neurons.sqrt())
        heads.append(queries.view(-1, config.head_dim).sum(dim=1).sqrt())
        sizes.append(sum((w.square().sum() for w in weights.values()), torch.zeros(())))
    reach = torch.stack(sizes).cumsum(dim=0)
    distance = (reach[None, :] - reach[:, None]).clamp(min=0).sqrt()
    return Scores(hidden.sqrt(), intermediate, heads, distance)


def random_scores(config: ModelConfig, seed: int) -> Scores:
    """The other baseline: every unit is worth a number out of a hat, uniform in [0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    layers = config.num_hidden_layers

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    return Scores(
        draw(config.hidden_size),
        [draw(config.intermediate_size) for _ in range(layers)],
        [draw(config.num_attention_heads) for _ in range(layers)],
        draw(layers + 1, layers + 1),
    )


def save_scores(directory: Path, scores: Scores) -> None:
    """Write scores beside a checkpoint, so that other shapes can be cut without reading the text again."""
    tensors = {"hidden": scores.hidden, "layer_distance": scores.layer_distance}
    for layer, (neurons, heads) in enumerate(zip(scores.intermediate, scores.heads, strict=True)):
        tensors |= {f"intermediate.{layer}": neurons, f"heads.{layer}": heads}
    save_tensors(directory / SCORES_FILE, {name: tensor.contiguous() for name, tensor in tensors.items()})


def load_scores(path: Path, config: ModelConfig) -> Scores:
    """Scores of a model of this shape.

    Args:
        path: the file, or the directory it lies in.
        config: of the model that is to be cut.

    Raises:
        ArtifactError: missing, damaged, or of a model of another shape.
    """
    file = path / SCORES_FILE if path.is_dir() else path
    try:
        tensors = load_file(str(file))
        layers = range(config.num_hidden_layers)
        scores = Scores(
            tensors["hidden"],
            [tensors[f"intermediate.{layer}"] for layer in layers],
            [tensors[f"heads.{layer}"] for layer in layers],
            tensors["layer_distance"],
        )
    except (SafetensorError, OSError, KeyError) as error:
        raise ArtifactError(
            f"{file}: holds no importance scores ({error}); make them with prune --calibration"
        ) from None
    wanted = random_scores(config, 0)
    if (scores.hidden.shape, [t.shape for t in scores.intermediate], [t.shape for t in scores.heads]) != (
        wanted.hidden.shape,
        [t.shape for t in wanted.intermediate],
        [t.shape for t in wanted.heads],
    ) or scores.layer_distance.shape != wanted.layer_distance.shape:
        raise ArtifactError(f"{file}: scores of a model of another shape; make them from this one with --calibration")
    return scores
