"""What a report is made from: stage directories, bench results, searches and texts, read with tolerance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.labels import is_number, part, verdict
from benchmarks.measure.floor import budget_depth
from benchmarks.report.search_results import FIT_FILE, Fit, read_fit
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.hf_config import load_config, read_json
from sportsllm.storage.artifact import MANIFEST, digest, directory_bytes, read_manifest


@dataclass(frozen=True)
class StageSummary:
    """What the report says about one stage.

    `metrics` are the records of metrics.jsonl ({"step", "tokens", "loss", "lr", "valid_bits_per_byte", …}),
    `manifest` is the directory's manifest.json, `bench` what `bench` measured of it. Sizes are in bytes.
    `digest` is what later stages' manifests call it by, None without a manifest.
    """

    name: str
    command: str
    directory: str
    parameters: int | None = None
    size_bytes: int | None = None
    bits_per_byte: float | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] | None = None
    digest: str | None = None

    @property
    def scored_by_bench(self) -> bool:
        """Whether the quality is `bench`'s, on all of its text, and not the one a training logged."""
        return self.bench is not None and is_number(self.bench.get("bits_per_byte"))


@dataclass(frozen=True)
class Sample:
    """A text to show; `prompt` is the part that was given, and is not repeated in `text`."""

    heading: str
    text: str
    prompt: str = ""


@dataclass(frozen=True)
class Inputs:
    """Everything a report shows. `bench` is the result that the verdict is about, `skipped` what was left out."""

    stages: list[StageSummary] = field(default_factory=list)
    bench: dict[str, Any] | None = None
    samples: list[Sample] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def deciding(self) -> dict[str, Any] | None:
        """The bench result that the verdict is about: the last one given, else the last stage's own."""
        measured = [stage.bench for stage in self.stages if stage.bench]
        return self.bench or (measured[-1] if measured else None)


# A figure of the stage by the names that limits have, and the quality itself.
FIGURES = ("file_mb", "bits_per_byte", "ttft_ms", "tpot_p50_ms", "tpot_p95_ms", "peak_memory_mb")


def figures(stage: StageSummary) -> dict[str, float | None]:
    """`FIGURES` of a stage as measured (MB, ms, at the depths of the budgets); None where there is none.

    A context with no room for a budget's depth gives the time per token at the deepest that was measured.
    """
    measured = part(stage.bench, "tpot_ms")
    depth = str(budget_depth(int(key) for key in measured)) if isinstance(measured, Mapping) else ""
    found = {
        "file_mb": None if stage.size_bytes is None else stage.size_bytes / 1e6,
        "bits_per_byte": stage.bits_per_byte,
        "ttft_ms": part(stage.bench, "ttft_ms", "512"),
        "tpot_p50_ms": part(measured, depth, "p50"),
        "tpot_p95_ms": part(measured, depth, "p95"),
    }
    peak = part(stage.bench, "peak_rss_bytes")
    found["peak_memory_mb"] = peak / 1e6 if is_number(peak) else None
    return {name: float(value) if is_number(value) else None for name, value in found.items()}


def too_short(stages: Sequence[StageSummary]) -> bool:
    """Whether a measured stage has no time per token, its context having no room for the steps."""
    depths = [part(stage.bench, "tpot_ms") for stage in stages]
    return any(isinstance(found, Mapping) and not found for found in depths)


def outcome(stage: StageSummary) -> str | None:
    """ "passed", "missed" or "incomplete" by the stage's own bench result; None without one."""
    judged = verdict(stage.bench)
    return None if judged is None else str(judged["outcome"])


def summarise_directory(directory: Path, bench: dict[str, Any] | None = None) -> StageSummary:
    """Read what a stage's directory says about itself.

    Args:
        directory: a finished stage, or any Hugging Face checkpoint.
        bench: what `bench` measured of it.

    Raises:
        ArtifactError: the directory is missing or a file in it is damaged.
    """
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory; give directories that the stages wrote")
    finished = (directory / MANIFEST).exists()
    manifest = read_manifest(directory) if finished else {}
    results = manifest.get("results", {})
    parameters = results.get("parameters")
    if parameters is None and (directory / "config.json").exists():
        parameters = load_config(directory).parameters
    quality = results.get("bits_per_byte", results.get("valid_bits_per_byte"))
    if bench is not None and bench.get("bits_per_byte") is not None:
        quality = bench["bits_per_byte"]
    return StageSummary(
        name=directory.name or str(directory),
        command=str(manifest.get("command", "checkpoint")),
        directory=str(directory),
        parameters=parameters,
        size_bytes=directory_bytes(directory),
        bits_per_byte=quality,
        metrics=read_metrics(directory / "metrics.jsonl"),
        manifest=manifest,
        bench=bench,
        digest=digest(directory) if finished else None,  # from the manifest alone, no weights are read
    )


def _summarise_bench(bench: dict[str, Any]) -> StageSummary:
    """A stage known by its measurement only, its directory not being here."""
    directory = str(bench.get("directory") or "measured")
    return StageSummary(
        name=Path(directory).name,
        command="bench",
        directory=directory,
        parameters=bench.get("parameters"),
        size_bytes=bench.get("file_bytes"),
        bits_per_byte=bench.get("bits_per_byte"),
        bench=bench,
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; none where there is no such file."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArtifactError(f"{path}:{number}: not valid JSON ({error}); make the directory again") from None
        if isinstance(record, dict):
            records.append(record)
    return records


def collect(paths: Sequence[Path]) -> Inputs:
    """Sort the report's inputs: stage directories, searches (with fit.json), bench results (.json), texts (.txt, .md).

    A bench result, also that of a search's finished model, belongs to the stage whose directory it measured, and is a
    stage of its own where that directory was not given; the last one gives the verdict.

    Raises:
        UsageError: a path is none of these.
        ArtifactError: a file is missing or damaged.
    """
    directories: list[Path] = []
    benches: list[dict[str, Any]] = []
    samples: list[Sample] = []
    fits: list[Fit] = []
    for path in paths:
        if path.is_dir() and (path / FIT_FILE).exists():
            fits.append(read_fit(path))
            benches += [found] if (found := fits[-1].bench) else []
        elif path.is_dir():
            directories.append(path)
        elif path.suffix == ".json":
            benches.append(_read_bench(path))
        elif path.suffix in (".txt", ".md") and path.is_file():
            samples.append(Sample(path.stem, path.read_text(encoding="utf-8", errors="replace")))
        else:
            raise UsageError(
                f"{path}: give stage directories, a directory of `fit`, bench results (.json) or sample texts (.txt)"
            )
    by_directory = {_key(bench.get("directory", "")): bench for bench in benches}
    given = {_key(path) for path in directories}
    stages = [summarise_directory(path, by_directory.get(_key(path))) for path in directories]
    stages += [_summarise_bench(bench) for key, bench in by_directory.items() if key not in given]
    return Inputs(stages, benches[-1] if benches else None, samples, fits)


def _read_bench(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data.get("tpot_ms"), Mapping):
        raise ArtifactError(f"{path}: is no result of `bench`; write one with bench --out")
    return data


def _key(directory: str | Path) -> str:
    return str(Path(directory).resolve())
