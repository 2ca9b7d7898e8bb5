"""How a model is kept, and what of it one token reads: bytes and numbers, by the form of its matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from export.paths import PROMPT_FILE
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import packed_by_bitsandbytes, read_json
from sportsllm.models.kinds import block_matrices
from sportsllm.models.size import (
    CACHE_BYTES,
    PRECISIONS,
    block_numbers,
    kv_cache_bytes_per_token,
    weight_bytes,
)
from sportsllm.storage.artifact import MANIFEST, directory_bytes, read_manifest

GRAPH_BYTES = 4_000
LAYER_GRAPH_BYTES = 5_000
INT8_CACHE_GRAPH_BYTES = 8_000
STANDARD_GRAPH_BYTES = 7_600
PROMPT_GRAPH_BYTES = 5_600
"""The graph without its weights, names and nodes: once, and for each layer, what a layer takes more where the cache is
INT8 (beside its scales) or the operators are standard ones, and what the second graph of the latency profile takes.
Graphs of 2 to 12 layers, 96 to 384 wide, took 4,200 to 5,600 a layer, 7,900 to 8,000, 7,400 to 8,400,
5,100 to 6,200."""
SCALE_NUMBERS = 16
"""What a block's scale costs beside its numbers, in numbers. MatMulNBits at 4 bits and blocks of 32, 64, 128 and 256
took 25, 22, 19 and 18 us with one row and 2.04, 1.90, 1.53 and 1.36 ns for 1,000 operations with 512: 15 and 20."""
OUTPUT_NUMBERS = {"fp32": 0, "fp16": 0, "int8": 150, "int4": 150, "int8_rows": 75}
"""What an output of a product with many rows costs beside the numbers that make it, in numbers. By a line through the
times of 128 rows by 768 outputs of 64 to 2,048 numbers, scales counted (2 threads, AVX512-VNNI): MatMul -9; MatMulNBits
110 and 210 at 4 bits in blocks of 32 and 128, 90 and 190 at 8 bits; DynamicQuantizeMatMul 78."""
SCORE_NUMBERS = 32
"""What a score of attention over a prompt costs beside its products, in numbers of a head. 128 tokens after 0 to 384
took 1.40, 1.67, 2.34 and 4.29 ns a score with heads of 16, 32, 64 and 128, on the same machine."""
USUAL_BLOCK = 128
"""The block of the matrices that shares of a bandwidth were found with."""
_HEAD_FORMS = {4: "int4", 8: "int8", 32: "fp32"}


@dataclass(frozen=True)
class Stored:
    """How a model is kept.

    Attributes:
        precision: of the layers' matrices, one of `sportsllm.models.size.PRECISIONS`.
        block_size: numbers of a quantized matrix that share a scale.
        head_bits: of embedding and head where the rest is quantized.
        zero_points: whether each block stores one.
        cache: precision of the key/value cache, None for the device's usual one.
        file_bytes: where a file exists, its size replaces the computed one.
        prompt_bytes: of these the latency profile's second graph, which decoding does not read.
        per_row: int8 with a scale a row in the layers; head and embedding in blocks.
        standard: standard ONNX operators alone: a growing cache, and a packed tied matrix by rows and by columns.
        latency: the latency profile, where there is no file to tell.
    """

    precision: str
    block_size: int = 32
    head_bits: int = 8
    zero_points: bool = False
    cache: str | None = None
    file_bytes: int | None = None
    prompt_bytes: int = 0
    per_row: bool = False
    standard: bool = False
    latency: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision {self.precision!r} is not known; use one of {', '.join(PRECISIONS)}")
        if self.cache is not None and self.cache not in CACHE_BYTES:
            raise UsageError(f"cache {self.cache!r} is not known; use one of {', '.join(CACHE_BYTES)}")
        if self.per_row and self.precision != "int8":
            raise UsageError(f"precision {self.precision!r} has no form with one scale a row; use int8")
        if self.reads_prompts_apart and (self.per_row or self.standard or not self.quantized):
            raise UsageError("the latency profile is for matrices in blocks and the runtime's own operators")

    @property
    def quantized(self) -> bool:
        """Whether the layers' matrices are packed."""
        return self.precision in ("int8", "int4")

    @property
    def reads_prompts_apart(self) -> bool:
        """Whether a second graph reads prompts."""
        return self.latency or self.prompt_bytes > 0

    @property
    def form(self) -> str:
        """Of the layers' matrices, one of `benchmarks.predict.coefficients.FORMS`."""
        return "int8_rows" if self.per_row else self.precision

    @property
    def head_form(self) -> str:
        """Of embedding and head."""
        return _HEAD_FORMS[self.head_bits] if self.quantized else self.precision


