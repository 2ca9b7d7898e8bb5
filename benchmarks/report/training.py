"""Loss and held-out quality over the tokens trained on."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.labels import is_number
from benchmarks.report.charts import Chart, chart, color, line, placeholder_chart
from benchmarks.report.inputs import StageSummary

_MOST_POINTS = 400


def training_charts(stages: Sequence[StageSummary]) -> list[Chart]:
    """A chart for each of loss and held-out quality, with a line for each stage."""
    loss = "Mean loss of the logged steps. Losses on text and against a teacher cannot be compared."
    quality = "Bits per byte of held-out text; lower is better."
    return [
        _training_chart(stages, "loss", "Training loss", "nats per token", loss),
        _training_chart(stages, "valid_bits_per_byte", "Held-out quality while training", "bits per byte", quality),
    ]


def _training_chart(stages: Sequence[StageSummary], key: str, title: str, unit: str, caption: str) -> Chart:
    identifier = key.replace("_", "-")
    data, drawn = [], set[str]()
    for index, stage in enumerate(stages):
        points = _curve(stage, key)
        if len(points) < 2 or stage.directory in drawn:  # a directory measured twice was trained once
            continue
        drawn.add(stage.directory)
        xs, ys = zip(*points, strict=True)
        look = {"mode": "lines+markers" if len(points) < 30 else "lines", "marker": {"size": 5}}
        data.append(line(xs, ys, stage.name, color(index), hovertemplate="%{x:,} tokens: %{y:.4f}") | look)
    if not data:
        missing = "No given stage has logged it (metrics.jsonl); exports and measurements have no training."
        command = "train --model tiny-1m --corpus CORPUS.jsonl --out runs/teacher"
        return placeholder_chart(identifier, title, missing, command)
    return chart(identifier, title, caption, data, {"title": "tokens"}, {"title": unit}, showlegend=True)


def _curve(stage: StageSummary, key: str) -> list[tuple[float, float]]:
    """(tokens, value) of the records that have it: at most about `_MOST_POINTS`, the last one among them."""
    pairs = [(record.get("tokens"), record.get(key)) for record in stage.metrics]
    points = [(tokens, value) for tokens, value in pairs if is_number(tokens) and is_number(value)]
    step = max(1, -(-len(points) // _MOST_POINTS))
    return points[:-1:step] + points[-1:]
