"""The verb `inspect`: a drawing of a model's parts, and its attention on a text."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError
from sportsllm.results import Result

if TYPE_CHECKING:
    from benchmarks.reporting.charts import Chart


@dataclass(frozen=True, kw_only=True)
class InspectResult(Result):
    """The parts of a model, and its attention on a text.

    Attributes:
        model: the model as it was named.
        parameters: parameters of the whole model.
        blocks: groups of layers with the same parts: indices (`layers`), and `parameters` of one layer.
        out: path of the page.
        attention: see `benchmarks.inspection.attention.measure_attention`.
    """

    model: str
    parameters: int
    blocks: list[dict[str, Any]] = field(default_factory=list)
    out: Path | None = None
    attention: dict[str, Any] | None = None


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
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="New page: parts and attention.")] = None,
) -> InspectResult:
    """Draw a model's parts, and show its attention on a text."""
    from benchmarks.inspection.attention import attention_chart, measure_attention
    from benchmarks.inspection.drawing import describe_model, draw_model
    from benchmarks.plan import read_model
    from sportsllm.files import atomic_write_text, require_new
    from sportsllm.formats.manifest import plain_name
    from sportsllm.inference.decoder import is_onnx_directory

    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: the drawing is a page; end it in .html")
    if out is not None:
        require_new(out)
    if text is not None and text.encode("utf-8", "replace").decode() != text:
        raise UsageError("--text is not valid UTF-8")
    config, directory = read_model(model)
    attention: dict[str, Any] | None = None
    charts: list[Chart] = []
    if text is not None:
        if directory is None or is_onnx_directory(directory):
            what = "a preset" if directory is None else "an export"
            raise UsageError(f"--text runs PyTorch, and {model} is {what}; give a checkpoint")
        from sportsllm.formats.checkpoint import load_checkpoint

        attention, weights = measure_attention(load_checkpoint(directory), directory, text)
        charts += [attention_chart(attention, weights)] if out is not None else []
    if out is not None:
        name = model if directory is None else plain_name(directory)
        atomic_write_text(out, _page(name, draw_model(config), charts))
    blocks = [{"layers": each.layers, "parameters": each.parameters} for each in describe_model(config).blocks]
    result = InspectResult(model=model, parameters=config.parameters, blocks=blocks, out=out, attention=attention)
    _print(result)
    return result


def _page(title: str, drawing: str, charts: list[Chart]) -> str:
    """A page of the drawing and any charts. Without charts it needs no template library, which devices lack."""
    if not charts:
        name = html.escape(title)
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
        body = f'<main><h1 style="font: 600 24px system-ui, sans-serif; margin: 0 1rem">{name}</h1>{drawing}</main>'
        return f'<!DOCTYPE html>\n<html lang="en" style="color-scheme: light dark">{head}<body>{body}</body></html>\n'
    from markupsafe import Markup

    from benchmarks.reporting.charts import render_page

    return render_page("inspect.html", charts, title=title, shown=charts, drawing=Markup(drawing))


def _print(result: InspectResult) -> None:
    from sportsllm.console import output

    lines = [f"{result.model}: {result.parameters:,} parameters"]
    for block in result.blocks:
        lines.append(f"layers {', '.join(map(str, block['layers']))}: {block['parameters']:,} parameters each")
    if result.attention is not None and (without := result.attention["layers_without_attention"]):
        lines.append(f"layers without attention over all tokens: {', '.join(map(str, without))}")
    drawing = "--out FILE.html draws it" + " with its attention" * (result.attention is not None)
    for line in [*lines, f"{result.out}: drawn" if result.out else drawing]:
        output().print(line)
