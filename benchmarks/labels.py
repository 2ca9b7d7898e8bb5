"""The limits of a budget and numbers as words, shared by console and report. Imports no other room."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

BUDGET_DEPTH = 512
"""Tokens before the one whose time a budget limits."""
MISSING = "\u2013"
RATIOS = {"against_ratios": "best peer", "against_tuned_ratios": "best peer, options of its own included"}
"""The keys of a bench result that hold ratios to other runtimes, and the runtimes they are to."""


@dataclass(frozen=True)
class Limit:
    """One limit of a budget.

    Attributes:
        unit: of its values.
        label: its name in a sentence or a row.
        title: its name with unit in the head of a column.
        note: at what it is measured.
    """

    unit: str
    label: str
    title: str
    note: str


LIMITS = {
    "file_mb": Limit("MB", "File size", "file MB", "graph and weights"),
    "peak_memory_mb": Limit("MB", "Peak memory", "memory MB", "of the process, 1,024 tokens of context"),
    "ttft_ms": Limit("ms", "Time to first token", "TTFT ms", "prompt of 512 tokens"),
    "tpot_p50_ms": Limit("ms", "Median time per token", "TPOT p50 ms", f"after {BUDGET_DEPTH} tokens"),
    "tpot_p95_ms": Limit("ms", "95th-percentile time per token", "TPOT p95 ms", f"after {BUDGET_DEPTH} tokens"),
    "quality_loss_percent": Limit("%", "Quality loss", "loss %", "bits per byte over the fp32 teacher's"),
}


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
    """Whether a record holds a finite number; True and False do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def short_depth(budget: Mapping[str, Any]) -> int | None:
    """The depth of the time per token where the model's context has no room for the limit's 512 tokens, else None."""
    depth = budget.get("tpot_depth_tokens")
    return int(depth) if is_number(depth) and 0 < depth < BUDGET_DEPTH else None
