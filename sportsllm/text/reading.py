"""How a command reads text: the field that holds it, and which tokens of it count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sportsllm.errors import UsageError
from sportsllm.formats.manifest import Manifest, manifest_of

LOSS_ON = ("assistant", "all")


@dataclass(frozen=True)
class Reading:
    """Settings of every command that reads text, by the names of its options.

    Attributes:
        text_field: field of .jsonl records, and column of .parquet, that holds plain text.
        parse_special: plain text that spells a special token becomes that token.
        loss_on: which tokens of a conversation are learned and scored, one of `LOSS_ON`.
    """

    text_field: str = "text"
    parse_special: bool = False
    loss_on: str = "assistant"


USUAL = Reading()
_now = USUAL


def reading() -> Reading:
    """How text is read at present."""
    return _now


def recorded(manifest: Manifest) -> dict[str, Any]:
    """How the text of a finished stage was read, if not as usual."""
    found = {name: manifest.settings.get(name) for name in asdict(USUAL)}
    return {name: value for name, value in found.items() if type(value) is type(getattr(USUAL, name))}


def reading_setting() -> dict[str, Any]:
    """The manifest's entries for how text is read, if not as usual."""
    return {name: value for name, value in asdict(_now).items() if value != getattr(USUAL, name)}


@contextmanager
def reading_as(models: Sequence[Path] = (), **given: Any) -> Iterator[None]:
    """Inside, text is read by the settings that are not None; by default as outside, or as a model's training text was.

    Args:
        models: checkpoints, or names of directories in runs/, whose manifests may record settings.
        given: fields of `Reading`.

    Raises:
        UsageError: `loss_on` is not one of `LOSS_ON`.
    """
    global _now
    before, places = _now, [place for model in models for place in (model, Path("runs") / model)]
    known = (recorded(manifest_of(place)) for place in places if before == USUAL)
    changes = next(filter(None, known), {}) | {name: value for name, value in given.items() if value is not None}
    if (loss_on := changes.get("loss_on", "all")) not in LOSS_ON:
        raise UsageError(f"--loss-on {loss_on}: use one of {', '.join(LOSS_ON)}")
    _now = replace(before, **changes)
    try:
        yield
    finally:
        _now = before
