"""The shapes that pruning can reach, and the search for those that meet a size. Imports no torch.

Widths are multiples of 32, the smallest block of the integer kernels; key/value groups stay whole. `widest_shapes` is
the search that `prune` and `fit` share: `prune` asks for a number of parameters, `fit` for a device's limits.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from sportsllm.errors import UsageError
from sportsllm.formats.huggingface import family_of
from sportsllm.models.config import DIMENSIONS, ModelConfig
from sportsllm.models.description import (
    block_matrices,
    block_units,
    can_cut_hidden,
    joint_vectors,
    norms_of_block,
    sublayers,
)
from sportsllm.models.sublayer import Matrix, Unit

WIDTH_STEP = 32
_DIMENSION_OF = {field: dimension for dimension, field in DIMENSIONS.items()}
_SLACK = 0.02  # a shape this much below the target counts as meeting it
_NEAR = 0.9  # of the target: a smaller shape is no candidate if there are larger ones
_BYTES_PER_PARAMETER = 4  # checkpoints are float32
_ONE = ""  # a dimension that is always 1


def dimension_of(unit: Unit) -> str | None:
    """The dimension of a shape that counts a unit; None for a unit that pruning leaves whole."""
    return _DIMENSION_OF.get(unit.field)


@dataclass(frozen=True)
class Shape:
    """The dimensions that pruning can change; `experts` are the routed ones of a layer, 0 in a dense model."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int
    experts: int = 0

    @staticmethod
    def of(config: ModelConfig) -> Shape:
        """A model's own shape."""
        sizes: dict[str, int] = {dimension: getattr(config, field) for dimension, field in DIMENSIONS.items()}
        return Shape(**sizes, experts=config.experts.count if config.experts else 0)

    def sizes(self) -> dict[str, int]:
        """The dimensions by name; experts only if there are any."""
        return {name: size for name, size in vars(self).items() if size or name != "experts"}

    @property
    def name(self) -> str:
        """For directories and messages, such as `h64-i128-h4-kh2-l3-hd16`."""
        return "-".join("".join(word[0] for word in key.split("_")) + str(size) for key, size in self.sizes().items())

    def merges_kv_heads(self, config: ModelConfig) -> bool:
        """Whether key/value heads must be merged: more query heads a group than the model has."""
        return self.heads * config.num_key_value_heads > self.kv_heads * config.num_attention_heads

    def applied_to(self, config: ModelConfig) -> ModelConfig:
        """The config of the pruned model; UsageError if a dimension grows, or cannot be cut that way."""
        full = Shape.of(config)
        cuttable = {"layers", "experts", *map(dimension_of, block_units(config).values())}
        whole_heads = {
            "two rotary bases": config.rope_local_theta,
            "partial rotation": config.rotary_dim,
            "norms of all heads together": config.joint_qk_norm,
            "longrope": config.rope_scaling is not None and config.rope_scaling.rope_type == "longrope",
        }
        if config.attention_kind == "grouped_query" and not any(whole_heads.values()):
            cuttable.add("head_dim")
        if not can_cut_hidden(config):
            cuttable.discard("hidden")
        for name, value in self.sizes().items():
            flag, limit = f"--{name.replace('_', '-')}", getattr(full, name)
            if not 1 <= value <= limit:
                raise UsageError(f"{flag} is {value}; the model has {limit}, choose 1 to {limit}")
            if value != limit and name not in cuttable:
                kinds = f"{config.attention_kind} attention and {config.mlp_kind} feed-forward"
                if name == "head_dim" and any(whole_heads.values()):
                    kinds = next(reason for reason, holds in whole_heads.items() if holds)
                if name == "hidden" and not can_cut_hidden(config):
                    kinds = "LayerNorm" if config.norm_kind == "layer" else "norms after attention and feed-forward"
                raise UsageError(f"{flag} cannot be cut in a model of {kinds}; leave it out")
        if self.heads % self.kv_heads:
            raise UsageError(f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}; choose a divisor")
        if self.head_dim % 2:
            raise UsageError(f"--head-dim is {self.head_dim}; rotary embedding needs an even number")
        if self.merges_kv_heads(config) and not can_merge_kv_heads(config):
            kind = f"{config.attention_kind} attention" + " with q/k norms" * config.qk_norm
            kind += " that rotates a part of each head" * (config.rotary_size != config.head_dim)
            raise UsageError(f"--kv-heads: {kind} cannot merge key/value heads; cut --heads as much as --kv-heads")
        if self.layers <= config.dense_layers:
            raise UsageError(
                f"--layers is {self.layers}; the first {config.dense_layers} of {full.layers} have no experts and "
                f"stay, choose {config.dense_layers + 1} to {full.layers}"
            )
        if self.experts not in (0, full.experts):
            config = fewer_experts(config, self.experts)
        changes = {field: getattr(self, name) for name, field in DIMENSIONS.items()}
        if config.dense_layers:
            changes["dense_intermediate_size"] = dense_width(config, self.intermediate)
        return config.with_changes(**changes)


