"""Random importance scores: for tests of what follows, whatever the scores are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.pruning.scores import Scores, layer_units, measure_scores
from sportsllm.models.language_model import SportsLLM


def random_scores(model: SportsLLM, samples: Sequence[Tensor], seed: int = 0) -> Scores:
    """Uniform scores in [0, 1), and the measured directions of the residual stream."""
    generator, layers = torch.Generator().manual_seed(seed), model.config.num_hidden_layers
    drawn = {
        (name, layer): torch.rand(unit.count, generator=generator)
        for layer, units in enumerate(layer_units(model.config))
        for name, (unit, _) in units.items()
    }
    directions = measure_scores(model, samples).directions
    return Scores(directions, drawn, torch.rand(layers + 1, layers + 1, generator=generator))
