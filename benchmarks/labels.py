"""Figures as words: the numbers, labels and table cells that every form of the report shares. No plotting here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from benchmarks.measure.floor import BUDGET_DEPTH

RATIOS = {"against_ratios": "best peer", "against_tuned_ratios": "best peer, options of its own included"}
"""What a result holds of ours over others (see `benchmarks.runtimes.compare.measure_against`), and whom that is."""
LIMIT_LABELS = {
    "file_mb": "File size",
    "peak_memory_mb": "Peak memory",
    "ttft_ms": "Time to first token",
    "tpot_p50_ms": "Median time per token",
    "tpot_p95_ms": "95th-percentile time per token",
    "quality_loss_percent": "Quality loss",
}
LIMIT_NOTES = {
    "file_mb": "graph and weights",
    "peak_memory_mb": "of the process, 1,024 tokens of context",
    "ttft_ms": "prompt of 512 tokens",
    "tpot_p50_ms": "after 512 tokens",
    "tpot_p95_ms": "after 512 tokens",
    "quality_loss_percent": "bits per byte over the fp32 teacher's",
}
MISSING = "\u2013"


@dataclass(frozen=True)
class Table:
    """Rows of text under headers; the columns in `texts` are words, the others numbers."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    texts: tuple[int, ...] = (0,)
    caption: str = ""


def number(value: float) -> str:
    """Three significant digits with thousands separators: 0.0123, 1.23, 123, 12,300."""
    if not math.isfinite(value):
        return MISSING
    if abs(value) < 1e-6:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def with_unit(value: Any, unit: str, scale: float = 1.0) -> str:
    """`value` / `scale` and its unit; a dash where there is no finite number."""
    return f"{number(float(value) / scale)} {unit}" if is_number(value) else MISSING


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a record holds a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def part(record: Any, *keys: str) -> Any:
    """What lies under `keys` in nested mappings; None where a level is missing or is no mapping."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def verdict(bench: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The budget as rows of text, with the share of each limit that is used up; None without a budget."""
    if bench is None or not bench.get("budget"):
        return None
    budget = bench["budget"]
    rows = []
    for limit in budget["limits"]:
        value, passed = limit["value"], limit["passed"]
        rows.append(
            {
                "label": LIMIT_LABELS.get(limit["name"], limit["name"]),
                "note": _note(limit["name"], short_depth(budget)),
                "value": with_unit(value, limit["unit"]),
                "limit": with_unit(limit["limit"], limit["unit"]),
                "used": None if value is None else min(100, max(0, round(100 * value / limit["limit"]))),
                "outcome": {True: "passed", False: "missed", None: "not measured"}[passed],
                "source": limit.get("source") or "",
            }
        )
    missed = [row["label"] for row in rows if row["outcome"] == "missed"]
    unknown = [row["label"] for row in rows if row["outcome"] == "not measured"]
    return {
        "device": budget["device"],
        "outcome": "missed" if missed else "incomplete" if unknown else "passed",
        "missed": missed,
        "unknown": unknown,
        "predicted": budget.get("decided_by") == "prediction",
        "noisy": bench.get("clean") is False,
        "rows": rows,
    }


def short_depth(budget: Mapping[str, Any]) -> int | None:
    """Tokens that the time per token stands behind, where the model's context has no room for the limit's 512."""
    depth = budget.get("tpot_depth_tokens")
    return int(depth) if is_number(depth) and 0 < depth < BUDGET_DEPTH else None


def _note(name: str, depth: int | None) -> str:
    note = LIMIT_NOTES.get(name, "")
    if depth and name.startswith("tpot_"):
        return f"after {depth} tokens: the context has no room for {BUDGET_DEPTH} and more"
    return note