@dataclass(frozen=True)
class Part:
    """Matrices of one form: the bytes they take in the file, and the numbers multiplied by for each token.

    In blocks the last one of a row counts whole, and each scale as `SCALE_NUMBERS` further ones. `outputs` are their
    rows, what products give for each token; 0 where they are not multiplied by.
    """

    form: str
    bytes: float
    numbers: float
    outputs: int


@dataclass(frozen=True)
class Sizes:
    """What a stored model consists of.

    Attributes:
        body: the layers, norms and biases counted with their matrices.
        head: the matrix that makes logits; where it is the embedding too, once.
        looked_up: an embedding that is stored by itself, of which decoding reads a row.
        prompt: the latency profile's layers a second time, without the last one's but for keys and values.
        rest: bytes of the rotary table, the graph and the scales of an INT8 cache.
    """

    body: Part
    head: Part
    looked_up: Part | None
    prompt: Part | None
    rest: float

    @property
    def decoding(self) -> tuple[Part, Part]:
        """What one token reads."""
        return self.body, self.head

    @property
    def total(self) -> float:
        """Bytes of all files."""
        parts = (self.body, self.head, self.looked_up, self.prompt)
        return sum(part.bytes for part in parts if part is not None) + self.rest


@lru_cache(maxsize=1_024)
def sizes(config: ModelConfig, stored: Stored) -> Sizes:
    """The parts of a model, as large as its file where there is one.

    Raises:
        UsageError: an unknown block size or number of bits.
    """
    table, body = _table_bytes(config, stored), _body_bytes(config, stored)
    # By columns for the head, since only so the runtime multiplies it packed, and by rows for the embedding.
    twice = not config.tie_word_embeddings or (stored.standard and stored.quantized and stored.head_bits != 32)
    looked_up = table if twice else 0
    rest = 4 * config.max_position_embeddings * config.head_dim + _graph_bytes(config, stored)
    prompt = stored.prompt_bytes or (_prompt_bytes(config) if stored.latency else 0)
    scale = 1.0
    if stored.file_bytes is not None:
        scale = (stored.file_bytes - stored.prompt_bytes) / (body + table + looked_up + rest)
    return Sizes(
        body=Part(
            stored.form,
            scale * body,
            _multiplied(config, stored),
            config.num_hidden_layers * sum(matrix.rows for matrix in block_matrices(config)),
        ),
        head=Part(
            stored.head_form,
            scale * table,
            config.vocab_size * config.hidden_size * _with_scales(stored.head_form, stored),
            config.vocab_size,
        ),
        looked_up=Part(stored.head_form, scale * looked_up, 0, 0) if looked_up else None,
        prompt=Part("int8_rows", prompt, _prompt_numbers(config), _prompt_outputs(config)) if prompt else None,
        rest=scale * rest,
    )


def file_bytes(config: ModelConfig, stored: Stored) -> int:
    """Size of the exported files: weights, rotary table and graph."""
    return stored.file_bytes if stored.file_bytes is not None else round(sizes(config, stored).total)


def stored_form(directory: Path) -> Stored:
    """How a directory stores its model, from config.json's quantization_config and the manifest.

    Of matrices with different bits (`quantize --bits-per-weight`) those that most have count for all.

    Raises:
        ArtifactError: config.json or the manifest is damaged.
    """
    size, packed = directory_bytes(directory), packed_as(directory)
    settings = read_manifest(directory).get("settings", {}) if (directory / MANIFEST).exists() else {}
    cache, standard = settings.get("kv_cache"), bool(settings.get("standard_ops"))
    if packed_by_bitsandbytes(packed) is not None:
        return Stored("fp32", cache=cache)  # read as dense: the file's size says nothing of what is moved
    if packed:
        return Stored(
            precision=f"int{packed['bits']}",
            block_size=int(packed.get("block_size", 32)),
            head_bits=int(packed.get("head_bits", packed["bits"])),
            zero_points=not packed.get("symmetric", True),
            cache=cache,
            file_bytes=size,
            prompt_bytes=prompt_graph_bytes(directory),
            per_row=bool(packed.get("per_row")),
            standard=standard,
        )
    precision = "fp16" if settings.get("dtype") == "fp16" else "fp32"
    return Stored(precision, cache=cache, file_bytes=size, standard=standard)


