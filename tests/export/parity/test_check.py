"""The parity gate: what passes and what must not."""

import json
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from export.cache_scales import CacheScales
from export.layout import GRAPH_FILE
from export.parity.check import check_parity, graph_rounding, unequal_tables
from export.parity.comparison import (
    DEPLOYED,
    EXACT,
    EXACT_INT8_CACHE,
    MOVED,
    PARAGRAPH,
    TEXTS,
    Comparison,
    Pass,
    compare,
    int8_cache_limits,
    make_sequences,
)
from export.runtime.decoder import OnnxDecoder
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import write_config
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.inference.decoder import Logits, logits_at_once
from sportsllm.models.config import Selection
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.export_models import CONTEXT, TINY, Exports, edit_tensor, save, save_graph, tiny_model

STANDARD = {"operators": "standard", "head_dim": 8}
FAITHFUL: list[tuple[str, dict[str, Any]]] = [
    ("fp32", {}), ("fp32", {"head_dim": 8}), ("fp16", {"dtype": "fp16-weights"}),
    ("fp16", {"dtype": "fp16-weights"} | STANDARD), ("fp16", {"dtype": "fp16-weights", "position_kind": "learned"}),
    ("int8", {"bits": 8}), ("int4", {"bits": 4}), ("int4", {"bits": 4} | STANDARD),
]  # fmt: skip


@pytest.mark.parametrize(("precision", "settings"), FAITHFUL, ids=str)
def test_a_faithful_export_passes(precision: str, settings: dict[str, Any], exports: Exports) -> None:
    report = exports(**settings).report
    assert report.failures() == [] and report.passed
    assert report.precision == precision
    names = [item.name for item in report.passes if not item.name.startswith("native")]
    assert names == (["exact"] if precision == "fp32" else ["exact", "deployed"])
    assert [c.kind for c in report.passes[0].comparisons] == ["prefill", "decode", "ragged batch"]
    # The limits leave room, but not much more than an order of magnitude: see the constants.
    assert max(c.relative_error for c in report.passes[0].comparisons) < EXACT.error / 4
    figures = json.loads(json.dumps(report.to_dict()))
    everywhere = report.passes[precision != "fp32"]  # the deployed pass if there is one
    assert figures["passed"] is True and figures["kl"] == max(c.kl for c in everywhere.comparisons)


