"""Compression methods at equal cost: finished trainings against their teacher and against training from scratch."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.inputs import ancestors, read_runs
from benchmarks.compare.runs import Run, best_for_cost
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import read_json
from sportsllm.storage.artifact import Stage, run_stage

RESULT = "comparison.json"
_SCORED_TOKENS = 65_536  # of held-out text, `sportsllm.training.setup`; a test holds the two together
_ABOUT_HALF = (0.4, 0.6)

Costs = Sequence[tuple[float, float]]


def scratch_cost(finals: Costs, target: float) -> tuple[str, float]:
    """How much training from scratch reaches a quality.

    Finished runs' (cost, bits per byte) are joined into the best value that so much has bought, in straight lines over
    the logarithm of the cost, and that is read off at `target`.

    Args:
        finals: of runs that finished their learning-rate schedule, tokens or FLOPs first; at least one.
        target: bits per byte to reach.

    Returns:
        ("=", cost); ("<", lowest cost tried) where that was better already; (">", highest cost tried) where none was
        as good.
    """
    envelope = best_for_cost(finals)
    if target > envelope[0][1]:
        return "<", envelope[0][0]
    if target == envelope[0][1]:
        return "=", envelope[0][0]
    for (cheap, worse), (dear, better) in itertools.pairwise(envelope):
        if better <= target:
            part = (worse - target) / (worse - better)
            return "=", math.exp(math.log(cheap) + part * math.log(dear / cheap))
    return ">", max(cost for cost, _ in finals)


def compare_runs(runs: Sequence[Run], teacher: Run) -> dict[str, Any]:
    """All figures of a comparison.

    Args:
        runs: without the teacher, all scored on its held-out text.
        teacher: sets the mark.

    Returns:
        `teacher` and `rows`, one a run, the largest model first and of equal ones the best first; `seeds`, runs that
        differ in the seed alone; `headroom`, what the teacher still gained; `notes`, sentences. Costs are in tokens,
        FLOPs and seconds, differences in percent.
    """
    ordered = sorted(runs, key=lambda run: (-run.config.parameters, run.bits_per_byte))
    headroom = teacher_headroom(teacher, runs)
    seeds = _seed_groups(runs)
    return {
        "teacher": _row(teacher, teacher, ()),
        "rows": [_row(run, teacher, runs) for run in ordered],
        "seeds": seeds,
        "headroom": headroom,
        "notes": _notes(runs, teacher, seeds, headroom),
    }


def _row(run: Run, teacher: Run, runs: Sequence[Run]) -> dict[str, Any]:
    scratch = [other for other in runs if other.from_scratch and other.shape == run.shape]
    factors: dict[str, Any] = {"tokens": None, "flops": None}
    if scratch and not run.from_scratch:
        for unit, own in (("tokens", run.tokens), ("flops", run.flops)):
            finals = [(float(getattr(other, unit)), other.bits_per_byte) for other in scratch]
            relation, cost = scratch_cost(finals, run.bits_per_byte)
            factors[unit] = {"relation": relation, "factor": cost / own, "cost": cost}
    return {
        "name": run.name,
        "method": run.method,
        "command": run.command,
        "directory": str(run.directory),
        "seed": run.seed,
        "parameters": run.config.parameters,
        "block_parameters": run.config.block_parameters,
        "share_of_teacher_block_parameters": run.config.block_parameters / teacher.config.block_parameters,
        "tokens": run.tokens,
        "share_of_teacher_tokens": run.tokens / teacher.tokens,
        "tokens_per_parameter": run.tokens / run.config.parameters,
        "epochs": run.epochs,
        "training_flops": run.flops,
        "training_flops_by_part": run.cost.parts(run.trained),
        "share_of_teacher_flops": run.flops / teacher.flops,
        "bits_per_byte_before_recovery": run.unrecovered,
        "bits_per_byte": run.bits_per_byte,
        "over_teacher_percent": 100 * (run.bits_per_byte / teacher.bits_per_byte - 1),
        "seconds": run.seconds,
        "scratch_tokens": factors["tokens"],
        "scratch_flops": factors["flops"],
        "settings": run.settings,
    }


def _seed_groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Runs whose settings differ in the seed alone, with mean and sample standard deviation of their bits per byte."""
    groups: dict[tuple[str, ModelConfig, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.config, run.recipe), []).append(run)
    return [
        {
            "names": [run.name for run in group],
            "seeds": [run.seed for run in group],
            "mean_bits_per_byte": statistics.fmean(run.bits_per_byte for run in group),
            "deviation_bits_per_byte": statistics.stdev(run.bits_per_byte for run in group),
        }
        for group in groups.values()
        if len({run.seed for run in group}) > 1
    ]


def teacher_headroom(teacher: Run, runs: Sequence[Run]) -> dict[str, Any] | None:
    """What the second half of the teacher's training gained: how far from converged it is.

    Measured against a finished run from scratch of its shape with about half its tokens, or else against its own value
    half-way, which is that of no finished model: its learning rate had not come down yet.

    Returns:
        `name` of the run, `finished`, `tokens`, `bits_per_byte` and `gain_percent`; None where neither is there.
    """
    low, high = (share * teacher.tokens for share in _ABOUT_HALF)
    halves = [run for run in runs if run.from_scratch and run.shape == teacher.shape and low <= run.tokens <= high]
    if halves:
        half = min(halves, key=lambda run: (abs(run.tokens - teacher.tokens / 2), run.bits_per_byte))
        name, finished, tokens, bits = half.name, True, half.tokens, half.bits_per_byte
    else:
        logged = [point for point in teacher.points if low <= teacher.before + point[0] <= high]
        if not logged:
            return None
        nearest = min(logged, key=lambda point: abs(teacher.before + point[0] - teacher.tokens / 2))
        name, finished, tokens, bits = teacher.name, False, teacher.before + nearest[0], nearest[1]
    gain = 100 * (1 - teacher.bits_per_byte / bits)
    return {"name": name, "finished": finished, "tokens": tokens, "bits_per_byte": bits, "gain_percent": gain}


