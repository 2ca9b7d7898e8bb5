"""What a drawing of a model shows, made of the model's own description; a new kind of layer needs nothing here.

Order and place follow from `sportsllm.models.parts`: matrices that read one tensor stand side by side, one that reads
another's output below it; an activation whose name is a formula of others stands below them. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

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
from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, Vector

Role = Literal["matrix", "norm", "table", "activation", "cache", "scores"]
_NUMBERED = re.compile(r"^(.*)\.\d+$")


@dataclass(frozen=True)
class Part:
    """A box: a matrix, norm or table with its parameters, or a tensor on the way.

    `shape` is (rows, columns) of a matrix or table, and of a tensor that of T tokens. `norms` follow a matrix.
    """

    name: str
    role: Role
    shape: str
    parameters: int = 0
    note: str = ""
    norms: tuple[Part, ...] = ()

    @property
    def total(self) -> int:
        """Parameters, with those of its norms."""
        return self.parameters + sum(norm.parameters for norm in self.norms)


@dataclass(frozen=True)
class Group:
    """Boxes in a frame of their own, such as an expert's; `times` are alike and drawn once."""

    name: str
    rows: tuple[tuple[Part, ...], ...]
    times: int = 1

    @property
    def total(self) -> int:
        """Parameters of all of them."""
        return self.times * sum(part.total for row in self.rows for part in row)


Row = tuple[Part, ...] | tuple[Group, ...]


@dataclass(frozen=True)
class Sublayer:
    """Attention or feed-forward between its norms.

    `parameters` are those of `rows`; `active` of them one token is multiplied by; `kept` is what later tokens read.
    """

    name: str
    kind: str
    before: Part
    rows: tuple[Row, ...]
    after: Part | None
    parameters: int
    active: int
    kept: str


@dataclass(frozen=True)
class Block:
    """Layers with the same parts; `types` are what their attention sees, with the layers of each, if they differ."""

    layers: tuple[int, ...]
    halves: tuple[Sublayer, ...]
    types: tuple[tuple[str, tuple[int, ...]], ...]
    parameters: int


@dataclass(frozen=True)
class Drawing:
    """A whole model from token ids to logits; `parameters` are the sum of all parts."""

    hidden: int
    before: tuple[Part, ...]
    blocks: tuple[Block, ...]
    after: tuple[Part, ...]
    parameters: int


def describe_model(config: ModelConfig) -> Drawing:
    """The parts of a model, layers with the same parts once, in the order of the first of them."""
    owned = _parameters(config)
    same: dict[tuple[Sublayer, ...], list[int]] = {}
    for layer in range(config.num_hidden_layers):
        same.setdefault(_halves(config, layer, owned), []).append(layer)
    blocks = tuple(
        Block(tuple(layers), made, _types(config, layers), sum(map(_half_total, made))) for made, layers in same.items()
    )
    table = _sizes(config.vocab_size, config.hidden_size)
    scaled = "" if config.embedding_scale == 1.0 else f"rows times {config.embedding_scale:g}"
    before = [Part("embed_tokens", "table", table, owned[EMBEDDING][""], scaled)]
    if config.positions:
        rows = _sizes(config.positions, config.hidden_size)
        before.append(Part("embed_positions", "table", rows, owned[POSITIONS][""], "added, by position"))
    tied = "the matrix of embed_tokens" if config.tie_word_embeddings else ""
    head = Part("lm_head", "table", table, owned.get(HEAD, {"": 0})[""], tied)
    after = (_norm(config, LAST_NORM, owned), head)
    total = sum(len(block.layers) * block.parameters for block in blocks)
    total += sum(part.total for part in (*before, *after))
    return Drawing(config.hidden_size, tuple(before), blocks, after, total)


