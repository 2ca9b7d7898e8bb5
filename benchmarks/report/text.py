"""A bench result as words: the outcome of the budget, the measurements and tables, for every format of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.labels import BUDGET_DEPTH, LIMITS, MISSING, RATIOS, is_number, number, short_depth, with_unit

MEMORY_PARTS = {
    "pss_bytes": ("memory_split", "pss_bytes"),
    "uss_bytes": ("memory_split", "uss_bytes"),
    "anonymous_bytes": ("memory_split", "anonymous_bytes"),
    "file_backed_bytes": ("memory_split", "file_bytes"),
}
# Measurements that not every machine gives: label, keys in the bench result, unit, bytes or seconds in one unit.
_OPTIONAL = (
    ("load, files not in memory", ("cold_load_s",), "s", 1.0),
    ("proportional memory (PSS)", MEMORY_PARTS["pss_bytes"], "MB", 1e6),
    ("own memory (USS)", MEMORY_PARTS["uss_bytes"], "MB", 1e6),
    ("anonymous memory", MEMORY_PARTS["anonymous_bytes"], "MB", 1e6),
    ("file-backed memory", MEMORY_PARTS["file_backed_bytes"], "MB", 1e6),
    ("energy", ("joules_per_token",), "J per token", 1.0),
    ("lost in the sustained run", ("sustained", "throttling_percent"), "%", 1.0),
)


@dataclass(frozen=True)
class Table:
    """Rows of text under headers; the columns in `texts` are words, the others numbers."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    texts: tuple[int, ...] = (0,)
    caption: str = ""


def get_nested(record: Any, *keys: str) -> Any:
    """The value under `keys` in nested mappings; None where a level is missing or is no mapping."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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

    `predicted` says that speed and memory are predictions, `noisy` that the measurement was disturbed.
    """

    device: str
    rows: list[BudgetRow]
    predicted: bool
    noisy: bool

    def labels(self, outcome: str) -> list[str]:
        """The limits with this outcome."""
        return [row.label for row in self.rows if row.outcome == outcome]

    @property
    def outcome(self) -> str:
        """ "missed", "incomplete" (nothing is missed, but not everything is known) or "passed"."""
        if self.labels("missed"):
            return "missed"
        return "incomplete" if self.labels("not measured") else "passed"

    @property
    def heading(self) -> str:
        """The outcome in a few words."""
        words = {"missed": "Does not fit {}", "passed": "Fits {}"}
        unsure = "Nothing missed on {}, but not everything is known"
        return words.get(self.outcome, unsure).format(self.device)

    @property
    def sentence(self) -> str:
        """Which limits decide the outcome."""
        if self.outcome == "passed":
            return "Every limit of the budget is kept."
        parts = {"Missed": self.labels("missed"), "Not measured": self.labels("not measured")}
        return " ".join(f"{word}: {listed(labels).lower()}." for word, labels in parts.items() if labels)


def summarize_budget(bench: Mapping[str, Any] | None) -> BudgetSummary | None:
    """The budget of a bench result; None without one."""
    budget = get_nested(bench, "budget")
    if bench is None or not budget:
        return None
    rows = [
        BudgetRow(
            label=LIMITS[limit["name"]].label,
            note=_note(limit["name"], short_depth(budget)),
            value=with_unit(limit["value"], limit["unit"]),
            limit=with_unit(limit["limit"], limit["unit"]),
            used=None if limit["value"] is None else min(100, max(0, round(100 * limit["value"] / limit["limit"]))),
            outcome={True: "passed", False: "missed", None: "not measured"}[limit["passed"]],
            source=limit.get("source") or "",
        )
        for limit in budget["limits"]
    ]
    predicted, noisy = budget.get("decided_by") == "prediction", bench.get("clean") is False
    return BudgetSummary(budget["device"], rows, predicted, noisy)


def _note(name: str, depth: int | None) -> str:
    if depth and name.startswith("tpot_"):
        return f"after {depth} tokens: the context has no room for {BUDGET_DEPTH} and more"
    return LIMITS[name].note


