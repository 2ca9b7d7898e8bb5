"""Which shape under a size keeps most: many are cut, the best few recovered briefly, the winner is named.

A ranking right after the cut misleads, and settles after some hundred steps of recovery (Minitron,
https://arxiv.org/abs/2407.14679). So the finalists differ in depth and hidden size, the even cut is always one of them,
and what decides is their loss after a brief recovery, on held-out text that is for choices.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from compress.distillation.recovery import Recovery
from compress.pruning.kept_units import loss_per_token
from compress.pruning.run import PruneConfig, PruneJob, measure_scores, prune_checkpoint, prune_to_shape
from compress.pruning.scores import SCORES_FILE, Scores, load_scores
from compress.pruning.shapes import Shape, candidate_shapes, shape_for_share
from sportsllm.console import log, logged, progress_bar
from sportsllm.errors import UsageError
from sportsllm.files import atomic_write_text
from sportsllm.formats.artifact import Stage
from sportsllm.formats.json_files import read_json
from sportsllm.formats.safetensors import quantization_config
from sportsllm.models.language_model import SportsLLM

LOG, FOUND = "log.txt", "found.json"  # what recovering the finalists says, and what a finished search found
_SCORING_SAMPLES, _REFIT_SAMPLES = 8, 64  # all shapes read the same text, so little of it tells them apart
_MOST_CUT = 64
_BRIEF_STEP = 1_024  # tokens
_REFITTED = 8  # of the shapes ranked by their loss right after the cut; ranked again after the refit


def directory_name(shape: Shape) -> str:
    """Of a finalist, for example `h64-i128-h4-kh2-l3-hd16`."""
    sizes = dataclasses.asdict(shape)
    return "-".join("".join(word[0] for word in key.split("_")) + str(value) for key, value in sizes.items())


class Finalist(NamedTuple):
    """A shape that the search recovers, and nats a token of calibration text right after its cut and its refit."""

    shape: Shape
    loss_after_cut: float
    loss_after_repair: float

    @property
    def name(self) -> str:
        """The name of its directory."""
        return directory_name(self.shape)

    def row(self, bits_per_byte: float | None) -> dict[str, Any]:
        """For the results; bits per byte after the brief recovery."""
        return {**self._asdict(), "shape": dataclasses.asdict(self.shape), "bits_per_byte": bits_per_byte}


def find_finalists(
    model: SportsLLM, scores: Scores, share: float, config: PruneConfig, samples: Sequence[Tensor], count: int
) -> list[Finalist]:
    """At most `count` shapes to recover, best first: the best after cut and refit for each depth and hidden size.

    `share` is that of the non-embedding parameters to keep. The shapes are ranked on the first few `samples`, and
    refitted to some of the others. The even cut is one of them.
    """
    started = time.perf_counter()
    held_out = max(1, min(_SCORING_SAMPLES, len(samples) // 4))
    scoring, fitted = samples[:held_out], samples[held_out : held_out + _REFIT_SAMPLES] or samples
    merging = fitted[:_SCORING_SAMPLES]  # heads are merged by other text than the shapes are ranked on
    candidates = thinned(candidate_shapes(model.config, share), _MOST_CUT)
    even = shape_for_share(model.config, share)
    plain = dataclasses.replace(config, refit=False)
    cut: list[tuple[float, Shape]] = []
    with progress_bar("shapes", len(candidates)) as bar:
        for shape in candidates:
            pruned = prune_to_shape(model, scores, shape, plain, merging)
            cut.append((loss_per_token(pruned.model, scoring), shape))
            bar.advance()
    best: dict[tuple[int, int], tuple[float, Shape]] = {}
    for loss, shape in sorted(cut, key=lambda item: item[0]):
        best.setdefault((shape.layers, shape.hidden), (loss, shape))
    chosen = dict.fromkeys([*(shape for _, shape in list(best.values())[: max(_REFITTED, count)]), even])
    losses = {shape: loss for loss, shape in cut}
    if even not in losses:
        losses[even] = loss_per_token(prune_to_shape(model, scores, even, plain, merging).model, scoring)
    refitted: list[Finalist] = []
    with progress_bar("refitted", len(chosen)) as bar:
        for shape in chosen:
            pruned = prune_to_shape(model, scores, shape, config, fitted)
            refitted.append(Finalist(shape, losses[shape], loss_per_token(pruned.model, scoring)))
            bar.advance()
    refitted.sort(key=lambda item: item.loss_after_repair)
    best_two = ", ".join(f"{one.name} {one.loss_after_repair:.3f}" for one in refitted[:2])
    seconds = time.perf_counter() - started
    log(f"{len(losses)} shapes cut, {len(refitted)} refitted in {seconds:.0f} s; nats a token after that: {best_two}")
    found = refitted[:count]
    if count > 1 and all(one.shape != even for one in found):
        found[-1] = next(one for one in refitted if one.shape == even)
    return found


def thinned(shapes: Sequence[Shape], most: int) -> list[Shape]:
    """At most `most` of the shapes, evenly spread over depths, hidden sizes and heads."""
    ordered = sorted(shapes, key=lambda shape: (shape.layers, shape.hidden, shape.heads, shape.kv_heads))
    if len(ordered) <= most:
        return ordered
    return [ordered[number * len(ordered) // most] for number in range(most)]


def search_shape(
    job: PruneJob, share: float, tokens: int, count: int, directory: Path
) -> tuple[Shape, list[dict[str, Any]], Scores | None]:
    """Recover `count` finalists briefly, on `tokens` each, in directories inside `directory`.

    What was found stays there for a second run, such as one that goes on with the main recovery. With 0 tokens, or no
    recovery, the shape that is best after the refit wins, and nothing is kept.

    Returns:
        The best shape; a row of results for each finalist, best first; and the scores that it was cut by, None where an
        earlier search did not store them.
    """
    if quantization_config(job.checkpoint) is not None:
        raise UsageError(f"{job.checkpoint}: is quantized; prune the unquantized checkpoint")
    brief = None if job.recovery is None or not tokens else brief_recovery(job.recovery, tokens)
    identity = "" if brief is None else _fingerprint(job, share, tokens, count)
    if brief is not None and (known := _found_before(directory, identity)):
        shape = Shape(**known[0]["shape"])
        stored = directory / directory_name(shape) / SCORES_FILE
        return shape, known, load_scores(stored, job.model_config()) if stored.exists() else None
    model, samples = job.calibrate()
    scores = measure_scores(model, job.config, samples, job.scores)
    finalists = find_finalists(model, scores, share, job.config, samples, 1 if brief is None else count)
    if brief is None:
        return finalists[0].shape, [finalists[0].row(None)], scores
    tried: list[tuple[float, Finalist]] = []
    directory.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    for finalist in finalists:
        with logged(directory / LOG):
            out = directory / finalist.name
            recovered = dataclasses.replace(job, recovery=brief)
            result = prune_checkpoint(recovered, finalist.shape, out, resume=True, known=scores)
        tried.append((float(result["best_bits_per_byte"]), finalist))
    tried.sort(key=lambda item: item[0])
    figures = ", ".join(f"{finalist.name} {bits:.4f}" for bits, finalist in tried)
    seconds, lines = time.perf_counter() - started, directory / LOG
    log(f"recovered on {length(brief):,} tokens each in {seconds:.0f} s ({lines}), bits per byte: {figures}")
    rows = [finalist.row(bits) for bits, finalist in tried]
    atomic_write_text(directory / FOUND, json.dumps({"fingerprint": identity, "tried": rows}, indent=1) + "\n")
    return tried[0][1].shape, rows, scores


def _found_before(directory: Path, identity: str) -> list[dict[str, Any]]:
    """The rows of a finished search; none if there is none, or another."""
    known = read_json(directory / FOUND) if (directory / FOUND).exists() else {}
    if known.get("fingerprint") != identity:
        return []
    log(f"{directory}: the shape was found there before")
    return list(known["tried"])


def _fingerprint(job: PruneJob, share: float, tokens: int, count: int) -> str:
    """Equal for two searches that find the same shape."""
    even = shape_for_share(job.model_config(), share)
    sought = {"share": share, "search": tokens, "finalists": count}
    return Stage("search", {**job.settings(even), **sought}, job.inputs()).fingerprint()


def brief_recovery(recovery: Recovery, tokens: int) -> Recovery:
    """The same on few tokens: small steps, a warm-up to match, one rate, and the text for choices scored at the end."""
    config = recovery.config
    batch_size = max(1, min(config.batch_size, _BRIEF_STEP // config.sequence))
    steps = -(-tokens // (batch_size * config.sequence))
    warmup = min(config.warmup, max(1, steps // 20))
    brief = dataclasses.replace(
        config, steps=steps, batch_size=batch_size, accumulation=1, warmup=warmup, try_rates=False, validate_every=0
    )
    return dataclasses.replace(recovery, config=brief)


def length(recovery: Recovery) -> int:
    """Tokens that a recovery reads."""
    return recovery.config.steps * recovery.config.tokens_per_step
