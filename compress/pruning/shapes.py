"""The shapes that pruning can reach, and the ones that meet a size.

Widths are multiples of 32, the smallest block of the integer kernels; key/value groups stay whole.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_matrices, block_units, can_cut_hidden, norms_of_block, sublayers
from sportsllm.models.parts import Matrix, Unit
from sportsllm.models.shape import DIMENSIONS

_DIMENSION_OF = {field: dimension for dimension, field in DIMENSIONS.items()}
_WIDTH_STEP = 32
_SLACK = 0.02  # a shape this much below the target counts as meeting it
_BYTES_PER_PARAMETER = 4  # checkpoints are float32
_ONE = ""  # a dimension that is always 1
EXPERTS_BY = ("merge", "use")  # see `compress.pruning.experts`


def dimension_of(unit: Unit) -> str | None:
    """The dimension of a shape that counts a unit; None for a unit that pruning leaves whole."""
    return _DIMENSION_OF.get(unit.field)


@dataclass(frozen=True)
class Shape:
    """The dimensions that pruning can change."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int

    @staticmethod
    def of(config: ModelConfig) -> Shape:
        """A model's own shape."""
        return Shape(**{dimension: getattr(config, field) for dimension, field in DIMENSIONS.items()})

    def merges_kv_heads(self, config: ModelConfig) -> bool:
        """Whether key/value heads must be merged: more query heads a group than the model has."""
        return self.heads * config.num_key_value_heads > self.kv_heads * config.num_attention_heads

    def applied_to(self, config: ModelConfig) -> ModelConfig:
        """The config of the pruned model; UsageError if a dimension grows, or cannot be cut that way."""
        full = Shape.of(config)
        cuttable = {"layers", *map(dimension_of, block_units(config).values())}
        if config.attention_kind == "grouped_query" and config.rope_local_theta is None:
            cuttable.add("head_dim")
        if not can_cut_hidden(config):
            cuttable.discard("hidden")
        for name, value in asdict(self).items():
            flag, limit = f"--{name.replace('_', '-')}", getattr(full, name)
            if not 1 <= value <= limit:
                raise UsageError(f"{flag} is {value}; the model has {limit}, choose 1 to {limit}")
            if value != limit and name not in cuttable:
                kinds = f"{config.attention_kind} attention and {config.mlp_kind} feed-forward"
                if name == "hidden" and not can_cut_hidden(config):
                    kinds = "LayerNorm" if config.norm_kind == "layer" else "norms after attention and feed-forward"
                raise UsageError(f"{flag} cannot be cut in a model of {kinds}; leave it out")
        if self.heads % self.kv_heads:
            raise UsageError(f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}; choose a divisor")
        if self.head_dim % 2:
            raise UsageError(f"--head-dim is {self.head_dim}; rotary embedding needs an even number")
        if self.merges_kv_heads(config) and not can_merge_kv_heads(config):
            kind = f"{config.attention_kind} attention" + " with q/k norms" * config.qk_norm
            raise UsageError(f"--kv-heads: {kind} cannot merge key/value heads; cut --heads as much as --kv-heads")
        changes = {DIMENSIONS[name]: value for name, value in asdict(self).items()}
        if config.dense_layers:
            if self.layers <= config.dense_layers:
                raise UsageError(
                    f"--layers is {self.layers}; the first {config.dense_layers} of {full.layers} have no experts and "
                    f"stay, choose {config.dense_layers + 1} to {full.layers}"
                )
            changes["dense_intermediate_size"] = dense_width(config, self.intermediate)
        return config.with_changes(**changes)


def dense_width(config: ModelConfig, intermediate: int) -> int:
    """FFN neurons of a layer without experts where each expert keeps `intermediate`: the same share, in whole steps."""
    full = config.dense_intermediate_size or 0
    if intermediate == config.intermediate_size:
        return full
    steps = round(full * intermediate / config.intermediate_size / _WIDTH_STEP)
    return min(full, max(1, steps) * _WIDTH_STEP)


def can_merge_kv_heads(config: ModelConfig) -> bool:
    """Whether key/value heads may be merged: norms of queries and keys do not commute with it."""
    return config.attention_kind == "grouped_query" and not config.qk_norm