def _notes(
    runs: Sequence[Run], teacher: Run, seeds: Sequence[dict[str, Any]], headroom: dict[str, Any] | None
) -> list[str]:
    notes = [
        f"Bits per byte, lower is better, on held-out text ({', '.join(teacher.text)}), the same for every row by "
        f"digest: its first documents, up to about {_SCORED_TOKENS:,} tokens."
    ]
    contexts = sorted({run.config.max_position_embeddings for run in (teacher, *runs)})
    if len(contexts) > 1:
        shown = ", ".join(f"{context:,}" for context in contexts)
        notes.append(f"The models' contexts differ ({shown} tokens): a longer one sees more text before each token.")
    repeated = {name for group in seeds for name in group["names"]}
    for group in seeds:
        listed = ", ".join(map(str, group["seeds"]))
        notes.append(
            f"{', '.join(group['names'])}: {group['mean_bits_per_byte']:.4f} \u00b1 "
            f"{group['deviation_bits_per_byte']:.4f} bits per byte, mean and standard deviation of "
            f"{len(group['names'])} runs with seeds {listed}."
        )
    if len(repeated) < len(runs):
        every = "Every other row" if repeated else "Every row"
        notes.append(f"{every} is one run with one seed: small differences may be chance.")
    notes.append(
        "Tokens and FLOPs are those of finished runs, from the teacher on or from random weights; the teacher's own "
        "training is not counted. FLOPs on a token: 6 for each number it is multiplied by (blocks and head) and "
        "12 x layers x query width x (sequence + 1) / 2 for attention; a third of that for each forward pass of the "
        "teacher, which learning from it and scoring units take. Validation is not counted."
    )
    if any(run.from_scratch for run in runs):
        notes.append(
            "Scratch needs: how many times the run's tokens or FLOPs training the same shape from scratch takes to the "
            "same bits per byte, read off the best of its finished runs, in straight lines over the logarithm of the "
            "cost. '>' is the largest budget tried, which did not get there; '<' the smallest, which was better."
        )
    if headroom is None:
        notes.append("How far the teacher is from converged is not known: no value near half of its tokens.")
    else:
        against = (
            f"{headroom['name']}, the same shape trained from scratch"
            if headroom["finished"]
            else "its own value in mid-run, of no finished model, so that the gain is overstated"
        )
        notes.append(
            f"The teacher ({teacher.tokens:,} tokens) is {headroom['gain_percent']:.1f}% better than after "
            f"{headroom['tokens']:,} tokens ({against}): that is what doubling its training still gained."
        )
    notes.append("Seconds are those of the machine each run had, validation included; other programs may have run too.")
    return notes + [f"{remark}." for run in (teacher, *runs) for remark in run.remarks]


def csv_text(result: dict[str, Any]) -> str:
    """The teacher and every row as comma-separated values, figures unrounded."""
    stream = io.StringIO()
    rows = [
        {**row, "role": role} for role, row in [("teacher", result["teacher"]), *(("run", r) for r in result["rows"])]
    ]
    for row in rows:
        for unit in ("tokens", "flops"):
            factor = row.pop(f"scratch_{unit}") or {}
            row |= {f"scratch_{unit}_relation": factor.get("relation"), f"scratch_{unit}_factor": factor.get("factor")}
        row |= {f"{part}_flops": flops for part, flops in row.pop("training_flops_by_part").items()}
        del row["settings"]
    writer = csv.DictWriter(stream, ["role", *(key for key in rows[0] if key != "role")], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def compare(directories: Sequence[Path], teacher: Path, out: Path, title: str) -> dict[str, Any]:
    """Compare finished trainings and write `comparison.json`, `.md`, `.csv` and `.html`.

    Args:
        directories: outputs of train, distill and prune --recover.
        teacher: the training that sets the mark; it need not be among them.
        out: directory to make.
        title: heading of table and page.

    Returns:
        `out`, `cached` and the content of `comparison.json`, see `compare_runs`.

    Raises:
        UsageError: there is nothing but the teacher.
        ArtifactError: an input is no finished training, or its score cannot be compared with the teacher's.
        ModuleNotFoundError: jinja2 or plotly is not installed.
    """
    from benchmarks.compare.page import markdown, page

    reference, runs = read_runs(directories, teacher)
    if not runs:
        raise UsageError(f"there is nothing to compare with the teacher {teacher}; give at least one other directory")
    inputs = sorted({run.directory for run in (reference, *runs)} | set(ancestors([teacher, *directories])), key=str)
    settings = {"title": title, "teacher": str(teacher), "directories": [str(path) for path in inputs]}

    def make(directory: Path) -> dict[str, Any]:
        result = {"title": title, **compare_runs(runs, reference)}
        texts = {
            RESULT: json.dumps(result, indent=1) + "\n",
            "comparison.md": markdown(result),
            "comparison.csv": csv_text(result),
            "comparison.html": page(result, runs, reference),
        }
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
        return {"runs": len(runs), "size_bytes": sum(len(text.encode()) for text in texts.values())}

    made = run_stage(out, Stage("compare", settings, inputs), make)
    return {"out": made["out"], "cached": made["cached"], **read_json(out / RESULT)}
