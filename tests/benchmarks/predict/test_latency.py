"""Predictions against measured and published figures, and their consequences for the shipped budgets."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.commands import plan
from benchmarks.devices.load import Device, judge, list_devices, load_device
from benchmarks.devices.schema import FORMAT
from benchmarks.predict.coefficients import CPU, CPU_FORMS, alike
from benchmarks.predict.latency import (
    EFFICIENCIES,
    LONG_PIECE_TOKENS,
    PREFILL_CHUNK_TOKENS,
    Stored,
    depths_that_fit,
    efficiency_of,
    file_bytes,
    peak_memory_bytes,
    predict,
    predict_figures,
    tpot_ms,
    ttft_ms,
)
from benchmarks.predict.model_size import (
    INT8_CACHE_GRAPH_BYTES,
    OUTPUT_NUMBERS,
    STANDARD_GRAPH_BYTES,
    prompt_graph_bytes,
    sizes,
    slower_reading,
)
from benchmarks.studies.prediction_models import FORMS, OTHERS, make_checkpoint, make_export
from export.graph.int8_cache_prefill import LONG_PIECE
from export.runtime.decoder import PREFILL_CHUNK
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.presets import PRESETS
from sportsllm.models.size import PRECISIONS

SMALL = PRESETS["small"]
HOST = load_device("host")
TWICE = 2.0
"""How far a prediction may be from a measurement, either way, in this first form."""


def _within(predicted: float, measured: float, factor: float = TWICE) -> None:
    assert measured / factor <= predicted <= measured * factor, (predicted, measured)


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, width: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        max_position_embeddings=8_192,
    )


LLAMA_3B = _llama(3_072, 8_192, 28, 24, 8, 128_256, 128)
LLAMA_1B = _llama(2_048, 8_192, 16, 32, 8, 128_256, 64)
LLAMA_8B = _llama(4_096, 14_336, 32, 32, 8, 128_256, 128).with_changes(tie_word_embeddings=False)
SMOL_135M = _llama(576, 1_536, 30, 9, 3, 49_152, 64)


@pytest.mark.parametrize(
    ("stored", "config", "depth", "tokens_per_s"),
    [
        (Stored("int4", 128, 4), SMALL, 32, 576),
        (Stored("int4", 128, 4), SMALL, 512, 376),
        (Stored("int4", 32, 4), SMALL, 32, 444),
        (Stored("int4", 32, 4), SMALL, 512, 317),
        (Stored("int4", 128, 4, cache="int8"), SMALL, 512, 449),
        (Stored("int4", 128, 4), SMALL.with_changes(num_key_value_heads=4), 512, 461),
        (Stored("int8", 128), SMALL, 32, 328),
        (Stored("int8", 128), SMALL, 512, 290),
        (Stored("fp32"), SMALL, 32, 94),
        (Stored("fp32"), SMALL, 512, 71),
    ],
)
def test_decoding_small_on_the_host(stored: Stored, config: ModelConfig, depth: int, tokens_per_s: float) -> None:
    """ONNX Runtime 1.31.1 and onnxruntime-genai, 2 threads, quiet machine."""
    _within(tpot_ms(config, HOST, stored, depth), 1_000 / tokens_per_s)


@pytest.mark.parametrize(
    ("stored", "milliseconds"),
    [(Stored("int4", 128, 4), 200), (Stored("int8", 128), 187), (Stored("fp32"), 377)],
)
def test_first_token_of_small_on_the_host(stored: Stored, milliseconds: float) -> None:
    _within(ttft_ms(SMALL, HOST, stored, 512), milliseconds)


def test_prompts_pay_for_scores_and_outputs_too() -> None:
    """Measured: twice the heads at half their size, 128 tokens after 0 to 384, 1.67 * 2 against 2.34 ns."""
    narrow = SMALL.with_changes(num_attention_heads=24, num_key_value_heads=24, head_dim=32)
    share = HOST.hardware.fp32_matmul_rate.value * 1e9 * efficiency_of(HOST).attention_share.fp32
    # 4 T S of numbers and scores, each piece of 128 with all before it.
    taken = 4 * 12 * 12 * (64 + 32) * 128 * 1_280 / share * 1e3
    more = ttft_ms(narrow, HOST, Stored("fp32"), 512) - ttft_ms(SMALL, HOST, Stored("fp32"), 512)
    assert more / taken == pytest.approx(2 * 1.67 / 2.34 - 1, rel=0.25)


def test_products_pay_for_outputs_and_for_whole_blocks() -> None:
    """Measured, 128 rows by 768 outputs, INT4 in blocks of 128: 245 and 257 us for 96 and 128 numbers, 935 for 768."""
    body = sizes(
        SMALL.with_changes(hidden_size=96, num_attention_heads=3, num_key_value_heads=3, head_dim=32),
        Stored("int4", 128),
    ).body
    padded = 12 * (4 * 96 * 128 + 2 * 2048 * 128 + 96 * 2048)
    assert body.outputs == 12 * (5 * 96 + 2 * 2048)
    assert body.numbers == padded * (1 + 16 / 128)
    cost = {width: width * (1 + 16 / 128) + OUTPUT_NUMBERS["int4"] for width in (128, 768)}
    assert cost[128] / cost[768] == pytest.approx(257 / 935, rel=0.1)


@pytest.mark.parametrize(
    ("model", "stored", "megabytes"),
    [
        ("small", Stored("fp32"), 620),
        ("small", Stored("fp16"), 610),
        ("small", Stored("int8"), 331),
        ("small", Stored("int4"), 288),
        ("small", Stored("int4", 128, 4), 248),
        ("tiny-5m", Stored("fp32"), 109),
        ("tiny-5m", Stored("int8"), 93),
        ("tiny-5m", Stored("int4"), 92),
    ],
)
def test_peak_memory_on_the_host(model: str, stored: Stored, megabytes: float) -> None:
    """`export.runtime.decoder` filled to 1,024 tokens: peak resident memory of the process, on 2026-11-21."""
    _within(peak_memory_bytes(PRESETS[model], HOST, stored, 1_024) / 1e6, megabytes, factor=1.2)


@pytest.mark.parametrize(
    ("stored", "megabytes"), [(Stored("fp32"), 389.56), (Stored("int8"), 110.06), (Stored("int4", 128, 4), 52.39)]
)
def test_file_size(stored: Stored, megabytes: float) -> None:
    assert file_bytes(SMALL, stored) / 1e6 == pytest.approx(megabytes, rel=5e-3)


@pytest.mark.parametrize(
    ("device", "config", "stored", "tokens_per_s"),
    [
        ("raspberry-pi-5-8gb", LLAMA_3B, Stored("int4"), 4.75),
        ("android-flagship", LLAMA_1B, Stored("int4"), 50.2),
        ("jetson-orin-nano-super", SMOL_135M, Stored("int4"), 165.2),
        ("jetson-orin-nano-super", LLAMA_3B, Stored("int4", 32, 4), 43),
        ("rtx-3060", LLAMA_3B, Stored("int4"), 122.85),
        ("rtx-3060", LLAMA_8B, Stored("int4"), 42),
        ("rtx-3080", LLAMA_8B, Stored("int4"), 74),
        ("rtx-3090", LLAMA_8B, Stored("int4"), 87),
    ],
)
def test_published_decoding_rates(device: str, config: ModelConfig, stored: Stored, tokens_per_s: float) -> None:
    _within(tpot_ms(config, load_device(device), stored, 64), 1_000 / tokens_per_s, factor=1.5)


@pytest.mark.parametrize("name", list_devices())
def test_every_budget_refuses_a_shipped_model(name: str) -> None:
    device = load_device(name)
    missed = {
        (model, precision): [verdict.name for verdict in judge(device.limits, {}, figures).missed]
        for model in ("tiny-5m", "small", "large")
        for precision in PRECISIONS
        if (figures := predict_figures(PRESETS[model], device, Stored(precision)))
    }
    assert {"file_mb", "peak_memory_mb"} <= set(missed["large", "fp32"])  # 3,722 MB
    assert not missed["tiny-5m", "int4"]


def test_the_host_refuses_small_and_takes_a_smaller_one() -> None:
    def passes(model: str, stored: Stored) -> bool:
        return judge(HOST.limits, {}, predict_figures(PRESETS[model], HOST, stored)).passed

    assert not passes("small", Stored("int4"))
    assert passes("tiny-5m", Stored("int4"))


def test_a_file_on_disk_replaces_the_computed_size() -> None:
    computed = predict_figures(SMALL, HOST, Stored("int4"))
    given = predict_figures(SMALL, HOST, Stored("int4", file_bytes=2 * round(computed["file_mb"] * 1e6)))
    assert given["file_mb"] == pytest.approx(2 * computed["file_mb"])
    assert given["tpot_p50_ms"] > computed["tpot_p50_ms"]
    assert given["peak_memory_mb"] > computed["peak_memory_mb"]


def test_more_costs_more() -> None:
    pi = load_device("raspberry-pi-5")
    rows = predict(SMALL, pi, Stored("int4"))
    assert [row.depth for row in rows] == [32, 512, 1_024, 1_900]
    for first, second in pairwise(rows):
        assert first.tpot_ms < second.tpot_ms
        assert first.peak_rss_bytes < second.peak_rss_bytes
    steps = [tpot_ms(SMALL, pi, Stored(precision), 512) for precision in ("fp32", "int8", "int4")]
    assert steps == sorted(steps, reverse=True)
    assert ttft_ms(SMALL, pi, Stored("int4"), 128) < ttft_ms(SMALL, pi, Stored("int4"), 512)
    assert tpot_ms(SMALL, pi, Stored("int4", cache="int8"), 1_900) < rows[-1].tpot_ms
    faster = pi.model_dump(mode="json")
    faster["hardware"]["memory_bandwidth"]["value"] = 34.14
    double = tpot_ms(SMALL, Device.model_validate_json(json.dumps(faster)), Stored("int4"), 512)
    assert rows[1].tpot_ms / 2 < double < rows[1].tpot_ms


def test_depths_fit_the_context() -> None:
    assert depths_that_fit(PRESETS["tiny-5m"]) == [32, 512, 876, 1_024]
    assert depths_that_fit(SMALL.with_changes(max_position_embeddings=100)) == [32]
    with pytest.raises(UsageError, match="context"):
        predict(SMALL, HOST, Stored("int4"), depths=[2_049])


def _sizes_on_disk(directory: Path) -> tuple[int, int]:
    """Bytes of a graph's large tensors, and those of them that no product reads, from the graph itself."""
    import onnx

    graph = onnx.load(str(directory / "model.onnx"), load_external_data=False).graph
    stored: dict[str, int] = {}
    seen = set()
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries and not tensor.name.endswith("_cache") and entries["offset"] not in seen:
            seen.add(entries["offset"])  # the same bytes may have two names and shapes
            stored[tensor.name] = int(entries["length"])
    reads = {name for node in graph.node if node.op_type in PRODUCTS for name in node.input}
    return sum(stored.values()), sum(
        size for name, size in stored.items() if "embed_tokens" in name and not reads & {name}
    )


