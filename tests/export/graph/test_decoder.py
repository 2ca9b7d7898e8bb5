"""The ONNX graph against the PyTorch model it was built from, read the way other loaders read it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from export.graph.builder import HALF, GraphForm
from export.graph.decoder import write_graph
from export.layout import DATA_FILE, GRAPH_FILE
from export.parity.check import exact_graph
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import load_checkpoint, write_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.rope import RopeScaling
from tests.support.export_models import TINY, Exports, logits_of, pack_model, save, save_graph, tiny_model

# Float32 in another order of additions; logits are of size 1.
TOLERANCE = 2e-5

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "qwen3 with a bias": {"qk_norm": True, "attention_bias": True},
    "all biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "yarn scaling": {"rope_scaling": RopeScaling("yarn", 4.0, original_max_position_embeddings=16)},
    "head_dim 8, rotated outside": {"head_dim": 8},
    "head_dim 24, rotated outside": {"head_dim": 24, "qk_norm": True},
    "one key head": {"num_key_value_heads": 1},
    "other epsilon": {"rms_norm_eps": 1e-3},
}


def run_as_other_loaders_do(
    graph: bytes, directory: Path, config: ModelConfig, tokens: np.ndarray, split: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the first `split` tokens, then of the rest fed one by one; the cache grows by copying."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(directory))
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    batch = len(tokens)
    empty = np.zeros((batch, config.num_key_value_heads, 0, config.head_dim), np.float32)
    pasts = {item.name: empty for item in session.get_inputs() if item.name.startswith("past_key_values.")}
    names = [item.name for item in session.get_outputs()]
    found = []
    for start, stop in [(0, split), *((i, i + 1) for i in range(split, tokens.shape[1]))]:
        feeds = {"input_ids": tokens[:, start:stop], "attention_mask": np.ones((batch, stop), np.int64), **pasts}
        outputs = dict(zip(names, session.run(names, feeds), strict=True))
        found.append(outputs.pop("logits"))
        pasts = {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
    return found[0], np.concatenate(found[1:], axis=1)


def assert_equals_pytorch(directory: Path, exact: bool = False, model: SportsLLM | None = None) -> None:
    model = model or load_checkpoint(directory)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 24))
    graph = (
        exact_graph(ir.load(directory / GRAPH_FILE), model.config) if exact else (directory / GRAPH_FILE).read_bytes()
    )
    whole, stepped = run_as_other_loaders_do(graph, directory, model.config, tokens, 18)
    expected = logits_of(model, tokens)
    np.testing.assert_allclose(whole, expected[:, :18], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(stepped, expected[:, 18:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_every_shape_computes_what_pytorch_computes(changes: dict[str, Any], tmp_path: Path) -> None:
    save_graph(tmp_path, tiny_model(**changes))
    onnx.checker.check_model(str(tmp_path / GRAPH_FILE), full_check=True)
    assert_equals_pytorch(tmp_path)


@pytest.mark.parametrize("packing", [(4, 16, True), (4, 64, False), (8, 16, False), (8, 64, True)], ids=str)
def test_packed_matrices_are_multiplied_exactly(packing: tuple[int, int, bool], tmp_path: Path) -> None:
    """Widths 72 and 100 are no multiple of any block, so last blocks are padded; 72 / 16 gives 5 zero points. Tables of
    20 rows lie within the graph or outside."""
    model = tiny_model(hidden_size=72, intermediate_size=100, vocab_size=20)
    save_graph(tmp_path, model, pack_model(model, *packing))
    onnx.checker.check_model(str(tmp_path / GRAPH_FILE), full_check=True)
    assert_equals_pytorch(tmp_path, exact=True)


def test_matrices_of_unlike_packing_stay_apart(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False, attention_bias=True)
    exceptions = {"layers.1.self_attn.q_proj": 4, "layers.1.mlp.up_proj": 16, "embed_tokens": 16}
    quantization = pack_model(model, 8, bits_of=lambda name: exceptions.get(name.removeprefix("model.")))
    assert not write_graph(save(tmp_path, model, quantization), tmp_path).wide_inputs
    assert_equals_pytorch(tmp_path, exact=True)


def test_interface(exports: Exports) -> None:
    file = str(exports().directory / GRAPH_FILE)
    model = onnx.load(file, load_external_data=False)
    assert model.ir_version == 10
    assert {item.domain: item.version for item in model.opset_import} == {"": 21, "com.microsoft": 1}
    session = ort.InferenceSession(file)
    cache = ["batch_size", 2, "past_sequence_length", 16]
    pasts = {f"past_key_values.{layer}.{part}": cache for layer in (0, 1) for part in ("key", "value")}
    assert {item.name: item.shape for item in session.get_inputs()} == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        **pasts,
    }
    grown = ["batch_size", 2, "total_sequence_length", 16]
    presents = {f"present.{layer}.{part}": grown for layer in (0, 1) for part in ("key", "value")}
    assert {item.name: item.shape for item in session.get_outputs()} == {
        "logits": ["batch_size", "sequence_length", 96],
        **presents,
    }

    # The number of logits can be asked for.
    empty = np.zeros((1, 2, 0, 16), np.float32)
    feeds = {item.name: empty for item in session.get_inputs() if "past" in item.name}
    feeds |= {"input_ids": np.arange(7)[None], "attention_mask": np.ones((1, 7), np.int64)}
    everything = session.run(["logits"], feeds)[0]
    for keep, rows in ((0, 7), (1, 1), (3, 3), (100, 7)):
        kept = session.run(["logits"], {**feeds, "num_logits_to_keep": np.array([keep])})[0]
        np.testing.assert_array_equal(kept, everything[:, 7 - rows :])


@pytest.mark.parametrize("bits", [None, 4])
def test_a_tied_head_is_stored_once(bits: int | None, exports: Exports) -> None:
    directories = [exports(bits, tie_word_embeddings=tied).directory for tied in (True, False)]
    sizes = [(directory / DATA_FILE).stat().st_size for directory in directories]
    matrix = 96 * 64 * (bits or 32) // 8
    assert matrix <= sizes[1] - sizes[0] <= 1.5 * matrix


def test_half_precision_storage(exports: Exports) -> None:
    """Half the bytes; computed as a float32 model whose matrices were rounded to float16."""
    full, half = (exports(dtype=dtype).directory for dtype in ("fp32", "fp16-weights"))
    assert (half / DATA_FILE).stat().st_size < 0.55 * (full / DATA_FILE).stat().st_size
    onnx.checker.check_model(str(half / GRAPH_FILE), full_check=True)
    rounded = load_checkpoint(half)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.half())
    assert_equals_pytorch(half, model=rounded)


def test_half_precision_refuses_numbers_beyond_its_range(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = -70_000.0
    save(tmp_path, model)
    with pytest.raises(ArtifactError, match=r"layers\.1\.mlp\.up_proj.*65,504.*fp32"):
        write_graph(tmp_path, tmp_path, GraphForm(dense=HALF))


@pytest.mark.parametrize("bits", [None, 4])
def test_writing_twice_gives_the_same_bytes(bits: int | None, exports: Exports, tmp_path: Path) -> None:
    directory = exports(bits).directory
    write_graph(directory, tmp_path)
    for file in (GRAPH_FILE, DATA_FILE):
        assert (tmp_path / file).read_bytes() == (directory / file).read_bytes()


def test_data_file_layout(tmp_path: Path) -> None:
    """Tensors of 1,024 bytes, as norms here, and more lie outside the graph: in order, aligned, up to the last byte."""
    save_graph(tmp_path, tiny_model(vocab_size=1024, hidden_size=256, tie_word_embeddings=False))
    graph = onnx.load(str(tmp_path / GRAPH_FILE), load_external_data=False).graph
    end = 0
    for tensor in graph.initializer:
        entry = {item.key: item.value for item in tensor.external_data}
        size = int(np.prod(tensor.dims)) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        assert bool(entry) == (size >= 1024), tensor.name
        if entry:
            offset, length = int(entry["offset"]), int(entry["length"])
            assert entry["location"] == DATA_FILE and length == size
            assert offset >= end and offset % (4096 if size >= 2**20 else 64) == 0
            end = offset + length
    assert end == (tmp_path / DATA_FILE).stat().st_size


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save(tmp_path, tiny_model())
    write_config(tmp_path, TINY.with_changes(intermediate_size=96))
    with pytest.raises(ArtifactError, match=r"gate_proj.*\(112, 64\).*\(96, 64\)"):
        write_graph(tmp_path, tmp_path)
    write_config(tmp_path, TINY.with_changes(num_hidden_layers=3))
    with pytest.raises(ArtifactError, match=r"layers\.2\..*missing"):
        write_graph(tmp_path, tmp_path)
