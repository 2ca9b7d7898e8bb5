"""The shapes that pruning can reach, and the ones that meet a size.

Widths are multiples of 32, the smallest block of the integer kernels; key/value groups stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

_WIDTH_STEP = 32
_SLACK = 0.02  # a shape this much below the target counts as meeting it
_BYTES_PER_PARAMETER = 4  # checkpoints are float32


@dataclass(frozen=True)
class Shape:
    """The dimensions that pruning can change."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int

    @staticmethod
    def of(config: ModelConfig) -> Shape:
        """A model's own shape."""
        return Shape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            layers=config.num_hidden_layers,
        )

    def merges_kv_heads(self, config: ModelConfig) -> bool:
        """Whether key/value heads must be merged: more query heads a group than the model has."""
        return self.heads * config.num_key_value_heads > self.kv_heads * config.num_attention_heads

    def applied_to(self, config: ModelConfig) -> ModelConfig:
        """The config of the pruned model.

        Raises:
            UsageError: a dimension grows, falls below 1, or breaks the key/value grouping.
        """
        for name, value in asdict(self).items():
            limit = asdict(Shape.of(config))[name]
            if not 1 <= value <= limit:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; the model has {limit}, choose 1 to {limit}")
        groups = config.num_key_value_heads
        if self.heads % self.kv_heads or (self.merges_kv_heads(config) and groups % self.kv_heads):
            raise UsageError(
                f"--heads {self.heads} with --kv-heads {self.kv_heads} breaks the grouping: --heads must be a multiple "
                f"of --kv-heads, and --kv-heads must divide the model's {groups} where they are merged "
                f"(more than {config.num_attention_heads // groups} query heads each)"
            )
        return config.with_changes(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            num_hidden_layers=self.layers,
        )


def share_for_megabytes(config: ModelConfig, megabytes: float) -> float:
    """The share of the non-embedding parameters that fits a float32 checkpoint of so many MB (10^6 bytes).

    Raises:
        UsageError: the embedding alone is larger, or the model is small enough already.
    """
    fixed = config.parameters - config.block_parameters
    left = megabytes * 1e6 / _BYTES_PER_PARAMETER - fixed
    if left <= 0:
        raise UsageError(
            f"--size-mb {megabytes:g}: embedding and head alone take {fixed * _BYTES_PER_PARAMETER / 1e6:.2f} MB; "
            "cut --vocab-size first"
        )
    if left >= config.block_parameters:
        size = config.parameters * _BYTES_PER_PARAMETER / 1e6
        raise UsageError(f"--size-mb {megabytes:g}: the model has {size:.2f} MB already, nothing is to be cut")
    return left / config.block_parameters


def shape_for_share(config: ModelConfig, share: float) -> Shape:
    """The shape whose non-embedding parameters come closest to `share` without going over; depth is kept.

    Hidden size and FFN shrink together, by the same factor as nearly as multiples of 32 allow; heads follow the
    hidden size in whole key/value groups (width before depth: Minitron, https://arxiv.org/abs/2407.14679).

    Raises:
        UsageError: share is not in (0, 1], or no shape is that small.
    """
    (found,) = even_shapes(config, [share])
    if found is None:
        raise UsageError(f"--params {share:g}: no width that small is left; cut --layers too")
    return found


def even_shapes(config: ModelConfig, shares: Sequence[float]) -> list[Shape | None]:
    """`shape_for_share` of several shares, None where no shape is that small.

    Raises:
        UsageError: a share is not in (0, 1].
    """
    full = Shape.of(config)
    per_group = full.heads // full.kv_heads
    sizes: dict[Shape, int] = {}
    for shape in _smaller_shapes(config, max(shares), [full.layers]):
        if shape.heads == shape.kv_heads * per_group:
            sizes[shape] = shape.applied_to(config).block_parameters
    spreads = {}
    for shape in sizes:
        kept = (shape.hidden / full.hidden, shape.intermediate / full.intermediate, shape.kv_heads / full.kv_heads)
        spreads[shape] = max(kept) - min(kept)
    found: list[Shape | None] = []
    for share in shares:
        target = share * config.block_parameters

        def unevenness(shape: Shape, target: float = target) -> tuple[float, int]:
            # Near the target first, then an even cut.
            return max(0.0, 1 - sizes[shape] / target - _SLACK) + 0.2 * spreads[shape], -sizes[shape]

        found.append(min((shape for shape, size in sizes.items() if size <= target), key=unevenness, default=None))
    return found


def candidate_shapes(config: ModelConfig, share: float) -> list[Shape]:
    """The shapes that use up `share` of the non-embedding parameters, largest first.

    For each hidden size, depth and set of heads that is the largest FFN that fits; where even the full FFN fits,
    the shape counts if it lies at most 5% below the share.

    Raises:
        UsageError: share is not in (0, 1], or no shape is that small.
    """
    largest: dict[tuple[int, int, int, int], Shape] = {}
    for shape in _smaller_shapes(config, share, range(1, config.num_hidden_layers + 1)):
        key = (shape.hidden, shape.heads, shape.kv_heads, shape.layers)
        if key not in largest or largest[key].intermediate < shape.intermediate:
            largest[key] = shape
    if not largest:
        raise UsageError(f"--params {share:g}: no shape that small is left")
    sizes = {shape: shape.applied_to(config).block_parameters for shape in largest.values()}
    floor = min(0.95 * share * config.block_parameters, max(sizes.values()))
    full = config.intermediate_size
    used = [shape for shape, size in sizes.items() if size >= floor or shape.intermediate < full]
    return sorted(used, key=lambda shape: -sizes[shape])


def _smaller_shapes(config: ModelConfig, share: float, depths: Iterable[int]) -> Iterator[Shape]:
    if not 0 < share <= 1:
        raise UsageError(f"--params is {share:g}; it must be above 0 and at most 1")
    full = Shape.of(config)
    target = share * config.block_parameters
    for layers in depths:
        for hidden in _widths(full.hidden):
            for heads, kv_heads in _head_counts(full):
                for intermediate in _widths(full.intermediate):
                    shape = Shape(hidden, intermediate, heads, kv_heads, layers)
                    if shape.applied_to(config).block_parameters <= target:
                        yield shape


def _head_counts(full: Shape) -> list[tuple[int, int]]:
    """(heads, kv_heads): whole groups cut, heads cut inside every group, or groups merged with all heads kept."""
    per_group = full.heads // full.kv_heads
    counts = {(kv * per_group, kv) for kv in range(1, full.kv_heads + 1)}
    counts |= {(full.kv_heads * heads, full.kv_heads) for heads in range(1, per_group + 1)}
    counts |= {(full.heads, kv) for kv in range(1, full.kv_heads) if full.kv_heads % kv == 0}
    return sorted(counts)


def _widths(full: int) -> list[int]:
    return [*range(_WIDTH_STEP, full, _WIDTH_STEP), full]
