"""How fast and how evenly: single steps as percentiles, and time per token against depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.labels import part
from benchmarks.report.charts import Plot, absent, bench_command, chart, colour, line, log_axis
from benchmarks.report.inputs import StageSummary
from benchmarks.spread import percentile

Bench = Mapping[str, Any] | None
_MARKS = ((50, "circle"), (95, "square"), (99, "diamond"))
_TICKS = (0, 50, 75, 90, 95, 99, 99.9, 99.99)
_MOST_POINTS = 300
_TAIL_POINTS = 100
_MOST_OTHERS = 5


def speed_plots(stages: Sequence[StageSummary], bench: Bench) -> list[Plot]:
    """Percentiles of single steps, and speed against depth."""
    return [_step_times(stages, bench), _speed_depth(stages, bench)]


def _step_times(stages: Sequence[StageSummary], bench: Bench) -> Plot:
    rounds = part(bench, "raw", "speed") or []
    data: list[Plot] = []
    most = 0
    for depth in part(bench, "tpot_ms") or {}:
        samples = sorted(sample for one in rounds for sweep in part(one, "step_ms", depth) or [] for sample in sweep)
        if samples:
            data += _percentile_traces(samples, f"after {depth}", colour(len(data) // 2))
            most = max(most, len(samples))
    identifier, title = "step-times", "How even the steps are"
    if not data:
        why = "The result has no single steps." if bench else "Nothing was measured."
        return absent(identifier, title, why, bench_command(stages))
    edges = [value for trace in data for value in trace["x"]]
    top = _tail(1 - 0.5 / most)
    ticks = [tick for tick in _TICKS if _tail(tick / 100) <= top]
    return chart(
        identifier,
        title,
        "Single decoding steps of all rounds: so many of them took at most this long. The scale stretches the slow "
        "end. Marked are the median (circle), 95% (square) and 99% (diamond) of all steps together; the tables have "
        "the medians of the rounds' own.",
        data,
        log_axis("ms", min(edges), max(edges)),
        {
            "title": "% of steps",
            "range": [0, top + 0.1],
            "tickmode": "array",
            "tickvals": [_tail(tick / 100) for tick in ticks],
            "ticktext": [f"{tick:g}" for tick in ticks],
        },
        showlegend=True,
    )


def _tail(share: float) -> float:
    """-log10(1 - share): 0.9, 0.99 and 0.999 lie equally far apart."""
    return -math.log10(1 - share)


def _percentile_traces(samples: Sequence[float], name: str, paint: str) -> list[Plot]:
    """The curve through sorted samples, all of the slow end and some of the rest, and its three marks."""
    count = len(samples)
    body = max(0, count - _TAIL_POINTS)
    kept = [*range(0, body, max(1, -(-body // _MOST_POINTS))), *range(body, count)]
    curve = line(
        [round(samples[i], 4) for i in kept],
        [round(_tail((i + 0.5) / count), 4) for i in kept],
        name,
        paint,
        mode="lines",
        customdata=[round(100 * (i + 0.5) / count, 2) for i in kept],
        hovertemplate="%{customdata}% of steps took at most %{x:.3g} ms",
    )
    marks = {
        "type": "scatter",
        "mode": "markers",
        "x": [round(percentile(samples, percent), 4) for percent, _ in _MARKS],
        "y": [_tail(percent / 100) for percent, _ in _MARKS],
        "customdata": [f"p{percent}" for percent, _ in _MARKS],
        "marker": {"color": paint, "size": 9, "symbol": [symbol for _, symbol in _MARKS]},
        "showlegend": False,
        "hovertemplate": "%{customdata} %{x:.3g} ms<extra>" + name + "</extra>",
    }
    return [curve, marks]


def _speed_depth(stages: Sequence[StageSummary], bench: Bench) -> Plot:
    times = part(bench, "tpot_ms") or {}
    identifier, title = "speed-depth", "Speed and depth"
    if bench is None or len(times) < 2:
        why = "The model's context has room for fewer than two depths." if bench else "Nothing was measured."
        return absent(identifier, title, why, bench_command(stages))
    depths = [int(depth) for depth in times]
    hover = {"hovertemplate": "%{y:.3g} ms after %{x:,} tokens"}
    data = [
        line(depths, [times[str(depth)][key] for depth in depths], label, paint, **hover)
        for key, label, paint in (("p50", "median", colour(0)), ("p95", "95%", colour(1)))
    ]
    floor = part(bench, "memory_floor", "by_depth_ms") or {}
    if all(str(depth) in floor for depth in depths):
        data.append(line(depths, [floor[str(depth)] for depth in depths], "memory floor", "theme:ink", "dot", **hover))
    others = [stage for stage in stages if stage.bench and stage.bench is not bench and part(stage.bench, "tpot_ms")]
    for index, stage in enumerate(others[:_MOST_OTHERS], start=2):
        medians = [(int(depth), values["p50"]) for depth, values in part(stage.bench, "tpot_ms").items()]
        trace = line([x for x, _ in medians], [y for _, y in medians], stage.name, colour(index), "dash", **hover)
        data.append({**trace, "line": {**trace["line"], "width": 1.2}, "marker": {"size": 4}})
    return chart(
        identifier,
        title,
        "Time per token against the tokens before it. The memory floor is the time that reading weights and "
        "cache takes at the bandwidth measured beside it."
        + (" Dashed: medians of the other stages." if others else ""),
        data,
        {"title": "tokens in the cache", "rangemode": "tozero"},
        {"title": "ms per token", "rangemode": "tozero"},
    )
