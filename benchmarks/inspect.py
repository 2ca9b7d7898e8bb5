"""The verb `inspect`: a model's parts as a drawing, and what passes, attends and is chosen while it reads a text."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError
from sportsllm.results import Result

if TYPE_CHECKING:
    from benchmarks.report.charts import Chart

_PAGES = (".html", ".htm")
_TRACED_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class InspectResult(Result):
    """What a model consists of, and what was seen of a run.

    Attributes:
        model: as it was given.
        parameters: of the whole model.
        blocks: of each group of layers with the same parts its `layers` and the `parameters` of one.
        out: the drawing.
        attention: see `benchmarks.inspection.attention.measure_attention`.
        experts: see `benchmarks.inspection.experts.measure_experts`.
        trace: see `benchmarks.inspection.trace.trace_model`.
    """

    model: str
    parameters: int
    blocks: list[dict[str, Any]] = field(default_factory=list)
    out: Path | None = None
    attention: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None
    trace: dict[str, Any] | None = None


def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint, an export, or a preset.", show_default=False),
        options.BY_NAME,
    ],
    *,
    text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Run the model on this text: every tensor that passes, attention maps."),
    ] = None,
    experts: Annotated[
        list[str] | None,
        typer.Option(metavar="[KIND=]FILE", help="Count the experts that a kind of text is sent to; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Drawing to write: .html, or .svg for the parts alone.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="List the tensors of every block, not of every third.")] = False,
) -> InspectResult:
    """Draw a model's parts; on a text also show its tensors, attention maps and the use of experts."""
    from benchmarks.inspection.experts import expert_chart, measure_experts, parse_kinds
    from benchmarks.inspection.parts import describe_model
    from benchmarks.predict.plan import read_model
    from sportsllm.files import atomic_write_text
    from sportsllm.inference.decoder import is_onnx_directory

    _check(out, text, experts)
    kinds = parse_kinds(experts or [])
    config, directory = read_model(model)
    described = describe_model(config)
    found: dict[str, Any] = {}
    charts: list[Chart] = []
    if directory is None and (text is not None or kinds):
        raise UsageError(f"--text and --experts run the model, and {model} is a preset; give a checkpoint")
    exported = directory is not None and is_onnx_directory(directory)
    if exported and kinds:
        raise UsageError(f"--experts runs PyTorch, and {model} is an export; give its checkpoint")
    if directory is not None and text is not None:
        from benchmarks.inspection.trace import trace_model

        length = min(_TRACED_TOKENS, config.max_position_embeddings)
        found["trace"] = trace_model(directory, text, length, all)
    if directory is not None and (kinds or (text is not None and not exported)):
        from sportsllm.formats.checkpoint import load_checkpoint

        opened = load_checkpoint(directory)
        if text is not None:
            from benchmarks.inspection.attention import attention_charts, measure_attention

            found["attention"], weights = measure_attention(opened, directory, text)
            charts += attention_charts(found["attention"], weights) if out is not None else []
        if kinds:
            found["experts"] = measure_experts(opened, directory, kinds)
            charts.append(expert_chart(found["experts"]))
    if out is not None:
        from benchmarks.inspection.drawing import draw_model

        name = model if directory is None else directory.resolve().name
        drawing = draw_model(described, name)
        atomic_write_text(out, drawing if out.suffix.lower() == ".svg" else _page(name, drawing, charts, found))
    blocks = [{"layers": list(block.layers), "parameters": block.parameters} for block in described.blocks]
    result = InspectResult(model=model, parameters=described.parameters, blocks=blocks, out=out, **found)
    _print(result)
    return result


def _check(out: Path | None, text: str | None, experts: list[str] | None) -> None:
    suffix = None if out is None else out.suffix.lower()
    if suffix not in (None, ".svg", *_PAGES):
        raise UsageError(f"--out {out}: the suffix names no format; end it in .html or .svg")
    if suffix == ".svg" and (text is not None or experts):
        raise UsageError(f"--out {out}: an SVG shows the parts alone; end it in .html for --text or --experts")
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("--text is not valid UTF-8") from None


def _page(title: str, drawing: str, charts: list[Chart], found: Mapping[str, Any]) -> str:
    """A page of the drawing, and of the charts if there are some; a device has no library for templates."""
    if not charts:
        head = f'<meta charset="utf-8"><title>{html.escape(title)}</title>'
        return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{drawing}</body></html>\n'
    from markupsafe import Markup

    from benchmarks.inspection.attention import attention_rows
    from benchmarks.report.page import render_page

    attention = found.get("attention")
    return render_page(
        "inspect.html",
        charts,
        title=title,
        drawing=Markup(drawing),
        shown=charts,
        attention=attention,
        heads=None if attention is None else _heads_table(attention_rows(attention)),
        experts=found.get("experts"),
    )


def _print(result: InspectResult) -> None:
    from benchmarks.inspection.attention import attention_rows
    from benchmarks.inspection.experts import expert_rows
    from sportsllm.console import output, table
    from sportsllm.models.feed_forward_kinds import unused_line

    console = output()
    for block in result.blocks:
        layers = block["layers"]
        which = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers from {layers[0]}"
        console.print(f"{which}: {block['parameters']:,} parameters each", markup=False)
    console.print(f"{result.model}: {result.parameters:,} parameters", markup=False)
    if result.trace is not None:
        trace = result.trace
        rows = [
            (one["name"], " x ".join(f"{size:,}" for size in one["shape"]) or "1", one["type"], f"{one['bytes']:,}")
            for one in trace["tensors"]
        ]
        rows.append(("all blocks together", f"{trace['count']:,} tensors", "", f"{trace['bytes']:,}"))
        which = "" if trace["every_block"] else ", every third block (--all lists all)"
        title = f"tensors on {trace['tokens']:,} tokens{which}"
        console.print(table(("tensor", "shape", "type", "bytes"), rows, (0, 1, 2), title))
        console.print(f"largest: {trace['largest']['name']}, {trace['largest']['bytes']:,} bytes", markup=False)
    if result.attention is not None:
        heads = _heads_table(attention_rows(result.attention))
        title = f"attention on {len(result.attention['tokens'])} tokens"
        console.print(table(heads.headers, heads.rows, heads.texts, title))
        if without := result.attention["layers_without_attention"]:
            console.print(f"layers without attention over all tokens: {', '.join(map(str, without))}", markup=False)
    if result.experts is not None:
        headers = ("layer", "kind of text", "tokens", "even share", "most used", "least used")
        console.print(table(headers, expert_rows(result.experts), (1,), "use of experts (--json has every share)"))
        line = unused_line({layer["layer"]: layer["never_used"] for layer in result.experts["layers"]})
        if line is not None:
            console.print(line, markup=False)
    if result.out is not None:
        console.print(f"{result.out}: drawn", markup=False)


def _heads_table(rows: list[tuple[str, ...]]) -> Any:
    from benchmarks.inspection.attention import FIGURES
    from benchmarks.report.text import Table

    headers = ("layer", "head", *(header for header, _ in FIGURES.values()), "attends most to")
    return Table("Heads", headers, rows, texts=(2 + len(FIGURES),))
