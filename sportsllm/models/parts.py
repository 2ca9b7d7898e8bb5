"""Records by which a kind of attention or feed-forward describes itself, so that no other module needs to know it.

Counting, pruning, refitting, quantizing, adapting and exporting iterate over these records. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from sportsllm.models.config import ModelConfig

Processor = Literal["cpu", "gpu"]
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
        input: a name for the tensor it reads; matrices with the same one are multiplied in one piece.
        writes_residual: whether its output is added to the residual stream.
        bias: whether it has one.
        scale_source: a matrix s where dividing row i of s by c and multiplying this one's columns that read it by c
            changes nothing; None where there is none. Matrices that read `HIDDEN` have the norm before them instead.
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
    """A norm's weight inside attention or feed-forward; pruning leaves it whole."""

    name: str
    size: int
    eps: float | None = None  # the model's if None


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


class Kind(Protocol):
    """One kind of attention or feed-forward, without norms and cache by default; see `sportsllm.models.kinds`."""

    def check(self, config: ModelConfig) -> None:
        """Raise `UsageError` for fields that it cannot have."""
        return

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        """Its matrices, in the order in which they are used."""

    def vectors(self, config: ModelConfig) -> tuple[Vector, ...]:
        """Its norms."""
        return ()

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        """Its units, the ones that group others first."""

    def state(self, config: ModelConfig) -> tuple[State, ...]:
        """The tensors it caches."""
        return ()

    def active_parameters(self, config: ModelConfig) -> int:
        """Numbers of the matrices that one token is multiplied by."""
        return sum(matrix.numel for matrix in self.matrices(config))

    def mixing_macs(self, config: ModelConfig, depth: int) -> int:
        """Multiply-adds of one token outside the matrices, where it sees `depth` tokens."""
        return 0

    def prompt_macs(self, config: ModelConfig, depth: int) -> int:
        """The same of one token of a prompt or of training, where that is another form."""
        return self.mixing_macs(config, depth)

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """Bytes it keeps of each token for the backward pass, its input not counted; `mixed` is mixed precision."""

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        """Matrices and activations in the order in which they are used."""