def dense_width(config: ModelConfig, intermediate: int) -> int:
    """FFN neurons of a layer without experts if each expert keeps `intermediate`: the same share, in whole steps."""
    full = config.dense_intermediate_size or 0
    if intermediate == config.intermediate_size:
        return full
    steps = round(full * intermediate / config.intermediate_size / WIDTH_STEP)
    return min(full, max(1, steps) * WIDTH_STEP)


def can_merge_kv_heads(config: ModelConfig) -> bool:
    """Whether key/value heads may be merged: their norms do not commute with it, and it takes whole rotary pairs."""
    whole = config.rotary_size == config.head_dim
    return config.attention_kind == "grouped_query" and not config.qk_norm and whole


def fewer_experts(config: ModelConfig, count: int) -> ModelConfig:
    """The config with `count` experts.

    Raises:
        UsageError: the model has no experts or fewer, or divides them into groups.
    """
    experts = config.experts
    if experts is None:
        raise UsageError("--experts: the model has no experts; leave it out")
    if not 1 <= count <= experts.count:
        raise UsageError(f"--experts is {count}; the model has {experts.count}, choose 1 to {experts.count}")
    if count != experts.count and experts.groups > 1:
        raise UsageError(f"--experts: the router chooses among {experts.groups} groups, which stay whole; leave it out")
    return config.with_changes(experts=replace(experts, count=count, active=min(experts.active, count)))


def unit_span(matrix: Matrix, unit: Unit, length: int) -> int:
    """How many of the `length` rows or columns of a matrix belong to one of its units."""
    assert length % unit.count == 0, f"{matrix.name}: {length} rows or columns, {unit.count} of unit {unit.name!r}"
    return length // unit.count


def block_counter(config: ModelConfig) -> Callable[[Shape], int]:
    """`ModelConfig.block_parameters` of a model cut to a shape: sums of products of two counts of units."""
    last_norm = config.norm_parameters // config.hidden_size

    @functools.cache
    def products(head_dim: int, experts: int) -> list[list[tuple[str, str, int]]]:
        of_size = config.with_changes(head_dim=head_dim)
        if config.experts is not None and experts not in (0, config.experts.count):
            of_size = fewer_experts(of_size, experts)
        return [_products(part) for part, _ in of_size.runs()]

    def count(shape: Shape) -> int:
        sizes = {**vars(shape), _ONE: 1}
        *dense, last = products(shape.head_dim, shape.experts)
        layer: int = sum(numel * sizes[rows] * sizes[columns] for rows, columns, numel in last)
        total = (shape.layers - config.dense_layers) * layer + shape.hidden * last_norm
        if dense:
            sizes["intermediate"] = dense_width(config, shape.intermediate)
            total += config.dense_layers * sum(numel * sizes[row] * sizes[column] for row, column, numel in dense[0])
        return total

    return count


