"""Compression methods at equal cost: finished trainings against their teacher and against training from scratch."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.inputs import ancestors, read_runs
from benchmarks.compare.runs import Run
from benchmarks.pareto import pareto_front
from benchmarks.report.markdown import csv_table
from benchmarks.report.page import render_notes
from sportsllm.errors import UsageError
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.json_files import read_json
from sportsllm.models.config import ModelConfig

RESULT = "comparison.json"
_SCORED_TOKENS = 65_536  # of held-out text, `sportsllm.training.setup`; a test holds the two together


def scratch_cost(finals: Sequence[tuple[float, float]], target: float) -> tuple[str, float]:
    """How much training from scratch reaches a quality.

    Finished runs' (cost, bits per byte) are joined into the best value for each cost, in straight lines over the
    logarithm of the cost, and that is read off at `target`. The cost is tokens or FLOPs.

    Returns:
        "=" and the cost; or "<" and the lowest cost tried, where that run was better already; or ">" and the highest
        one, where none was as good.
    """
    envelope = pareto_front(finals)
    if target > envelope[0][1]:
        return "<", envelope[0][0]
    if target == envelope[0][1]:
        return "=", envelope[0][0]
    for (cheap, worse), (dear, better) in itertools.pairwise(envelope):
        if better <= target:
            part = (worse - target) / (worse - better)
            return "=", math.exp(math.log(cheap) + part * math.log(dear / cheap))
    return ">", max(cost for cost, _ in finals)


def compare_runs(title: str, runs: Sequence[Run], teacher: Run) -> dict[str, Any]:
    """All figures of a comparison, the content of comparison.json; `runs` are without the teacher, in order."""
    seeds, headroom = _seed_groups(runs), teacher_headroom(teacher, runs)
    notes = render_notes(
        "compare_notes.txt",
        teacher=teacher,
        runs=runs,
        scored_tokens=_SCORED_TOKENS,
        contexts=sorted({run.config.max_position_embeddings for run in (teacher, *runs)}),
        seeds=seeds,
        single=len({name for group in seeds for name in group["names"]}) < len(runs),
        headroom=headroom,
    )
    return {
        "title": title,
        "teacher": _row(teacher, teacher, ()),
        "rows": [_row(run, teacher, runs) for run in runs],
        "seeds": seeds,
        "headroom": headroom,
        "notes": notes,
    }


def _row(run: Run, teacher: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """One run. FLOPs, tokens and seconds are those since the teacher or since random weights."""
    config = run.config
    return {
        "name": run.name,
        "method": run.method,
        "command": run.facts.command,
        "directory": str(run.facts.directory),
        "seed": run.facts.seed,
        "parameters": config.parameters,
        "block_parameters": config.block_parameters,
        "share_of_teacher_block_parameters": config.block_parameters / teacher.config.block_parameters,
        "tokens": run.tokens,
        "share_of_teacher_tokens": run.tokens / teacher.tokens,
        "tokens_per_parameter": run.tokens / config.parameters,
        "epochs": run.epochs,
        "training_flops": run.total_flops,
        "training_flops_by_part": run.flops.parts(run.facts.tokens),
        "share_of_teacher_flops": run.total_flops / teacher.total_flops,
        "bits_per_byte_before_recovery": run.untrained,
        "bits_per_byte": run.bits_per_byte,
        "over_teacher_percent": 100 * (run.bits_per_byte / teacher.bits_per_byte - 1),
        "seconds": run.seconds,
        "scratch_tokens": _scratch_factor(run, runs, lambda one: one.tokens),
        "scratch_flops": _scratch_factor(run, runs, lambda one: one.total_flops),
        "settings": run.facts.settings,
    }


def _scratch_factor(run: Run, runs: Sequence[Run], cost_of: Callable[[Run], int]) -> dict[str, Any] | None:
    """What `scratch_cost` finds for a run's quality, with the cost as a factor of the run's own."""
    scratch = [other for other in runs if other.facts.from_scratch and other.shape == run.shape]
    if run.facts.from_scratch or not scratch:
        return None
    finals = [(float(cost_of(other)), other.bits_per_byte) for other in scratch]
    relation, cost = scratch_cost(finals, run.bits_per_byte)
    return {"relation": relation, "factor": cost / cost_of(run), "cost": cost}


def _seed_groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Runs that differ in the seed alone, with mean and sample standard deviation of their bits per byte."""
    groups: dict[tuple[str, ModelConfig, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.config, run.recipe), []).append(run)
    return [
        {
            "names": [run.name for run in group],
            "seeds": [run.facts.seed for run in group],
            "mean_bits_per_byte": statistics.fmean(run.bits_per_byte for run in group),
            "deviation_bits_per_byte": statistics.stdev(run.bits_per_byte for run in group),
        }
        for group in groups.values()
        if len({run.facts.seed for run in group}) > 1
    ]