@pytest.mark.parametrize(("bits", "dtype"), [(None, "fp16-weights"), (4, "fp32")])
def test_a_reference_beyond_the_free_memory_gives_the_same_report(
    bits: int | None, dtype: str, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = exports(bits, dtype=dtype)
    report, before = export.report, {path.name: path.read_bytes() for path in export.directory.iterdir()}
    monkeypatch.setattr("sportsllm.formats.checkpoint.available_bytes", lambda: 0)
    assert check_parity(export.directory, export.directory, threads=1) == report
    assert {path.name: path.read_bytes() for path in export.directory.iterdir()} == before


def test_an_int8_cache_does_not_make_weights_int8(exports: Exports) -> None:
    """Of latent attention, whose graph has 8-bit constants of its own."""
    latent = {"attention_kind": "latent", "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8}
    export = exports(cache="int8", num_key_value_heads=1, **latent)
    report, stored = export.report, graph_rounding(ir.load(export.directory / GRAPH_FILE), export.model.config)
    assert isinstance(stored, CacheScales) and export.scales and torch.equal(*stored.states, *export.scales.states)
    assert report.precision == "fp32" and report.passed
    assert [item.name for item in report.passes if not item.name.startswith("native")] == ["exact"]


def add_to_one(index: tuple[int, ...], amount: float) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[index] += amount

    return change


def flip(index: tuple[int, ...]) -> Callable[[np.ndarray], None]:
    """The lowest bit of a packed number: a single step of the grid."""

    def change(array: np.ndarray) -> None:
        array[index] ^= 1

    return change


STANDARD_8 = {"bits": 8, "operators": "standard"}
FAULTS: dict[str, tuple[dict[str, Any], str, Callable[[np.ndarray], None]]] = {
    "a weight": ({}, "model.layers.0.mlp.down_proj.weight", add_to_one((5, 7), 0.02)),
    "not a number": ({}, "model.layers.1.mlp.down_proj.weight", add_to_one((0, 0), float("nan"))),
    "a stacked weight": ({}, "model.layers.1.self_attn.qkv_proj.weight", add_to_one((100, 7), 0.02)),
    "an embedding, by a millionth": ({}, "model.embed_tokens.weight", add_to_one((95, 0), 1e-6)),
    "the cosine table": ({}, "cos_cache", add_to_one((4, 1), 0.01)),
    "the sine table, beyond the prompts": ({}, "sin_cache", add_to_one((CONTEXT - 1, 0), 1e-6)),
    "a frequency that kernels read": ({"bits": 4}, "inv_freq", add_to_one((3,), 1e-6)),
    "a frequency of sliding layers, without tables": (
        {"bits": 4, "cache": "fp16", "layer_types": ("sliding", "full"), "sliding_window": 8}
        | {"rope_local_theta": 100.0},
        "local_inv_freq",
        add_to_one((0,), 1e-6),
    ),
    "a learned position, beyond the prompts": (
        {"position_kind": "learned", "max_position_embeddings": 350},
        "model.embed_positions.weight",
        add_to_one((349, 0), 1e-6),
    ),
    "an 8-bit number": ({"bits": 8}, "model.layers.1.mlp.down_proj.weight_packed", flip((3, 1, 2))),
    "a 4-bit number": ({"bits": 4}, "model.layers.0.self_attn.qkv_proj.weight_packed", flip((3, 1, 2))),
    "a 4-bit scale": ({"bits": 4}, "model.layers.0.mlp.gate_up_proj.weight_scale", add_to_one((3, 1), 1e-3)),
    "a number of columns": (STANDARD_8, "model.layers.1.mlp.down_proj.weight_packed_columns", flip((5, 7))),
    "a tied number as embedding": (STANDARD_8, "model.embed_tokens.weight_packed", flip((95, 1, 2))),
    "a tied number as head": (STANDARD_8, "model.embed_tokens.weight_packed_columns", flip((3, 95))),
    "a weight in float16": ({"dtype": "fp16"}, "model.layers.0.mlp.down_proj.weight", add_to_one((2, 3), 0.05)),
}


@pytest.mark.parametrize(("settings", "tensor", "change"), FAULTS.values(), ids=FAULTS)
def test_one_wrong_number_fails(
    settings: dict[str, Any], tensor: str, change: Callable[[np.ndarray], None], exports: Exports, tmp_path: Path
) -> None:
    edit_tensor(exports(**settings).copy_to(tmp_path), tensor, change)
    assert check_parity(tmp_path, tmp_path, threads=1).failures()


@pytest.mark.parametrize("least", [1, 100])
def test_one_wrong_cache_entry_fails(least: int, exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every prompt, or of those that are read in several pieces."""

    class Forgetful(OnnxDecoder):
        def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None) -> Logits:
            logits = super().prefill(rows, max_length)
            assert self._cache is not None
            self._cache.buffers["1.value"][0, 1, 0, 3] += 0.2 * (len(rows[0]) >= least)
            return logits

    directory = exports(4).directory
    monkeypatch.setattr("export.parity.check.OnnxDecoder", Forgetful)
    failures = check_parity(directory, directory, threads=1).failures()
    assert any("exact pass, decode" in line for line in failures)
    assert any("exact pass, ragged batch" in line for line in failures) == (least == 1)
    assert not any("prefill" in line for line in failures)


@pytest.mark.parametrize("context", [2, 4])
def test_short_contexts_are_checked(context: int, exports: Exports) -> None:
    assert exports(4, max_position_embeddings=context).report.passed


def test_an_export_of_another_model_is_refused(exports: Exports, tmp_path: Path) -> None:
    save(tmp_path, tiny_model())
    for config in (TINY, exports().model.config.with_changes(eos_token_id=(1, 5))):
        write_config(tmp_path, config)
        with pytest.raises(ArtifactError, match=r"config\.json"):
            check_parity(tmp_path, exports().directory, threads=1)


def test_the_longest_sequence_reaches_behind_the_window_and_the_selected() -> None:
    short, long = ({"layer_types": ("sliding", "full"), "sliding_window": window} for window in (20, 512))
    selected = {"attention_kind": "selected", "selection": Selection(512, 64)}
    for changes, length in (({}, 300), (short, 300), (long, 576), (selected, 812)):
        first, *_ = make_sequences(TINY.with_changes(max_position_embeddings=2_048, **changes), None)
        assert len(first) == length


def test_a_window_that_is_one_too_long_is_found(tmp_path: Path) -> None:
    """With another `local_window_size`, which is how versions of ONNX Runtime differ."""
    changes = {"layer_types": ("sliding", "full"), "sliding_window": 310, "max_position_embeddings": 400}
    save_graph(tmp_path, tiny_model(**changes))
    assert check_parity(tmp_path, tmp_path, 1).failures() == []
    graph = onnx.load(str(tmp_path / GRAPH_FILE), load_external_data=False)
    windows = [a for node in graph.graph.node for a in node.attribute if a.name == "local_window_size" and a.i > 0]
    assert len(windows) == 1
    windows[0].i += 1
    (tmp_path / GRAPH_FILE).write_bytes(graph.SerializeToString())
    assert check_parity(tmp_path, tmp_path, 1).failures()


def test_the_first_sequence_is_text(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    config = load_config(checkpoint).with_changes(max_position_embeddings=4_096)
    first, _, texts = make_sequences(config, tokenizer)
    assert tokenizer.decode(first[1:200]) in PARAGRAPH
    assert tokenizer.decode(texts[1:]) == "\n".join(TEXTS)


def test_figures_by_hand() -> None:
    """Two positions, three tokens: error 1 of spread 0.8165; KL worked out from the two distributions."""
    expected = np.array([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], np.float32)
    found = np.array([[0.0, 1.0, 2.0], [0.0, 2.0, 2.0]], np.float32)
    figures = compare(expected, found)
    p = np.exp(expected[1]) / np.exp(expected[1]).sum()
    q = np.exp(found[1]) / np.exp(found[1]).sum()
    assert figures.max_abs_logit_error == 1.0
    assert figures.relative_error == pytest.approx(1 / np.sqrt(2 / 3), rel=1e-6)
    assert figures.kl == pytest.approx(float((p * np.log(p / q)).sum()) / 2, rel=1e-5)
    assert figures.greedy_match == 0.5
    assert len(Pass("exact", EXACT, (Comparison("prefill", 2, *[np.nan] * 4),)).failures()) == 3


def test_neither_tables_nor_copies_of_all_logits_stay_in_memory(exports: Exports) -> None:
    directory, expected = exports(None).directory, np.random.default_rng(0).normal(size=(64, 20_000))
    graph, config = ir.load(directory / GRAPH_FILE), load_config(directory)
    assert not list(unequal_tables(graph, config, TensorFiles(directory)))
    tensors = [each.const_value for each in graph.graph.initializers.values()]
    assert {each.raw for each in tensors if isinstance(each, ir.ExternalTensor)} == {None}
    assert (logits_at_once(49_152), logits_at_once(262_144)) == (128, 32)
    logits = expected.astype(np.float32)
    tracemalloc.start()
    try:
        compare(logits, logits)
        assert tracemalloc.get_traced_memory()[1] < logits.nbytes
    finally:
        tracemalloc.stop()


def test_limits_follow_what_moved_keys_cost_the_model_between_bounds() -> None:
    steady = Comparison("", 100, 0.01, 0.002, 1e-7, 1.0)
    assert int8_cache_limits(steady) == EXACT_INT8_CACHE
    limits = int8_cache_limits(replace(steady, relative_error=0.2, kl=2e-4, greedy_match=0.99))
    assert (limits.error, limits.kl) == (3 * 0.2, 3 * 2e-4)
    assert abs(limits.greedy_match - 0.97) < 1e-9
    assert int8_cache_limits(replace(steady, relative_error=9.0, kl=1.0, greedy_match=0.1)) == DEPLOYED["int8"]


def test_moved_numbers_change_only_where_they_lie_between_two_steps() -> None:
    scales = CacheScales((torch.full((1, 1, 8), 0.5), torch.full((1, 1, 8), 0.5)))
    x = torch.randint(-100, 100, (1, 1, 5, 8)) * 0.5
    moved = replace(scales, moved=MOVED)
    for near, equal in ((x + 0.1, True), (x + 0.25, False)):
        pairs = zip(scales.rounded(0, near, near), moved.rounded(0, near, near), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) == equal