def fewer_experts(config: ModelConfig, count: int | None, active: int | None, by: str = "use") -> ModelConfig:
    """The config with `count` experts, `active` of them a token; as many as there are where one is not given.

    Raises:
        UsageError: the model has no experts or fewer, or divides them into groups; or `by` is none of `EXPERTS_BY`.
    """
    flag = "--experts" if count is not None else "--experts-per-token"
    experts = config.experts
    if by not in EXPERTS_BY:
        raise UsageError(f"--experts-by {by!r} is not known; use one of {', '.join(EXPERTS_BY)}")
    if experts is None:
        raise UsageError(f"{flag}: the model has no experts; leave it out")
    if count is not None and not 1 <= count <= experts.count:
        raise UsageError(f"--experts is {count}; the model has {experts.count}, choose 1 to {experts.count}")
    kept = count or experts.count
    if kept != experts.count and experts.groups > 1:
        raise UsageError(f"--experts: the router chooses among {experts.groups} groups, which stay whole; leave it out")
    most = min(experts.active, kept)
    if active is not None and not 1 <= active <= most:
        raise UsageError(f"--experts-per-token is {active}; choose 1 to {most}")
    return config.with_changes(experts=replace(experts, count=kept, active=active or most))


def unit_span(matrix: Matrix, unit: Unit, length: int) -> int:
    """How many of the `length` rows or columns of a matrix belong to one of its units."""
    if length % unit.count:
        raise UsageError(
            f"{matrix.name}: {length} rows or columns are not divided evenly among {unit.count} of unit "
            f"{unit.name!r}; pruning has no rule for it"
        )
    return length // unit.count


def block_counter(config: ModelConfig) -> Callable[[Shape], int]:
    """`ModelConfig.block_parameters` of a model cut to a shape: sums of products of two counts of units."""

    last_norm = config.norm_parameters // config.hidden_size

    @functools.cache
    def products(head_dim: int) -> list[list[tuple[str, str, int]]]:
        return [_products(part) for part, _ in config.with_changes(head_dim=head_dim).runs()]

    def count(shape: Shape) -> int:
        sizes = {**vars(shape), _ONE: 1}
        *dense, last = products(shape.head_dim)
        layer: int = sum(numbers * sizes[rows] * sizes[columns] for rows, columns, numbers in last)
        total = (shape.layers - config.dense_layers) * layer + shape.hidden * last_norm
        if dense:
            sizes["intermediate"] = dense_width(config, shape.intermediate)
            total += config.dense_layers * sum(
                numbers * sizes[row] * sizes[column] for row, column, numbers in dense[0]
            )
        return total

    return count


