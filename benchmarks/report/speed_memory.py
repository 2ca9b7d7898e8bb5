"""How fast and how evenly a model decodes, and how much memory it takes, against the tokens of the context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.labels import is_number
from benchmarks.report.charts import Chart, Plot, chart, color, line, log_axis, marks, placeholder_chart
from benchmarks.report.inputs import StageSummary, bench_command
from benchmarks.report.text import get_nested
from benchmarks.spread import percentile

Bench = Mapping[str, Any] | None
_MARKS = {50: "circle", 95: "square", 99: "diamond"}
_PERCENT_TICKS = (0, 50, 75, 90, 95, 99, 99.9, 99.99)
_MOST_POINTS = 300
_TAIL_POINTS = 100
_MOST_OTHERS = 5


def speed_charts(stages: Sequence[StageSummary], bench: Bench) -> list[Chart]:
    """Percentiles of single steps, and time per token against depth."""
    return [_step_times_chart(stages, bench), _speed_depth_chart(stages, bench)]


def _missing(identifier: str, title: str, reason: str, stages: Sequence[StageSummary], bench: Bench) -> Chart:
    return placeholder_chart(identifier, title, reason if bench else "Nothing was measured.", bench_command(stages))


def _step_times_chart(stages: Sequence[StageSummary], bench: Bench) -> Chart:
    identifier, title = "step-times", "How even the steps are"
    rounds = get_nested(bench, "raw", "speed") or []
    data: list[Plot] = []
    most = 0
    for depth in get_nested(bench, "tpot_ms") or {}:
        sweeps = [sweep for one in rounds for sweep in get_nested(one, "step_ms", depth) or []]
        samples = sorted(sample for sweep in sweeps for sample in sweep)
        if samples:
            data += _percentile_traces(samples, f"after {depth}", color(len(data) // 2))
            most = max(most, len(samples))
    if not data:
        return _missing(identifier, title, "The result has no single steps.", stages, bench)
    edges = [value for trace in data for value in trace["x"]]
    top = _tail(1 - 0.5 / most)
    ticks = {f"{tick:g}": _tail(tick / 100) for tick in _PERCENT_TICKS if _tail(tick / 100) <= top}
    caption = (
        "Single decoding steps of all rounds: the percentage that took at most this long. The scale stretches the slow "
        "end. Marked are the median (circle), 95% (square) and 99% (diamond) of all steps together; the tables have "
        "the medians of the rounds' own."
    )
    y = {"title": "% of steps", "range": [0, top + 0.1], "tickmode": "array"}
    y |= {"tickvals": list(ticks.values()), "ticktext": list(ticks)}
    return chart(identifier, title, caption, data, log_axis("ms", min(edges), max(edges)), y, showlegend=True)


def _tail(share: float) -> float:
    """-log10(1 - share): 0.9, 0.99 and 0.999 lie equally far apart."""
    return -math.log10(1 - share)


def _percentile_traces(samples: Sequence[float], name: str, shade: str) -> list[Plot]:
    """The curve through sorted samples, all of the slow end and some of the rest, and its three marks."""
    count = len(samples)
    body = max(0, count - _TAIL_POINTS)
    kept = [*range(0, body, max(1, -(-body // _MOST_POINTS))), *range(body, count)]
    shares = [(i + 0.5) / count for i in kept]
    hover = "%{customdata}% of steps took at most %{x:.3g} ms"
    percents = [round(100 * share, 2) for share in shares]
    xs, ys = [round(samples[i], 4) for i in kept], [round(_tail(share), 4) for share in shares]
    curve = line(xs, ys, name, shade, mode="lines", customdata=percents, hovertemplate=hover)
    at = [(round(percentile(samples, percent), 4), _tail(percent / 100), f"p{percent}") for percent in _MARKS]
    hover = f"%{{text}} %{{x:.3g}} ms<extra>{name}</extra>"
    return [curve, marks(at, name, shade, list(_MARKS.values()), hover, showlegend=False)]


def _speed_depth_chart(stages: Sequence[StageSummary], bench: Bench) -> Chart:
    identifier, title = "speed-depth", "Speed and depth"
    times = get_nested(bench, "tpot_ms") or {}
    if bench is None or len(times) < 2:
        reason = "The model's context has room for fewer than two depths."
        return _missing(identifier, title, reason, stages, bench)
    hover = {"hovertemplate": "%{y:.3g} ms after %{x:,} tokens"}
    depths = [int(depth) for depth in times]
    data = [
        line(depths, [one[key] for one in times.values()], label, color(index), **hover)
        for index, (key, label) in enumerate({"p50": "median", "p95": "95%"}.items())
    ]
    floor = get_nested(bench, "memory_floor", "by_depth_ms") or {}
    if floor.keys() >= times.keys():
        data.append(line(depths, [floor[depth] for depth in times], "memory floor", "theme:ink", "dot", **hover))
    others = [stage for stage in stages if stage.bench is not bench and get_nested(stage.bench, "tpot_ms")]
    for index, stage in enumerate(others[:_MOST_OTHERS], start=2):
        medians = {int(depth): one["p50"] for depth, one in get_nested(stage.bench, "tpot_ms").items()}
        trace = line(list(medians), list(medians.values()), stage.name, color(index), "dash", **hover)
        data.append({**trace, "line": {**trace["line"], "width": 1.2}, "marker": {"size": 4}})
    caption = (
        "Time per token against the tokens before it. The memory floor is the time that reading weights and cache "
        "takes at the bandwidth measured beside it." + (" Dashed: medians of the other stages." if others else "")
    )
    x = {"title": "tokens in the cache", "rangemode": "tozero"}
    return chart(identifier, title, caption, data, x, {"title": "ms per token", "rangemode": "tozero"})


def memory_chart(stages: Sequence[StageSummary], bench: Bench) -> Chart:
    """Measured peaks as marks, the cache and the peak at other lengths as computed lines, the budget's limit."""
    identifier, title = "memory-tokens", "Memory and context"
    peak = _peak(bench)
    if peak is None:
        reason = "The result does not say at which context its peak was reached."
        return _missing(identifier, title, reason, stages, bench)
    context, peak_mb = peak
    hover = "%{text}: %{y:.4g} MB<extra></extra>"
    measured = [*_loading(bench), (context, peak_mb, f"peak with {context:,} tokens")]
    data = [marks(measured, "measured", color(0), "circle", hover)]
    others = [(*found, stage.name) for stage in stages if stage.bench is not bench and (found := _peak(stage.bench))]
    if others:
        data.append(marks(others, "other stages", "theme:quiet", "diamond", hover))
    longest = max(context, int(get_nested(bench, "context_length") or 0))
    caption = (
        "Physical memory of the process. Marks are measured: at no tokens before and after loading the model, and the "
        f"peak with {context:,} tokens."
    )
    token_bytes = get_nested(bench, "memory_floor", "kv_bytes_per_token")
    if is_number(token_bytes):
        ends, look = [0, longest], {"mode": "lines", "hovertemplate": "%{y:.4g} MB with %{x:,} tokens, computed"}
        peaks = [peak_mb + token_bytes / 1e6 * (x - context) for x in ends]
        data.append(line(ends, peaks, "peak, computed", color(0), "dash", **look))
        data.append(line(ends, [token_bytes / 1e6 * x for x in ends], "cache, computed", color(1), "dot", **look))
        caption += (
            f" Lines are computed: {token_bytes:,.0f} bytes of keys and values a token, alone and added to the "
            "measured peak for other lengths."
        )
    else:
        caption += " The result has no bytes a token, so nothing is computed for other lengths."
    limits = {limit["name"]: limit["limit"] for limit in get_nested(bench, "budget", "limits") or []}
    limit = limits.get("peak_memory_mb")
    shapes: list[Plot] = []
    if limit is not None:
        caption += f" The red line is the budget of {get_nested(bench, 'budget', 'device')}."
        dashed = {"color": "theme:bad", "width": 1.5, "dash": "dash"}
        shapes = [{"type": "line", "y0": limit, "y1": limit, "xref": "paper", "x0": 0, "x1": 1, "line": dashed}]
    x = {"title": "tokens in the context", "range": [-0.04 * longest, 1.06 * longest]}
    return chart(identifier, title, caption, data, x, {"title": "MB", "rangemode": "tozero"}, shapes=shapes)


def _peak(bench: Bench) -> tuple[int, float] | None:
    """Tokens of the context and MB of the peak."""
    context, peak = get_nested(bench, "peak_rss_context_tokens"), get_nested(bench, "peak_rss_bytes")
    return (int(context), peak / 1e6) if is_number(context) and is_number(peak) else None


def _loading(bench: Bench) -> list[tuple[int, float, str]]:
    """MB before and after the model was loaded, the highest of the rounds as for the peak itself."""
    found = []
    for key, words in (("before_load_bytes", "before loading"), ("after_load_bytes", "after loading")):
        values = [one[key] for one in get_nested(bench, "raw", "memory") or [] if is_number(one.get(key))]
        if values:
            found.append((0, max(values) / 1e6, words))
    return found
