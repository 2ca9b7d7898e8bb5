"""One self-contained HTML page about a line of stages: verdict, figures, curves, samples, provenance.

The page loads nothing: plotly's script is inside it, and its content security policy forbids the network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report_plots import plots
from sportsllm.artifacts import MANIFEST, directory_bytes, read_manifest
from sportsllm.config import load_config, read_json
from sportsllm.errors import ArtifactError, UsageError

LIMIT_LABELS = {
    "file_mb": "File size",
    "peak_memory_mb": "Peak memory",
    "ttft_ms": "Time to first token",
    "tpot_p50_ms": "Median time per token",
    "tpot_p95_ms": "95th-percentile time per token",
    "quality_loss_percent": "Quality loss",
}
LIMIT_NOTES = {
    "file_mb": "graph and weights",
    "peak_memory_mb": "of the process, 1,024 tokens of context",
    "ttft_ms": "prompt of 512 tokens",
    "tpot_p50_ms": "after 512 tokens",
    "tpot_p95_ms": "after 512 tokens",
    "quality_loss_percent": "bits per byte over the fp32 teacher's",
}
MISSING = "\u2013"


@dataclass(frozen=True)
class StageSummary:
    """What the report says about one stage.

    `metrics` are the records of metrics.jsonl ({"step", "tokens", "loss", "lr", "valid_bits_per_byte", …}),
    `manifest` is the directory's manifest.json, `bench` what `bench` measured of it. Sizes are in bytes.
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
    manifest = read_manifest(directory) if (directory / MANIFEST).exists() else {}
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


def collect(paths: Sequence[Path]) -> tuple[list[StageSummary], dict[str, Any] | None, list[tuple[str, str]]]:
    """Sort the report's inputs: stage directories, bench results (.json) and sample texts (.txt, .md).

    A bench result belongs to the stage whose directory it measured; the last one gives the verdict.

    Raises:
        UsageError: a path is none of these.
        ArtifactError: a file is missing or damaged.
    """
    directories, benches, samples = [], [], []
    for path in paths:
        if path.is_dir():
            directories.append(path)
        elif path.suffix == ".json":
            data = read_json(path)
            if "tpot_ms" not in data:
                raise ArtifactError(f"{path}: is no result of `bench`; write one with bench --out")
            benches.append(data)
        elif path.suffix in (".txt", ".md") and path.is_file():
            samples.append((path.stem, path.read_text(encoding="utf-8", errors="replace")))
        else:
            raise UsageError(f"{path}: give stage directories, bench results (.json) or sample texts (.txt)")
    by_directory = {str(Path(bench.get("directory", "")).resolve()): bench for bench in benches}
    stages = [summarise_directory(path, by_directory.get(str(path.resolve()))) for path in directories]
    return stages, benches[-1] if benches else None, samples


