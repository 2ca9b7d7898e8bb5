"""Compression methods at equal cost: finished trainings against their teacher and against training from scratch."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.inputs import ancestors, read_runs
from benchmarks.compare.runs import Run
from benchmarks.pareto import pareto_front
from benchmarks.report.page import render_notes
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import read_json
from sportsllm.storage.artifact import Stage, run_stage

RESULT = "comparison.json"
_SCORED_TOKENS = 65_536  # of held-out text, `sportsllm.training.setup`; a test holds the two together
_ABOUT_HALF = (0.4, 0.6)


@dataclass(frozen=True)
class ScratchCost:
    """The cost of reaching a run's quality by training from scratch, `factor` times the run's own.

    `relation` is "=", or "<" where the cheapest finished run was better already, or ">" where none was as good: then
    the cost is the lowest or the highest tried.
    """

    relation: str
    factor: float
    cost: float


@dataclass(frozen=True)
class Row:
    """One run in comparison.json. FLOPs, tokens and seconds are those since the teacher or since random weights."""

    name: str
    method: str
    command: str
    directory: str
    seed: int | None
    parameters: int
    block_parameters: int
    share_of_teacher_block_parameters: float
    tokens: int
    share_of_teacher_tokens: float
    tokens_per_parameter: float
    epochs: float
    training_flops: int
    training_flops_by_part: dict[str, int]
    share_of_teacher_flops: float
    bits_per_byte_before_recovery: float | None
    bits_per_byte: float
    over_teacher_percent: float
    seconds: float
    scratch_tokens: ScratchCost | None
    scratch_flops: ScratchCost | None
    settings: dict[str, Any]


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in the seed alone, with mean and sample standard deviation of their bits per byte."""

    names: list[str]
    seeds: list[int | None]
    mean_bits_per_byte: float
    deviation_bits_per_byte: float


@dataclass(frozen=True)
class Headroom:
    """What the second half of the teacher's training gained, over `name` with about half of its tokens.

    `finished` is False for the teacher's own value in mid-run: its learning rate had not come down yet.
    """

    name: str
    finished: bool
    tokens: int
    bits_per_byte: float
    gain_percent: float


@dataclass(frozen=True)
class Comparison:
    """All figures of a comparison; `to_json` is the content of comparison.json."""

    title: str
    teacher: Row
    rows: list[Row]
    seeds: list[SeedGroup]
    headroom: Headroom | None
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain mappings and lists."""
        return asdict(self)


def scratch_cost(finals: Sequence[tuple[float, float]], target: float) -> tuple[str, float]:
    """How much training from scratch reaches a quality.

    Finished runs' (cost, bits per byte) are joined into the best value for each cost, in straight lines over the
    logarithm of the cost, and that is read off at `target`.

    Args:
        finals: of runs that finished their learning-rate schedule, tokens or FLOPs first; at least one.
        target: bits per byte to reach.

    Returns:
        Relation and cost, see `ScratchCost`.
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


def compare_runs(title: str, runs: Sequence[Run], teacher: Run) -> Comparison:
    """All figures of a comparison.

    Args:
        title: heading of table and page.
        runs: without the teacher, in the order of the rows, all scored on its held-out text.
        teacher: the training they are compared with.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """
    seeds, headroom = _seed_groups(runs), teacher_headroom(teacher, runs)
    repeated = {name for group in seeds for name in group.names}
    notes = render_notes(
        "compare_notes.txt",
        teacher=teacher,
        runs=runs,
        scored_tokens=_SCORED_TOKENS,
        contexts=sorted({run.config.max_position_embeddings for run in (teacher, *runs)}),
        seeds=seeds,
        single=len(repeated) < len(runs),
        headroom=headroom,
    )
    rows = [_row(run, teacher, runs) for run in runs]
    return Comparison(title, _row(teacher, teacher, ()), rows, seeds, headroom, notes)