def _products(config: ModelConfig) -> list[tuple[str, str, int]]:
    """Dimensions that count the rows and columns of one block's tensors, and the parameters of each pair of units."""
    units = block_units(config)
    terms: Counter[tuple[str, str]] = Counter()

    def side(matrix: Matrix, unit: Unit, length: int) -> tuple[str, int]:
        span, dimension = unit_span(matrix, unit, length), dimension_of(unit)
        return (_ONE, length) if dimension is None else (dimension, span)

    joint = joint_vectors(config).values()
    for matrix in block_matrices(config):
        rows, height = side(matrix, units[matrix.row_unit], matrix.rows)
        columns, width = side(matrix, units[matrix.column_unit], matrix.columns)
        terms[rows, columns] += height * width
        terms[rows, _ONE] += height * (matrix.bias + (matrix.name in joint))
    terms["hidden", _ONE] += norms_of_block(config) * (config.norm_parameters // config.hidden_size)
    vectors = [vector for kind in sublayers(config).values() for vector in kind.vectors]
    terms[_ONE, _ONE] += sum(vector.size for vector in vectors if vector.rows_of is None)
    return [(rows, columns, numel) for (rows, columns), numel in terms.items() if numel]


def share_for_megabytes(config: ModelConfig, megabytes: float) -> float:
    """The fraction of the non-embedding parameters that fits a float32 checkpoint of a size in MB (10^6 bytes)."""
    fixed = config.parameters - config.block_parameters
    left = megabytes * 1e6 / _BYTES_PER_PARAMETER - fixed
    if left <= 0:
        raise UsageError(
            f"--size-mb {megabytes:g}: embedding and head alone take {fixed * _BYTES_PER_PARAMETER / 1e6:.2f} MB; "
            "prune the vocabulary first (prune --vocab-size)"
        )
    if left >= config.block_parameters:
        size = config.parameters * _BYTES_PER_PARAMETER / 1e6
        raise UsageError(f"--size-mb {megabytes:g}: the model has {size:.2f} MB already; choose a smaller size")
    return left / config.block_parameters


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise UsageError(f"--params is {share:g}; it must be above 0 and at most 1")


def in_family(config: ModelConfig, sizes: dict[Shape, int]) -> dict[Shape, int]:
    """The shapes that transformers opens, all of them if it opens none: GPT-2's heads fill its hidden size."""
    if family_of(config) is None:
        return sizes
    return {one: size for one, size in sizes.items() if _opens(config, one.hidden, one.heads, one.kv_heads)} or sizes


@functools.lru_cache(maxsize=4_096)
def _opens(config: ModelConfig, hidden: int, heads: int, kv_heads: int) -> bool:
    shape = replace(Shape.of(config), hidden=hidden, heads=heads, kv_heads=kv_heads)
    return family_of(shape.applied_to(config)) is not None


def shape_for_share(config: ModelConfig, share: float) -> Shape:
    """The even cut: the shape whose non-embedding parameters come closest to `share` without going over, at full depth.

    Hidden size and FFN shrink together, by the same factor as nearly as multiples of 32 allow. Heads follow the hidden
    size in whole key/value groups (width before depth: Minitron, https://arxiv.org/abs/2407.14679).
    """
    _check_share(share)
    full, target = Shape.of(config), share * config.block_parameters
    sizes = in_family(config, {shape: size for shape, size in _width_cuts(config).items() if size <= target})
    if not sizes:
        raise UsageError(f"--params {share:g}: no width that small is left; cut --layers too")

    def cost(shape: Shape) -> tuple[float, int]:
        kept = (shape.hidden / full.hidden, shape.intermediate / full.intermediate, shape.kv_heads / full.kv_heads)
        spread = max(kept) - min(kept)
        return max(0.0, 1 - sizes[shape] / target - _SLACK) + 0.2 * spread, -sizes[shape]

    return min(sizes, key=cost)


@functools.lru_cache(maxsize=4)
def _width_cuts(config: ModelConfig) -> dict[Shape, int]:
    """Every cut of widths in whole key/value groups at full depth, with its non-embedding parameters."""
    full, count = Shape.of(config), block_counter(config)
    heads = [pair for pair in head_counts(config) if pair[0] * full.kv_heads == pair[1] * full.heads]
    grid = product(hidden_sizes(config), heads, widths(full.intermediate))
    shapes = (replace(full, hidden=width, heads=q, kv_heads=kv, intermediate=inner) for width, (q, kv), inner in grid)
    return {shape: count(shape) for shape in shapes}


def candidate_shapes(config: ModelConfig, share: float) -> list[Shape]:
    """The shapes that use up `share` of the non-embedding parameters, largest first.

    For each hidden size, depth and set of heads that is the widest FFN that fits. A shape counts if it has at least 90%
    of the parameters asked for, or of those of the largest shape if none has as many.
    """
    _check_share(share)
    count, target = block_counter(config), share * config.block_parameters
    fitting = widest_shapes(config, lambda shape: count(shape) <= target)
    sizes = in_family(config, {shape: count(shape) for shape in fitting})
    if not sizes:
        raise UsageError(f"--params {share:g}: no shape that small is left")
    least = _NEAR * min(target, max(sizes.values()))
    return sorted((shape for shape, size in sizes.items() if size >= least), key=lambda shape: -sizes[shape])


@dataclass(frozen=True)
class Target:
    """How small: a share of the non-embedding parameters, megabytes of float32 weights, or dimensions by name.

    A dimension that is None stays whole. A size is searched for: `finalists` shapes are recovered on `search_tokens`
    each, a twentieth of the recovery's if None; 0 cuts all widths alike.
    """

    share: float | None = None
    megabytes: float | None = None
    dimensions: Mapping[str, int | None] = field(default_factory=dict)
    search_tokens: int | None = None
    finalists: int = 3

    def shape(self, config: ModelConfig, whole: bool = False) -> tuple[Shape, float | None]:
        """The shape of the dimensions, or the even cut to a size, and that size as a share.

        `whole` allows that nothing is asked for.
        """
        named = {key: value for key, value in self.dimensions.items() if value is not None}
        flags = ", ".join("--" + key.replace("_", "-") for key in named)
        sizes = {"--params": self.share, "--size-mb": self.megabytes, flags: flags or None}
        ways = [flag for flag, value in sizes.items() if value is not None]
        if len(ways) > 1:
            raise UsageError(f"give one of {' and '.join(ways)}, not both")
        share = self.share if self.megabytes is None else share_for_megabytes(config, self.megabytes)
        if share is not None:
            return shape_for_share(config, share), share
        if not named and not whole:
            dimensions = "--hidden, --intermediate, --heads, --kv-heads, --head-dim, --layers, --experts"
            raise UsageError(f"say how small: --params SHARE, --size-mb MB, --vocab-size N, or {dimensions}")
        return replace(Shape.of(config), **named), None


def widest_shapes(
    config: ModelConfig, fits: Callable[[Shape], bool], *, experts: Sequence[int] = (), most: int | None = None
) -> Iterator[Shape]:
    """For each depth, hidden size, set of heads and number of experts the widest FFN that fits, if any does.

    Args:
        fits: whether a shape is small enough; of a wider FFN never if not of a narrower one.
        experts: numbers of routed experts to try; the model's own if empty.
        most: values of each dimension, evenly spread; all if None.
    """
    full, inner = Shape.of(config), widths(config.intermediate_size)
    depths = spread(range(config.dense_layers + 1, full.layers + 1), most)
    grid = product(depths, spread(hidden_sizes(config), most), head_counts(config, most), experts or [full.experts])
    for layers, hidden, (heads, kv_heads), count in grid:
        shape = replace(full, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, experts=count)
        fitting = bisect_left(inner, True, key=lambda width: not fits(replace(shape, intermediate=width)))
        if fitting:
            yield replace(shape, intermediate=inner[fitting - 1])


def head_counts(config: ModelConfig, most: int | None = None) -> list[tuple[int, int]]:
    """(heads, kv_heads): whole groups cut, heads cut inside every group, or groups merged with all heads kept."""
    full = Shape.of(config)
    if not {"heads", "kv_heads"} <= {dimension_of(unit) for unit in block_units(config).values()}:
        return [(full.heads, full.kv_heads)]
    per_group = full.heads // full.kv_heads
    counts = {(kv * per_group, kv) for kv in spread(range(1, full.kv_heads + 1), most)}
    counts |= {(full.kv_heads * heads, full.kv_heads) for heads in spread(range(1, per_group + 1), most)}
    if can_merge_kv_heads(config):
        counts |= {(full.heads, kv) for kv in range(1, full.kv_heads) if full.kv_heads % kv == 0}
    return sorted(counts)


def hidden_sizes(config: ModelConfig) -> list[int]:
    """Hidden sizes to cut to; the model's own alone if it cannot be cut."""
    return widths(config.hidden_size) if can_cut_hidden(config) else [config.hidden_size]


def widths(full: int) -> list[int]:
    """Multiples of `WIDTH_STEP` below a width, and the width."""
    return [*range(WIDTH_STEP, full, WIDTH_STEP), full]


def spread(values: Sequence[int], most: int | None) -> list[int]:
    """At most `most` of the values, evenly spread, the last one among them."""
    if most is None or len(values) <= most:
        return list(values)
    return [values[round((number + 1) * len(values) / most) - 1] for number in range(most)]
