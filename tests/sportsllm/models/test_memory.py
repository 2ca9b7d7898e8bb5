"""Memory arithmetic: the worked examples, and the formulas against what numpy really holds."""

from typing import Any

import numpy as np
import pytest

from sportsllm.errors import UsageError
from sportsllm.formats.packed import QuantizedWeight, pack
from sportsllm.models.description import block_matrices
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.memory import WeightFormat, block_bytes, kv_cache_bytes_per_token, tensor_shapes, weight_bytes
from sportsllm.models.presets import PRESETS
from tests.support.models import FAMILIES, tiny_config

TINY = tiny_config(vocab_size=100, hidden_size=48, intermediate_size=80, num_hidden_layers=3)


def _packed(rows: int, columns: int, bits: int, block: int, zero_points: bool) -> QuantizedWeight:
    groups = -(-columns // block)
    zeros = pack(np.zeros((rows, groups), dtype=np.uint8), bits) if zero_points else None
    quants = np.zeros((rows, groups, block), dtype=np.uint8)
    scales = np.ones((rows, groups), dtype=np.float32)
    return QuantizedWeight(pack(quants, bits), scales, zeros, bits, block, columns)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("precision", "bits", "head_bits"), [("int4", 4, 8), ("int4", 4, 4), ("int8", 8, 8), ("int4", 4, 32)]
)
def test_quantized_model_is_the_sum_of_its_matrices(
    precision: str, bits: int, head_bits: int, tied: bool, zero_points: bool
) -> None:
    config = TINY.with_changes(tie_word_embeddings=tied, attention_bias=True)
    block = 32  # divides neither 48 nor 80
    total = 0
    for matrix in block_matrices(config):
        packed = _packed(matrix.rows, matrix.columns, bits, block, zero_points and bits == 4)
        total += config.num_hidden_layers * packed.nbytes
    table = 4 * config.vocab_size * config.hidden_size
    if head_bits != 32:
        table = _packed(config.vocab_size, config.hidden_size, head_bits, block, zero_points and head_bits == 4).nbytes
    total += table if tied else 2 * table
    # What stays float32: the biases of q, k and v, and the norms.
    total += 4 * (3 * (64 + 2 * 32) + 3 * 2 * 48 + 48)
    assert weight_bytes(config, WeightFormat(precision, block, head_bits, zero_points)) == total


@pytest.mark.parametrize("changes", [*FAMILIES, {"norm_kind": "layer"}])
def test_the_parts_of_a_block_are_those_of_the_model(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    held = sum(parameter.nbytes for parameter in SportsLLM(config).model.layers[0].parameters())
    assert sum(block_bytes(config, WeightFormat("fp32")).values()) == held


@pytest.mark.parametrize(
    "arguments", [{"precision": "int3"}, {"precision": "int4", "block_size": 48}, {"precision": "int8", "head_bits": 5}]
)
def test_unknown_forms_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        WeightFormat(**arguments)


def test_shapes_name_every_tensor() -> None:
    config = PRESETS["base-162m"]
    shapes = {shape.name: shape for shape in tensor_shapes(config, 32, 2_048, element_bytes=2)}
    scores, logits = shapes["attention scores"], shapes["logits, whole"]
    assert scores.shape == (32, 12, 2_048, 2_048) and not scores.held
    assert scores.bytes == 3_221_225_472  # 3.2 GB in fp16
    assert logits.shape == (32, 2_048, 32_000) and not logits.held
    assert logits.bytes == 4_194_304_000  # 4.2 GB in fp16
    assert shapes["token ids"].bytes == 8 * 32 * 2_048
    cached = shapes["k, cached"]
    assert 2 * cached.layers * cached.bytes == 32 * 2_048 * kv_cache_bytes_per_token(config)["fp16"]
    weights = sum(shape.layers * shape.bytes for shape in shapes.values() if shape.kind == "weight")
    assert weights == 2 * (config.parameters - config.parameters_by_component()["norms"])