def _row(run: Run, teacher: Run, runs: Sequence[Run]) -> Row:
    config, cost, quality = run.config, run.cost, run.quality
    scratch = [other for other in runs if other.facts.from_scratch and other.shape == run.shape]
    tokens = flops = None
    if scratch and not run.facts.from_scratch:
        tokens = _scratch_cost([(other.cost.tokens, other) for other in scratch], cost.tokens, run)
        flops = _scratch_cost([(other.cost.total_flops, other) for other in scratch], cost.total_flops, run)
    return Row(
        name=run.name,
        method=run.method,
        command=run.facts.command,
        directory=str(run.facts.directory),
        seed=run.facts.seed,
        parameters=config.parameters,
        block_parameters=config.block_parameters,
        share_of_teacher_block_parameters=config.block_parameters / teacher.config.block_parameters,
        tokens=cost.tokens,
        share_of_teacher_tokens=cost.tokens / teacher.cost.tokens,
        tokens_per_parameter=cost.tokens / config.parameters,
        epochs=cost.epochs,
        training_flops=cost.total_flops,
        training_flops_by_part=cost.flops.parts(cost.trained),
        share_of_teacher_flops=cost.total_flops / teacher.cost.total_flops,
        bits_per_byte_before_recovery=quality.untrained,
        bits_per_byte=quality.finished,
        over_teacher_percent=100 * (quality.finished / teacher.quality.finished - 1),
        seconds=cost.seconds,
        scratch_tokens=tokens,
        scratch_flops=flops,
        settings=run.facts.settings,
    )


def _scratch_cost(scratch: Sequence[tuple[int, Run]], own: int, run: Run) -> ScratchCost:
    finals = [(float(cost), other.quality.finished) for cost, other in scratch]
    relation, cost = scratch_cost(finals, run.quality.finished)
    return ScratchCost(relation, cost / own, cost)


def _seed_groups(runs: Sequence[Run]) -> list[SeedGroup]:
    groups: dict[tuple[str, ModelConfig, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.config, run.recipe), []).append(run)
    found = []
    for group in groups.values():
        seeds, qualities = [run.facts.seed for run in group], [run.quality.finished for run in group]
        if len(set(seeds)) > 1:
            names, mean = [run.name for run in group], statistics.fmean(qualities)
            found.append(SeedGroup(names, seeds, mean, statistics.stdev(qualities)))
    return found


def teacher_headroom(teacher: Run, runs: Sequence[Run]) -> Headroom | None:
    """How far from converged the teacher is; None where nothing was scored near half of its tokens.

    Measured against a finished run from scratch of its shape with about half its tokens, or else against its own value
    half-way.
    """
    low, high = (share * teacher.cost.tokens for share in _ABOUT_HALF)
    twins = [run for run in runs if run.facts.from_scratch and run.shape == teacher.shape]
    halves = [(run.cost.tokens, run.quality.finished, run.name) for run in twins]
    own = [(teacher.cost.before + tokens, bits, teacher.name) for tokens, bits in teacher.quality.curve]
    for finished, values in ((True, halves), (False, own)):
        near = [value for value in values if low <= value[0] <= high]
        if near:
            tokens, bits, name = min(near, key=lambda value: (abs(value[0] - teacher.cost.tokens / 2), value[1]))
            return Headroom(name, finished, tokens, bits, 100 * (1 - teacher.quality.finished / bits))
    return None


def csv_text(comparison: Mapping[str, Any]) -> str:
    """The teacher and every row of comparison.json as comma-separated values, figures unrounded."""
    stream = io.StringIO()
    rows = [{"role": "teacher", **comparison["teacher"]}, *({"role": "run", **row} for row in comparison["rows"])]
    for row in rows:
        for unit in ("tokens", "flops"):
            factor = row.pop(f"scratch_{unit}") or {}
            row |= {f"scratch_{unit}_relation": factor.get("relation"), f"scratch_{unit}_factor": factor.get("factor")}
        row |= {f"{part}_flops": flops for part, flops in row.pop("training_flops_by_part").items()}
        del row["settings"]
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def compare(directories: Sequence[Path], teacher: Path, out: Path, title: str) -> dict[str, Any]:
    """Compare finished trainings and write `comparison.json`, `.md`, `.csv` and `.html`.

    Args:
        directories: outputs of train, distill and prune --recover.
        teacher: the training they are compared with; it need not be among them.
        out: directory to make.
        title: heading of table and page.

    Returns:
        `out`, `cached` and the content of `comparison.json`, see `Comparison`.

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
        comparison = compare_runs(title, runs, reference).to_json()
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
