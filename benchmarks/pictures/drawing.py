"""The drawing of a model's blocks as an SVG: boxes in rows along the residual stream, from token ids to logits.

Needs nothing but the standard library, so that a device draws too. Sizes are in pixels.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.pictures.blocks import Block, Drawing, Group, Part, Row, Sublayer
from benchmarks.pictures.svg import Element, add, path, text, tip

_BOX_GAP, _ROW_GAP, _LINE, _PADDING = 16, 30, 17, 9
_STREAM, _INSET, _MARGIN = 40, 84, 24  # the residual stream's x in a block, where its boxes begin, and around all
_LETTER = {"name": 8.5, "head": 10.0, "small": 7.4}  # widths of a letter that no common font exceeds by much
_LEAST_BOX, _MOST_ROW = 132, 1_080
_HEADER = 34
_LONGEST_NAME = 20
_LEGEND = (
    ("matrix", "matrix, outputs \u00d7 inputs"),
    ("table", "embedding, head"),
    ("norm", "norm"),
    ("activation", "tensor on the way"),
    ("cache", "kept for later tokens"),
)
_STYLE = Path(__file__).parents[1] / "templates" / "drawing.css"


def draw_model(drawing: Drawing, name: str) -> str:
    """The SVG of a described model, whole and without anything to load.

    Args:
        drawing: of `benchmarks.pictures.blocks.describe_model`.
        name: of the model, for the heading.
    """
    content = max(_block_width(block) for block in drawing.blocks)
    width = round(_MARGIN * 2 + _INSET + content + _MARGIN)
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "blocks", "role": "img"})
    add(svg, "title", f"{name}: {drawing.parameters:,} parameters")
    add(svg, "style", _STYLE.read_text(encoding="utf-8"))
    add(svg, "rect", cls="page", width="100%", height="100%")
    layers = sum(len(block.layers) for block in drawing.blocks)
    y = text(svg, name, _MARGIN, _MARGIN + 16, "title")
    said = f"{drawing.parameters:,} parameters, {layers} layers, residual stream of {drawing.hidden:,}"
    y = text(svg, f"{said}; T tokens", _MARGIN, y + 16, "quiet") + 14
    stream = _MARGIN + _STREAM
    y = _ends(svg, drawing.before, "\u2190 token ids: T", y, width)
    for block in drawing.blocks:
        path(svg, "stream", (stream, y), (stream, y + _ROW_GAP))
        y = _block(svg, block, y + _ROW_GAP, width)
    path(svg, "stream", (stream, y), (stream, y + _ROW_GAP))
    y = _ends(
        svg, drawing.after, f"\u2192 logits: T \u00d7 {drawing.after[-1].shape.partition(' ')[0]}", y + _ROW_GAP, width
    )
    y = _legend(svg, y + 26, width)
    svg.set("viewBox", f"0 0 {width} {round(y)}")
    svg.set("width", str(width))
    svg.set("height", str(round(y)))
    return ElementTree.tostring(svg, encoding="unicode")


def _ends(svg: Element, parts: Sequence[Part], words: str, y: float, width: float) -> float:
    """The parts before or after the blocks, side by side beside the stream, and what goes in or comes out."""
    box = max(map(_box_width, parts))
    tall = max(map(_box_height, parts))
    x = float(_MARGIN)
    for place, part in enumerate(parts):
        _box(svg, part, x, y, box, tall)
        if place:
            joined = "+" if part.name == "embed_positions" else "\u2192"
            text(svg, joined, x - _BOX_GAP, y + tall / 2 + 5, "head", "middle")
        x += box + 2 * _BOX_GAP
    text(svg, words, x - _BOX_GAP, y + tall / 2 + 5, "quiet")
    return y + tall


def _block(svg: Element, block: Block, y: float, width: float) -> float:
    """The frame of layers with the same parts."""
    frame = add(svg, "rect", cls="frame", x=_MARGIN, y=y, width=width - 2 * _MARGIN, rx=8)
    top, right = y, width - 2 * _MARGIN
    stream = _MARGIN + _STREAM
    called, total = _block_words(block)
    text(svg, called, _MARGIN + _INSET, y + 25, "head")
    text(svg, total, right, y + 25, "quiet", "end")
    y += _HEADER
    for words, layers in block.types if len(block.types) > 1 else ():
        y = text(svg, f"{len(layers)} {words}: {_numbers(layers)}", _MARGIN + _INSET, y + 12, "quiet")
    if len(block.types) == 1:
        y = text(svg, f"attention: {block.types[0][0]}", _MARGIN + _INSET, y + 12, "quiet")
    line = add(svg, "path", cls="stream")
    for half in block.halves:
        y = _half(svg, half, y + 12, width)
    line.set("d", f"M{stream} {top}V{y + 12}")
    frame.set("height", f"{y + 12 - top:g}")
    return y + 12


def _block_words(block: Block) -> tuple[str, str]:
    """Its layers and its parameters."""
    count, total = len(block.layers), f"{block.parameters:,} parameters"
    if count == 1:
        return f"layer {block.layers[0]}", total
    return f"layers {_numbers(block.layers)}, drawn once", f"{total} each, {count * block.parameters:,} together"


def _block_width(block: Block) -> float:
    called, total = _block_words(block)
    types = (f"{len(layers)} {words}: {_numbers(layers)}" for words, layers in block.types)
    lines = [len(called) * _LETTER["head"] + len(total) * _LETTER["small"] + _BOX_GAP]
    lines += [len(words) * _LETTER["small"] for words in types]
    return max(*lines, *map(_half_width, block.halves), _LEAST_BOX)


def _half(svg: Element, half: Sublayer, y: float, width: float) -> float:
    """One half of a block: from the stream through its norm and rows, and back by a sum."""
    stream, left, right = _MARGIN + _STREAM, _MARGIN + _INSET, width - 2 * _MARGIN
    middle = (left + right) / 2
    text(svg, f"{half.name}: {half.kind}", left, y + 16, "half")
    total = f"{half.parameters:,} parameters"
    total += f", {half.active:,} for a token" if half.active != half.parameters else ""
    text(svg, total, right, y + 16, "quiet", "end")
    y += 26
    if half.kept:
        y = text(svg, f"kept for later tokens: {half.kept}", left, y + 8, "quiet") + 6
    rows: list[Row] = [(half.before,), *half.rows, *([(half.after,)] if half.after else [])]
    above: list[tuple[float, float]] = []
    y += 6
    for place, row in enumerate(rows):
        lines = _wrapped(row)
        for line in lines:
            if above and line is lines[0]:
                paired = isinstance(line[0], Part) and len(line) == len(above)
                y = _arrows(svg, above, _places(line, middle), y, paired)
            tall = max(map(_height, line))
            for at, x in enumerate(_lefts(line, middle)):
                _draw(svg, line[at], x, y, max(map(_width, line)), tall)
            if place == 0:
                edge = _places(line, middle)[0] - _width(half.before) / 2
                path(svg, "line", (stream, y + tall / 2), (edge - 7, y + tall / 2))
                tip(svg, edge, y + tall / 2, "right")
            y += tall
            above = [(x, y) for x in _places(line, middle)]
            y += 0 if line is lines[-1] else _BOX_GAP
    return _back(svg, above, stream, y)


def _back(svg: Element, above: Sequence[tuple[float, float]], stream: float, y: float) -> float:
    """From the last row to the sum on the residual stream."""
    end = y + 26
    for x, bottom in above:
        path(svg, "line", (x, bottom), (x, end))
    path(svg, "line", (max(x for x, _ in above), end), (stream + 18, end))
    tip(svg, stream + 11, end, "left")
    add(svg, "circle", cls="sum", cx=stream, cy=end, r=10)
    text(svg, "+", stream, end + 5.5, "head", "middle")
    return end + 12


def _arrows(
    svg: Element, above: Sequence[tuple[float, float]], below: Sequence[float], y: float, paired: bool
) -> float:
    """Lines from the boxes of a row to those of the next, one to one or over a bar; returns where the next begins."""
    bottom, bar = y + _ROW_GAP, y + _ROW_GAP / 2
    if paired:
        for (x, end), to in zip(above, below, strict=True):
            path(svg, "line", (x, end), (x, bar), (to, bar), (to, bottom - 7))
    else:
        for x, end in above:
            path(svg, "line", (x, end), (x, bar))
        across = [*(x for x, _ in above), *below]
        path(svg, "line", (min(across), bar), (max(across), bar))
        for x in below:
            path(svg, "line", (x, bar), (x, bottom - 7))
    for x in below:
        tip(svg, x, bottom, "down")
    return bottom


def _draw(svg: Element, one: Part | Group, x: float, y: float, width: float, tall: float) -> None:
    if isinstance(one, Part):
        _box(svg, one, x, y, width, tall)
        return
    if one.times > 1:  # two more behind it
        for behind in (8, 4):
            add(svg, "rect", cls="group", x=x + behind, y=y + behind, width=width, height=tall, rx=6)
    add(svg, "rect", cls="group", x=x, y=y, width=width, height=tall, rx=6)
    each = one.total // one.times
    text(svg, f"{one.name}, {one.times} alike" if one.times > 1 else one.name, x + width / 2, y + 20, "name", "middle")
    said = f"{each:,} each, {one.total:,} together" if one.times > 1 else f"{each:,}"
    text(svg, said, x + width / 2, y + 38, "quiet", "middle")
    above: list[tuple[float, float]] = []
    y += 52
    for row in one.rows:
        if above:
            y = _arrows(svg, above, _places(row, x + width / 2), y, len(above) == len(row))
        high = max(map(_height, row))
        for part, left in zip(row, _lefts(row, x + width / 2), strict=True):
            _box(svg, part, left, y, max(map(_width, row)), high)
        y += high
        above = [(place, y) for place in _places(row, x + width / 2)]


def _box(svg: Element, part: Part, x: float, y: float, width: float, tall: float) -> None:
    add(svg, "rect", cls=part.role, x=x, y=y, width=width, height=tall, rx=4 if part.role != "norm" else 12)
    lines = _lines(part)
    first = y + (tall - len(lines) * _LINE) / 2 + 13
    for place, (words, cls) in enumerate(lines):
        text(svg, words, x + width / 2, first + place * _LINE, cls, "middle")


def _lines(part: Part) -> list[tuple[str, str]]:
    """The text in a box, and the class of each line."""
    found = [(words, "name") for words in textwrap.wrap(part.name, _LONGEST_NAME, break_long_words=False)] + [
        (part.shape, "")
    ]
    if part.parameters:
        found.append((f"{part.parameters:,}" + (f" {part.note}" if part.note == "with bias" else ""), "quiet"))
    found += [(f"then {norm.name}: {norm.parameters:,}", "quiet") for norm in part.norms]
    if part.note and part.note != "with bias":
        found.append((part.note, "quiet"))
    return found


def _box_width(part: Part) -> float:
    widths = [len(words) * _LETTER["name" if cls == "name" else "small"] for words, cls in _lines(part)]
    return max(_LEAST_BOX, *widths) + 2 * _PADDING


def _box_height(part: Part) -> float:
    return len(_lines(part)) * _LINE + 2 * _PADDING


def _width(one: Part | Group) -> float:
    if isinstance(one, Part):
        return _box_width(one)
    title = len(f"{one.total:,} each, {one.total:,} together") * _LETTER["small"]
    return max(title, *map(_row_width, one.rows)) + 2 * _BOX_GAP


def _height(one: Part | Group) -> float:
    if isinstance(one, Part):
        return _box_height(one)
    inner = sum(max(map(_height, row)) for row in one.rows) + _ROW_GAP * (len(one.rows) - 1)
    return 52 + inner + _BOX_GAP


def _row_width(row: Sequence[Part] | Sequence[Group]) -> float:
    """All boxes of a row are as wide as its widest."""
    return len(row) * max(map(_width, row)) + (len(row) - 1) * _BOX_GAP


def _wrapped(row: Row) -> list[Row]:
    """A row that is too wide in several lines."""
    fit = max(1, int((_MOST_ROW + _BOX_GAP) // (max(map(_width, row)) + _BOX_GAP)))
    return [row[start : start + fit] for start in range(0, len(row), fit)]


def _half_width(half: Sublayer) -> float:
    heads = (f"{half.name}: {half.kind} {half.parameters:,} parameters, {half.active:,} for a token", half.kept)
    words = max(len(line) * _LETTER["name"] for line in heads)
    return max(words, *(_row_width(line) for row in half.rows for line in _wrapped(row)), _box_width(half.before))


def _places(row: Sequence[Part] | Sequence[Group], middle: float) -> list[float]:
    """The middles of a row's boxes."""
    wide = max(map(_width, row))
    return [left + wide / 2 for left in _lefts(row, middle)]


def _lefts(row: Sequence[Part] | Sequence[Group], middle: float) -> list[float]:
    wide, first = max(map(_width, row)), middle - _row_width(row) / 2
    return [first + place * (wide + _BOX_GAP) for place in range(len(row))]


def _legend(svg: Element, y: float, width: float) -> float:
    x = float(_MARGIN)
    for cls, words in _LEGEND:
        wide = 24 + len(words) * _LETTER["small"] + 18
        if x + wide > width - _MARGIN and x > _MARGIN:
            x, y = float(_MARGIN), y + 22
        add(svg, "rect", cls=cls, x=x, y=y, width=16, height=12, rx=3)
        text(svg, words, x + 24, y + 10.5, "quiet")
        x += wide
    words = "Numbers alone are parameters, biases included."
    return text(svg, words, _MARGIN, y + 34, "quiet") + _MARGIN


def _numbers(layers: Sequence[int]) -> str:
    """0-4, 6-10: consecutive layers as ranges."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], layer]
        else:
            ranges.append([layer, layer])
    return ", ".join(f"{first}" if first == last else f"{first}\u2013{last}" for first, last in ranges)
