"""A bench result as words: the outcome of the budget, the measurements and tables, for every format of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.labels import BUDGET_DEPTH, LIMITS, MISSING, RATIOS, is_number, number, short_depth, with_unit

# Figures of one window of a sustained run, and their headers.
_WINDOW = {"start_s": "from s", "tokens_per_s": "tokens/s", "clock_mhz": "MHz", "temperature_c": "\u00b0C",
           "joules_per_token": "J per token"}  # fmt: skip

CACHE_HEADERS = ("after tokens", "tokens/s", "tokens/s without a cache", "ratio")
CACHE_CAPTION = "Without a cache of keys and values, each new token reads the whole text again."


@dataclass(frozen=True)
class Table:
    """Rows of text under headers; the columns in `texts` are words, the others numbers."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    texts: tuple[int, ...] = (0,)
    caption: str = ""


def get_nested(record: Any, *keys: str) -> Any:
    """The value under `keys` in nested mappings; None where a level is missing or not a mapping."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


@dataclass(frozen=True)
class BudgetRow:
    """One limit as text. `used` is the percentage of it that is used up, at most 100."""

    label: str
    note: str
    value: str
    limit: str
    used: int | None
    outcome: str
    source: str


@dataclass(frozen=True)
class BudgetSummary:
    """A bench result against its budget.

    `outcome` is "pass", "fail" or "uncertain"; `heading` has it
    in words, `sentence` the limits that decide it. `predicted` says that speed and memory are predictions, `noisy`
    that the measurement was disturbed.
    """

    rows: list[BudgetRow]
    outcome: str
    heading: str
    sentence: str
    predicted: bool
    noisy: bool


def summarize_budget(bench: Mapping[str, Any] | None) -> BudgetSummary | None:
    """The budget of a bench result; None without one."""
    budget = get_nested(bench, "budget")
    if bench is None or not budget:
        return None
    short = short_depth(budget)
    rows = [
        BudgetRow(
            label=LIMITS[limit["name"]].label,
            note=f"after {short} tokens: the context has no room for {BUDGET_DEPTH} and more"
            if short and limit["name"].startswith("tpot_")
            else LIMITS[limit["name"]].note,
            value=with_unit(limit["value"], limit["unit"]),
            limit=with_unit(limit["limit"], limit["unit"]),
            used=None if limit["value"] is None else min(100, max(0, round(100 * limit["value"] / limit["limit"]))),
            outcome=limit["verdict"],
            source=limit.get("source") or "",
        )
        for limit in budget["limits"]
    ]
    predicted, noisy = budget.get("decided_by") == "prediction", bench.get("clean") is False
    outcome, by = budget["verdict"], "by prediction" if predicted else "by measurement"
    headings = {"pass": "Fits {}, " + by, "fail": "Does not fit {}, " + by, "uncertain": "Uncertain on {}"}
    sentence = "Every limit of the budget is kept."
    if outcome != "pass":
        parts = {word: [row.label for row in rows if row.outcome == word] for word in ("fail", "uncertain")}
        titles = {"fail": "Missed", "uncertain": "Undecided or not measured"}
        sentence = " ".join(f"{titles[word]}: {_listed(names)}." for word, names in parts.items() if names)
    return BudgetSummary(rows, outcome, headings[outcome].format(budget["target"]), sentence, predicted, noisy)


def _listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`, in lower case."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words).lower()


def cache_rows(bench: Mapping[str, Any] | None) -> list[tuple[str, ...]]:
    """Decoding with and without the key/value cache by depth, under `CACHE_HEADERS`; none in an older result."""
    return [
        (
            depth,
            _cell(get_nested(bench, "decode_tokens_per_s", depth)),
            _cell(one["decode_tokens_per_s"]),
            _cell(one["cache_speedup"]),
        )
        for depth, one in (get_nested(bench, "without_cache") or {}).items()
    ]


def measurement_tables(bench: Mapping[str, Any] | None) -> list[Table]:
    """What the cache saves, batches, the sustained run by window, and other runtimes measured beside this one, where a
    result has them."""
    tables = []
    if rows := cache_rows(bench):
        tables.append(Table("What the cache saves", CACHE_HEADERS, rows, (), CACHE_CAPTION))
    if batches := get_nested(bench, "batches"):
        headers = ("sequences", "tokens/s of all", "step p50 ms", "step p95 ms", "peak MB")
        keys = (("decode_tokens_per_s",), ("step_ms", "p50"), ("step_ms", "p95"))
        rows = [
            (count, *(_cell(get_nested(one, *key)) for key in keys), _cell(one.get("peak_rss_bytes"), 1e6))
            for count, one in batches.items()
        ]
        tables.append(Table("Several sequences at once", headers, rows, ()))
    if windows := get_nested(bench, "sustained", "windows"):
        known = [key for key in _WINDOW if any(is_number(window.get(key)) for window in windows)]
        rows = [(str(place), *(_cell(one.get(key)) for key in known)) for place, one in enumerate(windows, start=1)]
        tables.append(Table("Sustained run", ("window", *(_WINDOW[key] for key in known)), rows, ()))
    if others := get_nested(bench, "against"):
        rows = [(name, one["status"], _runtime_figures(one) or MISSING) for name, one in others.items()]
        caption = "; ".join(
            f"ours / {whose}, {name}: {_cell(one['ratio'])} ({one['peer']}; {one['better']} is better)"
            for key, whose in RATIOS.items()
            for name, one in (get_nested(bench, key) or {}).items()
        )
        tables.append(Table("Other runtimes", ("runtime", "status", "figures"), rows, (0, 1, 2), caption))
    return tables


def _runtime_figures(result: Mapping[str, Any]) -> str:
    """The figures of another runtime in one cell; how to install one that is not there."""
    parts = [
        f"{key.replace('_', ' ')} {depth}: {number(value)}"
        for key in ("generated_tokens_per_s", "ttft_ms")
        for depth, value in (result.get(key) or {}).items()
    ]
    if is_number(result.get("peak_rss_bytes")):
        parts.append(f"peak memory: {with_unit(result['peak_rss_bytes'], 'MB', 1e6)}")
    return ", ".join(parts + [f"{key}: {result[key]}" for key in ("version", "install") if result.get(key)])


def _cell(value: Any, scale: float = 1.0) -> str:
    return number(value / scale) if is_number(value) else MISSING
