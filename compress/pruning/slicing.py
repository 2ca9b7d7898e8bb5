"""Width and depth pruning: a new model of the kept units and layers, the same width in every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.pruning.kept_units import KeptUnits
from sportsllm.errors import UsageError
from sportsllm.models.kinds import EMBEDDING, HEAD, LAST_NORM, NORMS, OUTPUT_NORMS, POSITIONS, block_matrices, sublayers
from sportsllm.models.language_model import SportsLLM

_NORM_PARTS = ("weight", "bias")


def slice_model(model: SportsLLM, kept: KeptUnits) -> SportsLLM:
    """A new model of the kept units of a float32 model; keeping everything changes nothing.

    Of the residual stream the first channels stay; `compress.pruning.rotation` makes them the ones that hold most.

    Raises:
        UsageError: a tensor that no kind describes.
    """
    rules = _rules(kept)
    layers = set(range(model.config.num_hidden_layers))
    dropped = tuple(f"model.layers.{layer}." for layer in layers.difference(kept.layers))
    result: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(dropped):
            continue
        if name not in rules:
            raise UsageError(f"{name}: pruning has no rule for this tensor")
        new_name, rows, columns = rules[name]
        part = tensor if rows is None else tensor[rows]
        result[new_name] = (part if columns is None else part[:, columns]).clone().contiguous()
    if model.config.tie_word_embeddings and not kept.config.tie_word_embeddings:
        result[f"{HEAD}.weight"] = result[f"{EMBEDDING}.weight"].clone()
    pruned = SportsLLM(kept.config)
    pruned.load_state_dict(result)
    return pruned.eval()


def _rules(kept: KeptUnits) -> dict[str, tuple[str, Tensor | None, Tensor | None]]:
    """For each tensor that stays its new name, and its rows and columns that stay; None means all."""
    hidden = torch.arange(kept.config.hidden_size)
    rules: dict[str, tuple[str, Tensor | None, Tensor | None]] = {
        f"{module}.weight": (f"{module}.weight", None, hidden) for module in (EMBEDDING, HEAD)
    }
    context = torch.arange(kept.config.positions)
    rules[f"{POSITIONS}.weight"] = f"{POSITIONS}.weight", context, hidden
    rules |= {f"{LAST_NORM}.{part}": (f"{LAST_NORM}.{part}", hidden, None) for part in _NORM_PARTS}
    for new, old in enumerate(kept.layers):
        inside: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        own = kept.full.of_layer(old)
        for half, kind in sublayers(own).items():
            norms = (NORMS[half], OUTPUT_NORMS[half])
            inside |= {f"{norm}.{part}": (hidden, None) for norm in norms for part in _NORM_PARTS}
            inside |= {f"{half}.{vector.name}.weight": (None, None) for vector in kind.vectors(own)}
        for matrix in block_matrices(own):
            rows, columns = kept.of_matrix(matrix, new)
            inside |= {f"{matrix.name}.weight": (rows, columns), f"{matrix.name}.bias": (rows, None)}
        for name, sides in inside.items():
            rules[f"model.layers.{old}.{name}"] = f"model.layers.{new}.{name}", *sides
    return rules
