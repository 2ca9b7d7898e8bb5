"""Which shape under a size keeps most: many are cut, the best few recovered briefly, the winner is named.

A ranking right after the cut misleads (a cut hidden size looks worst and recovers best), and settles after some
hundred steps of recovery (Minitron, https://arxiv.org/abs/2407.14679). So the finalists differ in depth and hidden
size, and what decides is their loss after a brief recovery, on text held out of the training text: the text that
final figures are scored on takes no part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.pruning.run import Cut, cut_to_shape
from compress.pruning.scores import Scores
from compress.pruning.shapes import Shape, candidate_shapes
from sportsllm.console import progress_bar, say
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.training.chunked_loss import cross_entropy

_SCORING_SAMPLES = 8
_REPAIRED = 12  # of the shapes ranked by their loss right after the cut, so many are repaired and ranked again

# (shape, directory) -> the results of a brief recovery, with valid_bits_per_byte
Recover = Callable[[Shape, Path], dict[str, Any]]


@torch.inference_mode()
def loss_per_token(model: SportsLLM, samples: Sequence[Tensor]) -> float:
    """Mean next-token cross-entropy in nats over samples of token ids, each (1, T)."""
    total = sum(
        float(cross_entropy(model.hidden(tokens[:, :-1]), model.head_weight, tokens[:, 1:])) for tokens in samples
    )
    return total / sum(tokens[:, 1:].numel() for tokens in samples)


def finalists(
    model: SportsLLM, scores: Scores, share: float, how: Cut, samples: Sequence[Tensor], count: int
) -> list[dict[str, Any]]:
    """The shapes to recover: the best after cut and repair for each pair of depth and hidden size, best first.

    Args:
        model: the full model.
        scores: its importance scores.
        share: of the non-embedding parameters to keep.
        how: as the final cut will be made.
        samples: calibration text; the first few rank the shapes.
        count: how many are wanted.

    Returns:
        One dict a shape: `shape`, `loss_after_cut` and `loss_after_repair` in nats a token.
    """
    candidates = candidate_shapes(model.config, share)
    scoring = samples[:_SCORING_SAMPLES]
    plain = dataclasses.replace(how, repair=False)
    rows: list[dict[str, Any]] = []
    with progress_bar("shapes", len(candidates)) as bar:
        for shape in candidates:
            pruned, _ = cut_to_shape(model, scores, shape, plain, scoring)
            rows.append({"shape": shape, "loss_after_cut": loss_per_token(pruned, scoring)})
            bar.advance()
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda item: float(item["loss_after_cut"])):
        best.setdefault((row["shape"].layers, row["shape"].hidden), row)
    chosen = list(best.values())[: max(_REPAIRED, count)]
    with progress_bar("repaired", len(chosen)) as bar:
        for row in chosen:
            repaired, _ = cut_to_shape(model, scores, row["shape"], how, samples)
            row["loss_after_repair"] = loss_per_token(repaired, scoring)
            bar.advance()
    say(f"{len(candidates)} shapes cut, {len(chosen)} repaired, {min(count, len(chosen))} to recover briefly")
    return sorted(chosen, key=lambda item: float(item["loss_after_repair"]))[:count]


def search_shape(rows: list[dict[str, Any]], directory: Path, recover: Recover) -> tuple[Shape, list[dict[str, Any]]]:
    """Recover each finalist briefly, in a directory of its own that is kept for the next run.

    Returns:
        The winner, and a row for each finalist with `bits_per_byte`, best first.
    """
    tried = []
    for row in rows:
        shape: Shape = row["shape"]
        name = "-".join(f"{key[0]}{value}" for key, value in dataclasses.asdict(shape).items())
        result = recover(shape, directory / name)
        tried.append({**row, "shape": dataclasses.asdict(shape), "bits_per_byte": result["valid_bits_per_byte"]})
        say(f"{name}: {result['valid_bits_per_byte']:.4f} bits per byte after {result['tokens']:,} tokens")
    tried.sort(key=lambda item: float(item["bits_per_byte"]))
    return Shape(**tried[0]["shape"]), tried


def rounds_to(config: ModelConfig, shape: Shape, rounds: int) -> list[Shape]:
    """The shapes on the way to `shape` in equal ratios, widths and groups snapped up; the last is `shape` itself.

    A step that snapping leaves without anything to cut is left out.
    """
    full = Shape.of(config)
    per_group = full.heads // full.kv_heads
    steps: list[Shape] = [full]
    for number in range(1, rounds):
        part = number / rounds

        def between(start: int, end: int, step: int, part: float = part) -> int:
            ratio: float = (end / start) ** part
            return min(start, max(end, math.ceil(start * ratio / step) * step))

        kv_heads = full.kv_heads if shape.merges_kv_heads(config) else between(full.kv_heads, shape.kv_heads, 1)
        steps.append(
            Shape(
                hidden=between(full.hidden, shape.hidden, 32),
                intermediate=between(full.intermediate, shape.intermediate, 32),
                heads=kv_heads * per_group,
                kv_heads=kv_heads,
                layers=between(full.layers, shape.layers, 1),
            )
        )
    return [step for step, before in zip(steps[1:], steps, strict=False) if step != before] + [shape]
