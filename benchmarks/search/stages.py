"""What a search starts from, and the settings of the commands that make a candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.predict.model_size import ModelFormat
from benchmarks.search.candidates import Candidate
from sportsllm.console import say
from sportsllm.models.hf_config import load_config
from sportsllm.storage.manifest import MANIFEST, read_manifest

_SEQUENCE = 512
_SHARE_OF_TEACHER = 0.05
_UNKNOWN_TOKENS = 1_000_000


@dataclass(frozen=True)
class Source:
    """What a search starts from.

    Attributes:
        teacher: an unquantized checkpoint.
        corpus: training text; part of it is held out and decides between finalists.
        calibration: text that statistics are taken from.
        valid: held-out text that the finished model's quality is measured on.
        threads: CPU threads of every command; all cores if None.
        seed: of everything random.
        settings: further flags of every training, such as `batch_size`.
    """

    teacher: Path
    corpus: tuple[Path, ...]
    calibration: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    threads: int | None = None
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def training(self) -> dict[str, Any]:
        """Flags of the commands that train."""
        return {"corpus": list(self.corpus), "seed": self.seed, "threads": self.threads, **self.settings}

    @property
    def sequence(self) -> int:
        """Tokens of one piece of text."""
        return min(int(self.settings.get("sequence") or _SEQUENCE), load_config(self.teacher).max_position_embeddings)


@dataclass(frozen=True)
class Effort:
    """How much work a search may be.

    Attributes:
        tokens: of the winner's recovery.
        search_tokens: of a finalist's brief recovery.
        finalists: candidates that are recovered.
        minutes: for the whole of it; None for no limit.
    """

    tokens: int
    search_tokens: int
    finalists: int = 3
    minutes: float | None = None


@dataclass(frozen=True)
class Target:
    """The device that the model is for: a name or a file, and whether this machine is it, recognised or not."""

    device: str
    on_device: bool = False


def vocabulary_stages(
    source: Source, cut: Path, tuned: Path, vocab_size: int, tokens: int
) -> list[tuple[str, dict[str, Any]]]:
    """The commands that make the teacher with fewer tokens, with their settings."""
    prune = {
        "checkpoint": source.teacher,
        "out": cut,
        "calibration": list(source.calibration),
        "vocab_size": vocab_size,
    }
    return [("prune", prune), ("train", {"init": cut, "out": tuned, "tokens": tokens, **source.training()})]


def prune_settings(
    source: Source, candidate: Candidate, teacher: Path, out: Path, tokens: int, samples: int | None = None
) -> dict[str, Any]:
    """Flags of `prune` that make a candidate's shape."""
    shape, training = candidate.shape, source.training()
    return {
        "checkpoint": teacher,
        "out": out,
        "calibration": list(source.calibration),
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "layers": shape.layers,
        "samples": samples,
        "recover": tokens,
        **training,
    }


def quantize_settings(
    source: Source, format: ModelFormat, checkpoint: Path, out: Path, method: str | None = None, qad: int | None = None
) -> dict[str, Any]:
    """Flags of `quantize` for a format: with a method that needs no text, or calibrated and trained on `qad` tokens."""
    settings: dict[str, Any] = {
        "checkpoint": checkpoint,
        "out": out,
        "bits": int(format.precision.removeprefix("int")),
        "threads": source.threads,
        **({"per_row": True} if format.per_row else {"block_size": format.block_size}),
        **({"calibration": list(source.calibration)} if method is None else {"method": method}),
    }
    if qad:
        settings |= {"qad": qad, **source.training()}
        settings.pop("learning_rate", None)  # training the rounded model has a rate of its own
    return settings


def export_settings(source: Source, format: ModelFormat, checkpoint: Path, out: Path) -> dict[str, Any]:
    """Flags of `export` for a format."""
    return {
        "checkpoint": checkpoint,
        "out": out,
        "kv_cache": format.cache,
        "profile": "latency" if format.latency else "memory",
        "threads": source.threads,
        **({"calibration": list(source.calibration)} if format.cache == "int8" else {}),
    }


def recovery_tokens(teacher: Path) -> int:
    """5% of the tokens that the teacher was trained on, as its manifest says; else a million."""
    trained = read_manifest(teacher)["results"].get("tokens") if (teacher / MANIFEST).exists() else None
    tokens = round(_SHARE_OF_TEACHER * trained) if trained else _UNKNOWN_TOKENS
    why = "5% of the teacher's" if trained else "the teacher's own are not known"
    say(f"no --tokens given: the winner is recovered on {tokens:,} ({why})")
    return max(1, tokens)
