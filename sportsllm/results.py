"""Results of commands: typed records for Python, and their JSON form for `--json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_NOT_IN_JSON = ("exit_code", "complaint")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command returns.

    Attributes:
        exit_code: of the command line; 4 if a gate was missed.
        complaint: why, in one line.
    """

    exit_code: int = 0
    complaint: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """A record from a mapping, for example one read back from a manifest. Unknown keys are ignored.

        Raises:
            TypeError: a field without a default is missing.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        if isinstance(given.get("out"), str):
            given["out"] = Path(given["out"])
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as `--json` prints them; paths are strings."""
        return {
            field.name: plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in _NOT_IN_JSON
        }


@dataclass(frozen=True, kw_only=True)
class StageResult(Result):
    """What a command returns that wrote a directory.

    Attributes:
        out: the directory.
        cached: it was there already, made from the same inputs.
        parameters: of the model in it.
        size_bytes: of its weight files.
        seconds: that the work took, also if cached.
    """

    out: Path
    cached: bool = False
    parameters: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingResult(StageResult):
    """What a command returns that trained a model; None where nothing was trained or held out.

    Attributes:
        tokens, steps, epochs: read in training.
        tokens_per_s: without validating and saving.
        loss: mean of the last logged steps, nats per token.
        valid_bits_per_byte: on the report split of the held-out text.
        best_step: whose weights were kept; 0 is the start.
        best_bits_per_byte: what it was chosen by, on the selection split.
        learning_rate, muon_learning_rate: peak rates, by trial if not given.
        bits_per_byte_before: of the start, on the report split.
    """

    tokens: int = 0
    steps: int = 0
    epochs: float | None = None
    tokens_per_parameter: float | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    valid_bits_per_byte: float | None = None
    best_step: int | None = None
    best_bits_per_byte: float | None = None
    learning_rate: float | None = None
    muon_learning_rate: float | None = None
    bits_per_byte_before: float | None = None
    peak_rss_bytes: int | None = None

    def line(self) -> str:
        """The result in a line."""
        quality = "not measured" if self.valid_bits_per_byte is None else f"{self.valid_bits_per_byte:.4f}"
        before = "" if self.bits_per_byte_before is None else f" (before {self.bits_per_byte_before:.4f})"
        return (
            f"{self.out}: {self.parameters:,} parameters, {self.size_bytes / 1e6:.1f} MB, "
            f"{self.tokens:,} tokens at {self.tokens_per_s or 0:,.0f} tokens/s, "
            f"held-out bits per byte {quality}{before}, peak memory {(self.peak_rss_bytes or 0) / 1e6:,.0f} MB"
        )


def plain(value: object) -> Any:
    """A value as JSON has it: records as objects, paths as strings."""
    if isinstance(value, Result):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