def _products(config: ModelConfig) -> list[tuple[str, str, int]]:
    """Dimensions that count the rows and columns of one block's tensors, and the numbers for each pair of units."""
    units = block_units(config)
    terms: Counter[tuple[str, str]] = Counter()

    def side(matrix: Matrix, unit: Unit, length: int) -> tuple[str, int]:
        span, dimension = unit_span(matrix, unit, length), dimension_of(unit)
        return (_ONE, length) if dimension is None else (dimension, span)

    for matrix in block_matrices(config):
        rows, height = side(matrix, units[matrix.row_unit], matrix.rows)
        columns, width = side(matrix, units[matrix.column_unit], matrix.columns)
        terms[rows, columns] += height * width
        terms[rows, _ONE] += height * matrix.bias
    terms["hidden", _ONE] += norms_of_block(config) * (config.norm_parameters // config.hidden_size)
    terms[_ONE, _ONE] += sum(vector.size for kind in sublayers(config).values() for vector in kind.vectors(config))
    return [(rows, columns, numbers) for (rows, columns), numbers in terms.items() if numbers]


def share_for_megabytes(config: ModelConfig, megabytes: float) -> float:
    """The share of the non-embedding parameters that fits a float32 checkpoint of a size in MB (10^6 bytes)."""
    fixed = config.parameters - config.block_parameters
    left = megabytes * 1e6 / _BYTES_PER_PARAMETER - fixed
    if left <= 0:
        raise UsageError(
            f"--size-mb {megabytes:g}: embedding and head alone take {fixed * _BYTES_PER_PARAMETER / 1e6:.2f} MB; "
            "cut the vocabulary first (prune-vocabulary)"
        )
    if left >= config.block_parameters:
        size = config.parameters * _BYTES_PER_PARAMETER / 1e6
        raise UsageError(f"--size-mb {megabytes:g}: the model has {size:.2f} MB already; choose a smaller size")
    return left / config.block_parameters


def shape_for_share(config: ModelConfig, share: float) -> Shape:
    """The shape whose non-embedding parameters come closest to `share` without going over; depth is kept.

    Hidden size and FFN shrink together, by the same factor as nearly as multiples of 32 allow; heads follow the
    hidden size in whole key/value groups (width before depth: Minitron, https://arxiv.org/abs/2407.14679).
    """
    full, target = Shape.of(config), share * config.block_parameters
    smaller = _smaller_shapes(config, share, [full.layers])
    sizes = {shape: size for shape, size in smaller if shape.heads * full.kv_heads == shape.kv_heads * full.heads}
    if not sizes:
        raise UsageError(f"--params {share:g}: no width that small is left; cut --layers too")

    def cost(shape: Shape) -> tuple[float, int]:
        kept = (shape.hidden / full.hidden, shape.intermediate / full.intermediate, shape.kv_heads / full.kv_heads)
        spread = max(kept) - min(kept)
        return max(0.0, 1 - sizes[shape] / target - _SLACK) + 0.2 * spread, -sizes[shape]

    return min(sizes, key=cost)


def candidate_shapes(config: ModelConfig, share: float) -> list[Shape]:
    """The shapes that use up `share` of the non-embedding parameters, largest first.

    For each hidden size, depth and set of heads that is the largest FFN that fits; where even the full FFN fits,
    the shape counts if it lies at most 5% below the share.
    """
    largest: dict[tuple[int, int, int, int], tuple[Shape, int]] = {}
    for shape, size in _smaller_shapes(config, share, range(config.dense_layers + 1, config.num_hidden_layers + 1)):
        largest[shape.hidden, shape.heads, shape.kv_heads, shape.layers] = shape, size  # the FFN rises
    if not largest:
        raise UsageError(f"--params {share:g}: no shape that small is left")
    sizes = dict(largest.values())
    least = min(0.95 * share * config.block_parameters, max(sizes.values()))
    full = config.intermediate_size
    used = [shape for shape, size in sizes.items() if size >= least or shape.intermediate < full]
    return sorted(used, key=lambda shape: -sizes[shape])


def _smaller_shapes(config: ModelConfig, share: float, depths: Iterable[int]) -> Iterator[tuple[Shape, int]]:
    """Shapes of at most a share of the non-embedding parameters, with their number; wider FFNs follow narrower ones.

    Raises:
        UsageError: share is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise UsageError(f"--params is {share:g}; it must be above 0 and at most 1")
    full, count = Shape.of(config), block_counter(config)
    target = share * config.block_parameters
    hidden_sizes = _widths(full.hidden) if can_cut_hidden(config) else [full.hidden]
    grid = product(depths, hidden_sizes, _head_counts(config), _widths(full.intermediate))
    for layers, hidden, (heads, kv_heads), intermediate in grid:
        shape = Shape(hidden, intermediate, heads, kv_heads, layers, full.head_dim)
        size = count(shape)
        if size <= target:
            yield shape, size


def _head_counts(config: ModelConfig) -> list[tuple[int, int]]:
    """(heads, kv_heads): whole groups cut, heads cut inside every group, or groups merged with all heads kept."""
    full = Shape.of(config)
    if not {"heads", "kv_heads"} <= {dimension_of(unit) for unit in block_units(config).values()}:
        return [(full.heads, full.kv_heads)]
    per_group = full.heads // full.kv_heads
    counts = {(kv * per_group, kv) for kv in range(1, full.kv_heads + 1)}
    counts |= {(full.kv_heads * heads, full.kv_heads) for heads in range(1, per_group + 1)}
    if can_merge_kv_heads(config):
        counts |= {(full.heads, kv) for kv in range(1, full.kv_heads) if full.kv_heads % kv == 0}
    return sorted(counts)


def _widths(full: int) -> list[int]:
    return [*range(_WIDTH_STEP, full, _WIDTH_STEP), full]
