"""The shape search of `prune` and `fit`: many shapes are cut, the best few refitted, fewer recovered briefly.

A ranking right after the cut misleads, and settles after some hundred steps of recovery (Minitron,
https://arxiv.org/abs/2407.14679). So the finalists differ in depth and hidden size, the even cut is one of them if its
refit is not far behind, and their loss after a brief recovery decides, on held-out text that is for choices.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.pruning.cut import loss_per_token
from compress.pruning.job import RANKING_SAMPLES, Calibration, PruneJob
from compress.pruning.shapes import WIDTH_STEP, Shape, Target, block_counter, candidate_shapes, in_family
from sportsllm.console import log, logged, progress_bar
from sportsllm.errors import ConflictError, UsageError
from sportsllm.files import JsonObject, atomic_write_text, has_state, read_json
from sportsllm.formats.artifact import check_state, finished_manifest, partial_directory
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import manifest_of

if TYPE_CHECKING:
    from compress.distillation.student import StudentTraining

LOG, FOUND = "log.txt", "found.json"  # what recovering the finalists says, and what a finished search found
_REFIT_SAMPLES = 16  # at least, for a ranking without a recovery
_LEAST_CUT, _MOST_CUT = 12, 64
_JUDGING_FRACTION = 1 / 16  # of the recovery's tokens, for all shapes that are cut
_BRIEF_STEP = 1_024  # tokens
_SEARCH_SHARE = 0.05  # of the recovery's tokens, for each finalist
# Finalists so close in bits per byte are recovered again, on so many times the tokens, up to a share of the recovery's.
_CLOSE, _LONGER, _LONGEST = 1.005, 2, 0.15
_MOST_SEARCHED = 5e8  # parameters, without a recovery: a search runs about a hundred models
_NEAR = 0.98  # of the size that was asked for
_FAR = 1.0, 0.15  # nats a token behind the best after cut and refit; winners were 0.24 and 0.07 behind at most
_REFITTED = 8, 4  # of the shapes ranked by their loss right after the cut, without and with a recovery; ranked again


class Finalist(NamedTuple):
    """A shape, and nats a token of calibration text right after its cut and, if shapes were ranked by it, its refit.

    `bits_per_byte` is that of the text for choices after the brief recovery on `tokens`, None without one.
    """

    shape: Shape
    loss_after_cut: float
    loss_after_refit: float | None
    bits_per_byte: float | None = None
    tokens: int = 0

    @property
    def loss(self) -> float:
        """Before recovery: after the refit, if there was one."""
        return self.loss_after_refit or self.loss_after_cut

    def row(self) -> dict[str, Any]:
        """For the results."""
        return {**self._asdict(), "shape": self.shape.sizes()}


def choose_shape(
    work: Calibration, target: Target, out: Path, recovered: Callable[[PruneJob, Shape, Path], float]
) -> tuple[Shape, list[Finalist]]:
    """The shape of the target's dimensions, or the one that a search finds for its size, and the search's finalists.

    Args:
        work: its job gets the search, which belongs to what `out` is made from.
        out: the search of a recovered checkpoint is kept beside it, in `OUT.search`.

    Raises:
        UsageError: options that do not go together, an impossible shape, or the model's own.
        ConflictError: `out` holds something else.
    """
    job, config = work.job, work.job.model_config()
    shape, share = target.shape(config, whole=job.experts is not None)
    if shape == Shape.of(load_config(job.checkpoint)):
        shown = ", ".join(f"{name} {size}" for name, size in shape.sizes().items())
        raise UsageError(f"{job.checkpoint}: nothing is cut, the model has that shape ({shown}); ask for less")
    tokens = target.search_tokens
    if (tokens is not None and share is None) or (tokens and job.recovery is None):
        raise UsageError("--search needs a size (--params or --size-mb), and above 0 also --recover TOKENS")
    if share is None:
        return shape, []
    if target.megabytes is not None and config.has_large_vocabulary:
        tables = 1 - config.block_parameters / config.parameters
        log(f"embedding and head are {tables:.0%} of the parameters and stay whole; prune --vocab-size cuts them")
    found: list[Finalist] = []
    if tokens != 0 and job.recovery is None and config.parameters > _MOST_SEARCHED:
        log("all widths are cut alike, since a search would take hours; --recover searches, dimensions set the shape")
    elif tokens != 0:
        shapes = candidate_shapes(config, share)
        shape = next(iter(in_family(config, dict.fromkeys([shape, *shapes], 0))))
        sought: JsonObject = {"share": share}
        if job.recovery is not None:
            job.recovery.prepare(config)  # signals for all of it: a finalist would make those of its own few tokens
            tokens = tokens or round(_SEARCH_SHARE * job.recovery.tokens)
            sought |= {"tokens": tokens, "finalists": target.finalists}
        work.job = job = dataclasses.replace(job, search=sought)
        made = manifest_of(out).results.get("shape")  # refuse what another job made before the search, not after it
        there = next((one for one in shapes if one.sizes() == made), shape)
        if finished_manifest(out, job.stage(there)) is not None:
            return there, []
        if job.recovery is None:
            found = find_finalists(work, shapes, [shape], 1)
        else:
            found = recovered_finalists(work, shapes, shape, out, recovered)
        shape = found[0].shape
    reached = block_counter(config)(shape) / config.block_parameters
    if reached < _NEAR * share:
        log(
            f"keeping {reached:.1%} of the non-embedding parameters, not {share:.1%}: widths are multiples of "
            f"{WIDTH_STEP} and heads stay whole; give dimensions to come closer"
        )
    return shape, found


def find_finalists(
    calibration: Calibration, shapes: Sequence[Shape], always: Sequence[Shape], count: int, seconds: float = math.inf
) -> list[Finalist]:
    """At most `count` shapes, best first: the best after cut and refit for each depth and hidden size.

    If there are no more than `count`, they are not refitted. Cuts and refits far behind the best one are left out.

    Args:
        calibration: the shapes are ranked on its first few samples, and refitted to some of the others.
        shapes: those to choose from, thinned out if they are many.
        always: cut too; one of them is among two or more finalists, if it is not far behind.
        seconds: no further shape is cut after as many, and no further one refitted after twice as many.
    """
    started, model = time.perf_counter(), calibration.model
    scoring, others = calibration.split_samples()
    enough = 8 * model.config.intermediate_size // scoring[0].numel()  # text for least squares
    fitted = others if calibration.job.recovery is not None else others[: max(_REFIT_SAMPLES, enough)]

    def losses_of(shapes: Collection[Shape], refit: bool, least: int, until_s: float) -> dict[Shape, float]:
        """The losses of some shapes, in their order: of `least`, and of others as long as `until_s` has not passed."""
        losses: dict[Shape, float] = {}
        with progress_bar("refitted" if refit else "shapes", len(shapes)) as bar:
            for shape in shapes:
                if len(losses) >= least and time.perf_counter() - started > until_s:
                    break
                read = fitted if refit else fitted[:RANKING_SAMPLES]  # which merge heads
                pruned = calibration.cut(shape.applied_to(model.config), read, refit)
                losses[shape] = loss_per_token(pruned.model, scoring)
                bar.advance()
        return losses

    most, recovery = _MOST_CUT, calibration.job.recovery
    if recovery is not None:
        judged = sum(sample.numel() for sample in scoring)
        most = min(most, max(_LEAST_CUT, round(_JUDGING_FRACTION * recovery.tokens / judged)))
    candidates = thinned(shapes, most)
    cut = losses_of(dict.fromkeys([*always, *candidates]), refit=False, least=1, until_s=seconds)
    best: dict[tuple[int, int], Shape] = {}
    for shape in sorted((one for one in candidates if one in cut), key=cut.__getitem__):
        best.setdefault((shape.layers, shape.hidden), shape)
    ranked = dict.fromkeys([*always, *list(best.values())[: max(_REFITTED[recovery is not None], count)]])
    chosen = [one for one in ranked if cut[one] <= min(cut.values()) + _FAR[0]]
    refitted: dict[Shape, float] = {}
    if len(chosen) > count:
        refitted = losses_of(chosen, refit=True, least=max(count, len(always)), until_s=2 * seconds)
    found = [Finalist(shape, cut[shape], refitted.get(shape)) for shape in refitted or chosen]
    found.sort(key=lambda one: one.loss)
    found = [one for one in found if not refitted or one.loss <= found[0].loss + _FAR[1]]
    whole, taken = loss_per_token(model, scoring), time.perf_counter() - started
    best_two = ", ".join(f"{one.shape.name} {one.loss / whole - 1:.1%}" for one in found[:2])
    log(f"shapes cut: {len(cut)}, refitted: {len(refitted)}, in {taken:.0f} s; loss above the full model's: {best_two}")
    rest = [one for one in found[count:] if one.shape in always]
    if rest and count > 1 and not {one.shape for one in found[:count]} & set(always):
        found[count - 1] = rest[0]
    return found[:count]


def thinned(shapes: Sequence[Shape], most: int) -> list[Shape]:
    """At most `most` of the shapes, evenly spread over depths, hidden sizes and heads.

    Most heads first: a few that are left out are then those with the fewest heads of each depth and hidden size.
    """
    ordered = sorted(shapes, key=lambda shape: (shape.layers, shape.hidden, -shape.heads, -shape.kv_heads))
    most = min(most, len(ordered))
    return [ordered[number * len(ordered) // most] for number in range(most)]


def recovered_finalists(
    calibration: Calibration,
    shapes: Sequence[Shape],
    even: Shape,
    out: Path,
    recovered: Callable[[PruneJob, Shape, Path], float],
) -> list[Finalist]:
    """Finalists among some shapes, recovered briefly beside `out`, best first; close ones again, for longer.

    A finished search is found there again by a second run, such as one that goes on with the main recovery.

    Args:
        shapes, even: those to choose from, and the even cut, which is always among them.
        recovered: given the job of a brief recovery, a shape and its directory, bits per byte of the text for choices.
    """
    job, recovery = calibration.job, calibration.job.recovery
    directory = out.with_name(f"{out.name}.search")  # has each finalist's first recovery under its shape's name
    assert recovery is not None and job.search is not None
    brief, identity = brief_recovery(recovery, job.search["tokens"]), job.stage(even).fingerprint()
    known = read_json(directory / FOUND) if (directory / FOUND).exists() else {}
    if known.get("fingerprint") == identity:
        log(f"{directory}: using the shape found there earlier")
        return [Finalist(**{**row, "shape": Shape(**row["shape"])}) for row in known["tried"]]
    if has_state(unfinished := partial_directory(out)):
        raise ConflictError(f"{unfinished}: keeps an interrupted run with other settings; remove it")
    short = dataclasses.replace(job, recovery=brief, search=None)
    there = {path.name.removesuffix(".partial") for path in directory.glob("*")}
    for shape in (one for one in (even, *shapes) if one.name in there):  # refuse another search's before the cuts
        if finished_manifest(made := directory / shape.name, stage := short.stage(shape)) is None:
            check_state(partial_directory(made), stage)
    directory.mkdir(parents=True, exist_ok=True)
    close = tried = find_finalists(calibration, shapes, [even], job.search["finalists"])
    assert calibration.text is not None, "a job with a recovery reads its text"
    calibration.text()  # here, since the log would take its lines
    where = directory
    while len(close) > 1:
        started, others, tried = time.perf_counter(), tried[len(close) :], []
        for finalist in close:
            log(f"recovering {finalist.shape.name}, {len(tried) + 1} of {len(close)}, on {brief.tokens:,} tokens")
            with logged(directory / LOG):
                bits = recovered(short, finalist.shape, where / finalist.shape.name)
            tried.append(finalist._replace(bits_per_byte=bits, tokens=brief.tokens))
        tried.sort(key=lambda one: one.bits_per_byte or 0.0)
        figures = ", ".join(f"{one.shape.name} {one.bits_per_byte:.4f}" for one in tried)
        seconds, lines = time.perf_counter() - started, directory / LOG
        log(f"recovered on {brief.tokens:,} tokens each in {seconds:.0f} s ({lines}), bits per byte: {figures}")
        close = [one for one in tried if (one.bits_per_byte or 0.0) <= _CLOSE * (tried[0].bits_per_byte or 0.0)]
        tried += others
        if _LONGER * brief.tokens > _LONGEST * recovery.tokens:
            break
        brief = brief_recovery(recovery, _LONGER * brief.tokens)
        short, where = dataclasses.replace(short, recovery=brief), directory / str(brief.tokens)
    known = {"fingerprint": identity, "tried": [one.row() for one in tried]}
    atomic_write_text(directory / FOUND, json.dumps(known, indent=1) + "\n")
    return tried


def brief_recovery(recovery: StudentTraining, tokens: int) -> StudentTraining:
    """The same on few tokens: small steps, a warm-up to match, one rate, after it only the text for choices.

    Its text is drawn in an order of its own, unless the teacher's signals are stored for one order.
    """
    config = recovery.config
    batch_size = max(1, min(config.batch_size, _BRIEF_STEP // config.sequence))
    steps = -(-tokens // (batch_size * config.sequence))
    warmup = min(config.warmup, max(1, steps // 20))
    seed = config.seed + (recovery.distillation.signals is None)
    brief = dataclasses.replace(config, steps=steps, batch_size=batch_size, accumulation=1, warmup=warmup, seed=seed)
    brief = dataclasses.replace(brief, try_rates=False, validate_every=0)
    return dataclasses.replace(recovery, config=brief, reported=False)