PRODUCTS = {"MatMulNBits", "DynamicQuantizeMatMul", "FusedMatMul", "MatMul", "DequantizeLinear"}
# Large enough for the tensors to lie in the data file.
SHAPE = _llama(256, 384, 2, 4, 2, 500, 64).with_changes(max_position_embeddings=256)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(SHAPE, tmp_path_factory.mktemp("untrained") / "checkpoint")


@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
def test_the_parts_of_a_form_are_those_of_its_graph(name: str, untrained: Path, tmp_path: Path) -> None:
    stored = make_export(untrained, {**FORMS, **OTHERS}[name], tmp_path / name)
    parts = sizes(SHAPE, dataclasses.replace(stored, file_bytes=None))
    everything, by_rows = _sizes_on_disk(tmp_path / name)
    looked_up = 0 if parts.looked_up is None else parts.looked_up.bytes
    weights = parts.body.bytes + parts.head.bytes + looked_up
    assert weights == pytest.approx(everything, rel=0.01)  # tensors below 1 KiB stay in the graph
    # Small models too, of which the graph is a good part; config.json is no part of a model.
    files = sum(path.stat().st_size for path in (tmp_path / name).glob("*.onnx*"))
    form = {**FORMS, **OTHERS}[name].stored()
    pages = 20 * 4_096 if form.latency else 0  # tensors of the second graph begin on whole pages in the file
    assert file_bytes(SHAPE, form) == pytest.approx(files, rel=0.02, abs=pages)
    if stored.standard:  # the tied matrix by rows, for the embedding alone: a token reads one row of it
        assert looked_up == pytest.approx(by_rows, rel=0.01) and by_rows > 0.05 * everything
    else:
        assert looked_up == 0
    assert (parts.prompt is not None) == ("latency" in name)
    if parts.prompt is not None:
        files = prompt_graph_bytes(tmp_path / name)
        computed = sizes(SHAPE, dataclasses.replace(stored, file_bytes=None, prompt_bytes=0, latency=True)).prompt
        # Tensors begin on whole pages in the file.
        assert computed is not None and -20 * 4_096 <= computed.bytes - files <= 0.01 * files


