"""What a search cuts of a teacher: its dimensions and, of a mixture, its experts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from compress.pruning.shapes import Shape, fewer_experts
from sportsllm.models.config import ModelConfig

_SHARES = (2, 4)  # half and a quarter of the experts


@dataclass(frozen=True)
class Cut(Shape):
    """A shape, and the experts of each layer; 0 in a dense model."""

    experts: int = 0

    @staticmethod
    def of(config: ModelConfig) -> Cut:
        """A model's own."""
        return Cut(**vars(Shape.of(config)), experts=config.experts.count if config.experts else 0)

    def applied_to(self, config: ModelConfig) -> ModelConfig:
        """The config of the pruned model; UsageError if something grows, or cannot be cut that way."""
        if (experts := self.flags(config).get("experts")) is not None:
            config = fewer_experts(config, experts, None)
        return Shape(**{field.name: getattr(self, field.name) for field in fields(Shape)}).applied_to(config)

    def flags(self, teacher: ModelConfig) -> dict[str, int]:
        """The flags of `prune` that make it of a teacher: experts only where there are to be fewer."""
        cuts_experts = teacher.experts is not None and self.experts != teacher.experts.count
        return {name: size for name, size in self.sizes().items() if cuts_experts or name != "experts"}

    def sizes(self) -> dict[str, Any]:
        """Every dimension by its name, and the experts where there are any."""
        return {name: size for name, size in asdict(self).items() if size}


def expert_counts(teacher: ModelConfig) -> list[int]:
    """How many experts a candidate may have: all, half, a quarter, but no fewer than a token is sent to."""
    experts = teacher.experts
    if experts is None:
        return [0]
    if experts.groups > 1:
        return [experts.count]
    fewer = (experts.count // share for share in _SHARES)
    return [experts.count, *(count for count in fewer if count >= experts.active)]
