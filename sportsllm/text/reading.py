"""How text is read: the field that holds it, and which tokens of it count."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sportsllm.formats.manifest import Manifest, manifest_of
from sportsllm.settings import TEXT


@dataclass(frozen=True)
class Reading:
    """The settings `TEXT` of a command.

    Attributes:
        text_field: field of .jsonl records, and column of .parquet, that holds plain text.
        parse_special: plain text that spells a special token becomes that token.
        loss_on: which tokens of a conversation are learned and scored, `assistant` or `all`.
    """

    text_field: str = "text"
    parse_special: bool = False
    loss_on: str = "assistant"

    def record(self) -> dict[str, Any]:
        """The manifest's entries: what is not as usual."""
        return {name: value for name, value in asdict(self).items() if value != getattr(USUAL, name)}


USUAL = Reading()


def recorded(manifest: Manifest) -> Reading:
    """How the text of a finished stage was read."""
    found: dict[str, Any] = {name: manifest.settings.get(name) for name in TEXT}
    return Reading(**{name: value for name, value in found.items() if type(value) is type(getattr(USUAL, name))})


def take_reading(settings: dict[str, Any], *models: Path | None) -> Reading:
    """Take how text is read out of a command's settings; by default as the text of a model was, the first unusual."""
    known = (recorded(manifest_of(model)) for model in models if model is not None)
    usual = next((reading for reading in known if reading != USUAL), USUAL)
    return Reading(**asdict(usual) | {name: settings.pop(name) for name in TEXT if name in settings})
