"""Which shape under a size keeps most: many are cut, the best few recovered briefly, the winner is named.

A ranking right after the cut misleads (a cut hidden size looks worst and recovers best), and settles after some
hundred steps of recovery (Minitron, https://arxiv.org/abs/2407.14679). So the finalists differ in depth and hidden
size, and what decides is their loss after a brief recovery, on text held out of the training text: the text that
final figures are scored on takes no part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.distillation.recovery import Recovery
from compress.pruning.kept_units import loss_per_token
from compress.pruning.run import PruneConfig, PruneJob, prune_checkpoint, prune_to_shape
from compress.pruning.scores import Scores
from compress.pruning.shapes import Shape, candidate_shapes
from sportsllm.console import progress_bar, say
from sportsllm.errors import UsageError
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.artifact import STATE_DIRECTORY, partial_directory
from sportsllm.storage.checkpoint import load_checkpoint
from sportsllm.storage.safetensors_files import quantization_config
from sportsllm.text.tokenizer import load_tokenizer

_SCORING_SAMPLES = 8
_REFITTED = 12  # of the shapes ranked by their loss right after the cut; ranked again after the refit


@dataclass(frozen=True)
class Finalist:
    """A shape that the search tries.

    Attributes:
        shape: the shape.
        loss_after_cut, loss_after_refit: nats a token of calibration text; the latter is NaN before the refit.
    """

    shape: Shape
    loss_after_cut: float
    loss_after_refit: float = float("nan")

    @property
    def name(self) -> str:
        """The name of its directory, for example `h64-i128-h4-k2-l3`."""
        return "-".join(f"{key[0]}{value}" for key, value in dataclasses.asdict(self.shape).items())

    def to_json(self, bits_per_byte: float) -> dict[str, Any]:
        """A row of `search` in the results; `bits_per_byte` is that after the brief recovery."""
        return {
            "shape": dataclasses.asdict(self.shape),
            "loss_after_cut": self.loss_after_cut,
            "loss_after_repair": self.loss_after_refit,
            "bits_per_byte": bits_per_byte,
        }


def find_finalists(
    model: SportsLLM, scores: Scores, share: float, config: PruneConfig, samples: Sequence[Tensor], count: int
) -> list[Finalist]:
    """The shapes to recover: the best after cut and refit for each pair of depth and hidden size, best first.

    Args:
        model: the full model.
        scores: its importance scores.
        share: of the non-embedding parameters to keep.
        config: of the final cut.
        samples: calibration text; the first few rank the shapes.
        count: how many are wanted.
    """
    candidates = candidate_shapes(model.config, share)
    scoring = samples[:_SCORING_SAMPLES]
    plain = dataclasses.replace(config, refit=False)
    cut: list[Finalist] = []
    with progress_bar("shapes", len(candidates)) as bar:
        for shape in candidates:
            pruned = prune_to_shape(model, scores, shape, plain, scoring)
            cut.append(Finalist(shape, loss_per_token(pruned.model, scoring)))
            bar.advance()
    best: dict[tuple[int, int], Finalist] = {}
    for row in sorted(cut, key=lambda item: item.loss_after_cut):
        best.setdefault((row.shape.layers, row.shape.hidden), row)
    chosen = list(best.values())[: max(_REFITTED, count)]
    refitted: list[Finalist] = []
    with progress_bar("refitted", len(chosen)) as bar:
        for row in chosen:
            pruned = prune_to_shape(model, scores, row.shape, config, samples)
            refitted.append(dataclasses.replace(row, loss_after_refit=loss_per_token(pruned.model, scoring)))
            bar.advance()
    say(f"{len(candidates)} shapes cut, {len(chosen)} refitted, {min(count, len(chosen))} to recover briefly")
    return sorted(refitted, key=lambda item: item.loss_after_refit)[:count]


def search_shape(
    job: PruneJob, recovery: Recovery, share: float, tokens: int, count: int, directory: Path
) -> tuple[Shape, list[dict[str, Any]]]:
    """Find the shape that keeps most at a size.

    Each finalist is recovered in a directory of its own that is kept for the next run.

    Args:
        job: what is pruned and how.
        recovery: the job's.
        share: of the non-embedding parameters to keep.
        tokens: of each brief recovery.
        count: finalists.
        directory: of their directories.

    Returns:
        The winner, and a row for each finalist with `bits_per_byte`, best first.
    """
    if quantization_config(job.checkpoint) is not None:
        raise UsageError(f"{job.checkpoint}: is quantized; prune the unquantized checkpoint")
    model = load_checkpoint(job.checkpoint)
    samples = job.samples(load_tokenizer(job.checkpoint, model.config), model.config)
    found = find_finalists(model, job.measure_scores(model, samples), share, job.config, samples, count)
    steps = -(-tokens // recovery.config.tokens_per_step)
    # Without held-out text of its own a stage holds out a part of the corpus by hash.
    brief = dataclasses.replace(recovery, config=dataclasses.replace(recovery.config, steps=steps), valid=())
    tried: list[tuple[float, Finalist]] = []
    for finalist in found:
        out = directory / finalist.name
        resume = (partial_directory(out) / STATE_DIRECTORY).exists()
        result = prune_checkpoint(dataclasses.replace(job, recovery=brief), finalist.shape, out, resume=resume)
        tried.append((float(result["valid_bits_per_byte"]), finalist))
        say(f"{finalist.name}: {tried[-1][0]:.4f} bits per byte after {result['tokens']:,} tokens")
    tried.sort(key=lambda item: item[0])
    return tried[0][1].shape, [finalist.to_json(bits) for bits, finalist in tried]
