"""Calibration on random tokens: samples, what a model's modules read of them, and random importance scores."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.pruning.scores import Scores, layer_units, measure_scores
from sportsllm.models.language_model import SportsLLM

NARROW: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
"""Changes of a tiny model that make it cheaper to prune and to quantize, which takes some time for every column."""


def random_tokens(count: int, length: int = 40, rows: int = 2, seed: int = 0, below: int = 384) -> list[Tensor]:
    """`count` samples of (rows, length) token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, below, (rows, length), generator=generator) for _ in range(count)]


@torch.inference_mode()
def inputs_of(model: SportsLLM, names: Sequence[str], samples: Sequence[Tensor]) -> dict[str, Tensor]:
    """What the named modules read of the samples, a row a token, float64."""
    caught: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, args, name=name: caught[name].append(args[0].flatten(0, 1).double())
        )
        for name in names
    ]
    for tokens in samples:
        model.hidden(tokens)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in caught.items()}


def random_scores(model: SportsLLM, samples: Sequence[Tensor]) -> Scores:
    """Uniform scores in [0, 1), and the measured directions of the residual stream."""
    generator, layers = torch.Generator().manual_seed(0), model.config.num_hidden_layers
    drawn = {
        (name, layer): torch.rand(unit.count, generator=generator)
        for layer, units in enumerate(layer_units(model.config))
        for name, (unit, _) in units.items()
    }
    directions = measure_scores(model, samples).directions
    return Scores(directions, drawn, torch.rand(layers + 1, layers + 1, generator=generator))
