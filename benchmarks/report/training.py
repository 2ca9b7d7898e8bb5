"""Loss, held-out quality and the experts' shares over the tokens trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.labels import is_number
from benchmarks.report.charts import Chart, chart, color, even_map, line, placeholder_chart
from benchmarks.report.inputs import StageSummary

_MOST_POINTS = 400
_EXPERT_PX, _LAYER_PX, _MOST_PX = 9, 10, 900  # of the experts' chart: a row, the space between layers, at most


def training_charts(stages: Sequence[StageSummary]) -> list[Chart]:
    """A chart for each of loss and held-out quality, with a line for each stage; and one for each stage's experts."""
    loss = "Mean loss of the logged steps. Losses on text and against a teacher cannot be compared."
    quality = "Bits per byte of held-out text; lower is better."
    return [
        _training_chart(stages, "loss", "Training loss", "nats per token", loss),
        _training_chart(stages, "valid_bits_per_byte", "Held-out quality while training", "bits per byte", quality),
        *_expert_charts(stages),
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


def _expert_charts(stages: Sequence[StageSummary]) -> list[Chart]:
    """For each stage with experts their shares of the tokens, a row for each; a directory measured twice once."""
    found: dict[str, Chart] = {}
    for stage in stages:
        records = [record for record in stage.metrics if _are_shares(record.get("expert_shares"))]
        same = [record for record in records if _counts(record) == _counts(records[-1])]
        if len(same) > 1 and stage.directory not in found:
            step = max(1, -(-len(same) // _MOST_POINTS))
            found[stage.directory] = _expert_chart(len(found), stage.name, same[:-1:step] + same[-1:])
    return list(found.values())


def _are_shares(value: Any) -> bool:
    """Whether a record's field is a list of shares for each of some layers."""
    return (
        isinstance(value, list) and bool(value) and all(isinstance(x, list) and all(map(is_number, x)) for x in value)
    )


def _counts(record: Mapping[str, Any]) -> list[int]:
    return [len(layer) for layer in record["expert_shares"]]


def _expert_chart(number: int, name: str, records: Sequence[Mapping[str, Any]]) -> Chart:
    rows: list[list[float | None]] = []
    labels: list[list[str]] = []
    middles: list[float] = []
    for layer, count in enumerate(_counts(records[0])):
        middles.append(len(rows) + (count - 1) / 2)
        for expert in range(count):
            rows.append([round(count * record["expert_shares"][layer][expert], 3) for record in records])
            labels.append([f"mixture {layer}, expert {expert}"] * len(records))
        rows.append([None] * len(records))
        labels.append([""] * len(records))
    hover = "%{text}, %{x:,} tokens: %{z:.2f} times an even share<extra></extra>"
    trace = even_map(rows[:-1], hover, x=[record.get("tokens") for record in records], text=labels[:-1])
    height = min(_MOST_PX, 90 + _EXPERT_PX * len(rows) + _LAYER_PX * len(middles))
    caption = (
        "Of the choices in the steps since the last logged one: a row for each expert, layers apart; 1\u00d7 is even."
    )
    y = {"title": "mixtures, from the first layer", "tickvals": middles, "ticktext": list(range(len(middles)))}
    look = {"autorange": "reversed", "showgrid": False}
    title = f"Experts' shares while training, {name}"
    x = {"title": "tokens", "showgrid": False}
    return chart(f"expert-shares-{number}", title, caption, [trace], x, y | look, height=height)
