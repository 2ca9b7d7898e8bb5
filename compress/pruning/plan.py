"""From flags to pruned checkpoints: find the shape, then one stage, or several rounds of cutting and recovering.

Each round and each shape that a search recovers is a directory of its own beside the output (`OUT.round1`,
`OUT.search/...`), a finished stage like any other: a second run finds them up to date, an interrupted one goes on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.distillation.recovery import Recovery
from compress.pruning.run import Cut, make_scores, prune_stage, target_shape
from compress.pruning.search import finalists, rounds_to, search_shape
from compress.pruning.shapes import Shape, share_for_megabytes
from sportsllm.console import say
from sportsllm.errors import UsageError
from sportsllm.models.hf_config import load_config
from sportsllm.storage.artifact import STATE_DIRECTORY, partial_directory
from sportsllm.storage.checkpoint import load_checkpoint
from sportsllm.storage.safetensors_files import quantization_config
from sportsllm.text.calibration import calibration_samples
from sportsllm.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Plan:
    """How small, and on which way.

    Attributes:
        share: of the non-embedding parameters to keep, or None.
        megabytes: of float32 weights to reach, or None.
        given: dimensions to keep; None means all of it.
        rounds: of cutting and recovering.
        search_tokens: brief recovery of each finalist; None does not search.
        finalists: shapes that a search recovers.
    """

    share: float | None
    megabytes: float | None
    given: dict[str, int | None]
    rounds: int = 1
    search_tokens: int | None = None
    finalists: int = 4


def prune_line(
    *,
    checkpoint: Path,
    out: Path,
    plan: Plan,
    how: Cut,
    calibration: Sequence[Path],
    scores: Path | None,
    recovery: Recovery | None,
    resume: bool,
) -> dict[str, Any]:
    """Prune `checkpoint` into `out` as planned; arguments as in `prune_stage`.

    Raises:
        UsageError: flags that do not go together, or an impossible shape.
    """
    if plan.rounds > 1 and recovery is None:
        raise UsageError(f"--rounds {plan.rounds} recovers after every cut; give --recover TOKENS too")
    config = load_config(checkpoint)
    shape = target_shape(config, plan.share, plan.megabytes, plan.given)
    extra: dict[str, Any] = {}
    common: dict[str, Any] = {"how": how, "calibration": calibration}
    if plan.search_tokens is not None:
        share = plan.share if plan.megabytes is None else share_for_megabytes(config, plan.megabytes)
        if share is None or recovery is None:
            raise UsageError("--search needs a size (--params or --size-mb) and --recover TOKENS")
        if recovery.objective.signals is not None:
            raise UsageError(
                "--search judges shapes on text held out of the corpus, which signals were made with; "
                "search first, then give the shape found and --signals"
            )
        shape, extra["search"] = _search(checkpoint, out, plan, share, scores, recovery, common)
    shapes = rounds_to(config, shape, plan.rounds)
    if recovery is not None:
        brief = dataclasses.replace(recovery.config, steps=math.ceil(recovery.config.steps / len(shapes)))
        recovery = dataclasses.replace(recovery, config=brief)
    source = checkpoint
    for number, step in enumerate(shapes, start=1):
        last = number == len(shapes)
        target = out if last else out.with_name(f"{out.name}.round{number}")
        if not last:
            say(f"round {number} of {len(shapes)}: {target}")
        result = prune_stage(
            **common,
            checkpoint=source,
            out=target,
            shape=step,
            scores=scores if source == checkpoint else None,
            recovery=_from(recovery, None if source == checkpoint else checkpoint),
            resume=resume and (partial_directory(target) / STATE_DIRECTORY).exists(),
            extra=extra if last else {},
        )
        source = target
    return result


def _from(recovery: Recovery | None, teacher: Path | None) -> Recovery | None:
    """A recovery from a teacher, unless it names its own."""
    if recovery is None or recovery.teacher is not None:
        return recovery
    return dataclasses.replace(recovery, teacher=teacher)


def _search(
    checkpoint: Path,
    out: Path,
    plan: Plan,
    share: float,
    scores: Path | None,
    recovery: Recovery,
    common: dict[str, Any],
) -> tuple[Shape, list[dict[str, Any]]]:
    if quantization_config(checkpoint) is not None:
        raise UsageError(f"{checkpoint}: is quantized; prune the unquantized checkpoint")
    assert plan.search_tokens is not None
    how: Cut = common["how"]
    model = load_checkpoint(checkpoint)
    words = load_tokenizer(checkpoint, model.config)
    samples = calibration_samples(common["calibration"], words, model.config, how.samples, recovery.config.sequence)
    measured = make_scores(model, how, samples, scores)
    rows = finalists(model, measured, share, how, samples, plan.finalists)
    steps = -(-plan.search_tokens // recovery.config.tokens_per_step)
    # Without held-out text of its own a stage holds out a part of the corpus by hash.
    brief = dataclasses.replace(recovery, config=dataclasses.replace(recovery.config, steps=steps), valid=())

    def recovered(shape: Shape, directory: Path) -> dict[str, Any]:
        return prune_stage(
            **common,
            checkpoint=checkpoint,
            out=directory,
            shape=shape,
            scores=scores,
            recovery=brief,
            resume=(partial_directory(directory) / STATE_DIRECTORY).exists(),
        )

    return search_shape(rows, out.with_name(f"{out.name}.search"), recovered)
