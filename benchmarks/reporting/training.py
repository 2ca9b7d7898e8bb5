"""Training curves: loss, held-out quality and the load of the busiest expert over the tokens trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.labels import is_number
from benchmarks.reporting.charts import Chart, chart, color, line
from benchmarks.reporting.inputs import StageSummary

_MOST_POINTS = 400
Record = Mapping[str, Any]


def training_charts(stages: Sequence[StageSummary]) -> list[Chart]:
    """A chart for each figure that a stage has logged twice or more, with a line for each stage."""
    plans = {
        "loss": (
            "Training loss",
            "nats per token",
            "Mean loss of the logged steps. Losses on text and against a teacher cannot be compared.",
            lambda record: record.get("loss"),
        ),
        "valid-bits-per-byte": (
            "Held-out quality while training",
            "bits per byte",
            "Bits per byte of held-out text; lower is better.",
            lambda record: record.get("valid_bits_per_byte"),
        ),
        "busiest-expert": (
            "Load of the busiest expert",
            "multiples of an even load",
            "The expert that most tokens of its layer were sent to, in the layer where that is most; 1 is even.",
            _busiest,
        ),
    }
    charts = []
    for identifier, (title, unit, caption, value) in plans.items():
        data, drawn = [], set[str]()
        for index, stage in enumerate(stages):
            points = _curve(stage.metrics, value)
            if len(points) < 2 or stage.directory in drawn:  # a directory measured twice was trained once
                continue
            drawn.add(stage.directory)
            xs, ys = zip(*points, strict=True)
            look = {"mode": "lines+markers" if len(points) < 30 else "lines", "marker": {"size": 5}}
            data.append(line(xs, ys, stage.name, color(index), hovertemplate="%{x:,} tokens: %{y:.4f}") | look)
        if data:
            axes = {"title": "tokens"}, {"title": unit}
            charts.append(chart(identifier, title, caption, data, *axes, showlegend=True))
    return charts


def _curve(records: Sequence[Record], value: Callable[[Record], Any]) -> list[tuple[float, float]]:
    """(tokens, value) of the records that have it: at most about `_MOST_POINTS`, the last one among them."""
    pairs = [(record.get("tokens"), value(record)) for record in records]
    points = [(tokens, each) for tokens, each in pairs if is_number(tokens) and is_number(each)]
    step = max(1, -(-len(points) // _MOST_POINTS))
    return points[:-1:step] + points[-1:]


def _busiest(record: Record) -> float | None:
    """The largest share of a layer's tokens times the number of its experts; None if that was not logged."""
    layers = record.get("expert_shares")
    if not isinstance(layers, list) or not all(isinstance(x, list) and x and all(map(is_number, x)) for x in layers):
        return None
    return max((len(layer) * max(layer) for layer in layers), default=None)