def _parameters(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Numbers in each module, biases included: by half of a layer and the name inside it, "" for a norm or a table."""
    found: dict[str, dict[str, int]] = {}
    for one in parameters(config):
        words = one.name.split(".")[:-1]
        inside = found.setdefault(".".join(words[:4]), {})
        name = ".".join(words[4:])
        inside[name] = inside.get(name, 0) + math.prod(one.shape)
    return found


def _halves(config: ModelConfig, layer: int, owned: dict[str, dict[str, int]]) -> tuple[Sublayer, ...]:
    """The two halves of a layer, equal for layers with the same parts."""
    config, prefix = config.of_layer(layer), f"model.layers.{layer}."
    names = {id(kind): name for name, kind in (ATTENTION | FEED_FORWARD).items()}
    made = []
    for name, kind in sublayers(config).items():
        mine = owned[f"{prefix}{name}"]
        unused = sum(matrix.numel for matrix in kind.matrices(config)) - kind.active_parameters(config)
        after = _norm(config, f"{prefix}{OUTPUT_NORMS[name]}", owned) if config.output_norms else None
        made.append(
            Sublayer(
                name,
                names.get(id(kind), type(kind).__name__),
                _norm(config, f"{prefix}{NORMS[name]}", owned),
                _described_rows(config, kind, mine),
                after,
                sum(mine.values()),
                sum(mine.values()) - unused,
                ", ".join(f"{state.name} {_sizes(*state.shape)}" for state in kind.state(config)),
            )
        )
    return tuple(made)


def _half_total(half: Sublayer) -> int:
    norms = [half.before] if half.after is None else [half.before, half.after]
    return half.parameters + sum(norm.parameters for norm in norms)


def _types(config: ModelConfig, layers: Iterable[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: dict[str, list[int]] = {}
    for layer in layers if config.layer_types is not None else ():
        kind = config.layer_types[layer] if config.layer_types else ""
        words = f"{kind}, the last {config.sliding_window:,} tokens" if kind == SLIDING else kind
        found.setdefault(words, []).append(layer)
    return tuple((words, tuple(each)) for words, each in found.items())


def _norm(config: ModelConfig, module: str, owned: dict[str, dict[str, int]]) -> Part:
    kind = "RMSNorm" if config.norm_kind == "rms" else "LayerNorm"
    return Part(module.rpartition(".")[2], "norm", kind, owned[module][""])


def _described_rows(config: ModelConfig, kind: Kind, owned: dict[str, int]) -> tuple[Row, ...]:
    """Boxes from a half's first tensor to its last; matrices of one path (an expert's) are a group."""
    tensors = kind.tensors(config)
    norms = _norms_by_matrix([item.name for item in tensors if isinstance(item, Matrix)], kind.vectors(config), owned)
    last = {_path(item.name): place for place, item in enumerate(tensors) if isinstance(item, Matrix)}
    grouped: dict[str, list[Matrix | Activation]] = {}
    sequence: list[Matrix | Activation | str] = []  # a text stands for the group of that name
    for place, item in enumerate(tensors):
        # A tensor on the way between an expert's matrices is drawn with them.
        path = _path(item.name) if isinstance(item, Matrix) else next((p for p in grouped if last[p] > place), "")
        if not path:
            sequence.append(item)
        elif path not in grouped:
            sequence.append(path)
        if path:
            grouped.setdefault(path, []).append(item)
    rows: list[Row] = []
    for kind_of, run in groupby(sequence, type):
        items = list(run)
        if kind_of is str:
            rows.append(_alike_once([(str(p), tuple(_part_rows(grouped[str(p)], norms, owned))) for p in items]))
        else:
            rows += _part_rows([item for item in items if not isinstance(item, str)], norms, owned)
    return tuple(rows)


def _path(name: str) -> str:
    return name.rpartition(".")[0]


def _part_rows(
    tensors: Sequence[Matrix | Activation], norms: dict[str, tuple[Part, ...]], owned: dict[str, int]
) -> list[tuple[Part, ...]]:
    rows: list[tuple[Part, ...]] = []
    for _, run in groupby(tensors, lambda item: isinstance(item, Matrix)):
        items = list(run)
        for matrices in _matrix_rows([item for item in items if isinstance(item, Matrix)]):
            rows.append(tuple(_matrix(matrix, norms, owned) for matrix in matrices))
        for made in _activation_rows([item for item in items if isinstance(item, Activation)]):
            rows.append(tuple(map(_activation, made)))
    return rows


def _matrix_rows(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Consecutive matrices by depth: what reads another's output, or is not read from the norm, lies below."""
    depths: list[int] = []
    first = any(matrix.input == HIDDEN for matrix in matrices)
    for matrix in matrices:
        above = zip(depths, matrices, strict=False)
        made = [d for d, m in above if m.row_unit == matrix.column_unit and m.input != matrix.input]
        depths.append(0 if matrix.input == HIDDEN else 1 + max(made, default=0 if first else -1))
    return [[m for m, d in zip(matrices, depths, strict=True) if d == depth] for depth in sorted(set(depths))]