def test_a_standard_graph_does_not_read_its_embedding() -> None:
    """The fault that was: the file has the tied matrix twice, and both were counted as read for each token."""
    plain, standard = Stored("int4", 128, 8), Stored("int4", 128, 8, standard=True)
    table = 16_000 * 768 + 4 * 16_000 * 768 // 128
    graph = 12 * STANDARD_GRAPH_BYTES
    assert file_bytes(SMALL, standard) - file_bytes(SMALL, plain) == table + graph
    as_file = dataclasses.replace(standard, file_bytes=file_bytes(SMALL, standard))
    for stored in (standard, as_file):
        more_operators = 5 * 12 * efficiency_of(HOST).layer_overhead_us / 1000  # six times a layer's
        assert tpot_ms(SMALL, HOST, stored, 0) == pytest.approx(tpot_ms(SMALL, HOST, plain, 0) + more_operators)
        assert tpot_ms(SMALL, HOST, stored, 512) > tpot_ms(SMALL, HOST, plain, 512)  # its cache is copied
        more = peak_memory_bytes(SMALL, HOST, stored, 1) - peak_memory_bytes(SMALL, HOST, plain, 1)
        assert more == pytest.approx(table + graph + 2 * 73_728, rel=1e-3)


def test_a_growing_cache_is_copied_at_the_rate_of_all_its_buffers() -> None:
    """What is held three times falls out of a processor's caches before what is held once does."""
    evidence = {"unit": "GB/s", "source": "made up", "date": "2026-11-22", "kind": "estimated"}
    curve = [
        {"value": 100.0, "working_set_mb": 100.0, **evidence},
        {"value": 20.0, "working_set_mb": 101.0, **evidence},
    ]
    raw = HOST.model_dump(mode="json")
    raw["hardware"]["bandwidth_by_working_set"] = curve
    device = Device.model_validate_json(json.dumps(raw))
    plain, standard = Stored("int4", 128, 8), Stored("int4", 128, 8, standard=True)
    cached = 512 * 73_728
    assert 52e6 + cached < 100e6 < 52e6 + 3 * cached
    own = efficiency_of(device)
    told = own.model_copy(update={"growing_share": 2 * own.between_share, "standard_overhead_us": 70.0})
    for each, share, more_us in ((own, own.between_share, 5 * own.layer_overhead_us), (told, told.growing_share, 70.0)):
        here = device.model_copy(update={"efficiency": each})
        copied = 5 * cached / (20e9 * share)
        found = tpot_ms(SMALL, here, standard, 512) - tpot_ms(SMALL, here, plain, 512)
        assert found == pytest.approx(1000 * copied + 12 * more_us / 1000)