def bench_rows(bench: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What was measured and how, as label and text. Keys that only some versions of `bench` write may be absent."""
    if bench is None:
        return []
    rows = [
        ("directory", str(bench.get("directory", MISSING))),
        ("runtime", f"{bench.get('runtime', MISSING)}, {bench.get('threads', MISSING)} threads"),
        ("load", with_unit(bench.get("load_s"), "s")),
    ]
    first = bench.get("ttft_ms") or {}
    rows += [(f"first token, prompt of {prompt}", with_unit(ms, "ms")) for prompt, ms in first.items()]
    rows.append(("prefill", with_unit(bench.get("prefill_tokens_per_s"), "tokens/s")))
    for depth, times in (bench.get("tpot_ms") or {}).items():
        rate = with_unit(part(bench, "decode_tokens_per_s", depth), "tokens/s")
        shown = " / ".join(number(times[key]) for key in ("p50", "p90", "p95", "p99") if is_number(times.get(key)))
        rows.append((f"per token after {depth}", f"{shown} ms (p50 / p90 / p95 / p99), {rate}"))
    rows.append(("memory floor", with_unit(bench.get("memory_floor_tpot_ms"), "ms per token")))
    rows.append(("peak memory", with_unit(bench.get("peak_rss_bytes"), "MB", 1e6)))
    for label, places, unit, scale in OPTIONAL_FIGURES:
        rows.append((label, with_unit(first_number(bench, places), unit, scale)))
    rows = [row for row in rows if row[1] != MISSING]
    rows += [(f"no {str(name).replace('_', ' ')}", str(why)) for name, why in (part(bench, "absent") or {}).items()]
    if bench.get("noisy"):
        rows.append(("noisy figures", ", ".join(map(str, bench["noisy"]))))
    for key, value in (bench.get("machine") or {}).items():
        shown = with_unit(value, "GB", 1e9) if key.endswith("_bytes") else str(value)
        rows.append((key.removesuffix("_bytes").replace("_", " "), shown))
    return rows


Places = tuple[tuple[str, ...], ...]
MEMORY_PARTS: dict[str, Places] = {
    "pss_bytes": (("memory_split", "pss_bytes"), ("memory", "pss_bytes")),
    "uss_bytes": (("memory_split", "uss_bytes"), ("memory", "uss_bytes")),
    "anonymous_bytes": (("memory_split", "anonymous_bytes"), ("memory", "anonymous_bytes")),
    "file_backed_bytes": (("memory_split", "file_bytes"), ("memory", "file_backed_bytes")),
}
ENERGY: Places = (("joules_per_token",), ("energy", "joules_per_token"))
OPTIONAL_FIGURES: tuple[tuple[str, Places, str, float], ...] = (
    ("load, files not in memory", (("cold_load_s",),), "s", 1.0),
    ("proportional memory (PSS)", MEMORY_PARTS["pss_bytes"], "MB", 1e6),
    ("own memory (USS)", MEMORY_PARTS["uss_bytes"], "MB", 1e6),
    ("anonymous memory", MEMORY_PARTS["anonymous_bytes"], "MB", 1e6),
    ("file-backed memory", MEMORY_PARTS["file_backed_bytes"], "MB", 1e6),
    ("energy", ENERGY, "J per token", 1.0),
    ("lost in the sustained run", (("sustained", "throttling_percent"),), "%", 1.0),
)
"""Figures that not every bench result has: label, where they may lie, unit, and what the stored value is divided by."""


def first_number(record: Any, places: Places) -> float | None:
    """The first finite number that lies under one of the key paths."""
    return next((value for keys in places if is_number(value := part(record, *keys))), None)


def bench_tables(bench: Mapping[str, Any] | None) -> list[Table]:
    """Batches, the sustained run by window, and other runtimes measured beside this one, where a result has them."""
    tables = []
    batches = part(bench, "batches") or {}
    if batches:
        columns: tuple[tuple[str, tuple[str, ...], float], ...] = (
            ("tokens/s of all", ("decode_tokens_per_s",), 1.0),
            ("step p50 ms", ("step_ms", "p50"), 1.0),
            ("step p95 ms", ("step_ms", "p95"), 1.0),
            ("peak MB", ("peak_rss_bytes",), 1e6),
        )
        rows = [
            (str(count), *(_cell(part(one, *keys), scale) for _, keys, scale in columns))
            for count, one in batches.items()
        ]
        tables.append(Table("Several sequences at once", ("sequences", *(name for name, *_ in columns)), rows, ()))
    windows = [window for window in part(bench, "sustained", "windows") or [] if isinstance(window, Mapping)]
    if windows:
        known = [(name, key) for name, key in _WINDOW_COLUMNS if any(is_number(window.get(key)) for window in windows)]
        rows = [
            (str(index), *(_window_cell(key, window.get(key)) for _, key in known))
            for index, window in enumerate(windows, start=1)
        ]
        tables.append(Table("Sustained run", ("window", *(name for name, _ in known)), rows, ()))
    others = part(bench, "against")
    if isinstance(others, Mapping) and others:
        found = [
            (str(name), str(part(result, "status") or MISSING), ", ".join(_leaves(result)) or MISSING)
            for name, result in others.items()
        ]
        caption = "; ".join(
            f"ours / {whose}, {name}: {_cell(part(one, 'ratio'))} ({part(one, 'peer') or MISSING}; "
            f"{part(one, 'better') or 'higher'} is better)"
            for key, whose in RATIOS.items()
            for name, one in (part(bench, key) or {}).items()
        )
        tables.append(Table("Other runtimes", ("runtime", "status", "figures"), found, (0, 1, 2), caption))
    return tables


_WINDOW_COLUMNS = (
    ("from s", "start_s"), ("s", "seconds"), ("tokens/s", "tokens_per_s"), ("MHz", "clock_mhz"),
    ("\u00b0C", "temperature_c"), ("J per token", "joules_per_token"),
)  # fmt: skip


def _window_cell(key: str, value: Any) -> str:
    return _cell(round(value, 1) if key == "start_s" and is_number(value) else value)


def _cell(value: Any, scale: float = 1.0) -> str:
    return number(value / scale) if is_number(value) else MISSING


def _leaves(record: Any, name: str = "") -> Iterator[str]:
    """`name value` of the numbers in a record, and of the reason it gives where there is one; samples are left out."""
    if isinstance(record, Mapping):
        for key, value in record.items():
            if key not in ("raw", "noise", "noisy", "rounds", "status"):
                yield from _leaves(value, f"{name} {key}".strip().replace("_", " "))
    elif is_number(record):
        yield f"{name}: {number(record)}"
    elif isinstance(record, str) and name in ("reason", "error", "version", "note", "install"):
        yield f"{name}: {record}"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
