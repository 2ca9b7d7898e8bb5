"""What a report is made from: stage directories, bench results, searches and texts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.labels import BUDGET_DEPTH, is_number
from benchmarks.report.bench_file import read_bench
from benchmarks.report.search_results import FIT_FILE, Fit, read_fit
from benchmarks.report.text import get_nested, summarize_budget
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.json_files import read_json_lines
from sportsllm.formats.manifest import MANIFEST, Manifest, digest, directory_bytes, manifest_of


@dataclass(frozen=True)
class StageSummary:
    """What the report says about one stage.

    `metrics` are the records of metrics.jsonl ({"step", "tokens", "loss", "lr", "valid_bits_per_byte", …}), `bench` is
    what `bench` measured of it, `digest` what later stages' manifests call it by, None without a manifest.
    """

    name: str
    command: str
    directory: str
    parameters: int | None = None
    size_bytes: int | None = None
    bits_per_byte: float | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    manifest: Manifest = field(default_factory=Manifest)
    bench: dict[str, Any] | None = None
    digest: str | None = None

    @property
    def scored_by_bench(self) -> bool:
        """Whether the quality is `bench`'s, on all of its text, and not the one a training logged."""
        return self.bench is not None and is_number(self.bench.get("bits_per_byte"))

    @property
    def outcome(self) -> str | None:
        """The verdict of the stage's own bench result, "pass", "fail" or "uncertain"; None without a target."""
        budget = summarize_budget(self.bench)
        return None if budget is None else budget.outcome

    def limit_metrics(self) -> dict[str, float | None]:
        """The measurements by the names of the limits, in MB and ms, and the quality; None where there is none.

        A context with no room for a budget's depth gives the time per token at the deepest that was measured.
        """
        depth = str(get_nested(self.bench, "budget", "tpot_depth_tokens") or BUDGET_DEPTH)
        peak = get_nested(self.bench, "peak_rss_bytes")
        found = {
            "file_mb": None if self.size_bytes is None else self.size_bytes / 1e6,
            "bits_per_byte": self.bits_per_byte,
            "ttft_ms": get_nested(self.bench, "ttft_ms", str(BUDGET_DEPTH)),
            "tpot_p50_ms": get_nested(self.bench, "tpot_ms", depth, "p50"),
            "peak_memory_mb": peak / 1e6 if is_number(peak) else None,
        }
        return {name: float(value) if is_number(value) else None for name, value in found.items()}


@dataclass(frozen=True)
class Sample:
    """A text to show; `prompt` is the part that was given, and is not repeated in `text`."""

    heading: str
    text: str
    prompt: str = ""


@dataclass(frozen=True)
class Inputs:
    """Everything a report shows. `bench` is the last result given, `skipped` says which samples were left out."""

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


def bench_command(stages: Sequence[StageSummary], flags: str = "--target host") -> str:
    """The command that measures the last stage, or any where none was given."""
    last = stages[-1] if stages else None
    directory, name = (last.directory, last.name) if last else ("EXPORT", "EXPORT")
    return f"bench {shlex.quote(directory)} {flags} --out {shlex.quote(name + '.json')}"


def summarize_directory(directory: Path, bench: dict[str, Any] | None = None) -> StageSummary:
    """Read the directory of a finished stage or any Hugging Face checkpoint; `bench` is what was measured of it.

    Raises:
        ArtifactError: the directory is missing or a file in it is damaged.
    """
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory; give directories that the stages wrote")
    finished = (directory / MANIFEST).exists()
    manifest = manifest_of(directory)
    results = manifest.results
    parameters = results.get("parameters")
    if parameters is None and (directory / "config.json").exists():
        parameters = load_config(directory).parameters
    quality = results.get("bits_per_byte", results.get("valid_bits_per_byte"))
    scored = get_nested(bench, "bits_per_byte")
    return StageSummary(
        name=directory.name or str(directory),
        command=manifest.command or "checkpoint",
        directory=str(directory),
        parameters=parameters,
        size_bytes=directory_bytes(directory),
        bits_per_byte=quality if scored is None else scored,
        metrics=read_metrics(directory / "metrics.jsonl"),
        manifest=manifest,
        bench=bench,
        digest=digest(directory) if finished else None,  # from the manifest alone, no weights are read
    )


def _summarize_bench(bench: dict[str, Any]) -> StageSummary:
    """A stage known by its measurement only, its directory not being here."""
    directory = str(bench.get("directory") or "measured")
    parameters, size, quality = (bench.get(key) for key in ("parameters", "file_bytes", "bits_per_byte"))
    return StageSummary(Path(directory).name, "bench", directory, parameters, size, quality, bench=bench)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; none where there is no such file."""
    if not path.exists():
        return []
    return [record for _, record in read_json_lines(path)]


def collect(paths: Sequence[Path]) -> Inputs:
    """Sort the report's inputs: stage directories, searches (with fit.json), bench results (.json), texts (.txt, .md).

    A bench result, also that of a search's finished model, belongs to the stage whose directory it measured; if that
    directory was not given, it becomes a stage itself. A directory with several results is shown once for each, named
    by the file. The last result gives the verdict.

    Raises:
        UsageError: a path is none of these.
        ArtifactError: a file is missing or damaged.
    """
    directories: dict[Path, Path] = {}
    benches: list[tuple[str, dict[str, Any]]] = []
    samples: list[Sample] = []
    fits: list[Fit] = []
    for path in paths:
        if path.is_dir() and (path / FIT_FILE).exists():
            fits.append(read_fit(path))
            benches.append((path.name, fits[-1].bench))
        elif path.is_dir():
            directories.setdefault(path.resolve(), path)
        elif path.suffix == ".json":
            benches.append((path.stem, read_bench(path)))
        elif path.suffix in (".txt", ".md") and path.is_file():
            samples.append(Sample(path.stem, path.read_text(encoding="utf-8", errors="replace")))
        else:
            raise UsageError(
                f"{path}: give stage directories, a directory of `fit`, bench results (.json) or sample texts (.txt)"
            )
    measured: dict[Path, list[tuple[str, dict[str, Any]]]] = {place: [] for place in directories}
    for name, bench in benches:
        measured.setdefault(Path(bench.get("directory", "")).resolve(), []).append((name, bench))
    stages = []
    for place, found in measured.items():
        if not found:
            stages.append(summarize_directory(directories[place]))
        for name, bench in found:
            given = directories.get(place)
            stage = summarize_directory(given, bench) if given else _summarize_bench(bench)
            stages.append(replace(stage, name=f"{stage.name} ({name})") if len(found) > 1 else stage)
    if not stages and not fits:
        raise UsageError(f"{', '.join(map(str, paths))}: sample texts alone; give the stages that wrote them too")
    return Inputs(stages, benches[-1][1] if benches else None, samples, fits)