def test_a_layer_waits_for_what_it_touches_beyond_the_caches() -> None:
    """Records, code and activations count at what a byte takes more than in the caches; in them they count nothing."""
    evidence = {"unit": "GB/s", "source": "made up", "date": "2026-11-23", "kind": "estimated"}
    raw = HOST.model_dump(mode="json")
    raw["hardware"]["bandwidth_by_working_set"] = [
        {"value": value, "working_set_mb": size, **evidence} for value, size in ((100.0, 1.0), (20.0, 2.0))
    ]
    device = Device.model_validate_json(json.dumps(raw))
    touching = device.model_copy(
        update={"efficiency": efficiency_of(device).model_copy(update={"layer_touched_kb": 500.0})}
    )
    tiny, stored = PRESETS["tiny-300k"], Stored("int4", 32, 8)
    for config, a_byte_s in ((tiny, 0.0), (SMALL, 1 / 20e9 - 1 / 100e9)):
        layers = config.num_hidden_layers * 500e3 * a_byte_s * 1000
        assert sum(part.bytes for part in sizes(config, stored).decoding) < 1e6 or config is SMALL
        more = tpot_ms(config, touching, stored, 0) - tpot_ms(config, device, stored, 0)
        assert more == pytest.approx(layers)
        # Once for each piece of a prompt.
        more = ttft_ms(config, touching, stored, 300) - ttft_ms(config, device, stored, 300)
        assert more == pytest.approx(3 * layers)


