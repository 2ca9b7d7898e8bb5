"""The kinds of attention and feed-forward, and the tensors of a whole model. Imports no torch.

A new kind is a description like `Gelu` and a module like `PlainMLP`, with a line in a table here and in one of
`language_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from sportsllm.models.attention_kinds import LSTM, GroupedQuery, Latent, Selected
from sportsllm.models.feed_forward_kinds import Gated, Gelu, Mixture
from sportsllm.models.parts import HIDDEN, Kind, Matrix, State, Unit

if TYPE_CHECKING:
    from sportsllm.models.config import ModelConfig

ATTENTION: dict[str, Kind] = {
    "grouped_query": GroupedQuery(),
    "latent": Latent(),
    "selected": Selected(),
    "lstm": LSTM(),
}
FEED_FORWARD: dict[str, Kind] = {
    "swiglu": Gated("silu"),
    "geglu": Gated("gelu"),
    "gelu": Gelu(),
    "experts": Mixture(),
}

NORMS = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
"""The two sublayers of a block, in order, and the norm before each."""
OUTPUT_NORMS = {"self_attn": "attention_output_norm", "mlp": "feed_forward_output_norm"}
"""The norm after each sublayer, in a model with `output_norms`."""
EMBEDDING, HEAD, POSITIONS, LAST_NORM = "model.embed_tokens", "lm_head", "model.embed_positions", "model.norm"


Size = TypeVar("Size")


class Parameter(NamedTuple):
    """A tensor of a checkpoint: its name, shape and role."""

    name: str
    shape: tuple[int, ...]
    role: Literal["embedding", "positions", "head", "matrix", "bias", "norm"]
    writes_residual: bool = False


def sublayers(config: ModelConfig) -> dict[str, Kind]:
    """The kind of each sublayer of a block, by module name.

    Here and below a config is that of a model of like layers, `ModelConfig.of_layer` of another one.
    """
    return {"self_attn": ATTENTION[config.attention_kind], "mlp": FEED_FORWARD[config.mlp_kind]}


def block_matrices(config: ModelConfig) -> list[Matrix]:
    """The matrices of one block in order; names, inputs and scale sources begin with the sublayer: `mlp.up_proj`."""
    return list(_block_matrices(config))


@lru_cache(maxsize=64)  # a search asks many times for one shape after the other
def _block_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    found = []
    for sublayer, kind in sublayers(config).items():
        for matrix in kind.matrices(config):
            source = None if matrix.scale_source is None else f"{sublayer}.{matrix.scale_source}"
            name, read = f"{sublayer}.{matrix.name}", f"{sublayer}.{matrix.input}"
            found.append(matrix._replace(name=name, input=read, scale_source=source))
    return tuple(found)


def input_groups(config: ModelConfig) -> list[list[Matrix]]:
    """`block_matrices`, those that read the same tensor together."""
    groups: dict[str, list[Matrix]] = {}
    for matrix in block_matrices(config):
        groups.setdefault(matrix.input, []).append(matrix)
    return list(groups.values())


def block_units(config: ModelConfig) -> dict[str, Unit]:
    """The units that pruning may cut, by name: the residual stream's channels, then each sublayer's units."""
    units = {HIDDEN: Unit(HIDDEN, "hidden_size", config.hidden_size)}
    for kind in sublayers(config).values():
        units |= {unit.name: unit for unit in kind.units(config)}
    return units


def block_state(config: ModelConfig) -> list[State]:
    """The tensors that one block caches, for each token or of a whole sequence."""
    return [state for kind in sublayers(config).values() for state in kind.state(config)]


def cached_shape(state: State, length: Size) -> tuple[int | Size, ...]:
    """The shape of a cached tensor of one sequence with room for `length` tokens: they are on the last axis but one."""
    return (*state.shape[:-1], length, state.shape[-1]) if state.per_token else state.shape


def cache_grows(config: ModelConfig) -> bool:
    """Whether anything is cached for each token."""
    return any(state.per_token for state in block_state(config))


def parameters(config: ModelConfig) -> list[Parameter]:
    """Every tensor of a checkpoint, in the order of the model's own."""
    table = (config.vocab_size, config.hidden_size)
    found = [Parameter(f"{EMBEDDING}.weight", table, "embedding")]
    if config.positions:
        found.append(Parameter(f"{POSITIONS}.weight", (config.positions, config.hidden_size), "positions"))
    for layer in range(config.num_hidden_layers):
        own, prefix = config.of_layer(layer), f"model.layers.{layer}"
        for sublayer, kind in sublayers(own).items():
            found += _norm(config, f"{prefix}.{NORMS[sublayer]}")
            for matrix in kind.matrices(own):
                name, shape = f"{prefix}.{sublayer}.{matrix.name}", (matrix.rows, matrix.columns)
                found.append(Parameter(f"{name}.weight", shape, "matrix", matrix.writes_residual))
                if matrix.bias:
                    found.append(Parameter(f"{name}.bias", (matrix.rows,), "bias"))
            for vector in kind.vectors(own):
                found.append(Parameter(f"{prefix}.{sublayer}.{vector.name}.weight", (vector.size,), "norm"))
            if config.output_norms:
                found += _norm(config, f"{prefix}.{OUTPUT_NORMS[sublayer]}")
    found += _norm(config, LAST_NORM)
    if not config.tie_word_embeddings:
        found.append(Parameter(f"{HEAD}.weight", table, "head"))
    return found


def _norm(config: ModelConfig, name: str) -> list[Parameter]:
    """A norm of the residual stream."""
    found = [Parameter(f"{name}.weight", (config.hidden_size,), "norm")]
    return found + [Parameter(f"{name}.bias", (config.hidden_size,), "bias")] * (config.norm_kind == "layer")


def norms_of_block(config: ModelConfig) -> int:
    """How many norms of the residual stream a block has."""
    return len(NORMS) * (2 if config.output_norms else 1)


def adds_to_residual(config: ModelConfig, matrix: Matrix) -> bool:
    """Whether a matrix's output is added to the residual stream as it is, with no norm between."""
    one_of_several = config.experts is not None and matrix.name.startswith("mlp.")
    return matrix.writes_residual and not one_of_several and not config.output_norms


def can_cut_hidden(config: ModelConfig) -> bool:
    """Whether the residual stream may be written in another basis: norms must have nothing but a scale to fold away."""
    return config.norm_kind == "rms" and not config.output_norms


def matrix_shapes(config: ModelConfig, layers_only: bool = False) -> dict[str, tuple[int, int]]:
    """(rows, columns) of every matrix by its module's name; `layers_only` leaves out embedding and head.

    Everything that must know what a matrix is asks here.
    """
    roles = ("matrix",) if layers_only else ("matrix", "embedding", "head")
    found = [item for item in parameters(config) if item.role in roles]
    return {item.name.removesuffix(".weight"): (item.shape[0], item.shape[1]) for item in found}


def check_parameters(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Hold a model's own tensors against their description.

    Raises:
        TypeError: a tensor that no kind describes, or one that is missing or of another shape; a bug in a kind.
    """
    described = {item.name: item.shape for item in parameters(config)}
    for name in sorted(described.keys() | shapes.keys()):
        if described.get(name) != shapes.get(name):
            raise TypeError(f"{name}: the model has {shapes.get(name)}, its description says {described.get(name)}")
