"""What a kind of attention or feed-forward says of itself: matrices, norms, units that pruning may cut, cached tensors.

Counting, pruning, refitting, quantizing, adapting, drawing and exporting iterate over these records, so no other module
needs to know a kind. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

HIDDEN = "hidden"
"""The name of the residual stream's channels, the one unit that every kind reads and writes."""


@dataclass(frozen=True)
class Unit:
    """A group of rows or columns that pruning keeps or cuts as a whole.

    Attributes:
        name: for example `neuron`.
        field: the field of `ModelConfig` that counts it.
        count: how many there are.
        size: consecutive rows or columns of a matrix that belong to one.
        group: the unit that these are divided among in equal shares, for example the key/value head of query heads.
    """

    name: str
    field: str
    count: int
    size: int = 1
    group: str | None = None


class Matrix(NamedTuple):
    """A matrix that inputs are multiplied by: y = x W^T + b, W of shape (`rows`, `columns`).

    Attributes:
        name: of the module, within its sublayer of the block.
        rows, columns: outputs and inputs.
        row_unit, column_unit: the units that they are made of, `HIDDEN` or the name of a `Unit`.
        input: a name for the tensor it reads; matrices with the same one are multiplied together.
        writes_residual: whether its output is added to the residual stream.
        bias: whether it has one.
        scale_source: a matrix s for which dividing row i of s by c and multiplying this one's columns that read it by c
            changes nothing; None if there is none. Matrices that read `HIDDEN` have the norm before them instead.
        routed: whether it reads some tokens only, which ones being the model's own choice.
        router: whether its outputs choose experts; an update that treats all directions alike is not for it (Muon).
        stepwise: whether it reads a prompt token by token, each product after the one before.
    """

    name: str
    rows: int
    columns: int
    row_unit: str
    column_unit: str
    input: str
    writes_residual: bool = False
    bias: bool = False
    scale_source: str | None = None
    routed: bool = False
    router: bool = False
    stepwise: bool = False

    @property
    def numel(self) -> int:
        """Weights, without the bias."""
        return self.rows * self.columns


class Vector(NamedTuple):
    """A norm's weight inside attention or feed-forward; pruning leaves it whole, or cuts it like a matrix's rows."""

    name: str
    size: int
    eps: float | None = None  # the model's if None
    rows_of: str | None = None  # the matrix


class State(NamedTuple):
    """A tensor that is cached: `name` in the graph, and the shape of one token's part.

    Without `per_token` it is kept of a sequence, (B, *shape), and is as large after one token as after a thousand.
    """

    name: str
    shape: tuple[int, ...]
    per_token: bool = True


class Activation(NamedTuple):
    """A tensor on the way through a sublayer of the block.

    `shape` is that of one token's part. `kind` is `activation`; `cache` for what is kept for later tokens, its tokens
    on the last axis but one; `state` for what is kept of a whole sequence; or `scores`, which have a further axis as
    long as the sequence. `held` is False for a tensor that is never made whole.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["activation", "cache", "state", "scores"] = "activation"
    held: bool = True


class Kept(NamedTuple):
    """Values that a sublayer keeps of each token for the backward pass, its input aside.

    Attributes:
        computed: in the compute dtype.
        float32: always in float32.
        attended: read and made by attention: float32 on a CPU, the compute dtype on a GPU (FlashAttention,
            https://arxiv.org/abs/2205.14135). No (T, T) scores are kept.
        normed: heads before their norm, float32, twice on a CPU.
        cast: 16-bit copies under mixed precision.
    """

    computed: int = 0
    float32: int = 0
    attended: int = 0
    normed: int = 0
    cast: int = 0


@dataclass(frozen=True)
class Sublayer:
    """Attention or feed-forward of a block.

    Attributes:
        matrices: in the order of the model's own.
        tensors: matrices and activations in the order of use.
        units: those that group others first.
        kept: for the backward pass.
        vectors, state: norms and cached tensors.
        active: weights that one token is multiplied by, if not all.
        macs, prompt_macs: multiply-adds outside the matrices for each token that a token attends to, when decoding and
            in a prompt or training.
        own_macs: multiply-adds outside the matrices at any depth.
    """

    matrices: tuple[Matrix, ...]
    tensors: tuple[Matrix | Activation, ...]
    units: tuple[Unit, ...]
    kept: Kept
    vectors: tuple[Vector, ...] = ()
    state: tuple[State, ...] = ()
    active: int | None = None
    macs: int = 0
    prompt_macs: int = 0
    own_macs: int = 0

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied by."""
        return sum(matrix.numel for matrix in self.matrices) if self.active is None else self.active