def test_a_model_stands_on_the_curve_where_its_step_fills_the_caches() -> None:
    """A working set that counts twice is read as fast as one of twice the size, and not twice as often."""
    evidence = {"unit": "GB/s", "source": "made up", "date": "2026-11-22", "kind": "estimated"}
    raw = HOST.model_dump(mode="json")
    raw["hardware"]["bandwidth_by_working_set"] = [
        {"value": value, "working_set_mb": size, **evidence} for value, size in ((100.0, 80.0), (20.0, 81.0))
    ]
    device = Device.model_validate_json(json.dumps(raw))
    stored, own = Stored("int4", 128, 8), efficiency_of(device)
    bytes_read = sum(part.bytes for part in sizes(SMALL, stored).decoding)
    assert bytes_read < 80e6 < 2 * bytes_read
    once, twice = (
        tpot_ms(SMALL, device.model_copy(update={"efficiency": each}), stored, 0)
        for each in (own, own.model_copy(update={"working_set_scale": 2.0}))
    )
    assert twice - once == pytest.approx(1000 * bytes_read * (1 / 20e9 - 1 / 100e9))
    # So is one that finds the caches full of something else, as the last token of a prompt in the latency profile does.
    assert tpot_ms(SMALL, device, stored, 0, read_between=80e6) == pytest.approx(twice)
    latency = dataclasses.replace(stored, latency=True)
    prompt = sizes(SMALL, latency).prompt
    assert prompt is not None and bytes_read + prompt.bytes > 81e6
    slower = ttft_ms(SMALL, device, latency, 2) - tpot_ms(SMALL, device, stored, 1)
    assert slower > tpot_ms(SMALL, device, stored, 1, read_between=prompt.bytes) - tpot_ms(SMALL, device, stored, 1) > 0


@pytest.mark.parametrize(("form", "bits"), [("int4", 4), ("int8", 8)])
def test_a_number_in_small_blocks_is_read_as_long_as_its_scales_take(form: str, bits: int) -> None:
    """By numbers and scales, not bytes, against blocks of 128; a GPU's shares were found with no such difference."""
    time_32, time_128 = (
        slower_reading(form, block) * (bits / 8 + 4 / block) for block in (32, 128)
    )  # of a number, in units of a byte of the usual block
    assert time_32 / time_128 == pytest.approx((1 + 16 / 32) / (1 + 16 / 128)) and slower_reading(form, 128) == 1
    for name, factor in (("host", slower_reading(form, 32)), ("rtx-3060", 1.0)):
        device = load_device(name)
        stored, own = Stored(form, 32, bits), efficiency_of(device)
        twice = own.bandwidth_share.model_copy(update={form: getattr(own.bandwidth_share, form) / 2})
        slow = device.model_copy(
            update={
                "efficiency": own.model_copy(update={"bandwidth_share": twice}),
                "hardware": device.hardware.model_copy(update={"bandwidth_share": None, "layer_overhead": None}),
            }
        )
        size = sum(part.bytes for part in sizes(SMALL, stored).decoding if part.form == form)
        rate = 1e9 * device.hardware.memory_bandwidth.value * getattr(own.bandwidth_share, form)
        more = tpot_ms(SMALL, slow, stored, 0) - tpot_ms(SMALL, device, stored, 0)
        assert more == pytest.approx(1000 * factor * size / rate)


