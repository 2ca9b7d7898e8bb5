"""What a search cuts of a teacher: its dimensions and, of a mixture, its experts."""

from __future__ import annotations

from compress.pruning.shapes import Shape
from sportsllm.models.config import ModelConfig

_SHARES = (2, 4)  # half and a quarter of the experts


def prune_options(shape: Shape, teacher: ModelConfig) -> dict[str, int]:
    """The options of `prune` that make a shape of a teacher: experts only if there are to be fewer."""
    whole = teacher.experts is not None and shape.experts == teacher.experts.count
    return {name: size for name, size in shape.sizes().items() if not (whole and name == "experts")}


def expert_counts(teacher: ModelConfig) -> list[int]:
    """How many experts a candidate may have: all, half, a quarter, but no fewer than a token is sent to."""
    experts = teacher.experts
    if experts is None:
        return [0]
    if experts.groups > 1:
        return [experts.count]
    fewer = (experts.count // share for share in _SHARES)
    return [experts.count, *(count for count in fewer if count >= experts.active)]
