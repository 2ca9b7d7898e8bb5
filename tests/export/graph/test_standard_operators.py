"""The graph of standard operators: against PyTorch, by ONNX Runtime and by the reference evaluator of `onnx`."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from export.graph.builder import GraphForm
from export.layout import GRAPH_FILE
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.models.config import ModelConfig
from tests.support.export_models import logits_of, pack_model, save_graph, tiny_model

# Float32 in another order of additions; logits are of size 1.
TOLERANCE = 2e-5

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "qwen3 with biases": {"qk_norm": True, "attention_bias": True, "attention_output_bias": True},
    "all biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "head_dim 8": {"head_dim": 8},
    "odd widths": {"head_dim": 24, "hidden_size": 72, "intermediate_size": 100, "vocab_size": 97},
    "one key head": {"num_key_value_heads": 1},
    "a key head each": {"num_key_value_heads": 4},
    "scaled embedding": {"embedding_scale": 3.0},
}
PACKINGS = {"dense": None, "4 bits, asymmetric": (4, 16, True), "4 bits": (4, 64, False), "8 bits": (8, 32, False)}


def make(directory: Path, packing: tuple[int, int, bool] | None = None, **changes: Any) -> Path:
    """A checkpoint and its graph of standard operators in one directory."""
    model = tiny_model(**changes)
    return save_graph(directory, model, pack_model(model, *packing) if packing else None, GraphForm("standard"))


def exact_session(directory: Path) -> ort.InferenceSession:
    """With products of packed matrices in float32."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return ort.InferenceSession(str(directory / GRAPH_FILE), options, providers=["CPUExecutionProvider"])


def read_in_pieces(
    runner: ort.InferenceSession | ReferenceEvaluator, config: ModelConfig, tokens: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Logits of every column, (B, T, V): 5 columns at once, 3 more, then one by one; the cache grows by copying."""
    batch, width = tokens.shape
    empty = np.zeros((batch, config.num_key_value_heads, 0, config.head_dim), np.float32)
    layers = range(config.num_hidden_layers)
    pasts = {f"past_key_values.{layer}.{part}": empty for layer in layers for part in ("key", "value")}
    names = ["logits", *(name.replace("past_key_values", "present") for name in pasts)]
    found = []
    for start, stop in [(0, 5), (5, 8), *((i, i + 1) for i in range(8, width))]:
        feeds = {"input_ids": tokens[:, start:stop], "attention_mask": mask[:, :stop], **pasts}
        logits, *presents = runner.run(names, feeds)
        found.append(logits)
        pasts = dict(zip(pasts, presents, strict=True))
    return np.concatenate(found, axis=1)


PACKED = [
    ("odd widths", "4 bits, asymmetric"), ("odd widths", "4 bits"), ("odd widths", "8 bits"), ("untied", "8 bits"),
    ("qwen3 with biases", "4 bits, asymmetric"), ("scaled embedding", "4 bits"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "packing"), [*((shape, "dense") for shape in SHAPES), *PACKED])
def test_every_shape_computes_what_pytorch_computes(shape: str, packing: str, tmp_path: Path) -> None:
    """A left-padded batch: no padding, 3 and 6 columns of it, so that one row begins in the second piece."""
    make(tmp_path, PACKINGS[packing], **SHAPES[shape])
    onnx.checker.check_model(str(tmp_path / GRAPH_FILE), full_check=True)
    graph = onnx.load(str(tmp_path / GRAPH_FILE), load_external_data=False)
    assert {node.domain for node in graph.graph.node} == {""}
    assert [(item.domain, item.version) for item in graph.opset_import] == [("", 21)] and graph.ir_version == 10

    model, pads = load_checkpoint(tmp_path), (0, 3, 6)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (len(pads), 12))
    mask = (np.arange(12) >= np.array(pads)[:, None]).astype(np.int64)
    found = read_in_pieces(exact_session(tmp_path), model.config, tokens, mask)
    assert np.isfinite(found).all()
    for row, pad in enumerate(pads):
        np.testing.assert_allclose(found[row, pad:], logits_of(model, tokens[row, pad:]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_the_reference_evaluator_agrees(packing: tuple[int, int, bool] | None, tmp_path: Path) -> None:
    """Another implementation of the standard, by the standard's authors: nothing leans on how ONNX Runtime reads it."""
    changes = {"hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 1, "qk_norm": True, "vocab_size": 50}
    make(tmp_path, packing, **changes)
    model = load_checkpoint(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 10))
    mask = (np.arange(10) >= np.array([[0], [4]])).astype(np.int64)
    found = read_in_pieces(ReferenceEvaluator(str(tmp_path / GRAPH_FILE)), model.config, tokens, mask)
    for row, pad in enumerate((0, 4)):
        np.testing.assert_allclose(found[row, pad:], logits_of(model, tokens[row, pad:]), atol=TOLERANCE, rtol=0)
