"""Loss and held-out quality over the tokens trained on."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.labels import is_number
from benchmarks.report.charts import Chart, chart, color, line, placeholder_chart
from benchmarks.report.inputs import StageSummary

_MOST_POINTS = 400
_CURVES = {
    "loss": (
        "Training loss",
        "nats per token",
        "Mean loss of the logged steps. Losses on text and against a teacher cannot be compared.",
    ),
    "valid_bits_per_byte": (
        "Held-out quality while training",
        "bits per byte",
        "Bits per byte of held-out text; lower is better.",
    ),
}


def training_charts(stages: Sequence[StageSummary]) -> list[Chart]:
    """A chart for each of loss and held-out quality, with a line for each stage."""
    return [_training_chart(stages, key) for key in _CURVES]


def _training_chart(stages: Sequence[StageSummary], key: str) -> Chart:
    title, unit, caption = _CURVES[key]
    identifier = key.replace("_", "-")
    data, drawn = [], set[str]()
    for index, stage in enumerate(stages):
        points = _curve(stage, key)
        if len(points) < 2 or stage.directory in drawn:  # a directory measured twice was trained once
            continue
        drawn.add(stage.directory)
        trace = line([tokens for tokens, _ in points], [value for _, value in points], stage.name, color(index))
        trace |= {"mode": "lines+markers" if len(points) < 30 else "lines", "marker": {"size": 5}}
        data.append(trace | {"hovertemplate": "%{x:,} tokens: %{y:.4f}"})
    if not data:
        missing = "No given stage has logged it (metrics.jsonl); exports and measurements have no training."
        command = "train --model tiny-1m --corpus CORPUS.jsonl --out runs/teacher"
        return placeholder_chart(identifier, title, missing, command)
    return chart(identifier, title, caption, data, {"title": "tokens"}, {"title": unit}, showlegend=True)


def _curve(stage: StageSummary, key: str) -> list[tuple[float, float]]:
    """(tokens, value) of the records that have it: at most about `_MOST_POINTS`, the last one among them."""
    points = [
        (record["tokens"], record[key])
        for record in stage.metrics
        if is_number(record.get("tokens")) and is_number(record.get(key))
    ]
    step = max(1, -(-len(points) // _MOST_POINTS))
    return points[:-1:step] + points[-1:]
