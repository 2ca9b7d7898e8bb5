"""Queries on the description of a model: its matrices, units, cached tensors and parameters. Imports no torch.

Unless said otherwise, a config here is that of a model of like layers, `ModelConfig.of_layer` of another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from sportsllm.models.kinds import ATTENTION, FEED_FORWARD, index_size
from sportsllm.models.sublayer import HIDDEN, Matrix, State, Sublayer, Unit

if TYPE_CHECKING:
    from sportsllm.models.config import ModelConfig

NORMS = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
"""The two sublayers of a block, in order, and the norm before each, in a model with `input_norms`."""
OUTPUT_NORMS = {"self_attn": "attention_output_norm", "mlp": "feed_forward_output_norm"}
"""The norm after each sublayer, in a model with `output_norms`."""
EMBEDDING, HEAD, POSITIONS, LAST_NORM = "model.embed_tokens", "lm_head", "model.embed_positions", "model.norm"

Size = TypeVar("Size")
Component = Literal["embedding", "attention", "feed_forward", "norms", "head"]


class Parameter(NamedTuple):
    """A tensor of a checkpoint: its name, shape, role and the part of the model that it counts to."""

    name: str
    shape: tuple[int, ...]
    role: Literal["embedding", "positions", "head", "matrix", "bias", "norm"]
    component: Component
    writes_residual: bool = False

    @property
    def numel(self) -> int:
        """Values in it."""
        return math.prod(self.shape)


def sublayers(config: ModelConfig) -> dict[str, Sublayer]:
    """The two sublayers of a block, by module name."""
    return dict(zip(NORMS, _sublayers(config), strict=True))


@lru_cache(maxsize=64)  # a search asks many times for one shape after the other
def _sublayers(config: ModelConfig) -> tuple[Sublayer, Sublayer]:
    return ATTENTION[config.attention_kind](config), FEED_FORWARD[config.mlp_kind](config)


def is_llama_like(config: ModelConfig) -> bool:
    """Whether all blocks of a whole model have grouped-query attention and a gated feed-forward alone."""
    kinds = {(part.attention_kind, part.mlp_kind, part.qk_norm) for part, _ in config.runs()}
    return kinds <= {("grouped_query", "swiglu", False), ("grouped_query", "geglu", False)}


@lru_cache(maxsize=64)
def block_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    """The matrices of one block in order; names, inputs and scale sources begin with the sublayer: `mlp.up_proj`."""
    found = []
    for name, sublayer in sublayers(config).items():
        for matrix in sublayer.matrices:
            source = None if matrix.scale_source is None else f"{name}.{matrix.scale_source}"
            found.append(
                matrix._replace(name=f"{name}.{matrix.name}", input=f"{name}.{matrix.input}", scale_source=source)
            )
    return tuple(found)


def joint_vectors(config: ModelConfig) -> dict[str, str]:
    """Vectors that are cut like the rows of a matrix, and the matrix, by their names in the block."""
    found = [(name, vector) for name, sublayer in sublayers(config).items() for vector in sublayer.vectors]
    return {f"{name}.{each.name}": f"{name}.{each.rows_of}" for name, each in found if each.rows_of is not None}


def input_groups(config: ModelConfig) -> list[list[Matrix]]:
    """`block_matrices`, those that read the same tensor together."""
    groups: dict[str, list[Matrix]] = {}
    for matrix in block_matrices(config):
        groups.setdefault(matrix.input, []).append(matrix)
    return list(groups.values())


def block_units(config: ModelConfig) -> dict[str, Unit]:
    """The units that pruning may cut, by name: the residual stream's channels, then each sublayer's units."""
    units = {HIDDEN: Unit(HIDDEN, "hidden_size", config.hidden_size)}
    return units | {unit.name: unit for sublayer in _sublayers(config) for unit in sublayer.units}


def block_state(config: ModelConfig) -> list[State]:
    """The tensors that one block caches, for each token or of a whole sequence."""
    return [state for sublayer in _sublayers(config) for state in sublayer.state]


def cached_shape(state: State, length: Size) -> tuple[int | Size, ...]:
    """The shape of a cached tensor of one sequence with room for `length` tokens: they are on the last axis but one."""
    return (*state.shape[:-1], length, state.shape[-1]) if state.per_token else state.shape


def mixing_macs(config: ModelConfig, depth: int, prompt: bool = False) -> int:
    """Multiply-adds outside the matrices of one token that sees `depth` tokens, in one layer; of a `prompt` or decoded.

    The mean over layers if some see fewer tokens. An indexer scores all tokens as soon as there are more than it
    selects; in a prompt the selection is a mask over scores of all.
    """
    attention, _ = _sublayers(config)
    seen = [min(depth, config.window(layer) or depth) for layer in range(config.num_hidden_layers)]
    index = 0
    if config.selection is not None and depth > config.selection.tokens:
        index = config.selection.heads * (index_size(config) + 1) * depth
        seen = seen if prompt else [config.selection.tokens]
    macs = attention.prompt_macs if prompt else attention.macs
    return macs * sum(seen) // len(seen) + index + attention.own_macs


@lru_cache(maxsize=64)
def block_tensors(config: ModelConfig) -> tuple[Parameter, ...]:
    """Every tensor of one block, in the order of the model's own; names begin with the sublayer or are the norm's."""
    found: list[Parameter] = []
    components: tuple[Component, ...] = ("attention", "feed_forward")
    for component, (name, sublayer) in zip(components, sublayers(config).items(), strict=True):
        if config.input_norms:
            found += _norm(config, NORMS[name])
        for matrix in sublayer.matrices:
            module, shape = f"{name}.{matrix.name}", (matrix.rows, matrix.columns)
            found.append(Parameter(f"{module}.weight", shape, "matrix", component, matrix.writes_residual))
            if matrix.bias:
                found.append(Parameter(f"{module}.bias", (matrix.rows,), "bias", component))
        for vector in sublayer.vectors:
            found.append(Parameter(f"{name}.{vector.name}.weight", (vector.size,), "norm", "norms"))
        if config.output_norms:
            found += _norm(config, OUTPUT_NORMS[name])
    return tuple(found)


def end_tensors(config: ModelConfig) -> list[Parameter]:
    """The tensors before and after the blocks; those before are the embedding's."""
    table = (config.vocab_size, config.hidden_size)
    found = [Parameter(f"{EMBEDDING}.weight", table, "embedding", "embedding")]
    if config.positions:
        shape = (config.positions, config.hidden_size)
        found.append(Parameter(f"{POSITIONS}.weight", shape, "positions", "embedding"))
    found += _norm(config, LAST_NORM)
    return found if config.tie_word_embeddings else [*found, Parameter(f"{HEAD}.weight", table, "head", "head")]


