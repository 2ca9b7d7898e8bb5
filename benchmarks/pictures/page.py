"""`plan --draw`, `--attention`, `--experts`: pictures of a model as an SVG or a page, and the figures behind them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.pictures.attention import (
    attention_charts,
    attention_table,
    measure_attention,
    print_attention,
    without_line,
)
from benchmarks.pictures.blocks import describe_model
from benchmarks.pictures.drawing import draw_model
from benchmarks.pictures.experts import expert_chart, measure_experts, never_used, parse_kinds, print_experts
from benchmarks.predict.plan import parameter_count, read_model
from benchmarks.report.page import render_page
from sportsllm.errors import UsageError
from sportsllm.files import atomic_write_text
from sportsllm.inference.decoder import is_onnx_directory
from sportsllm.models.experts import unused_line
from sportsllm.models.presets import PLANNED

if TYPE_CHECKING:
    from sportsllm.models.language_model import SportsLLM

_SVG, _PAGES = ".svg", (".html", ".htm")
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  html {{ color-scheme: light dark; background: #fff; }}
  body {{ margin: 0 auto; width: max-content; }}
  @media screen and (prefers-color-scheme: dark) {{ html {{ background: #14181c; }} }}
  @media print {{ body {{ width: auto; }} svg {{ max-width: 100%; height: auto; }} }}
</style>
</head>
<body>{drawing}</body>
</html>
"""
"""The page of a drawing alone: a device has no library for templates."""


def take_pictures(
    model: str, draw: Path | None, attention: str | None, experts: Sequence[str] | None
) -> dict[str, Any]:
    """Measure what the pictures show and write them.

    Args:
        model: a shape's name, a checkpoint or an export; attention and experts need a checkpoint, which is run.
        draw: a new or old .svg or .html file; a drawing of the parts, and in a page the charts of the others.
        attention: a text, for `measure_attention`.
        experts: texts by kind, for `parse_kinds`.

    Returns:
        What was asked for of `drawing` (`out`, `parameters`, and by block `layers` and `parameters`), `attention` and
        `experts`.

    Raises:
        UsageError: a file of another suffix, or a model or text that is not possible.
        ArtifactError: the model or a text is missing or damaged.
        ModuleNotFoundError: torch is not installed, or for a page with charts jinja2 or plotly.
    """
    suffix = None if draw is None else draw.suffix.lower()
    if suffix not in (None, _SVG, *_PAGES):
        raise UsageError(f"--draw {draw}: the suffix names no format; end it in .html or .svg")
    if suffix == _SVG and (attention is not None or experts):
        raise UsageError(f"--draw {draw}: an SVG shows the parts alone; end it in .html for --attention or --experts")
    kinds = parse_kinds(experts or [])
    if parameter_count(model) is not None and model not in PLANNED and not Path(model).is_dir():
        raise UsageError(f"model {model!r}: a number of parameters has no parts to draw; give a shape or a checkpoint")
    config, directory = read_model(model)
    result: dict[str, Any] = {}
    charts, values = [], dict[str, Any]()
    if attention is not None or kinds:
        opened, path = _open(model, directory)
        if attention is not None:
            result["attention"], weights = measure_attention(opened, path, attention)
            charts += attention_charts(result["attention"], weights)
            values["attention"] = {"charts": charts[:], "table": attention_table(result["attention"])}
            values["attention"]["without"] = without_line(result["attention"])
            values["attention"] |= {key: result["attention"][key] for key in ("text", "tokens")}
        if kinds:
            result["experts"] = measure_experts(opened, path, kinds)
            charts.append(expert_chart(result["experts"]))
            values["experts"] = {"chart": charts[-1], "unused": unused_line(never_used(result["experts"]))}
            values["experts"]["kinds"] = result["experts"]["kinds"]
    if draw is not None:
        described = describe_model(config)
        name = model if directory is None else directory.resolve().name
        drawing = draw_model(described, name)
        if charts:
            drawing = _page_with_charts(name, drawing, charts, values)
        elif suffix != _SVG:
            drawing = _PAGE.format(title=html.escape(name), drawing=drawing)
        atomic_write_text(draw, drawing)
        blocks = [{"layers": list(block.layers), "parameters": block.parameters} for block in described.blocks]
        result["drawing"] = {"out": str(draw), "parameters": described.parameters, "blocks": blocks}
    return result


def print_pictures(console: Console, result: dict[str, Any]) -> None:
    """The figures, and where the pictures are."""
    if "attention" in result:
        print_attention(console, result["attention"])
    if "experts" in result:
        print_experts(console, result["experts"])
    if "drawing" in result:
        console.print(f"{result['drawing']['out']}: drawn", markup=False)


def _open(model: str, directory: Path | None) -> tuple[SportsLLM, Path]:
    """The checkpoint that --attention and --experts run."""
    from sportsllm.formats.checkpoint import load_checkpoint

    if directory is None:
        raise UsageError(f"--attention and --experts run the model, and {model} is no directory; give a checkpoint")
    if is_onnx_directory(directory):
        raise UsageError(
            f"--attention and --experts look into PyTorch, and {directory} is an export; give its checkpoint"
        )
    return load_checkpoint(directory), directory


def _page_with_charts(title: str, drawing: str, charts: list[Any], values: dict[str, Any]) -> str:
    from markupsafe import Markup

    given = {"attention": None, "experts": None} | values
    return render_page("pictures.html", charts, title=title, drawing=Markup(drawing), **given)
