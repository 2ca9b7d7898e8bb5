"""Layers as calls of functions: which are, that the body is the same graph, and what is stored."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from export.graph.builder import GraphForm
from export.graph.decoder import write_graph
from export.kernels.library import VERSION
from export.layout import DATA_FILE, GRAPH_FILE
from export.runtime.decoder import OnnxDecoder
from export.runtime.session import choose_kernels
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.decoder import Decoder
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.config import Experts
from tests.support.export_models import Export, Exports, logits_of, pack_model, save, tiny_model

LATENT: dict[str, Any] = {
    "attention_kind": "latent", "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 12, "head_dim": 8,
}  # fmt: skip
LATENT |= {"num_key_value_heads": 1}
SETTINGS: list[dict[str, Any]] = [
    {"bits": 4, "asymmetric": True, "cache": "int8"},
    {"bits": 8, "block": 64, "num_hidden_layers": 4, "tie_word_embeddings": False, "cache": "fp16"},
    {"bits": 4, "head_dim": 8, "num_hidden_layers": 1},
    {"bits": 8, "attention_bias": True, "mlp_bias": True, "attention_output_bias": True},
    {"bits": 8, "cache": "int8", "head_dim": 8, "qk_norm": True},
    {"bits": 4, **LATENT, "q_lora_rank": 32},
    {"bits": 8, "cache": "int8", **LATENT},
]


def graph_of(export: Export) -> onnx.ModelProto:
    return onnx.load(str(export.directory / GRAPH_FILE), load_external_data=False)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_portable_logits_are_those_of_the_plain_graph(settings: dict[str, Any], exports: Exports) -> None:
    """Bit for bit, prompts, steps and batches: the body has the same operators. Graphs are valid and no larger."""
    prompt = np.random.default_rng(0).integers(0, 96, 100).tolist()
    folded, inline = exports(**settings), exports(inline=True, **settings)
    found = []
    for export in (folded, inline):
        decoder = OnnxDecoder(export.directory, 2, kernels="portable")
        logits = [decoder.logits(prompt), decoder.prefill([prompt[:3], prompt[:70], prompt], 120)]
        logits += [decoder.step([4, token, 7]) for token in (5, 6)]
        found.append(np.concatenate(logits))
    np.testing.assert_array_equal(*found)
    onnx.checker.check_model(str(folded.directory / GRAPH_FILE), full_check=True)
    graph = graph_of(folded)
    inferred = onnx.shape_inference.infer_shapes(graph, check_type=True, data_prop=True)
    assert [item.name for item in inferred.graph.output] == [item.name for item in graph_of(inline).graph.output]
    assert {item.key: item.value for item in graph.metadata_props}["kernels"] == VERSION
    assert "kernels" not in {item.key for item in graph_of(inline).metadata_props}
    assert len(graph_of(inline).functions) == 0
    sizes = [(export.directory / DATA_FILE).stat().st_size for export in (folded, inline)]
    assert sizes[0] == sizes[1]  # what is large is stored once, and not in functions
    assert (folded.directory / GRAPH_FILE).stat().st_size < 60_000


def test_equal_layers_share_a_function(exports: Exports) -> None:
    """The first has no residual stream yet, the last keeps some positions only."""
    graph = graph_of(exports(4, num_hidden_layers=5))
    calls = [node.op_type for node in graph.graph.node if node.domain == "sportsllm"]
    middle = "DecoderLayer1"
    assert calls == ["DecoderLayer", middle, middle, middle, "DecoderLayer2", "DecoderHead"]
    assert sorted(function.name for function in graph.functions) == sorted(set(calls))
    assert {item.name for item in graph.graph.initializer} <= {name for node in graph.graph.node for name in node.input}
    int8 = graph_of(exports(4, cache="int8"))
    assert [node.op_type for node in int8.graph.node][-3:] == ["DecoderLayerInt8", "DecoderLayerInt81", "DecoderHead"]
    half = graph_of(exports(4, cache="fp16"))
    assert [node.op_type for node in half.graph.node][-3:] == ["DecoderLayerHalf", "DecoderLayerHalf1", "DecoderHead"]


def test_latent_attention_is_called_in_its_branch(exports: Exports) -> None:
    """Long pieces keep ONNX Runtime's operators; layers alike share a function, within and without the branch."""
    graph = graph_of(exports(4, num_hidden_layers=3, **LATENT))
    branches = [attribute for node in graph.graph.node if node.op_type == "If" for attribute in node.attribute]
    inside = {one.name: [node.op_type for node in one.g.node] for one in branches}
    assert inside["else_branch"] == ["LatentAttention"] and "Softmax" in inside["then_branch"]
    calls = [node.op_type for node in graph.graph.node if node.domain == "sportsllm"]
    assert calls == [*["LatentTokens", "DecoderFeedForward"] * 3, "DecoderHead"]
    assert {"LatentTokens", "LatentAttention"} <= {function.name for function in graph.functions}
    tokens = [node for node in graph.graph.node if node.op_type == "LatentTokens"]
    assert [a.f for node in tokens for a in node.attribute if a.name == "epsilon"] == [np.float32(1e-6)] * 3
    int8 = graph_of(exports(4, cache="int8", **LATENT))
    assert {"LatentTokensInt8", "LatentAttentionInt8"} <= {function.name for function in int8.functions}


def formats(name: str) -> int | None:
    """Of each layer another format, more of them than there are names for; dense in the twelfth."""
    parts = name.split(".")
    if "layers" not in parts or len(parts) < 5:
        return None
    layer = int(parts[2])
    if layer == 11:
        return 16
    place = {"self_attn": 0, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}
    kind = place.get(parts[4], place["self_attn"])
    return 8 if layer >> kind & 1 else 4