def packed_as(directory: Path) -> dict[str, Any]:
    """config.json's quantization_config; empty where nothing is packed."""
    found: dict[str, Any] | None = read_json(directory / "config.json").get("quantization_config")
    return found or {}


def prompt_graph_bytes(directory: Path) -> int:
    """Size of the latency profile's second graph and its data, of which decoding reads nothing."""
    return sum(path.stat().st_size for path in directory.glob(f"{PROMPT_FILE}*"))


def cache_bytes(config: ModelConfig, precision: str) -> int:
    """Bytes of keys and values for one token."""
    return kv_cache_bytes_per_token(config)[precision]


def _graph_bytes(config: ModelConfig, stored: Stored) -> int:
    """The decoding graph with the scales of an INT8 cache, one for each channel of keys and values."""
    a_layer = LAYER_GRAPH_BYTES + (STANDARD_GRAPH_BYTES if stored.standard else 0)
    if stored.cache == "int8":
        a_layer += INT8_CACHE_GRAPH_BYTES + 2 * 4 * config.key_value_size
    return GRAPH_BYTES + config.num_hidden_layers * a_layer


def _multiplied(config: ModelConfig, stored: Stored) -> float:
    """Numbers of the layers' matrices as `Part` counts them."""
    if stored.form not in ("int8", "int4"):
        return block_numbers(config)
    return block_numbers(config, stored.block_size) * _with_scales(stored.form, stored)


def _with_scales(form: str, stored: Stored) -> float:
    return 1 + SCALE_NUMBERS / stored.block_size if form in ("int8", "int4") else 1.0


def slower_reading(form: str, block_size: int) -> float:
    """How much longer a byte of such blocks takes to read than one of `USUAL_BLOCK` with one row: scales hold it up.

    What reading takes goes with the numbers, scales counted as further ones, and not with the bytes: chains of 1 to
    100 MB at 4 bits took 1.2 to 2.3, mostly 1.4, times as long a number in blocks of 32 as in ones of 128 (a Zen 5,
    2 threads), where they have 1.18 times the bytes and 1.33 times these numbers.
    """

    def numbers_a_byte(block: int) -> float:
        return (block + SCALE_NUMBERS) / (block * (0.5 if form == "int4" else 1.0) + 4)  # a scale is a float32

    return numbers_a_byte(block_size) / numbers_a_byte(USUAL_BLOCK)


def _body_bytes(config: ModelConfig, stored: Stored) -> int:
    if stored.per_row:
        scales = config.num_hidden_layers * sum(matrix.rows for matrix in block_matrices(config))
        return block_numbers(config) + 4 * scales + 4 * (config.block_parameters - block_numbers(config))
    return _all_bytes(config, stored, tied=True) - _table_bytes(config, stored)


def _table_bytes(config: ModelConfig, stored: Stored) -> int:
    """Embedding or head: what a model that has both by themselves has more than one where they are tied."""
    return _all_bytes(config, stored, tied=False) - _all_bytes(config, stored, tied=True)


def _all_bytes(config: ModelConfig, stored: Stored, tied: bool) -> int:
    shape = config.with_changes(tie_word_embeddings=tied)
    return weight_bytes(shape, stored.precision, stored.block_size, stored.head_bits, stored.zero_points)


def _prompt_numbers(config: ModelConfig) -> int:
    """Of the last layer the graph that reads prompts needs keys and values only."""
    last = block_numbers(config) // config.num_hidden_layers
    return block_numbers(config) - last + 2 * config.key_value_size * config.hidden_size


def _prompt_outputs(config: ModelConfig) -> int:
    a_layers = sum(matrix.rows for matrix in block_matrices(config))
    return (config.num_hidden_layers - 1) * a_layers + 2 * config.key_value_size


def _prompt_bytes(config: ModelConfig) -> int:
    return _prompt_numbers(config) + 4 * _prompt_outputs(config) + config.num_hidden_layers * PROMPT_GRAPH_BYTES
