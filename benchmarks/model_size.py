"""What a stored model consists of: bytes and multiply-adds (MACs) by the format of its matrices; and the floating-point
operations (FLOPs) of reading and training on a token.

One multiply-add is two FLOPs. Counted are the products with weight matrices and attention, nearly all of the work
(Kaplan et al., appendix B of https://arxiv.org/abs/2001.08361; PaLM's appendix B, https://arxiv.org/abs/2204.02311,
calls it model FLOPs). Not counted: norms, rotations, the softmax over the vocabulary, the optimizer, validation and
recomputation that saves memory. Letters: T tokens of a sequence, L layers, V vocabulary, H query heads, D hidden_size,
E head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sportsllm.errors import UsageError
from sportsllm.formats.manifest import GGUF_RECORD, directory_bytes, manifest_of
from sportsllm.formats.packed import bitsandbytes_kind, quantization_config
from sportsllm.models import description
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import block_matrices, block_state
from sportsllm.models.memory import (
    MIXED_GROWTH,
    WeightFormat,
    active_matrix_parameters,
    matrix_parameters,
    weight_bytes,
)

CACHES = ("fp32", "fp16", "int8")
# The graph file without its weights: once, and a layer; a layer more with an INT8 cache (beside its scales) or standard
# operators. Measured: 4,200 to 5,600 a layer, 400, ...
GRAPH_BYTES, LAYER_GRAPH_BYTES = 4_000, 5_000
INT8_CACHE_GRAPH_BYTES, STANDARD_GRAPH_BYTES = 400, 7_600
# With calls of kernels: once, the body of each form of layer (first, between, last), and a layer; more for rotary rows.
CALLED_GRAPH_BYTES, BODY_BYTES, CALL_BYTES, ROTATION_BYTES, _FORMS = 6_000, 2_750, 3_600, 2_250, 3
_HEAD_FORMATS = {4: "int4", 8: "int8", 32: "fp32"}


@dataclass(frozen=True)
class ModelFormat(WeightFormat):
    """How a model is stored.

    Attributes:
        cache: format of keys and values.
        file_bytes: of the file, if there is one.
        standard: standard ONNX operators only: a growing cache, and a tied quantized matrix stored twice.
    """

    cache: str = "fp32"
    file_bytes: int | None = None
    standard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache not in CACHES:
            raise UsageError(f"no export has a cache of {self.cache!r}; use one of {', '.join(CACHES)}")

    @property
    def in_kernels(self) -> bool:
        """Whether this program's kernels decode: layers in blocks, but in graphs that call none."""
        return self.quantized and not self.standard

    @property
    def weights_name(self) -> str:
        """Name of the weights' format, for people and directories, such as int4-b64-asym-h4."""
        if not self.quantized:
            return self.precision
        other_head = "" if self.head_bits == 8 else f"-h{self.head_bits}"
        return f"{self.precision}-b{self.block_size}{'-asym' * self.zero_points}{other_head}"

    @property
    def name(self) -> str:
        """Such as int4-b32-kv8."""
        return self.weights_name + "-kv8" * (self.cache == "int8") + "-standard" * self.standard

    @property
    def head_format(self) -> str:
        """Format of embedding and head."""
        return _HEAD_FORMATS[self.head_bits] if self.quantized else self.precision


@dataclass(frozen=True)
class WeightGroup:
    """Matrices of one format: their bytes in the file, and the MACs of their products for each token."""

    weight_format: str
    bytes: float
    macs: int


@dataclass(frozen=True)
class Sizes:
    """What a stored model consists of: the layers, with norms and biases, and the head, which may be the embedding too.

    `embedding` is the bytes of one that is stored separately, of which decoding reads a row. `rest` is the rotary
    tables, the graph and the scales of an INT8 cache.
    """

    layers: WeightGroup
    head: WeightGroup
    embedding: float
    rest: float


@lru_cache(maxsize=1_024)
def sizes(config: ModelConfig, stored: ModelFormat) -> Sizes:
    """The parts of a model, as large as its file if there is one."""
    tied, untied = (weight_bytes(each, stored) for each in _tied_and_untied(config))
    table, macs, scale = untied - tied, matrix_parameters(config), 1.0
    layers = tied - table
    # By columns for the head, since only so the runtime multiplies it packed, and by rows for the embedding.
    twice = not config.tie_word_embeddings or (stored.standard and stored.quantized and stored.head_bits != 32)
    rotary = 1 + (config.rope_local_theta is not None) if _stores_rotary_tables(config, stored) else 0
    rest = 4 * config.max_position_embeddings * config.rotary_size * rotary + _graph_bytes(config, stored)
    if stored.file_bytes is not None:
        scale = stored.file_bytes / (layers + table * (1 + twice) + rest)
    return Sizes(
        layers=WeightGroup(stored.precision, scale * layers, macs),
        head=WeightGroup(stored.head_format, scale * table, config.vocab_size * config.hidden_size),
        embedding=scale * table * twice,
        rest=scale * rest,
    )


@lru_cache(maxsize=64)
def _tied_and_untied(config: ModelConfig) -> tuple[ModelConfig, ModelConfig]:
    return config.with_changes(tie_word_embeddings=True), config.with_changes(tie_word_embeddings=False)


def _stores_rotary_tables(config: ModelConfig, stored: ModelFormat) -> bool:
    """Whether the graph stores rotary tables. It computes the new tokens' rows if ONNX Runtime's attention does not
    rotate: over a float16 cache, and with heads of other sizes."""
    if config.position_kind != "rotary" or stored.standard or config.attention_kind != "grouped_query":
        return config.position_kind == "rotary"
    return stored.cache != "fp16" and config.head_dim % 16 == 0 and config.rotary_size % 16 == 0


