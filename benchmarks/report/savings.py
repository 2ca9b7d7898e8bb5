"""What the last measured model saves against the first one, and what that costs, in words.

Speeds are left out: two runs of `bench` at different times are no ratio. `bench --against` gives one, with an interval.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.labels import number
from benchmarks.report.inputs import StageSummary
from benchmarks.report.scores import Scored


def savings_line(stages: Sequence[StageSummary]) -> str | None:
    """The line that `report` ends with; None unless two of the stages were measured.

    Figures that one of the two lacks are left out, and so is a quality of another text.
    """
    measured = [stage for stage in stages if stage.bench is not None]
    if len(measured) < 2:
        return None
    first, last = measured[0], measured[-1]
    before, after = first.limit_metrics(), last.limit_metrics()

    def pair(name: str) -> tuple[float, float] | None:
        old, new = before[name], after[name]
        return (old, new) if old and new else None

    parts = []
    if size := pair("file_mb"):
        parts.append(f"{100 * size[1] / size[0]:.0f}% of the file ({number(size[1])} of {number(size[0])} MB)")
    if memory := pair("peak_memory_mb"):
        parts.append(f"{100 * memory[1] / memory[0]:.0f}% of the peak memory")
    if (quality := pair("bits_per_byte")) and Scored.of(first) == Scored.of(last):
        change = 100 * (quality[1] / quality[0] - 1)
        word = "more" if change > 0 else "fewer"
        parts.append(f"{abs(change):.1f}% {word} bits per byte ({quality[1]:.4f} against {quality[0]:.4f})")
    if not parts:
        return None
    outcome = "" if last.outcome is None else f"; verdict on its budget: {last.outcome}"
    return f"{last.name} against {first.name}: {', '.join(parts)}{outcome}"