def parameters(config: ModelConfig) -> list[Parameter]:
    """Every tensor of a checkpoint, in the order of the model's own; of any model."""
    ends = end_tensors(config)
    before = 1 + (config.positions > 0)
    layers = [
        item._replace(name=f"model.layers.{layer}.{item.name}")
        for layer in range(config.num_hidden_layers)
        for item in block_tensors(config.of_layer(layer))
    ]
    return [*ends[:before], *layers, *ends[before:]]


def _norm(config: ModelConfig, name: str) -> list[Parameter]:
    """A norm of the residual stream."""
    found = [Parameter(f"{name}.weight", (config.hidden_size,), "norm", "norms")]
    bias = Parameter(f"{name}.bias", (config.hidden_size,), "bias", "norms")
    return [*found, bias] if config.norm_kind == "layer" else found


def norms_of_block(config: ModelConfig) -> int:
    """How many norms of the residual stream a block has."""
    return len(NORMS) * (config.input_norms + config.output_norms)


def adds_to_residual(config: ModelConfig, matrix: Matrix) -> bool:
    """Whether a matrix's output is added to the residual stream as it is, with no norm between."""
    one_of_several = config.experts is not None and matrix.name.startswith("mlp.")
    return matrix.writes_residual and not one_of_several and not config.output_norms


def can_cut_hidden(config: ModelConfig) -> bool:
    """Whether the residual stream may be written in another basis: norms must have nothing but a scale to fold away."""
    return config.norm_kind == "rms" and not config.output_norms


def matrix_shapes(config: ModelConfig, layers_only: bool = False) -> dict[str, tuple[int, int]]:
    """(rows, columns) of every matrix of any model, by its module's name; `layers_only` leaves out embedding and head.

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


def described_shape(config: ModelConfig) -> str:
    """The shape and the number of parameters, in a line."""
    experts, heads = config.experts, f"on {config.num_key_value_heads} key/value heads"
    if config.attention_kind == "latent":
        heads = f"on a latent of {config.kv_rank}"
    if config.selection is not None:
        heads += f" that see {config.selection.tokens:,} tokens"
    mixing = f"{config.num_attention_heads} heads of {config.head_dim} {heads}"
    if config.attention_kind == "lstm":
        mixing = f"LSTM of {config.cells:,} cells"
    inner = f"FFN {config.intermediate_size:,}"
    if experts is not None:
        inner = f"{experts.active} of {experts.count} experts of {config.intermediate_size:,}"
        inner += f" and {experts.shared} shared" if experts.shared else ""
    if config.dense_layers:
        inner += f" after {config.dense_layers} with FFN {config.dense_intermediate_size:,}"
    dropout = f", dropout {config.dropout:g}" if config.dropout else ""
    return (
        f"{config.num_hidden_layers} layers of {config.hidden_size:,}, {inner}, {mixing}, "
        f"vocabulary {config.vocab_size:,} ({'tied' if config.tie_word_embeddings else 'untied'}), "
        f"context {config.max_position_embeddings:,}{dropout}: {config.parameters:,} parameters"
    )
