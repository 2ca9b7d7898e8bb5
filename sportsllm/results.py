"""What commands return: typed records for Python with a JSON form for `--json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_NOT_IN_JSON = ("exit_code", "complaint")
_WARNINGS = {
    "yes": ": worse than the start",
    "uncertain": ": worse than the start, but uncertain on so little held-out text; eval --against compares on more",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command returns.

    Attributes:
        exit_code: of the command line; 4 if a gate was missed, 3 if `verify` found a problem.
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
        given = {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}
        if isinstance(given.get("out"), str):
            given["out"] = Path(given["out"])
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as `--json` prints them; paths are strings."""
        return {name: as_json(value) for name, value in vars(self).items() if name not in _NOT_IN_JSON}


@dataclass(frozen=True, kw_only=True)
class StageResult(Result):
    """The output directory of a command.

    Attributes:
        out: path of the directory.
        cached: whether it existed already, made from the same inputs.
        parameters: parameters of the model.
        size_bytes: size of the weight files.
        seconds: time of the work, also if cached.
    """

    out: Path
    cached: bool = False
    parameters: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingFigures:
    """Figures of a training run. Those of quality are None if no text was held out.

    Attributes:
        tokens, steps: length of the training.
        tokens_per_s: training speed, without validation and saving.
        seconds: time of the run, validation and saving included.
        loss: mean loss of the last logged steps, nats per token.
        valid_bits_per_byte: quality of the result on the report split of the held-out text.
        best_step: step whose weights were kept; 0 is the start.
        best_bits_per_byte: quality of that step on the selection split.
        learning_rate, muon_learning_rate: peak learning rates.
        bits_per_byte_before: quality of the start, estimated from a part of the report split.
        worse_than_start: "yes" if the report split shows that the training made the model worse; "uncertain" if it is
            worse there, but on fewer than 16 documents, or within the 95% interval. None if it is not worse.
        peak_rss_bytes: peak memory of the process.
    """

    tokens: int = 0
    steps: int = 0
    tokens_per_s: float | None = None
    seconds: float = 0.0
    loss: float | None = None
    valid_bits_per_byte: float | None = None
    best_step: int | None = None
    best_bits_per_byte: float | None = None
    learning_rate: float | None = None
    muon_learning_rate: float | None = None
    bits_per_byte_before: float | None = None
    worse_than_start: str | None = None
    peak_rss_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingResult(TrainingFigures, StageResult):
    """A trained checkpoint. Figures are None if nothing was trained.

    Attributes:
        epochs: passes over the training text.
        tokens_per_parameter: training tokens per parameter.
    """

    epochs: float | None = None
    tokens_per_parameter: float | None = None

    @property
    def warning(self) -> str:
        """What to add to the quality of a model that is worse than its start."""
        return _WARNINGS.get(self.worse_than_start or "", "")

    def line(self) -> str:
        """The result in a line."""
        if not self.tokens:
            return f"{self.out}: {self.parameters:,} parameters, {self.size_bytes / 1e6:.1f} MB, not trained"
        quality = "not measured" if self.valid_bits_per_byte is None else f"{self.valid_bits_per_byte:.4f}"
        before = "" if self.bits_per_byte_before is None else f" (before {self.bits_per_byte_before:.4f}{self.warning})"
        return (
            f"{self.out}: {self.parameters:,} parameters, {self.size_bytes / 1e6:.1f} MB, "
            f"{self.tokens:,} tokens at {self.tokens_per_s or 0:,.0f} tokens/s, "
            f"held-out bits per byte {quality}{before}, peak memory {(self.peak_rss_bytes or 0) / 1e6:,.0f} MB"
        )


def as_json(value: object) -> Any:
    """A value as JSON has it: records as objects, paths as strings."""
    if isinstance(value, Result):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
