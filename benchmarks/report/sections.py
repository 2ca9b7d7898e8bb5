"""The page from top to bottom: sections of charts, tables and notes, or of what is missing for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.labels import Table, bench_tables
from benchmarks.report.changes import change_plots, change_table, changes
from benchmarks.report.charts import Plot, training_plots
from benchmarks.report.inputs import Inputs
from benchmarks.report.memory import memory_plot
from benchmarks.report.roofline import roofline
from benchmarks.report.search_results import fit_tables
from benchmarks.report.speed import speed_plots
from benchmarks.report.trade_off import pareto_plots


@dataclass(frozen=True)
class Section:
    """One heading of the page. A plot is a figure, or says what is missing for it and which command supplies that."""

    identifier: str
    title: str
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def sections(inputs: Inputs) -> list[Section]:
    """All sections between the stages' table and the samples."""
    bench = inputs.deciding
    found = changes(inputs)
    table = change_table(found)
    return [
        Section(
            "trade-off",
            "Quality, size and speed",
            pareto_plots(inputs),
            fit_tables(inputs.fits, len(inputs.stages) + 1),
        ),
        Section("changes", "What each stage changed", change_plots(found), [table] if table else []),
        Section("speed", "Speed", speed_plots(inputs.stages, bench), bench_tables(bench)),
        Section("memory", "Memory and roofline", [memory_plot(inputs.stages, bench), roofline(inputs.stages, bench)]),
        Section("training", "Training", training_plots(inputs.stages)),
    ]
