"""The inputs of a report: stage directories, bench results, searches and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.labels import BUDGET_DEPTH, is_number
from benchmarks.measure.summary import budget_depth
from benchmarks.model_size import forward_flops_per_token, training_flops_per_token
from benchmarks.reporting.fits import FIT_FILE, Fit, read_fit
from benchmarks.reporting.measured import Bench, Scored, as_bench
from sportsllm.commands import find_model
from sportsllm.console import log
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import read_json, read_json_lines
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import MANIFEST, Manifest, directory_bytes, manifest_of, plain_name
from sportsllm.models.config import ModelConfig

_OF_OTHERS = {"perplexity", "prompt"}  # fields in results of `eval` and `generate`, which lie beside those of `bench`
Record = dict[str, Any]
"""A line of metrics.jsonl: "step", "tokens", and some of "loss", "lr", "valid_bits_per_byte", "expert_shares"."""


@dataclass(frozen=True)
class StageSummary:
    """One stage of the report.

    Attributes:
        name: of its directory.
        command: its command; `checkpoint` for a model that no command here made.
        tokens, flops: of its training, with the teacher's forward passes; None if it was not trained.
        metrics: records of its training.
        bench: its result of `bench`.
    """

    name: str
    command: str
    directory: str
    parameters: int | None = None
    size_bytes: float | None = None
    bits_per_byte: float | None = None
    tokens: int | None = None
    flops: float | None = None
    metrics: list[Record] = field(default_factory=list)
    manifest: Manifest = field(default_factory=Manifest)
    bench: Bench | None = None

    @property
    def verdict(self) -> str | None:
        """Its bench verdict, "pass", "fail" or "uncertain"; None without a target."""
        return self.bench.budget.verdict if self.bench is not None and self.bench.budget is not None else None

    @property
    def scored(self) -> Scored | None:
        """Who scored its quality, and on which text; None without one."""
        measured, made = self.bench.scored if self.bench is not None else None, self.manifest
        if self.bits_per_byte is None or measured is not None:
            return measured
        return ("training", *(made.paths("valid") or made.paths("corpus") or made.paths("text")))

    def figures(self) -> dict[str, float]:
        """Its known figures by the limits' names, in MB and ms, and `bits_per_byte`.

        A context with no room for a budget's depth gives the time per token at the deepest that was measured.
        """
        found: dict[str, float | None] = {}
        if (bench := self.bench) is not None:
            found = bench.figures(BUDGET_DEPTH, budget_depth([*map(int, bench.tpot_ms)]))
        found |= {"bits_per_byte": self.bits_per_byte, "file_mb": self.size_bytes and self.size_bytes / 1e6}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Sample:
    """A text to show; `text` does not repeat the given `prompt`."""

    heading: str
    text: str
    prompt: str = ""


@dataclass(frozen=True)
class Inputs:
    """Everything a report shows. The verdict is about `bench`, `skipped` says which samples were left out."""

    stages: list[StageSummary] = field(default_factory=list)
    bench: Bench | None = None
    samples: list[Sample] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def collect(paths: Sequence[Path]) -> Inputs:
    """Sort the inputs: stage directories, GGUF files, searches (fit.json), bench results (.json), texts (.txt, .md).

    A bench result, also that of a search's finished model, belongs to the stage whose directory it measured; if that
    directory was not given, it becomes a stage itself. A directory with several results is shown once for each, named
    by the file. The last result gives the verdict. Results of `eval` and `generate` are skipped.

    Raises:
        UsageError: a path is none of these.
        ArtifactError: a file is missing or damaged.
    """
    directories: dict[Path, Path] = {}
    benches: list[tuple[str, Bench]] = []
    samples: list[Sample] = []
    fits: list[Fit] = []
    for path in paths:
        if path.is_dir() and (path / FIT_FILE).exists():
            fits.append(read_fit(path))
            benches.append((path.name, fits[-1].bench))
        elif path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
            directories.setdefault(path.resolve(), path)
        elif path.suffix == ".json" and path.is_file():
            if _OF_OTHERS & (data := read_json(path)).keys() and "tpot_ms" not in data:
                log(f"{path}: skipped, since it is no result of `bench`")
            else:
                benches.append((path.stem, as_bench(data, path)))
        elif path.suffix in (".txt", ".md") and path.is_file():
            samples.append(Sample(path.stem, path.read_text(encoding="utf-8", errors="replace")))
        else:
            raise UsageError(
                f"{path}: not found or no input of a report; give stage directories, GGUF files, a directory of `fit`, "
                "bench results (.json) or sample texts (.txt)"
            )
    measured: dict[Path, list[tuple[str, Bench | None]]] = {place: [] for place in directories}
    for name, bench in benches:
        measured.setdefault(Path(bench.directory).resolve(), []).append((name, bench))
    stages = []
    for place, found in measured.items():
        for name, result in found or [("", None)]:
            stage = summarize(directories.get(place), result)
            stages.append(replace(stage, name=f"{stage.name} ({name})") if len(found) > 1 else stage)
    if not stages and not fits:
        raise UsageError(
            f"{', '.join(map(str, paths))}: no stage among them; give stage directories or bench results too"
        )
    return Inputs(stages, benches[-1][1] if benches else None, samples, fits)


def summarize(directory: Path | None, bench: Bench | None = None) -> StageSummary:
    """A finished stage or any Hugging Face checkpoint with its measurement; without a directory the measurement alone.

    Raises:
        ArtifactError: the directory holds no stage, or a file in it is damaged.
    """
    if directory is None:
        assert bench is not None
        place = Path(bench.directory)
        return StageSummary(
            plain_name(place), "bench", str(place), bench.parameters, bench.file_bytes, bench.bits_per_byte, bench=bench
        )
    given, directory = directory, find_model(directory) if directory.is_file() else directory
    if not any((directory / name).exists() for name in (MANIFEST, "config.json", "metrics.jsonl")):
        inside = "".join(f", such as {path.parent}" for path in sorted(directory.glob(f"*/{MANIFEST}"))[:1])
        raise ArtifactError(
            f"{directory}: holds no model and no other stage's output; give directories that have one{inside}"
        )
    manifest, metrics = manifest_of(directory), directory / "metrics.jsonl"
    config = load_config(directory) if (directory / "config.json").exists() else None
    parameters, tokens = manifest.figure("parameters"), manifest.figure("tokens")
    quality = manifest.figure("bits_per_byte") or manifest.figure("valid_bits_per_byte")
    return StageSummary(
        name=plain_name(given),
        command=manifest.command or "checkpoint",
        directory=str(given),
        parameters=int(parameters) if is_number(parameters) else config.parameters if config is not None else None,
        size_bytes=directory_bytes(directory) or None,
        bits_per_byte=bench.bits_per_byte if bench is not None and bench.bits_per_byte is not None else quality,
        tokens=int(tokens) if is_number(tokens) else None,
        flops=_training_flops(manifest, config) if config is not None and is_number(tokens) else None,
        metrics=[record for _, record in read_json_lines(metrics)] if metrics.exists() else [],
        manifest=manifest,
        bench=bench,
    )


def _training_flops(manifest: Manifest, config: ModelConfig) -> float | None:
    """FLOPs of a stage's training, with the teacher's forward passes if it ran beside it and its shape is there."""
    settings = manifest.settings
    recovery = settings.get("recover")
    sequence = (recovery if isinstance(recovery, dict) else settings).get("sequence")
    if not is_number(sequence) or not 0 < sequence <= config.max_position_embeddings:
        return None
    work, teacher = training_flops_per_token(config, int(sequence)), manifest.text("teacher")
    if teacher is not None and manifest.text("signals") is None:
        if not (Path(teacher) / "config.json").is_file():
            return None
        work += forward_flops_per_token(load_config(Path(teacher)), int(sequence))
    return work * (manifest.figure("tokens") or 0)