def write_report(
    out: Path,
    title: str,
    stages: list[StageSummary],
    bench: dict[str, Any] | None,
    samples: list[tuple[str, str]],
) -> None:
    """Write the report; an existing one is replaced, in one move.

    Args:
        out: the .html file.
        title: its heading.
        stages: in the order they ran; may be empty.
        bench: the result that the verdict is about; the last stage's own where None.
        samples: (heading, text) pairs.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed.
    """
    measured = [stage.bench for stage in stages if stage.bench]
    if bench is None and measured:
        bench = measured[-1]
    figures = plots(stages, bench)
    html = render_page(
        "report.html",
        charts=bool(figures),
        title=title,
        verdict=_verdict(bench),
        bench=bench,
        bench_rows=_bench_rows(bench),
        stages=[stage_row(stage) for stage in stages],
        figures=figures,
        samples=samples,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    try:
        partial.write_text(html, encoding="utf-8")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def render_page(template: str, *, charts: bool, **values: Any) -> str:
    """A self-contained HTML page from a template beside this file.

    Args:
        template: its file name.
        charts: whether the page needs the plotting library.
        values: what the template shows, beside `written` and `plotly`.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        plotly=Markup(get_plotlyjs() if charts else ""),
        **values,
    )


def _verdict(bench: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The budget as rows of text, with the share of each limit that is used up."""
    if bench is None or not bench.get("budget"):
        return None
    budget = bench["budget"]
    rows = []
    for limit in budget["limits"]:
        value, passed = limit["value"], limit["passed"]
        rows.append(
            {
                "label": LIMIT_LABELS.get(limit["name"], limit["name"]),
                "note": LIMIT_NOTES.get(limit["name"], ""),
                "value": MISSING if value is None else f"{number(value)} {limit['unit']}",
                "limit": f"{number(limit['limit'])} {limit['unit']}",
                "used": None if value is None else min(100, max(0, round(100 * value / limit["limit"]))),
                "outcome": {True: "passed", False: "missed", None: "not measured"}[passed],
                "source": limit.get("source") or "",
            }
        )
    missed = [row["label"] for row in rows if row["outcome"] == "missed"]
    unknown = [row["label"] for row in rows if row["outcome"] == "not measured"]
    return {
        "device": budget["device"],
        "outcome": "missed" if missed else "incomplete" if unknown else "passed",
        "missed": missed,
        "unknown": unknown,
        "noisy": bench.get("clean") is False,
        "rows": rows,
    }


def stage_row(stage: StageSummary) -> dict[str, Any]:
    """One line of the stage table, as texts."""
    bench = stage.bench or {}
    ttft = bench.get("ttft_ms", {}).get("512")
    tpot = bench.get("tpot_ms", {}).get("512", {}).get("p50")
    peak = bench.get("peak_rss_bytes")
    verdict = _verdict(bench or None)
    manifest = stage.manifest
    return {
        "name": stage.name,
        "command": stage.command,
        "directory": stage.directory,
        "parameters": MISSING if stage.parameters is None else f"{stage.parameters:,}",
        "size": MISSING if stage.size_bytes is None else f"{number(stage.size_bytes / 1e6)} MB",
        "quality": MISSING if stage.bits_per_byte is None else f"{stage.bits_per_byte:.4f}",
        "ttft": MISSING if ttft is None else f"{number(ttft)} ms",
        "tpot": MISSING if tpot is None else f"{number(tpot)} ms",
        "memory": MISSING if peak is None else f"{number(peak / 1e6)} MB",
        "budget": verdict["outcome"] if verdict else MISSING,
        "created": manifest.get("created", ""),
        "settings": manifest.get("settings", {}),
        "seed": manifest.get("seed"),
        "versions": manifest.get("versions", {}),
        "parents": manifest.get("parents", []),
        "files": manifest.get("files", {}),
    }


def _bench_rows(bench: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What was measured and how, as label and text."""
    if bench is None:
        return []
    rows = [
        ("directory", str(bench.get("directory", MISSING))),
        ("runtime", f"{bench.get('runtime', MISSING)}, {bench.get('threads', MISSING)} threads"),
        ("load", _optional(bench.get("load_s"), "s")),
    ]
    rows += [(f"first token, prompt of {prompt}", _optional(ms, "ms")) for prompt, ms in bench["ttft_ms"].items()]
    rows.append(("prefill", _optional(bench.get("prefill_tokens_per_s"), "tokens/s")))
    for depth, times in bench["tpot_ms"].items():
        rate = _optional(bench.get("decode_tokens_per_s", {}).get(depth), "tokens/s")
        shown = " / ".join(number(times[key]) for key in ("p50", "p90", "p95", "p99"))
        rows.append((f"per token after {depth}", f"{shown} ms (p50 / p90 / p95 / p99), {rate}"))
    rows.append(("memory floor", _optional(bench.get("memory_floor_tpot_ms"), "ms per token")))
    if bench.get("noisy"):
        rows.append(("noisy figures", ", ".join(bench["noisy"])))
    for key, value in bench.get("machine", {}).items():
        shown = f"{number(value / 1e9)} GB" if key.endswith("_bytes") else str(value)
        rows.append((key.removesuffix("_bytes").replace("_", " "), shown))
    return rows


def _optional(value: float | None, unit: str) -> str:
    return MISSING if value is None else f"{number(value)} {unit}"


def number(value: float) -> str:
    """Three significant digits with thousands separators: 0.0123, 1.23, 123, 12,300."""
    if not math.isfinite(value):
        return MISSING
    if abs(value) < 1e-6:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
