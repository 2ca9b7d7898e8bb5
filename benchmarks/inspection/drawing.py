"""A model's parts as an SVG: boxes in rows along the residual stream, from token ids to logits. Sizes in pixels.

Needs the standard library alone, so that a device draws too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.inspection.parts import Block, Drawing, Part, Row, Sublayer

_GAP, _ROW_GAP, _LINE, _PADDING = 16, 30, 17, 9
_STREAM, _LEFT, _MARGIN = 64, 108, 24  # x of the residual stream, of the boxes in a block, and the margin
_LETTER, _LEAST, _WIDEST_ROW = 8.5, 132, 1_080  # of a name's letter, which no common font exceeds by much
_LEGEND = {
    "matrix": "matrix, outputs \u00d7 inputs",
    "table": "embedding, head",
    "norm": "norm",
    "activation": "tensor on the way",
    "cache": "kept for later tokens",
}
_STYLE = Path(__file__).parents[1] / "templates" / "drawing.css"


class _Canvas:
    """An SVG that is written from top to bottom; `y` is where the next thing goes."""

    def __init__(self, width: float) -> None:
        self.svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "blocks", "role": "img"})
        self.width, self.y = width, float(_MARGIN)

    def add(self, tag: str, words: str | None = None, **attributes: float | str) -> ElementTree.Element:
        given = {
            key.rstrip("_"): value if isinstance(value, str) else f"{value:g}" for key, value in attributes.items()
        }
        child = ElementTree.SubElement(self.svg, tag, given)
        child.text = words
        return child

    def line(self, words: str, cls: str = "quiet", x: float = _MARGIN, height: float = 22) -> None:
        self.y += height
        self.add("text", words, class_=cls, x=x, y=self.y - 6)

    def box(self, part: Part, x: float, width: float, height: float) -> None:
        self.add(
            "rect", class_=part.role, x=x, y=self.y, width=width, height=height, rx=12 if part.role == "norm" else 4
        )
        lines = _lines(part)
        first = self.y + (height - len(lines) * _LINE) / 2 + 13
        for at, (words, cls) in enumerate(lines):
            middle = {"text-anchor": "middle"}
            self.add("text", words, class_=cls, x=x + width / 2, y=first + at * _LINE, **middle)

    def row(self, row: Row, left: float) -> None:
        """Boxes side by side, in as many lines as they need."""
        width, fit = _box_width(row), _fit(row)
        for start in range(0, len(row), fit):
            line = row[start : start + fit]
            height = max(len(_lines(part)) for part in line) * _LINE + 2 * _PADDING
            for at, part in enumerate(line):
                self.box(part, left + at * (width + _GAP), width, height)
            self.y += height + _GAP
        self.y -= _GAP

    def arrow(self, x: float) -> None:
        """Down to what follows."""
        end = self.y + _ROW_GAP
        self.add("path", class_="line", d=f"M{x:g} {self.y:g}V{end - 7:g}")
        self.add("path", class_="tip", d=f"M{x:g} {end:g}L{x - 4:g} {end - 8:g}L{x + 4:g} {end - 8:g}Z")
        self.y = end


def draw_model(drawing: Drawing, name: str) -> str:
    """The SVG of a described model, whole and without anything to load; `name` is its heading."""
    width = (
        _MARGIN * 3
        + _LEFT
        + max(_row_width(row) for block in drawing.blocks for each in block.sublayers for row in each.rows)
    )
    canvas = _Canvas(max(width, 720))
    canvas.add("title", f"{name}: {drawing.parameters:,} parameters")
    canvas.add("style", _STYLE.read_text(encoding="utf-8"))
    canvas.add("rect", class_="page", width="100%", height="100%")
    canvas.line(name, "title", height=24)
    layers = sum(len(block.layers) for block in drawing.blocks)
    said = f"{drawing.parameters:,} parameters, {layers} layers, residual stream of {drawing.hidden:,}; T tokens"
    canvas.line(said)
    canvas.line("token ids: T")
    canvas.row(drawing.before, _MARGIN)
    for block in drawing.blocks:
        canvas.arrow(_STREAM)
        _block(canvas, block)
    canvas.arrow(_STREAM)
    canvas.row(drawing.after, _MARGIN)
    canvas.line(f"logits: T \u00d7 {drawing.after[-1].shape.partition(' ')[0]}", height=26)
    canvas.y += 14
    for at, (cls, words) in enumerate(_LEGEND.items()):
        canvas.y += 22 * (at > 0)
        canvas.add("rect", class_=cls, x=_MARGIN, y=canvas.y, width=16, height=12, rx=3)
        canvas.add("text", words, class_="quiet", x=_MARGIN + 24, y=canvas.y + 10.5)
    canvas.line("Bare figures are parameters, biases included.", height=40)
    canvas.svg.set("viewBox", f"0 0 {canvas.width:g} {canvas.y + _MARGIN:g}")
    canvas.svg.set("width", f"{canvas.width:g}")
    canvas.svg.set("height", f"{canvas.y + _MARGIN:g}")
    return ElementTree.tostring(canvas.svg, encoding="unicode")


def _block(canvas: _Canvas, block: Block) -> None:
    """The frame of layers with the same parts."""
    top, count = canvas.y, len(block.layers)
    frame = canvas.add("rect", class_="frame", x=_MARGIN, y=top, width=canvas.width - 2 * _MARGIN, rx=8)
    stream = canvas.add("path", class_="stream")
    called = f"layer {block.layers[0]}" if count == 1 else f"layers {_numbers(block.layers)}, drawn once"
    total = f"{block.parameters:,} parameters" + (f" each, {count * block.parameters:,} together" if count > 1 else "")
    canvas.line(f"{called}: {total}", "head", _LEFT, 28)
    for words, layers in block.types:
        canvas.line(f"attention: {words}" + (f", layers {_numbers(layers)}" if len(block.types) > 1 else ""), x=_LEFT)
    for each in block.sublayers:
        _sublayer(canvas, each)
    canvas.y += 12
    frame.set("height", f"{canvas.y - top:g}")
    stream.set("d", f"M{_STREAM} {top:g}V{canvas.y:g}")


def _sublayer(canvas: _Canvas, each: Sublayer) -> None:
    """From the stream through norm and rows, and back by a sum."""
    active = f", {each.active:,} for a token" if each.active != each.parameters else ""
    canvas.line(f"{each.name}: {each.kind}, {each.parameters:,} parameters{active}", "half", _LEFT, 30)
    if each.kept:
        canvas.line(f"kept for later tokens: {each.kept}", x=_LEFT)
    for at, row in enumerate(each.rows):
        if at:
            canvas.arrow(_LEFT + _box_width(row) / 2)
        canvas.row(row, _LEFT)
        if not at:
            canvas.add("path", class_="line", d=f"M{_STREAM} {canvas.y - 20:g}H{_LEFT}")
    canvas.y += 22
    canvas.add("path", class_="line", d=f"M{_LEFT + 30} {canvas.y - 22:g}V{canvas.y:g}H{_STREAM}")
    canvas.add("circle", class_="sum", cx=_STREAM, cy=canvas.y, r=10)
    middle = {"text-anchor": "middle"}
    canvas.add("text", "+", class_="head", x=_STREAM, y=canvas.y + 5.5, **middle)
    canvas.y += 12


def _lines(part: Part) -> list[tuple[str, str]]:
    """The text in a box, and the class of each line."""
    found = [(words, "name") for words in textwrap.wrap(part.name, 20, break_long_words=False)] + [(part.shape, "")]
    if part.times > 1:
        found.append((f"{part.times} alike, {part.total:,} together", "quiet"))
    if part.parameters:
        found.append((f"{part.parameters:,}", "quiet"))
    return found + ([(part.note, "quiet")] if part.note not in ("", "around") else [])


def _box_width(row: Row) -> float:
    """All boxes of a row are as wide as its widest."""
    widths = [len(words) * (_LETTER if cls == "name" else 7.4) for part in row for words, cls in _lines(part)]
    return max(_LEAST, *widths) + 2 * _PADDING


def _fit(row: Row) -> int:
    return max(1, int((_WIDEST_ROW + _GAP) // (_box_width(row) + _GAP)))


def _row_width(row: Row) -> float:
    return min(len(row), _fit(row)) * (_box_width(row) + _GAP)


def _numbers(layers: Sequence[int]) -> str:
    """0-4, 6-10: consecutive layers as ranges."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1][-1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(f"{first}" if first == last else f"{first}\u2013{last}" for first, last in ranges)