def test_each_form_has_a_share_of_the_bandwidth_and_one_number_stands_for_all() -> None:
    raw = HOST.model_dump(mode="json") | {"format": FORMAT, "efficiency": CPU.model_dump(mode="json")}
    raw["efficiency"]["bandwidth_share"] = 0.5
    device = Device.model_validate_json(json.dumps(raw))
    assert efficiency_of(device).bandwidth_share == alike(0.5)
    stored, parts = Stored("int4", 128, 8), sizes(SMALL, Stored("int4", 128, 8)).decoding
    slow = efficiency_of(device).model_copy(update={"bandwidth_share": alike(0.5).model_copy(update={"int4": 0.25})})
    more = tpot_ms(SMALL, device.model_copy(update={"efficiency": slow}), stored, 0)
    reading = sum(part.bytes for part in parts if part.form == "int4") / (1e9 * HOST.hardware.memory_bandwidth.value)
    assert reading > 0 and more - tpot_ms(SMALL, device, stored, 0) == pytest.approx(1000 * reading * (4 - 2))
    for wrong in (True, "half", 0, 5):
        raw["efficiency"]["bandwidth_share"] = wrong
        with pytest.raises(ValidationError, match="bandwidth_share"):
            Device.model_validate_json(json.dumps(raw))


def test_cores_share_attention_by_whole_heads() -> None:
    """Three heads on two cores take as long as four; a GPU has no such cores."""

    def scores_ms(heads: int, device: Device) -> float:
        config = SMALL.with_changes(num_attention_heads=heads, num_key_value_heads=1, head_dim=64)
        return tpot_ms(config, device, Stored("int4", 128, cache="int8"), 1_024) - tpot_ms(
            config, device, Stored("int4", 128, cache="int8"), 0
        )

    assert scores_ms(3, HOST) == pytest.approx(scores_ms(4, HOST), rel=1e-3)
    assert scores_ms(4, HOST) > 1.3 * scores_ms(2, HOST)
    prompts = [
        ttft_ms(
            SMALL.with_changes(num_attention_heads=heads, num_key_value_heads=1, head_dim=64), HOST, Stored("fp32"), 512
        )
        for heads in (1, 2, 3)
    ]
    assert prompts[2] - prompts[1] > 2 * (prompts[1] - prompts[0])  # the second head waits for nothing
    card = load_device("rtx-3060")
    assert scores_ms(3, card) < scores_ms(4, card)


