"""The parts of a model for a drawing, from the model's own description: a new kind of layer needs nothing here.

Matrices that read the norm's output stand side by side, a matrix that reads another's output below it. Matrices whose
names differ by a number alone (an expert's) are one box that stands for all. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from sportsllm.models.config import SLIDING, ModelConfig
from sportsllm.models.kinds import (
    ATTENTION,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    LAST_NORM,
    NORMS,
    OUTPUT_NORMS,
    POSITIONS,
    parameters,
    sublayers,
)
from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix

_NUMBER = re.compile(r"\.\d+\.")
_ROLES = {"activation": "activation", "cache": "cache", "state": "cache", "scores": "scores"}


@dataclass(frozen=True)
class Part:
    """A box: a matrix, norm or table, or a tensor on the way.

    `role` is matrix, norm, table, activation, cache or scores; `shape` that of a matrix (rows, columns), or of a tensor
    for T tokens; the box stands for `times` alike, each with `parameters`.
    """

    name: str
    role: str
    shape: str
    parameters: int = 0
    times: int = 1
    note: str = ""

    @property
    def total(self) -> int:
        """Parameters of all that the box stands for."""
        return self.times * self.parameters


Row = tuple[Part, ...]


@dataclass(frozen=True)
class Sublayer:
    """Attention or feed-forward from its norm to its last matrix; one token is multiplied by `active` parameters and
    leaves `kept` for later tokens."""

    name: str
    kind: str
    rows: tuple[Row, ...]
    active: int
    kept: str

    @property
    def parameters(self) -> int:
        """Of all parts but the norms around it."""
        return sum(part.total for row in self.rows for part in row if part.note != "around")

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(part.total for row in self.rows for part in row)


@dataclass(frozen=True)
class Block:
    """Layers with the same parts; `types` are what their attention sees, with the layers of each, if they differ."""

    layers: tuple[int, ...]
    sublayers: tuple[Sublayer, ...]
    types: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def parameters(self) -> int:
        """Of one of the layers."""
        return sum(each.total for each in self.sublayers)


@dataclass(frozen=True)
class Drawing:
    """A whole model from token ids to logits."""

    hidden: int
    before: Row
    blocks: tuple[Block, ...]
    after: Row

    @property
    def parameters(self) -> int:
        """The sum of all parts."""
        blocks = sum(len(block.layers) * block.parameters for block in self.blocks)
        return blocks + sum(part.total for part in (*self.before, *self.after))


def describe_model(config: ModelConfig) -> Drawing:
    """The parts of a model, layers with the same parts once, in the order of the first of them."""
    owned = _owned(config)
    same: dict[tuple[Sublayer, ...], list[int]] = {}
    for layer in range(config.num_hidden_layers):
        same.setdefault(_sublayers(config.of_layer(layer), layer, owned), []).append(layer)
    blocks = tuple(Block(tuple(layers), made, _types(config, layers)) for made, layers in same.items())
    table = sizes(config.vocab_size, config.hidden_size)
    scaled = "" if config.embedding_scale == 1.0 else f"rows times {config.embedding_scale:g}"
    before = [Part("embed_tokens", "table", table, owned[EMBEDDING][""], note=scaled)]
    if config.positions:
        rows = sizes(config.positions, config.hidden_size)
        before.append(Part("embed_positions", "table", rows, owned[POSITIONS][""], note="added, by position"))
    tied = "the matrix of embed_tokens" if config.tie_word_embeddings else ""
    head = Part("lm_head", "table", table, owned.get(HEAD, {"": 0})[""], note=tied)
    return Drawing(config.hidden_size, tuple(before), blocks, (_norm(config, LAST_NORM, owned), head))


def _owned(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Parameters with their biases: by sublayer and the name inside it, "" for a norm or a table."""
    found: dict[str, dict[str, int]] = {}
    for one in parameters(config):
        words = one.name.split(".")[:-1]
        inside, name = found.setdefault(".".join(words[:4]), {}), ".".join(words[4:])
        inside[name] = inside.get(name, 0) + math.prod(one.shape)
    return found


def _sublayers(config: ModelConfig, layer: int, owned: Mapping[str, Mapping[str, int]]) -> tuple[Sublayer, ...]:
    prefix, names = f"model.layers.{layer}.", {id(kind): name for name, kind in (ATTENTION | FEED_FORWARD).items()}
    made = []
    for name, kind in sublayers(config).items():
        rows: list[Row] = [(_norm(config, f"{prefix}{NORMS[name]}", owned, "around"),)]
        rows += _rows(config, kind, owned[f"{prefix}{name}"])
        if config.output_norms:
            rows.append((_norm(config, f"{prefix}{OUTPUT_NORMS[name]}", owned, "around"),))
        unused = sum(matrix.numel for matrix in kind.matrices(config)) - kind.active_parameters(config)
        active = sum(owned[f"{prefix}{name}"].values()) - unused
        kept = ", ".join(f"{state.name} {sizes(*state.shape)}" for state in kind.state(config))
        made.append(Sublayer(name, names.get(id(kind), type(kind).__name__), tuple(rows), active, kept))
    return tuple(made)