def measurement_rows(bench: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What was measured and how, as label and text. Figures that the result lacks are left out."""
    if bench is None:
        return []
    rows = [
        ("directory", str(bench.get("directory", MISSING))),
        ("runtime", f"{bench.get('runtime', MISSING)}, {bench.get('threads', MISSING)} threads"),
        ("load", with_unit(bench.get("load_s"), "s")),
    ]
    first_tokens = bench.get("ttft_ms") or {}
    rows += [(f"first token, prompt of {prompt}", with_unit(ms, "ms")) for prompt, ms in first_tokens.items()]
    rows.append(("prefill", with_unit(bench.get("prefill_tokens_per_s"), "tokens/s")))
    for depth, times in (bench.get("tpot_ms") or {}).items():
        rate = with_unit(get_nested(bench, "decode_tokens_per_s", depth), "tokens/s")
        shown = " / ".join(number(times[key]) for key in ("p50", "p90", "p95", "p99") if is_number(times.get(key)))
        rows.append((f"per token after {depth}", f"{shown} ms (p50 / p90 / p95 / p99), {rate}"))
    rows.append(("memory floor", with_unit(bench.get("memory_floor_tpot_ms"), "ms per token")))
    rows.append(("peak memory", with_unit(bench.get("peak_rss_bytes"), "MB", 1e6)))
    rows += [(label, with_unit(get_nested(bench, *keys), unit, scale)) for label, keys, unit, scale in _OPTIONAL]
    rows = [row for row in rows if row[1] != MISSING]
    rows += [(f"no {name.replace('_', ' ')}", str(why)) for name, why in (bench.get("absent") or {}).items()]
    if bench.get("noisy"):
        rows.append(("noisy figures", ", ".join(bench["noisy"])))
    for key, value in (bench.get("machine") or {}).items():
        shown = with_unit(value, "GB", 1e9) if key.endswith("_bytes") else str(value)
        rows.append((key.removesuffix("_bytes").replace("_", " "), shown))
    return rows


def measurement_tables(bench: Mapping[str, Any] | None) -> list[Table]:
    """Batches, the sustained run by window, and other runtimes measured beside this one, where a result has them."""
    batches = get_nested(bench, "batches") or {}
    windows = get_nested(bench, "sustained", "windows") or []
    others = get_nested(bench, "against") or {}
    tables = []
    if batches:
        headers = ("sequences", "tokens/s of all", "step p50 ms", "step p95 ms", "peak MB")
        rows = [
            (
                count,
                _cell(one.get("decode_tokens_per_s")),
                _cell(get_nested(one, "step_ms", "p50")),
                _cell(get_nested(one, "step_ms", "p95")),
                with_unit(one.get("peak_rss_bytes"), "", 1e6).strip(),
            )
            for count, one in batches.items()
        ]
        tables.append(Table("Several sequences at once", headers, rows, ()))
    if windows:
        tables.append(_sustained_table(windows))
    if others:
        runtimes = [(name, one["status"], _runtime_figures(one) or MISSING) for name, one in others.items()]
        caption = "; ".join(
            f"ours / {whose}, {name}: {_cell(one['ratio'])} ({one['peer']}; {one['better']} is better)"
            for key, whose in RATIOS.items()
            for name, one in (get_nested(bench, key) or {}).items()
        )
        tables.append(Table("Other runtimes", ("runtime", "status", "figures"), runtimes, (0, 1, 2), caption))
    return tables


def _sustained_table(windows: Sequence[Mapping[str, Any]]) -> Table:
    columns = {"start_s": "from s", "tokens_per_s": "tokens/s", "clock_mhz": "MHz", "temperature_c": "\u00b0C"}
    columns["joules_per_token"] = "J per token"
    known = [key for key in columns if any(is_number(window.get(key)) for window in windows)]
    rows = [(str(index), *(_cell(window.get(key)) for key in known)) for index, window in enumerate(windows, start=1)]
    return Table("Sustained run", ("window", *(columns[key] for key in known)), rows, ())


def _runtime_figures(result: Mapping[str, Any]) -> str:
    """The figures of another runtime in one cell; how to install one that is not there."""
    parts = [
        f"{key.replace('_', ' ')} {depth}: {number(value)}"
        for key in ("decode_tokens_per_s", "ttft_ms")
        for depth, value in (result.get(key) or {}).items()
    ]
    if is_number(result.get("peak_rss_bytes")):
        parts.append(f"peak memory: {with_unit(result['peak_rss_bytes'], 'MB', 1e6)}")
    return ", ".join(parts + [f"{key}: {result[key]}" for key in ("version", "install") if result.get(key)])


def _cell(value: Any) -> str:
    return number(value) if is_number(value) else MISSING
