"""Memory against the tokens of the context: what was measured, and what the cache's arithmetic adds to it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.labels import is_number, part
from benchmarks.report.charts import Plot, absent, bench_command, chart, colour, limit_line, line
from benchmarks.report.inputs import StageSummary


def memory_plot(stages: Sequence[StageSummary], bench: Mapping[str, Any] | None) -> Plot:
    """Measured peaks as marks, the cache and the peak at other lengths as computed lines, the budget's limit."""
    identifier, title = "memory-tokens", "Memory and context"
    context = part(bench, "peak_rss_context_tokens")
    peak = part(bench, "peak_rss_bytes")
    if bench is None or not is_number(context) or not is_number(peak):
        why = "The result does not say at which context its peak was reached." if bench else "Nothing was measured."
        return absent(identifier, title, why, bench_command(stages))
    marks = [(0, value, words) for value, words in _loading(bench)]
    marks.append((int(context), peak / 1e6, f"peak with {int(context):,} tokens"))
    data = [_marks(marks, "measured", colour(0), "circle")]
    others = [
        (int(part(stage.bench, "peak_rss_context_tokens")), part(stage.bench, "peak_rss_bytes") / 1e6, stage.name)
        for stage in stages
        if stage.bench is not bench
        and is_number(part(stage.bench, "peak_rss_context_tokens"))
        and is_number(part(stage.bench, "peak_rss_bytes"))
    ]
    if others:
        data.append(_marks(others, "other stages", "theme:quiet", "diamond"))
    longest = max(int(context), int(part(bench, "context_length") or 0))
    caption = (
        "Physical memory of the process. Marks are measured: at no tokens before and after loading the model, and the "
        f"peak with {int(context):,} tokens."
    )
    a_token = part(bench, "memory_floor", "kv_bytes_per_token")
    if is_number(a_token):
        data += _computed(peak / 1e6, int(context), longest, a_token / 1e6)
        caption += (
            f" Lines are computed: {a_token:,.0f} bytes of keys and values a token, alone and as what the measured "
            "peak gains or loses at other lengths."
        )
    else:
        caption += " The result has no bytes a token, so nothing is computed for other lengths."
    limit = next(
        (one["limit"] for one in part(bench, "budget", "limits") or [] if part(one, "name") == "peak_memory_mb"), None
    )
    if is_number(limit):
        caption += f" The red line is the budget of {part(bench, 'budget', 'device')}."
    return chart(
        identifier,
        title,
        caption,
        data,
        {"title": "tokens in the context", "range": [-0.04 * longest, 1.06 * longest]},
        {"title": "MB", "rangemode": "tozero"},
        shapes=[limit_line(float(limit), "y")] if is_number(limit) else [],
    )


def _loading(bench: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Peaks before and after the model was loaded, the highest of the rounds as for the peak itself."""
    rounds = part(bench, "raw", "memory") or []
    found = []
    for key, words in (("before_load_bytes", "before loading"), ("after_load_bytes", "after loading")):
        values = [part(one, key) for one in rounds if is_number(part(one, key))]
        if values:
            found.append((max(values) / 1e6, words))
    return found


def _marks(points: Sequence[tuple[int, float, str]], name: str, paint: str, symbol: str) -> Plot:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "text": [html.escape(words) for _, _, words in points],
        "name": name,
        "marker": {"color": paint, "size": 10, "symbol": symbol},
        "hovertemplate": "%{text}: %{y:.4g} MB<extra></extra>",
    }


def _computed(peak_mb: float, context: int, longest: int, token_mb: float) -> list[Plot]:
    hover = {"mode": "lines", "hovertemplate": "%{y:.4g} MB with %{x:,} tokens, computed"}
    ends = [0, longest]
    return [
        line(ends, [peak_mb + token_mb * (x - context) for x in ends], "peak, computed", colour(0), "dash", **hover),
        line(ends, [token_mb * x for x in ends], "cache, computed", colour(1), "dot", **hover),
    ]
