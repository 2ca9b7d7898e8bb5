"""`Family`, the record of a model type, and `Fields`, the fields of a config.json while they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip
from sportsllm.models.config import FULL, SLIDING, ModelConfig
from sportsllm.models.field_checks import MOST_LAYERS, check_size

ORIGINAL_CONTEXT = "original_max_position_embeddings"
"""A field that `transformers` reads for longrope, besides the one in `rope_scaling`."""


class Fields(dict[str, Any]):
    """The fields of a config.json that are not read yet; `where` names the file in errors."""

    def __init__(self, data: JsonObject, where: str) -> None:
        super().__init__(data)
        self.where = where

    def require(self, **allowed: tuple[object, ...]) -> None:
        """Take fields out that are harmless only with these values; the first is the meaning of absence."""
        for key, values in allowed.items():
            value = self.pop(key, values[0])
            if value not in values:
                raise ArtifactError(f"{self.where}: {key} is {clip(repr(value))}; only {values[0]!r} is supported")

    def drop(self, *names: str) -> None:
        """Take fields out that say nothing of the model's output."""
        for name in names:
            self.pop(name, None)

    def layers(self) -> int:
        """`num_hidden_layers`, which stays; 1 if it is missing, which is refused later."""
        layers = self.get("num_hidden_layers", 1)
        check_size("num_hidden_layers", layers, 1, MOST_LAYERS)
        return int(layers)

    def biases(self) -> JsonObject:
        """`attention_bias` of all of attention's matrices."""
        bias = self.pop("attention_bias", False)
        return {"attention_bias": bias, "attention_output_bias": bias}

    def rotary_dim(self, share: str, usual: float = 0.25) -> int | None:
        """Channels of a head that are rotated, by the field with their share; all if None."""
        size = self.get("head_dim") or self.get("hidden_size", 0) // (self.get("num_attention_heads") or 1)
        factor = float(self.pop(share, self.get("partial_rotary_factor", usual)))
        self.drop("partial_rotary_factor", "rotary_pct")
        return None if factor == 1.0 else int(size * factor)

    def full_only(self) -> None:
        """Take `layer_types` out, which may name full attention alone."""
        types = self.pop("layer_types", None)
        if types is not None and set(types) != {"full_attention"}:
            raise ArtifactError(f"{self.where}: layer_types has {sorted(set(types))}; give 'full_attention' alone")


_HF_TYPES = {"full_attention": FULL, "sliding_attention": SLIDING}
HF_NAMES = {ours: theirs for theirs, ours in _HF_TYPES.items()}
"""Hugging Face's name of a layer's type."""


def layer_types(given: list[str], where: str) -> tuple[str, ...]:
    """`ModelConfig.layer_types` of Hugging Face's."""
    unknown = sorted(set(given) - _HF_TYPES.keys())
    if unknown:
        raise ArtifactError(f"{where}: layer_types has {unknown[0]!r}; use {', '.join(_HF_TYPES)}")
    return tuple(_HF_TYPES[name] for name in given)


@dataclass(frozen=True)
class Family:
    """How a model type's config.json differs from LLaMA's.

    A model is written as the first family whose file reads back as the same model.

    Attributes:
        architecture: the class of `transformers`.
        read: returns the fields of `ModelConfig` that take more than a table, and takes theirs out of the file's.
        names: fields of `ModelConfig` by the names that they have in the file.
        defaults: by our names, the meaning of absence where it is not LLaMA's.
        only: values that are supported; the first is the meaning of absence.
        ignored: fields that do not change the model's output.
        fixed: fields of `ModelConfig` that are the same for the whole family.
        ties: whether embedding and head are one if the file does not say.
        constants: fields that are written with these values.
        unwritten: LLaMA's fields that the family has not.
        write: the fields that take more than a table; None for a model that cannot be of this family.
    """

    architecture: str
    read: Callable[[Fields], JsonObject]
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: JsonObject = field(default_factory=dict)
    only: dict[str, tuple[object, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    fixed: JsonObject = field(default_factory=dict)
    ties: bool = False
    constants: JsonObject = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    write: Callable[[ModelConfig], JsonObject | None] = lambda config: {}

    def values(self, rest: Fields) -> JsonObject:
        """Fields of `ModelConfig` that the family has beyond LLaMA's; theirs are taken out of `rest` or renamed."""
        for theirs, ours in self.names.items():
            if theirs in rest:
                rest[ours] = rest.pop(theirs)
        for name, value in self.defaults.items():
            rest.setdefault(name, value)
        rest.require(**self.only)
        rest.drop(*self.ignored)
        return self.read(rest) | self.fixed

    def written(self, config: ModelConfig, common: JsonObject) -> JsonObject | None:
        """A model's config.json from the fields that most families have; None for no model of this family."""
        if (own := self.write(config)) is None:
            return None
        absent = {*self.names.values(), *self.unwritten}
        named = {theirs: getattr(config, ours) for theirs, ours in self.names.items()}
        return {name: value for name, value in common.items() if name not in absent} | self.constants | named | own
