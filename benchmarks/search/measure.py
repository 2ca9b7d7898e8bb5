"""What rounding and smaller vocabularies cost this teacher, measured once each."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.predict.model_size import ModelFormat
from benchmarks.search.candidates import Estimates
from benchmarks.search.clock import Clock
from benchmarks.search.estimate import ShapeLosses
from benchmarks.search.formats import (
    FINEST,
    FINEST_SMALL_HEAD,
    activation_kind,
    format_losses,
    usual_loss,
    weight_formats,
)
from benchmarks.search.trials import Trials
from compress.pruning.shapes import Shape
from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.config import ModelConfig

_ROW_STEP = 32  # `prune-vocabulary` keeps multiples of this
_USUAL_VOCABULARY_WEIGHT = 40.0  # percent at ln(kept share) = 1; right after the cut a quarter fewer cost 9%
_SHARE = 0.3  # of the time limit, for measuring what rounding costs
_LEFT_BY_TUNING = 0.4  # of the loss right after the cut, until a fine-tuned one was measured


def usual_estimates(teacher: ModelConfig, tokens: int, vocabularies: Sequence[int] = ()) -> Estimates:
    """Estimates from other teachers, of nothing measured on this one.

    Args:
        teacher: the full model.
        tokens: of the winner's recovery.
        vocabularies: smaller ones to consider.
    """
    rounding = {each: usual_loss(each) for each in weight_formats(teacher, zero_points=False)}
    costs = {size: _USUAL_VOCABULARY_WEIGHT * (1 - size / teacher.vocab_size) ** 2 for size in vocabularies}
    shapes = ShapeLosses(Shape.of(teacher), tokens)
    return Estimates(shapes, format_losses(teacher, rounding), {teacher.vocab_size: 0.0, **costs})


def measured_estimates(
    teacher: ModelConfig, tokens: int, trials: Trials, asked: Sequence[int], suggested: Sequence[int], clock: Clock
) -> Estimates:
    """The same, rounding and vocabularies measured on the teacher; what cuts cost is learnt later.

    Args:
        teacher, tokens: as above.
        trials: measures them.
        asked: vocabularies to consider; one that cannot be made is an error.
        suggested: more of them; what cannot be made is left out.
        clock: formats that it leaves no time for keep their usual losses.
    """
    log("measuring what rounding costs this teacher")
    losses = dict[ModelFormat, float]()
    activations = dict[tuple[str, bool], float]()  # of one format of each kind, exported
    formats = weight_formats(teacher)
    with progress_bar("rounded", len(formats)) as bar:
        for each in formats:
            if not clock.allows(f"rounding to {each.weights_name}", "rounding", share=_SHARE):
                break
            with clock.step("rounding"):
                losses[each] = max(0.0, trials.rounding(each))
                if each.quantized and activation_kind(each) not in activations:
                    activations[activation_kind(each)] = max(0.0, trials.activations(each))
            bar.advance(1, each.weights_name)
    # Calibration takes about the same share of what rounding costs from every block size.
    left = {}
    for finest in (FINEST, FINEST_SMALL_HEAD):
        known = losses.get(finest) and clock.allows("calibrated rounding", "rounding", share=_SHARE)
        calibrated = max(0.0, trials.rounding(finest, calibrated=True)) if known else 0.0
        left[finest.head_bits] = min(1.0, calibrated / losses[finest]) if known else 1.0
    rounding = {
        each: (loss * left[each.head_bits] if each.precision == "int4" else loss)
        + activations.get(activation_kind(each), 0.0)
        for each, loss in losses.items()
    }
    rounding |= {each: usual_loss(each) for each in formats if each not in losses and not each.zero_points}
    vocabularies = {teacher.vocab_size: 0.0} | {size: _vocabulary_loss(trials, size) for size in asked}
    for size in suggested:
        try:
            vocabularies[size] = _vocabulary_loss(trials, size)
        except (ArtifactError, UsageError) as error:
            log(f"a vocabulary of {size:,} tokens is left out: {error}")
    return Estimates(ShapeLosses(Shape.of(teacher), tokens), format_losses(teacher, rounding), vocabularies)


def suggested_vocabularies(teacher: ModelConfig) -> list[int]:
    """Three quarters and a half of the tokens, where they make up much of the model."""
    if not teacher.has_large_vocabulary:
        return []
    return [round(share * teacher.vocab_size / _ROW_STEP) * _ROW_STEP for share in (0.75, 0.5)]


def _vocabulary_loss(trials: Trials, size: int) -> float:
    return max(0.0, _LEFT_BY_TUNING * trials.vocabulary_loss(size))