def test_layers_without_a_name_or_a_format_stay_as_they_are(tmp_path: Any) -> None:
    model = tiny_model(num_hidden_layers=12)
    record = pack_model(model, 4, bits_of=formats)
    written = write_graph(save(tmp_path, model, record), tmp_path)
    # Eight as wholes, three as two halves each.
    assert str(written.kernels) == "kernels: called for 11 of 12 layers and the head (dense matrices)"
    calls = [node.op_type for node in onnx.load(str(tmp_path / GRAPH_FILE), load_external_data=False).graph.node]
    assert sum(call.startswith("DecoderFeedForward") for call in calls) == 3
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    write_graph(tmp_path, plain, GraphForm(inline=True))
    found = [OnnxDecoder(path, 1, kernels="portable").logits([1, 2, 3]) for path in (tmp_path, plain)]
    np.testing.assert_array_equal(*found)


GEMMA: dict[str, Any] = {
    "mlp_kind": "geglu",
    "output_norms": True,
    "qk_norm": True,
    "attention_scale": 0.2,
    "embedding_scale": 8.0,
    "layer_types": ("sliding", "full", "sliding"),
    "sliding_window": 20,
    "rope_local_theta": 100.0,
}
GPT2: dict[str, Any] = {
    "norm_kind": "layer", "mlp_kind": "gelu", "mlp_bias": True, "attention_bias": True, "attention_output_bias": True,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"mlp_kind": "experts"}
HALVES: list[dict[str, Any]] = [
    EXPERTS | {"experts": Experts(4, 2, 1, "sigmoid", "softmax", 2.0, gated=False), "mlp_bias": True},
    EXPERTS | {"experts": Experts(4, 2, 0, "sigmoid", "sum", 1.0, 2, 1, choice_bias=True)},
    EXPERTS | {"experts": Experts(3, 1), "dense_layers": 1, "dense_intermediate_size": 80},
    {"layer_types": ("sliding", "full", "sliding"), "sliding_window": 20},
    {"layer_types": ("unrotated", "full", "sliding"), "sliding_window": 5},
    {"layer_types": ("sliding", "full", "sliding"), "sliding_window": 2**24},
    {"mlp_kind": "geglu", "mlp_bias": True, "attention_scale": 0.1},
    GEMMA,
    GPT2,
    GEMMA | EXPERTS | {"experts": Experts(4, 2)},
    {**LATENT, "q_lora_rank": 32},
]


@pytest.mark.parametrize("changes", HALVES, ids=[str(n) for n in range(len(HALVES))])
def test_halves_of_layers_are_called(changes: dict[str, Any], exports: Exports) -> None:
    """The body gives the plain graph's bits; kernels come nearer to PyTorch than it does."""
    shape = {"num_hidden_layers": 3, "max_position_embeddings": 128} | changes
    export, plain, called = exports(8, **shape), exports(8, inline=True, **shape), "all 3 layers and the head"
    graph, prompt = export.directory / GRAPH_FILE, np.random.default_rng(0).integers(0, 96, 60).tolist()
    assert str(export.written.kernels) == f"kernels: called for {called}"
    assert str(choose_kernels(graph, "native")) == f"kernels: native (version {VERSION}: {called})"
    onnx.checker.check_model(str(graph), full_check=True)

    def logits(decoder: Decoder, whole: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        found = [whole, decoder.prefill([prompt[:3], prompt[:50], prompt], 80)]
        return np.concatenate([*found, *(decoder.step([4, token, 7]) for token in (5, 6))])

    inline, portable, native = (
        logits(decoder, decoder.logits(prompt))
        for decoder in (
            OnnxDecoder(one.directory, 2, kernels=kernels)
            for one, kernels in ((plain, "portable"), (export, "portable"), (export, "native"))
        )
    )
    np.testing.assert_array_equal(inline, portable)
    packed = load_checkpoint(export.directory)
    expected = logits(TorchDecoder(packed), logits_of(packed, prompt))
    # A token whose experts are nearly level may be sent to others, so the middle one is looked at.
    error, of_body = (np.median(np.abs(found - expected)) for found in (native, portable))
    assert error < 0.02 * expected.std()
    assert error < of_body  # kernels round inputs by fewer numbers


def test_a_context_that_is_too_long_for_kernels_is_named(tmp_path: Any) -> None:
    model = tiny_model(num_hidden_layers=1, max_position_embeddings=2**20 + 1)
    save(tmp_path, model, pack_model(model, 8))
    assert "a context above 2^20 tokens" in str(write_graph(tmp_path, tmp_path).kernels)
    found = OnnxDecoder(tmp_path, 1, kernels="native").prefill([[1, 2, 3]], 8)
    expected = TorchDecoder(load_checkpoint(tmp_path)).prefill([[1, 2, 3]], 8)
    assert np.abs(found - expected).max() < 0.05 * expected.std()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "dense"),
        ({"bits": 4, "block": 16}, "4 bits in blocks of 16"),
        ({"bits": 4, "hidden_size": 32776, "head_dim": 16, "num_hidden_layers": 1}, "rows of more than 1024 blocks"),
        ({"bits": 4, "operators": "standard"}, "standard operators"),
        ({"bits": 4, "operators": "web"}, "a browser has none"),
    ],
    ids=str,
)
def test_what_calls_none_says_why(settings: dict[str, Any], reason: str, exports: Exports) -> None:
    kernels = exports(**settings).written.kernels
    assert kernels.version is None
    assert str(kernels).startswith("kernels: the graph calls none (") and reason in str(kernels)
