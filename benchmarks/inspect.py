"""The verb `inspect`: a model's parts as a drawing, and what it attends to and which experts it uses on a text."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError
from sportsllm.results import Result
from sportsllm.settings import TEXT, parse_settings

if TYPE_CHECKING:
    from benchmarks.reporting.charts import Chart


@dataclass(frozen=True, kw_only=True)
class InspectResult(Result):
    """The parts of a model, and its attention and experts on a text.

    Attributes:
        model: the model as it was named.
        parameters: parameters of the whole model.
        blocks: groups of layers with the same parts: indices (`layers`), and `parameters` of one layer.
        out: path of the page.
        attention: see `benchmarks.inspection.on_text.measure_attention`.
        experts: see `benchmarks.inspection.on_text.measure_experts`.
    """

    model: str
    parameters: int
    blocks: list[dict[str, Any]] = field(default_factory=list)
    out: Path | None = None
    attention: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None


def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint, an export, or a preset.", show_default=False),
        options.BY_NAME,
    ],
    *,
    text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Show which tokens of this text each head attends to.")
    ] = None,
    experts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Show how this text's tokens are spread over the experts; may be repeated."),
        options.READS_TEXT,
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Page to write: the parts, and charts.")] = None,
    settings: options.Settings = None,
) -> InspectResult:
    """Draw a model's parts, and show its attention and experts on a text."""
    from benchmarks.inspection import on_text
    from benchmarks.inspection.drawing import describe_model, draw_model
    from benchmarks.plan import read_model
    from sportsllm.files import atomic_write_text
    from sportsllm.inference.decoder import is_onnx_directory
    from sportsllm.text.reading import take_reading

    rare = parse_settings(settings, TEXT)
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: the drawing is a page; end it in .html")
    if text is not None and text.encode("utf-8", "replace").decode() != text:
        raise UsageError("--text is not valid UTF-8")
    config, directory = read_model(model)
    found: dict[str, Any] = {}
    charts: list[Chart] = []
    if text is not None or experts:
        if directory is None or is_onnx_directory(directory):
            what = "a preset" if directory is None else "an export"
            raise UsageError(f"--text and --experts run PyTorch, and {model} is {what}; give a checkpoint")
        from sportsllm.formats.checkpoint import load_checkpoint

        opened = load_checkpoint(directory)
        if text is not None:
            found["attention"], weights = on_text.measure_attention(opened, directory, text)
            charts += [on_text.attention_chart(found["attention"], weights)] if out is not None else []
        if experts:
            found["experts"] = on_text.measure_experts(opened, directory, experts, take_reading(rare, directory))
            charts.append(on_text.expert_chart(found["experts"]))
    if out is not None:
        name = model if directory is None else directory.resolve().name
        atomic_write_text(out, _page(name, draw_model(config, name), charts))
    blocks = [{"layers": each.layers, "parameters": each.parameters} for each in describe_model(config).blocks]
    result = InspectResult(model=model, parameters=config.parameters, blocks=blocks, out=out, **found)
    _print(result)
    return result


def _page(title: str, drawing: str, charts: list[Chart]) -> str:
    """A page of the drawing, and of the charts if there are some; a device has no library for templates."""
    if not charts:
        head = (
            f'<meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>{html.escape(title)}</title>'
        )
        return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{drawing}</body></html>\n'
    from markupsafe import Markup

    from benchmarks.reporting.charts import render_page

    return render_page("inspect.html", charts, title=title, shown=charts, drawing=Markup(drawing))


def _print(result: InspectResult) -> None:
    from benchmarks.inspection.on_text import expert_table
    from sportsllm.console import output
    from sportsllm.models.parts import unused_line

    lines = [f"{result.model}: {result.parameters:,} parameters"]
    for block in result.blocks:
        first, *others = block["layers"]
        which = f"{1 + len(others)} layers from {first}" if others else f"layer {first}"
        lines.append(f"{which}: {block['parameters']:,} parameters each")
    if result.attention is not None:
        lines.append("attention: --out FILE.html draws a map of each head, --json has its figures")
        if without := result.attention["layers_without_attention"]:
            lines.append(f"layers without attention over all tokens: {', '.join(map(str, without))}")
    if result.experts is not None:
        expert_table(result.experts).print(output())
        unused = unused_line({layer["layer"]: layer["never_used"] for layer in result.experts["layers"]})
        lines += [unused] if unused else []
    for line in [*lines, f"{result.out}: drawn"] if result.out else lines:
        output().print(line, markup=False)
