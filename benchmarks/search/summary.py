"""What a search found, as a plain dict for fit.json and the screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.devices.verdict import misses
from benchmarks.labels import LIMITS
from benchmarks.search.candidates import Candidate, cut_by_limit
from benchmarks.search.search import Search, known
from compress.pruning.shapes import Shape


def summary(
    search: Search, chosen: Candidate, teacher_bits_per_byte: float | None = None, shown: int = 40
) -> dict[str, Any]:
    """The result's part about the search: candidates tried and the best of the others, and what each limit ruled out.

    If measurements decide, predictions are the corrected ones. Losses are percent of the teacher's bits per byte, on
    the text that the search chose by.
    """
    seen = {*search.timed, *search.tried}
    kept = [one for one in search.found if one.name in seen or one is chosen]
    kept += [one for one in search.front(shown) if one.name not in seen and one is not chosen]
    records = []
    for candidate in kept:
        timed, tried = search.timed.get(candidate.name), search.tried.get(candidate.name)
        expected = candidate.predicted if timed else known(search.figures(candidate))  # as it was held to the limits
        bits = teacher_bits_per_byte * (1 + tried.rounded / 100) if tried and teacher_bits_per_byte else None
        factor = tried.factor if tried else search.error_factor(candidate)
        records.append(
            replace(candidate, predicted=expected).record()
            | {
                "estimated_loss_percent": round(tried.foretold if tried else candidate.loss_percent, 3),
                "estimate_factor": round(factor, 3),
                "tried_tokens": tried.tokens if tried else None,
                "recovered_loss_percent": round(tried.recovered, 3) if tried else None,
                "rounded_loss_percent": round(tried.rounded, 3) if tried else None,
                "expected_loss_percent": round(search.expected(candidate), 3),
                "interval_percent": tried.interval if tried else None,
                "measured": timed,
                "busy": candidate.name in search.busy,
                "bits_per_byte": bits,
                "within": not misses(search.figures(candidate), search.device),
                "sure": search.keeps_to_limits(candidate, sure=not search.decides),
            }
        )
    rounding = {each.weights_name: round(loss, 3) for each, loss in search.estimates.formats.items()}
    return {
        "target": search.device.name,
        "decided_by": "measurement" if search.decides else "prediction",
        "limits": {name: getattr(search.device.limits, name) for name in LIMITS},
        "considered": len(search.found),
        "inside": len(search.inside()),
        "cut_by_limit": cut_by_limit(search.found, search.device),
        "candidates": records,
        "rounding_loss_percent": rounding,
        "vocabulary_loss_percent": {str(size): loss for size, loss in search.estimates.vocabularies.items()},
        "recovered": [
            {"shape": one.shape.sizes(), "tokens": one.tokens, "loss_percent": round(one.loss_percent, 3)}
            for one in search.seen
        ],
        "band": search.band,
        "uncertain": search.uncertain,
        "chosen": chosen.name,
        "whole_teacher": chosen.shape == Shape.of(search.teacher),
    }
