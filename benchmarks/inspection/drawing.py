"""A model's parts as HTML: boxes in rows along the residual stream, from token ids to logits.

It follows from the descriptions of attention and feed-forward kinds (`sportsllm/models/kinds.py`), so a new kind needs
no code here. Imports no torch and no templates, so that a device draws too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from sportsllm.models.config import SLIDING, ModelConfig
from sportsllm.models.description import NORMS, OUTPUT_NORMS, sublayers
from sportsllm.models.sublayer import HIDDEN, Activation, Matrix
from sportsllm.models.sublayer import Sublayer as Described

_EXPERT = re.compile(r"\.\d+\.")
_ROLES = {"activation": "activation", "cache": "cache", "state": "cache", "scores": "scores"}
_STYLE_AND_LEGEND = Path(__file__).parents[1] / "templates" / "drawing.html"


class Part(NamedTuple):
    """A box for `times` tensors alike of `parameters` each.

    `role` is a class of drawing.html; `shape` that of a matrix (rows, columns), or of a tensor for T tokens.
    """

    name: str
    role: str
    shape: str
    parameters: int = 0
    times: int = 1
    note: str = ""


Row = list[Part]


class Sublayer(NamedTuple):
    """Attention or feed-forward with its norms; a token is multiplied by `active` parameters."""

    name: str
    kind: str
    rows: list[Row]
    parameters: int
    active: int


class Block(NamedTuple):
    """Layers with the same parts."""

    layers: list[int]
    sublayers: list[Sublayer]

    @property
    def parameters(self) -> int:
        """Parameters of one of the layers."""
        return sum(each.parameters for each in self.sublayers)


class Drawing(NamedTuple):
    """A whole model from token ids to logits."""

    before: Row
    blocks: list[Block]
    after: Row


def describe_model(config: ModelConfig) -> Drawing:
    """The parts of a model, layers with the same parts once."""
    alike: dict[ModelConfig, list[int]] = {}
    for layer in range(config.num_hidden_layers):
        alike.setdefault(config.of_layer(layer), []).append(layer)
    hidden, shape = config.hidden_size, sizes(config.vocab_size, config.hidden_size)
    scaled = "" if config.embedding_scale == 1.0 else f"rows times {config.embedding_scale:g}"
    before = [Part("embed_tokens", "table", shape, config.vocab_size * hidden, note=scaled)]
    if config.positions:
        positions, note = sizes(config.positions, hidden), "added, by position"
        before.append(Part("embed_positions", "table", positions, config.positions * hidden, note=note))
    head = before[0]._replace(name="lm_head", note="")
    if config.tie_word_embeddings:
        head = head._replace(parameters=0, note="the matrix of embed_tokens")
    blocks = [Block(layers, _sublayers(own)) for own, layers in alike.items()]
    return Drawing(before, blocks, [_norm(config, "norm"), head])


def _sublayers(config: ModelConfig) -> list[Sublayer]:
    made = []
    for called, (name, kind) in zip((config.attention_kind, config.mlp_kind), sublayers(config).items(), strict=True):
        rows = [*([[_norm(config, NORMS[name])]] if config.input_norms else []), *_rows(kind)]
        rows += [[_norm(config, OUTPUT_NORMS[name])]] if config.output_norms else []
        unused = sum(matrix.numel for matrix in kind.matrices) - kind.active_parameters
        total = sum(part.times * part.parameters for row in rows for part in row)
        made.append(Sublayer(name, called, rows, total, total - unused))
    return made


def _norm(config: ModelConfig, name: str) -> Part:
    return Part(name, "norm", "RMSNorm" if config.norm_kind == "rms" else "LayerNorm", config.norm_parameters)


def _rows(kind: Described) -> list[Row]:
    """Boxes from a sublayer's first tensor to its last.

    Matrices that read the norm's output stand side by side, others that follow them below. A tensor whose name is a
    formula, and scores, have a row of their own. Norms inside stand below the first matrices, whose outputs they read.
    """
    alike: dict[str, list[Matrix | Activation]] = {}
    for tensor in kind.tensors:
        alike.setdefault(_EXPERT.sub(".N.", tensor.name), []).append(tensor)
    rows, above = list[Row](), ""
    for name, (tensor, *others) in alike.items():
        if isinstance(tensor, Matrix):
            part = _matrix(name, tensor, 1 + len(others))
            rows += [] if above == "matrix" else [[], []]
            rows[-2 if tensor.input == HIDDEN else -1].append(part)
        else:
            part = _tensor(tensor)
            rows += [[]] if above in ("matrix", "scores") or part.role == "scores" or "(" in part.name else []
            rows[-1].append(part)
        above = part.role
    rows = [row for row in rows if row]
    norms = [Part(each.name, "norm", f"{each.size:,}", each.size) for each in kind.vectors]
    return [rows[0], norms, *rows[1:]] if norms else rows


def _matrix(name: str, matrix: Matrix, times: int) -> Part:
    parameters, note = matrix.numel + matrix.bias * matrix.rows, "with bias" if matrix.bias else ""
    called = name if times > 1 else matrix.name
    return Part(called, "matrix", sizes(matrix.rows, matrix.columns), parameters, times, note)


def _tensor(item: Activation) -> Part:
    shape: tuple[int | str, ...] = item.shape if item.kind == "state" else ("T", *item.shape)
    if item.kind == "cache":
        shape = (*item.shape[:-1], "T", *item.shape[-1:])
    elif item.kind == "scores":
        shape = (*item.shape, "T", "T")
    return Part(item.name, _ROLES[item.kind], sizes(*shape), note="" if item.held else "never held whole")


def sizes(*sizes: int | str) -> str:
    """12 x 64 with the sign for times and thousands separators."""
    return " \u00d7 ".join(size if isinstance(size, str) else f"{size:,}" for size in sizes)


def draw_model(config: ModelConfig) -> str:
    """A model's parts as an HTML element with its style, whole and without anything to load."""
    drawing = describe_model(config)
    size = f"{config.parameters:,} parameters, {config.num_hidden_layers} layers"
    lines = [f'<div class="model"><h2>Parts</h2><p>{size}, residual stream of {config.hidden_size:,}.</p>']
    lines.append("<p>T is the number of tokens. Numbers without dimensions are parameters, biases included.</p>")
    for kind in dict.fromkeys(types := config.layer_types or ()):
        layers = [layer for layer, own in enumerate(types) if own == kind]
        seen = f", the last {config.sliding_window:,} tokens" if kind == SLIDING else ""
        lines.append(f"<p>attention: {kind}{seen}, layers {_ranges(layers)}</p>")
    lines += ["<p>attention and feed-forward of a layer run in parallel</p>"] * config.parallel_residual
    lines += ["<p>token ids: T</p>", _row(drawing.before), *map(_block, drawing.blocks), _row(drawing.after)]
    lines += [f"<p>logits: {sizes('T', config.vocab_size)}</p>", _STYLE_AND_LEGEND.read_text(encoding="utf-8")]
    return "\n".join([*lines, "</div>"])