def _types(config: ModelConfig, layers: Sequence[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: dict[str, list[int]] = {}
    for layer in layers if config.layer_types is not None else ():
        kind = config.layer_types[layer] if config.layer_types else ""
        words = f"{kind}, the last {config.sliding_window:,} tokens" if kind == SLIDING else kind
        found.setdefault(words, []).append(layer)
    return tuple((words, tuple(each)) for words, each in found.items())


def _norm(config: ModelConfig, module: str, owned: Mapping[str, Mapping[str, int]], note: str = "") -> Part:
    kind = "RMSNorm" if config.norm_kind == "rms" else "LayerNorm"
    return Part(module.rpartition(".")[2], "norm", kind, owned[module][""], note=note)


def _rows(config: ModelConfig, kind: Kind, owned: Mapping[str, int]) -> list[Row]:
    """Boxes from a sublayer's first tensor to its last."""
    rows: list[Row] = []
    seen: dict[str, int] = {}
    once: list[Matrix | Activation] = []
    for tensor in kind.tensors(config):
        if isinstance(tensor, Matrix):
            seen[_alike(tensor.name)] = seen.get(_alike(tensor.name), 0) + 1
        if not isinstance(tensor, Matrix) or seen[_alike(tensor.name)] == 1:
            once.append(tensor)
    for is_matrix, run in groupby(once, lambda one: isinstance(one, Matrix)):
        items = list(run)
        if is_matrix:
            rows += _matrix_rows([one for one in items if isinstance(one, Matrix)], seen, owned)
        else:
            rows += _tensor_rows([one for one in items if isinstance(one, Activation)])
    return _with_norms(rows, {vector.name: (vector.size, owned[vector.name]) for vector in kind.vectors(config)})


def _alike(name: str) -> str:
    """The name without the number of an expert."""
    return _NUMBER.sub(".N.", name)


def _matrix_rows(matrices: Sequence[Matrix], seen: Mapping[str, int], owned: Mapping[str, int]) -> list[Row]:
    """Consecutive matrices by depth: what reads another's output, or is not read from the norm, lies below."""
    depths: list[int] = []
    reads_norm = any(matrix.input == HIDDEN for matrix in matrices)
    for matrix in matrices:
        above = [d for d, m in zip(depths, matrices, strict=False) if m.row_unit == matrix.column_unit]
        above = [d for d, m in zip(depths, matrices, strict=False) if d in above and m.input != matrix.input]
        depths.append(0 if matrix.input == HIDDEN else 1 + max(above, default=0 if reads_norm else -1))
    rows = []
    for depth in sorted(set(depths)):
        row = [matrix for matrix, at in zip(matrices, depths, strict=True) if at == depth]
        rows.append(tuple(_matrix(matrix, seen[_alike(matrix.name)], owned) for matrix in row))
    return rows


def _matrix(matrix: Matrix, times: int, owned: Mapping[str, int]) -> Part:
    shape, note = sizes(matrix.rows, matrix.columns), "with bias" if matrix.bias else ""
    name = _alike(matrix.name) if times > 1 else matrix.name
    return Part(name, "matrix", shape, owned[matrix.name], times, note)


def _tensor_rows(tensors: Sequence[Activation]) -> list[Row]:
    """Consecutive tensors side by side: scores alone, and a formula below what its name is made of."""
    rows: list[list[Activation]] = []
    for item in tensors:
        words = set(re.findall(r"\w+", item.name))
        formula = bool(rows) and any(words > set(re.findall(r"\w+", each.name)) for each in rows[-1])
        alone = bool(rows) and "scores" in {item.kind, rows[-1][-1].kind}
        if not rows or alone or (formula and item.kind == "activation"):
            rows.append([])
        rows[-1].append(item)
    return [tuple(map(_tensor, row)) for row in rows]


def _tensor(item: Activation) -> Part:
    tokens = {"scores": ("T", "T"), "state": ()}.get(item.kind, ("T",))
    shape: tuple[int | str, ...] = (*tokens, *item.shape)
    if item.kind == "cache":
        shape = (*item.shape[:-1], *tokens, *item.shape[-1:])
    if item.kind == "scores":
        shape = (*item.shape, *tokens)
    return Part(item.name, _ROLES[item.kind], sizes(*shape), note="" if item.held else "never made whole")


def _with_norms(rows: list[Row], vectors: Mapping[str, tuple[int, int]]) -> list[Row]:
    """Norms inside a sublayer, each beside the matrix whose name begins most like its own."""
    for name, (size, numel) in vectors.items():
        places = [(row, at) for row, parts in enumerate(rows) for at, part in enumerate(parts) if part.role == "matrix"]
        row, at = max(places, key=lambda place: _letters_alike(rows[place[0]][place[1]].name, name))
        owner = rows[row][at]
        norm = Part(name, "norm", f"{size:,}", numel, note=f"of {owner.name}")
        rows[row] = (*rows[row][: at + 1], norm, *rows[row][at + 1 :])
    return rows


def _letters_alike(first: str, second: str) -> int:
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), len(second))


def sizes(*sizes: int | str) -> str:
    """12 x 64 with the sign for times and thousands separators."""
    return " \u00d7 ".join(size if isinstance(size, str) else f"{size:,}" for size in sizes)
