"""Which shape under a size keeps most: many are cut, the best few recovered briefly, the winner is named.

A ranking right after the cut misleads (a cut hidden size looks worst and recovers best), and settles after some
hundred steps of recovery (Minitron, https://arxiv.org/abs/2407.14679). So the finalists differ in depth and hidden
size, and what decides is their loss after a brief recovery, on text held out of the training text: the text that
final figures are scored on takes no part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from compress.distillation.recovery import Recovery
from compress.pruning.kept_units import loss_per_token
from compress.pruning.run import PruneConfig, PruneJob, prune_checkpoint, prune_to_shape
from compress.pruning.scores import Scores
from compress.pruning.shapes import Shape, candidate_shapes
from sportsllm.console import progress_bar, say
from sportsllm.errors import UsageError
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.safetensors_files import quantization_config

_SCORING_SAMPLES = 8
_REFITTED = 12  # of the shapes ranked by their loss right after the cut; ranked again after the refit


class Finalist(NamedTuple):
    """A shape that the search recovers, and nats a token of calibration text right after its cut and its refit."""

    shape: Shape
    loss_after_cut: float
    loss_after_repair: float

    @property
    def name(self) -> str:
        """The name of its directory, for example `h64-i128-h4-kh2-l3-hd16`."""
        sizes = dataclasses.asdict(self.shape)
        return "-".join("".join(word[0] for word in key.split("_")) + str(value) for key, value in sizes.items())


def find_finalists(
    model: SportsLLM, scores: Scores, share: float, config: PruneConfig, samples: Sequence[Tensor], count: int
) -> list[Finalist]:
    """At most `count` shapes to recover: the best after cut and refit for each depth and hidden size, best first.

    `share` is that of the non-embedding parameters to keep; the first few `samples` rank the shapes.
    """
    candidates = candidate_shapes(model.config, share)
    scoring = samples[:_SCORING_SAMPLES]
    plain = dataclasses.replace(config, refit=False)
    cut: list[tuple[float, Shape]] = []
    with progress_bar("shapes", len(candidates)) as bar:
        for shape in candidates:
            pruned = prune_to_shape(model, scores, shape, plain, scoring)
            cut.append((loss_per_token(pruned.model, scoring), shape))
            bar.advance()
    best: dict[tuple[int, int], tuple[float, Shape]] = {}
    for loss, shape in sorted(cut, key=lambda item: item[0]):
        best.setdefault((shape.layers, shape.hidden), (loss, shape))
    chosen = list(best.values())[: max(_REFITTED, count)]
    refitted: list[Finalist] = []
    with progress_bar("refitted", len(chosen)) as bar:
        for loss, shape in chosen:
            pruned = prune_to_shape(model, scores, shape, config, samples)
            refitted.append(Finalist(shape, loss, loss_per_token(pruned.model, scoring)))
            bar.advance()
    say(f"{len(candidates)} shapes cut, {len(chosen)} refitted, {min(count, len(chosen))} to recover briefly")
    return sorted(refitted, key=lambda item: item.loss_after_repair)[:count]


def search_shape(
    job: PruneJob, recovery: Recovery, share: float, tokens: int, count: int, directory: Path
) -> tuple[Shape, list[dict[str, Any]]]:
    """Recover `count` finalists briefly, on `tokens` each, in directories inside `directory` that a second run reuses.

    Returns:
        The best shape, and a row of results for each finalist, best first.
    """
    if quantization_config(job.checkpoint) is not None:
        raise UsageError(f"{job.checkpoint}: is quantized; prune the unquantized checkpoint")
    model, samples, scores = job.calibrate()
    finalists = find_finalists(model, scores, share, job.config, samples, count)
    steps = -(-tokens // recovery.config.tokens_per_step)
    # Without held-out text of its own a stage holds out a part of the corpus by hash.
    brief = dataclasses.replace(recovery, config=dataclasses.replace(recovery.config, steps=steps), valid=())
    tried: list[tuple[float, Finalist]] = []
    for finalist in finalists:
        out = directory / finalist.name
        result = prune_checkpoint(dataclasses.replace(job, recovery=brief), finalist.shape, out, resume=True)
        tried.append((float(result["valid_bits_per_byte"]), finalist))
        say(f"{finalist.name}: {tried[-1][0]:.4f} bits per byte after {result['tokens']:,} tokens")
    tried.sort(key=lambda item: item[0])
    rows = [
        {**found._asdict(), "shape": dataclasses.asdict(found.shape), "bits_per_byte": bits} for bits, found in tried
    ]
    return tried[0][1].shape, rows