def _activation_rows(activations: Sequence[Activation]) -> list[list[Activation]]:
    """Consecutive tensors: scores for themselves, and a formula below what its name is made of."""
    rows: list[list[Activation]] = []
    for item in activations:
        words = set(re.findall(r"\w+", item.name))
        formula = rows and any(words > set(re.findall(r"\w+", each.name)) for each in rows[-1])
        alone = rows and "scores" in {item.kind, rows[-1][-1].kind}
        if not rows or alone or (formula and item.kind == "activation"):
            rows.append([])
        rows[-1].append(item)
    return rows


def _matrix(matrix: Matrix, norms: dict[str, tuple[Part, ...]], owned: dict[str, int]) -> Part:
    name, shape = matrix.name.rpartition(".")[2], _sizes(matrix.rows, matrix.columns)
    note = "with bias" if matrix.bias else ""
    return Part(name, "matrix", shape, owned[matrix.name], note, norms.get(matrix.name, ()))


def _activation(item: Activation) -> Part:
    roles: dict[str, Role] = {"activation": "activation", "cache": "cache", "state": "cache", "scores": "scores"}
    lengths: dict[str, tuple[str, ...]] = {"scores": ("T", "T"), "state": ()}
    tokens = lengths.get(item.kind, ("T",))
    shape: tuple[int | str, ...] = (*tokens, *item.shape)
    if item.kind == "cache":
        shape = (*item.shape[:-1], *tokens, *item.shape[-1:])
    if item.kind == "scores":
        shape = (*item.shape, *tokens)
    return Part(item.name, roles[item.kind], _sizes(*shape), note="" if item.held else "never made whole")


def _norms_by_matrix(
    matrices: Sequence[str], vectors: Sequence[Vector], owned: dict[str, int]
) -> dict[str, tuple[Part, ...]]:
    """Norms inside a half, each at the matrix whose name begins most like its own."""
    found: dict[str, tuple[Part, ...]] = {}
    for vector in vectors:
        owner = max(matrices, key=lambda name: _letters_alike(name, vector.name))
        found[owner] = (*found.get(owner, ()), Part(vector.name, "norm", f"{vector.size:,}", owned[vector.name]))
    return found


def _letters_alike(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _alike_once(groups: Sequence[tuple[str, tuple[tuple[Part, ...], ...]]]) -> tuple[Group, ...]:
    """Groups whose names differ by a number alone, and whose boxes do not, once."""
    found: list[Group] = []
    for name, rows in groups:
        numbered = _NUMBERED.match(name)
        alike = numbered and found and (found[-1].name, _weighed(found[-1].rows)) == (numbered[1], _weighed(rows))
        if alike:
            found[-1] = replace(found[-1], times=found[-1].times + 1)
        else:
            found.append(Group(numbered[1] if numbered else name, rows))
    return tuple(found)


def _weighed(rows: tuple[tuple[Part, ...], ...]) -> list[Part]:
    return [part for row in rows for part in row if part.role == "matrix"]


def _sizes(*sizes: int | str) -> str:
    return " \u00d7 ".join(size if isinstance(size, str) else f"{size:,}" for size in sizes)
