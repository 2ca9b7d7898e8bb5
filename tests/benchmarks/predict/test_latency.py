"""The formulas by hand, against measured and published figures, and what they mean for the shipped budgets."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.devices.load import list_devices, load_device
from benchmarks.devices.schema import Coefficients, Device, Hardware
from benchmarks.devices.verdict import misses
from benchmarks.measure import machine
from benchmarks.model_size import ModelFormat
from benchmarks.predict import latency
from benchmarks.predict.latency import (
    PREFILL_CHUNK_TOKENS,
    SHARES,
    Formulas,
    costs,
    predict,
    predict_directory,
    predict_figures,
    reliability,
    resolve,
    total,
)
from export.runtime.decoder import PREFILL_CHUNK
from sportsllm.formats.huggingface import to_hf
from sportsllm.formats.packed import QUANT_METHOD
from sportsllm.models.config import ModelConfig
from sportsllm.models.presets import PRESETS
from tests.support.devices import reference_machine

SMALL = PRESETS["small"]
REFERENCE = reference_machine()

# Every coefficient differs, so that a term priced by the wrong one shows.
KNOWN = Coefficients.model_validate(
    {
        **resolve(REFERENCE).model_dump(), "bandwidth_gb_per_s": 50.0, "int8_gop_per_s": 1_000.0,
        "fp32_gop_per_s": 300.0, "layer_us": 5.0, "runtime_mb": 70.0, "weight_copies": 1.1,
    }
)  # fmt: skip
DEVICE = REFERENCE.model_copy(update={"coefficients": KNOWN})
# `small`: 12 layers, 768 wide, 12 heads of 64 with keys of their own, 2,048 inner, 16,000 tokens, tied; int4 in blocks
# of 128 with an int8 head, by hand.
MACS = 12 * (4 * 768**2 + 3 * 768 * 2_048)
HEAD_BYTES = 16_000 * 768 * (1 + 2 / 128)
LAYER_BYTES = MACS * (0.5 + 2 / 128) + 4 * (12 * 2 * 768 + 768)
CACHE_BYTES = 2 * 12 * 768 * 4
ATTENTION_MACS = 2 * 12 * 768
ACTIVATIONS = 4 * (768 + 768) + 2 * (768 + 2_048) + (2_048 + 768)  # inputs and outputs of a layer's seven products
INT4 = ModelFormat("int4", 128)


def predicted(figure: str, config: ModelConfig, device: Device, stored: ModelFormat, tokens: int) -> float:
    terms = getattr(Formulas(config, stored, SHARES[device.processor]), figure)(tokens)
    return total(terms, costs(resolve(device)))


tpot_ms, ttft_ms, peak_memory_bytes = (partial(predicted, figure) for figure in ("tpot", "ttft", "memory"))
HEAD_S = HEAD_BYTES / 50e9 + 16_000 * 768 / (0.25 * 500e9)  # of INT8: read, then multiplied
LAYERS_S = (0.55 + 12 * 0.7) * 5e-6  # a pass, and layers in the kernels
GRAPH_BYTES = 6_000 + 3 * 2_750 + 12 * 3_600


def test_time_per_token_by_hand() -> None:
    weights = LAYER_BYTES / 50e9 + MACS / (0.4 * 500e9) + HEAD_S
    cache = 500 * (CACHE_BYTES / (0.7 * 50e9) + ATTENTION_MACS / (0.25 * 150e9))
    expected = 1_000 * (weights + cache + LAYERS_S)
    assert tpot_ms(SMALL, DEVICE, INT4, 500) == pytest.approx(expected, rel=1e-9)
    small_cache = dataclasses.replace(INT4, cache="int8")
    less = 500 * CACHE_BYTES * (1 / (0.7 * 50e9) - 1 / 4 / (0.45 * 50e9))
    assert tpot_ms(SMALL, DEVICE, small_cache, 500) == pytest.approx(expected - 1_000 * less, rel=1e-9)


def test_first_token_by_hand() -> None:
    """300 tokens are chunks of 128, 128 and 44, which see 128, 256 and 300 tokens."""
    seen = 128 * 128 + 128 * 256 + 44 * 300
    products = 300 * MACS / (0.42 * 500e9) + seen * ATTENTION_MACS / (0.4 * 150e9)
    activations = 4 * 300 * 12 * ACTIVATIONS / (0.25 * 50e9)
    expected = 1_000 * (products + activations + 3 * LAYERS_S + HEAD_S)
    assert PREFILL_CHUNK_TOKENS == PREFILL_CHUNK  # the runtime's
    assert ttft_ms(SMALL, DEVICE, INT4, 300) == pytest.approx(expected, rel=1e-9)


def test_memory_by_hand() -> None:
    expected = 70e6 + 1.1 * (1.3 * LAYER_BYTES + 1.28 * HEAD_BYTES) + 4 * 2_048 * 64 + GRAPH_BYTES  # and rotary tables
    for depth, chunk in ((1_024, 128), (100, 100)):
        activations = 4 * chunk * ACTIVATIONS + 4 * 16_000
        found = peak_memory_bytes(SMALL, DEVICE, INT4, depth)
        assert found == pytest.approx(expected + depth * CACHE_BYTES + activations, rel=1e-9)


def test_standard_operators_by_hand() -> None:
    """More of them a layer, a cache that is copied at each step, and the tied matrix once more in memory."""
    standard = dataclasses.replace(INT4, standard=True)
    more = tpot_ms(SMALL, DEVICE, standard, 500) - tpot_ms(SMALL, DEVICE, INT4, 500)
    assert more == pytest.approx(1_000 * (12 * (6 - 0.7) * 5e-6 + 500 * CACHE_BYTES / (0.25 * 50e9)), rel=1e-9)
    held = peak_memory_bytes(SMALL, DEVICE, standard, 500) - peak_memory_bytes(SMALL, DEVICE, INT4, 500)
    assert held == pytest.approx(2 * 500 * CACHE_BYTES + HEAD_BYTES + 4_000 + 12 * 12_600 - GRAPH_BYTES, rel=1e-9)


def test_half_precision_is_widened_on_a_cpu_and_not_on_a_gpu() -> None:
    half, whole = ModelFormat("fp16"), ModelFormat("fp32")
    # The weights' bytes are those of float32 by the time they are read; norms stay float32 in neither count.
    assert tpot_ms(SMALL, DEVICE, half, 0) == pytest.approx(tpot_ms(SMALL, DEVICE, whole, 0), rel=1e-6)
    assert ttft_ms(SMALL, DEVICE, half, 128) == pytest.approx(ttft_ms(SMALL, DEVICE, whole, 128), rel=1e-6)
    card = load_device("rtx-3060")
    assert tpot_ms(SMALL, card, half, 0) < 0.8 * tpot_ms(SMALL, card, whole, 0)


def test_coefficients_are_the_hardwares_figures_or_the_device_files_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve(REFERENCE)
    rates = found.bandwidth_gb_per_s, found.int8_gop_per_s, found.fp32_gop_per_s, found.layer_us
    assert rates == (65, 2_060, 510, 18) and resolve(DEVICE) is KNOWN
    pi = resolve(load_device("raspberry-pi-5"))
    assert (pi.layer_us, pi.bandwidth_gb_per_s) == (70, pytest.approx(0.97 * 17.07))
    assert not reliability(REFERENCE)["own"] and reliability(REFERENCE)["band"]["measured"]
    assert reliability(DEVICE)["own"] and not reliability(load_device("rtx-3060"))["band"]["measured"]
    here = reference_machine(bandwidth=12.5).hardware  # `host` is predicted with this machine's figures
    monkeypatch.setattr(latency, "this_machine", lambda: here)
    assert resolve(load_device("host")).bandwidth_gb_per_s == 12.5


def test_the_figures_of_this_machine_are_measured() -> None:
    found = machine.this_machine(1)
    assert isinstance(found, Hardware) and found.cores.value == 1
    assert found.memory_bandwidth.kind == found.fp32_matmul_rate.kind == "measured"
    factor = 4 if any(name in found.instruction_set.value for name in machine.DOT_PRODUCT) else 2
    # Four digits of either.
    assert found.int8_matmul_rate.value == pytest.approx(factor * found.fp32_matmul_rate.value, rel=1e-3)
    assert machine.this_machine(1) is found  # once


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, width: int) -> ModelConfig:
    return ModelConfig(vocab, hidden, inner, layers, heads, kv_heads, head_dim=width, max_position_embeddings=8_192)


LLAMA_3B = _llama(3_072, 8_192, 28, 24, 8, 128_256, 128)
LLAMA_1B = _llama(2_048, 8_192, 16, 32, 8, 128_256, 64)
LLAMA_8B = _llama(4_096, 14_336, 32, 32, 8, 128_256, 128).with_changes(tie_word_embeddings=False)
SMOL_135M = _llama(576, 1_536, 30, 9, 3, 49_152, 64)


@pytest.mark.parametrize(
    ("device", "config", "stored", "tokens_per_s"),
    [
        ("raspberry-pi-5-8gb", LLAMA_3B, ModelFormat("int4"), 4.75),
        ("android-flagship", LLAMA_1B, ModelFormat("int4"), 50.2),
        ("jetson-orin-nano-super", SMOL_135M, ModelFormat("int4"), 165.2),
        ("jetson-orin-nano-super", LLAMA_3B, ModelFormat("int4", 32, 4), 43),
        ("rtx-3060", LLAMA_3B, ModelFormat("int4"), 122.85),
        ("rtx-3060", LLAMA_8B, ModelFormat("int4"), 42),
        ("rtx-3080", LLAMA_8B, ModelFormat("int4"), 74),
        ("rtx-3090", LLAMA_8B, ModelFormat("int4"), 87),
    ],
)
def test_published_decoding_rates(device: str, config: ModelConfig, stored: ModelFormat, tokens_per_s: float) -> None:
    assert 1 / 1.5 <= tpot_ms(config, load_device(device), stored, 64) * tokens_per_s / 1_000 <= 1.5


@pytest.mark.parametrize("name", list_devices())
def test_every_budget_refuses_a_shipped_model(name: str) -> None:
    device = load_device(name)
    device = reference_machine() if device.hardware is None else device
    small, large = (
        misses(predict_figures(PRESETS[name], device, ModelFormat(precision)).figures, device)
        for name, precision in (("tiny-5m", "int4"), ("large", "fp32"))
    )
    assert {"file_mb", "peak_memory_mb"} <= large.keys() and not small  # 3,722 MB


def test_a_row_has_the_band_of_the_coefficients() -> None:
    (row, *_) = predict(SMALL, DEVICE, INT4)
    for name, factor in (("ttft_ms", KNOWN.band.ttft), ("tpot_ms", KNOWN.band.tpot)):
        assert row[f"{name}_low"] == pytest.approx(row[name] / factor)
        assert row[f"{name}_high"] == pytest.approx(row[name] * factor)
    # Whole bytes.
    assert row["peak_rss_bytes_high"] == pytest.approx(KNOWN.band.memory * row["peak_rss_bytes"], abs=1)
    assert isinstance(row["peak_rss_bytes"], int)
    found = predict_figures(SMALL, DEVICE, INT4)
    assert found.band["tpot_p95_ms"] == KNOWN.band.tpot
    assert found.figures["tpot_p95_ms"] == pytest.approx(1.25 * tpot_ms(SMALL, DEVICE, INT4, 512))
    assert found.figures["peak_memory_mb"] == pytest.approx(peak_memory_bytes(SMALL, DEVICE, INT4, 1_024) / 1e6)


def test_a_directory_is_predicted_as_it_is_stored(tmp_path: Path) -> None:
    packed = {"quant_method": QUANT_METHOD, "bits": 4, "block_size": 128, "head_bits": 8, "method": "gptq"}
    config = {**to_hf(SMALL), "quantization_config": packed}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "model.onnx.data").write_bytes(bytes(50_000_000))
    found = predict_directory(DEVICE, SMALL, tmp_path)
    expected = predict_figures(SMALL, DEVICE, dataclasses.replace(INT4, file_bytes=50_000_000))
    assert found.figures == expected.figures and found.figures["file_mb"] == 50
    assert found.made_with["own"] and found.made_with["band"]["tpot"] == KNOWN.band.tpot