def test_forms_are_predicted_as_what_they_are() -> None:
    blocks, rows = Stored("int8", 128), Stored("int8", 128, per_row=True)
    assert ttft_ms(SMALL, HOST, rows, 512) < 0.75 * ttft_ms(SMALL, HOST, blocks, 512)  # 1,310 for 686 GOP/s
    assert file_bytes(SMALL, rows) < file_bytes(SMALL, blocks)
    int4, latency = Stored("int4", 128), Stored("int4", 128, latency=True)
    assert tpot_ms(SMALL, HOST, latency, 512) == tpot_ms(SMALL, HOST, int4, 512)
    # The second graph has rows of all layers but what the last one makes besides keys and values.
    last = 2 * 768**2 + 3 * 768 * 2_048
    numbers = 12 * (4 * 768**2 + 3 * 768 * 2_048) - last
    assert file_bytes(SMALL, latency) - file_bytes(SMALL, int4) == pytest.approx(numbers, rel=0.01)
    read_in_rows = ttft_ms(SMALL, HOST, rows, 512) * numbers / (numbers + last)
    assert ttft_ms(SMALL, HOST, latency, 512) == pytest.approx(read_in_rows + tpot_ms(SMALL, HOST, int4, 511), rel=0.03)
    grown = peak_memory_bytes(SMALL, HOST, latency, 512) - peak_memory_bytes(SMALL, HOST, int4, 512)
    assert grown == pytest.approx(numbers * EFFICIENCIES["cpu"].weight_copies.int8_rows, rel=0.01)
    small_cache = Stored("int4", 128, cache="int8")
    less = peak_memory_bytes(SMALL, HOST, int4, 512) - peak_memory_bytes(SMALL, HOST, small_cache, 512)
    more_graph = 12 * (INT8_CACHE_GRAPH_BYTES + 2 * 4 * 768)
    assert less == pytest.approx(512 * 73_728 * (3 / 4 - 1 / 12) - more_graph)  # one of 12 layers back in float32
    assert tpot_ms(SMALL, HOST, small_cache, 1_900) < tpot_ms(SMALL, HOST, int4, 1_900)
    # Prompts are read with float32 attention over what the cache holds; only pieces under 32 tokens go the slow way.
    assert 1 < ttft_ms(SMALL, HOST, small_cache, 512) / ttft_ms(SMALL, HOST, int4, 512) < 1.1


@pytest.mark.parametrize(
    "arguments",
    [{"precision": "int4", "per_row": True}, {"precision": "fp32", "latency": True},
     {"precision": "int8", "per_row": True, "latency": True}, {"precision": "int4", "standard": True, "latency": True}],
)  # fmt: skip
def test_forms_that_do_not_exist(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Stored(**arguments)


@pytest.mark.parametrize("arguments", [("int3",), ("int4", 32, 8, False, "int2")])
def test_unknown_forms_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        Stored(*arguments)  # type: ignore[arg-type]


def test_constants_cover_every_precision() -> None:
    assert (PREFILL_CHUNK_TOKENS, LONG_PIECE_TOKENS) == (PREFILL_CHUNK, LONG_PIECE)
    for processor, efficiency in EFFICIENCIES.items():
        needed = set(CPU_FORMS) | (set() if processor == "cpu" else {"fp16"})
        for shares in (efficiency.prefill_share, efficiency.decode_share, efficiency.weight_copies):
            assert {name for name, value in shares if value is not None} == needed


def test_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(model="small", device="raspberry-pi-5", shapes=True, block_size=128, head_bits=4)
    assert result["parameters"] == 97_241_856
    assert sum(result["parameters_by_component"].values()) == result["parameters"]
    assert set(result["weight_bytes"]) == set(PRECISIONS)
    assert result["weight_bytes"]["fp32"] == 388_967_424
    assert result["kv_cache_bytes_per_token"] == {"fp32": 73_728, "fp16": 36_864, "int8": 18_432}
    assert result["training_memory_bytes"] == result["training_memory"]["total_bytes"]
    assert result["training_memory"]["total_checkpointed_bytes"] < result["training_memory_bytes"]
    keys = {"precision", "depth", "ttft_ms", "tpot_ms", "peak_rss_bytes"}
    assert all(keys <= set(row) for row in result["predicted"])
    assert {row["precision"] for row in result["predicted"]} == set(PRECISIONS)
    assert result["predicted_budget"]["int4"]["passed"] and not result["predicted_budget"]["fp32"]["passed"]
    json.dumps(result)
    printed = capsys.readouterr().out
    for part in ("97,241,856", "73,728", "q_proj.weight", "never made whole", "misses", "fits"):
        assert part in printed


def test_plan_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny-1m"].to_hf()), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000))
    result = plan(model=str(tmp_path))
    assert (result["parameters"], result["file_bytes"]) == (PRESETS["tiny-1m"].parameters, 1_000)
    assert "predicted" not in result


def test_plan_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(UsageError, match="tiny-1m"):
        plan(model="smal")
    with pytest.raises(UsageError, match="context"):
        plan(model="tiny-1m", length=5_000)
    with pytest.raises(UsageError, match="raspberry-pi-5-8gb"):
        plan(model="small", device="toaster")