def file_bytes(config: ModelConfig, stored: ModelFormat) -> int:
    """Size of the exported files: weights, rotary tables and graph."""
    parts = sizes(config, stored)
    return round(parts.layers.bytes + parts.head.bytes + parts.embedding + parts.rest)


def mixed_bytes(config: ModelConfig, stored: ModelFormat) -> float:
    """Bytes that `quantize` may add to the file of an INT4 model that is not made yet."""
    if stored.precision != "int4" or stored.file_bytes is not None:
        return 0.0
    parts = sizes(config, stored)
    tables = parts.head.bytes + (0 if config.tie_word_embeddings else parts.embedding)
    return MIXED_GROWTH * (parts.layers.bytes + tables) + BODY_BYTES + _extra_graph_bytes(config, stored)


@lru_cache(maxsize=1_024)
def mixing_macs(config: ModelConfig, depth: int) -> int:
    """MACs outside the matrices, in all layers, of one token that sees `depth` tokens: scores, and sums of values."""
    return config.num_hidden_layers * description.mixing_macs(config, depth)


@lru_cache(maxsize=1_024)
def active_share(config: ModelConfig) -> float:
    """Share of the values in the layers' matrices that one token is multiplied by: below 1 with experts."""
    return active_matrix_parameters(config) / matrix_parameters(config)


@lru_cache(maxsize=1_024)
def stepwise_share(config: ModelConfig) -> float:
    """Share of the values in the layers' matrices that read a prompt token by token: an LSTM's last state."""
    alone = sum(matrix.numel for matrix in block_matrices(config) if matrix.stepwise)
    return config.num_hidden_layers * alone / matrix_parameters(config)


@lru_cache(maxsize=1_024)
def layer_activations(config: ModelConfig) -> int:
    """Values that the products of one layer read and write for each token, the mean of all layers."""
    total = 0.0
    for part, layers in config.runs():
        routed = 1.0 if part.experts is None else part.experts.active / part.experts.count
        total += layers * sum((m.rows + m.columns) * (routed if m.routed else 1.0) for m in block_matrices(part))
    return round(total / config.num_hidden_layers)


def stored_format(directory: Path) -> ModelFormat:
    """How a directory stores its model. Matrices of mixed bits count as the bits that most of them have.

    Raises:
        ArtifactError: another method quantized it.
    """
    packed, settings = quantization_config(directory), manifest_of(directory).settings
    cache = settings.get("kv_cache") or "fp32"
    if bitsandbytes_kind(directory) is not None or (directory / GGUF_RECORD).exists():
        return ModelFormat("fp32", cache=cache)  # read as dense: the file's size says nothing of what is moved
    size, standard = directory_bytes(directory) or None, settings.get("format") == "standard"
    if packed is None:
        half = settings.get("dtype") == "fp16"
        return ModelFormat("fp16" if half else "fp32", cache=cache, file_bytes=size, standard=standard)
    return ModelFormat(
        precision=f"int{packed.bits}",
        block_size=packed.block_size,
        head_bits=packed.head_bits,
        zero_points=not packed.symmetric,
        cache=cache,
        file_bytes=size,
        standard=standard,
    )


def _extra_graph_bytes(config: ModelConfig, stored: ModelFormat) -> int:
    """What a layer, or the body of its call, has more by its cache's format and by computing rotary rows."""
    rotates = config.position_kind == "rotary" and not _stores_rotary_tables(config, stored)
    return INT8_CACHE_GRAPH_BYTES * (stored.cache == "int8") + ROTATION_BYTES * rotates


def _graph_bytes(config: ModelConfig, stored: ModelFormat) -> int:
    """The decoding graph, with an INT8 cache's scale for each channel."""
    layers, more = config.num_hidden_layers, _extra_graph_bytes(config, stored)
    scales = sum(math.prod(state.shape) for state in block_state(config)) if stored.cache == "int8" else 0
    if stored.in_kernels:
        return CALLED_GRAPH_BYTES + min(layers, _FORMS) * (BODY_BYTES + more) + layers * (CALL_BYTES + 4 * scales)
    return GRAPH_BYTES + layers * (LAYER_GRAPH_BYTES + more + STANDARD_GRAPH_BYTES * stored.standard + 4 * scales)


def matmul_parameters(config: ModelConfig) -> int:
    """N, the weights a token is multiplied by: the blocks' matrices, of experts the chosen ones, and the (V, D) head.

    The embedding is a look-up and free; a tied head is a product all the same and counts.
    """
    return active_matrix_parameters(config) + config.vocab_size * config.hidden_size


def forward_flops_per_token(config: ModelConfig, sequence: int) -> int:
    """FLOPs of reading one token, the mean over a sequence of T = `sequence` tokens.

        2 N + 4 L (H E) c    with c = (T + 1) / 2, the mean number of positions a token attends to

    Each attended position costs 2 H E for its score and 2 H E for its value; kinds of attention that differ say what
    it costs them. PaLM and Chinchilla's appendix F
    (https://arxiv.org/abs/2203.15556) have c = T; causal attention needs half. Packed documents attend inside
    themselves only, so for them this is an upper bound.
    """
    mixing = description.mixing_macs(config, sequence + 1, prompt=True)  # of two mean depths
    return 2 * matmul_parameters(config) + config.num_hidden_layers * mixing


def training_flops_per_token(config: ModelConfig, sequence: int) -> int:
    """FLOPs of training on one token, 6 N + 12 L (H E) (T + 1) / 2: forward, and twice that backward (Kaplan et al.,
    section 2.1)."""
    return 3 * forward_flops_per_token(config, sequence)