def teacher_headroom(teacher: Run, runs: Sequence[Run]) -> dict[str, Any] | None:
    """What the second half of the teacher's training gained; None where nothing was scored near half of its tokens.

    Measured against a finished run from scratch of its shape with about half its tokens, or else against its own value
    half-way, when its learning rate had not come down yet (`finished` is False).
    """
    low, high = 0.4 * teacher.tokens, 0.6 * teacher.tokens
    twins = [run for run in runs if run.facts.from_scratch and run.shape == teacher.shape]
    halves = [(run.tokens, run.bits_per_byte, run.name) for run in twins]
    own = [(teacher.before + tokens, bits, teacher.name) for tokens, bits in teacher.curve]
    for finished, values in ((True, halves), (False, own)):
        if near := [value for value in values if low <= value[0] <= high]:
            tokens, bits, name = min(near, key=lambda value: (abs(value[0] - teacher.tokens / 2), value[1]))
            found = {"name": name, "finished": finished, "tokens": tokens, "bits_per_byte": bits}
            return found | {"gain_percent": 100 * (1 - teacher.bits_per_byte / bits)}
    return None


def csv_text(comparison: Mapping[str, Any]) -> str:
    """The teacher and every row of comparison.json as comma-separated values, figures unrounded."""
    rows = [{"role": "teacher", **comparison["teacher"]}, *({"role": "run", **row} for row in comparison["rows"])]
    for row in rows:
        for unit in ("tokens", "flops"):
            factor = row.pop(f"scratch_{unit}") or {}
            row |= {f"scratch_{unit}_{key}": factor.get(key) for key in ("relation", "factor")}
        row |= {f"{part}_flops": flops for part, flops in row.pop("training_flops_by_part").items()}
        del row["settings"]
    return csv_table(list(rows[0]), rows)


def compare(directories: Sequence[Path], teacher: Path, out: Path, title: str) -> dict[str, Any]:
    """Compare finished trainings with a teacher and write `comparison.json`, `.md`, `.csv` and `.html` into `out`.

    Returns:
        `out`, `cached` and the content of `comparison.json`, see `compare_runs`.

    Raises:
        UsageError: there is nothing but the teacher.
        ArtifactError: an input is not a finished training, or its score cannot be compared with the teacher's.
        ModuleNotFoundError: jinja2 or plotly is not installed.
    """
    from benchmarks.compare.page import html_page, markdown

    reference, runs = read_runs(directories, teacher)
    if not runs:
        raise UsageError(f"there is nothing to compare with the teacher {teacher}; give at least one other directory")
    used = {run.facts.directory for run in (reference, *runs)} | set(ancestors([teacher, *directories]))
    inputs = sorted(used, key=str)
    settings = {"title": title, "teacher": str(teacher), "directories": [str(path) for path in inputs]}

    def make(directory: Path) -> dict[str, Any]:
        comparison = compare_runs(title, runs, reference)
        texts = {
            RESULT: json.dumps(comparison, indent=1) + "\n",
            "comparison.md": markdown(comparison),
            "comparison.csv": csv_text(comparison),
            "comparison.html": html_page(comparison, runs, reference),
        }
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
        return {"runs": len(runs), "size_bytes": sum(len(text.encode()) for text in texts.values())}

    made = run_stage(out, Stage("compare", settings, inputs), make)
    return {"out": made["out"], "cached": made["cached"], **read_json(out / RESULT)}