def _block(block: Block) -> str:
    count, size = len(block.layers), f"{block.parameters:,} parameters"
    called = f"layer {block.layers[0]}" if count == 1 else f"layers {_ranges(block.layers)}, drawn once"
    together = f" each, {count * block.parameters:,} together" if count > 1 else ""
    lines = [f'<div class="block"><h3>{called}: {size}{together}</h3>']
    for each in block.sublayers:
        active = f", {each.active:,} for a token" if each.active != each.parameters else ""
        lines.append(f"<h4>{each.name}: {each.kind}, {each.parameters:,} parameters{active}</h4>")
        lines += [*map(_row, each.rows), '<p class="sum">added to the residual stream</p>']
    return "\n".join([*lines, "</div>"])


def _row(row: Row) -> str:
    boxes = []
    for part in row:
        lines = [f"<b>{escape(part.name)}</b>", part.shape]
        lines += [f"{part.times} alike, {part.times * part.parameters:,} together"] if part.times > 1 else []
        lines += [f"{part.parameters:,}"] if part.parameters else []
        lines += [part.note] if part.note else []
        boxes.append(f'<div class="part {part.role}">{"<br>".join(lines)}</div>')
    return f'<div class="row">{"".join(boxes)}</div>'


def _ranges(layers: Sequence[int]) -> str:
    """0-4, 6-10: consecutive layers as ranges."""
    runs = [list(run) for _, run in groupby(layers, lambda layer: layer - layers.index(layer))]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}\u2013{run[-1]}" for run in runs)
