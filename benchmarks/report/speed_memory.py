"""How fast a model decodes, and how much memory it takes, against the tokens of the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.labels import is_number
from benchmarks.report.charts import Chart, Plot, chart, color, line, marks, placeholder_chart
from benchmarks.report.inputs import StageSummary, bench_command
from benchmarks.report.text import get_nested

Bench = Mapping[str, Any] | None
_MOST_OTHERS = 5


def _missing(identifier: str, title: str, reason: str, stages: Sequence[StageSummary], bench: Bench) -> Chart:
    return placeholder_chart(identifier, title, reason if bench else "Nothing was measured.", bench_command(stages))


def speed_chart(stages: Sequence[StageSummary], bench: Bench) -> Chart:
    """Time per token against depth, with the memory floor and the other stages' medians."""
    identifier, title, times = "speed-depth", "Speed and depth", get_nested(bench, "tpot_ms") or {}
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
    if (kernels := get_nested(bench, "kernels")) is not None:
        caption += f" Run by the {kernels} kernels."
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
    limits = get_nested(bench, "budget", "limits") or []
    limit = next((one["limit"] for one in limits if one["name"] == "peak_memory_mb"), None)
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
    rounds = get_nested(bench, "raw", "memory") or []
    states = {"before_load_bytes": "before loading", "after_load_bytes": "after loading"}
    peaks = {key: [one[key] for one in rounds if is_number(one.get(key))] for key in states}
    return [(0, max(values) / 1e6, states[key]) for key, values in peaks.items() if values]
