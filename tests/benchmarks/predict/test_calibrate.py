"""`calibrate`: its graphs against `onnx` and numpy, its arithmetic on a made-up machine, its file."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from benchmarks.devices.load import is_this_machine, load_device
from benchmarks.devices.recognise import instruction_set, processor_name
from benchmarks.devices.schema import FORMAT
from benchmarks.devices.write import write_device
from benchmarks.predict import calibrate, calibrate_figures
from benchmarks.predict.calibrate import Readings, describe, probes, run_calibrate
from benchmarks.predict.coefficients import CPU_FORMS, MOST_OF_A_RATE, bandwidth_at, longer
from benchmarks.predict.latency import Stored, efficiency_of, tpot_ms
from benchmarks.predict.model_size import OUTPUT_NUMBERS, SCALE_NUMBERS, SCORE_NUMBERS
from benchmarks.predict.probes import add_product, attention, gated, layers, measure_footprint, time_graph
from benchmarks.predict.small_models import ProbeGraph
from sportsllm.cli import main as cli
from sportsllm.errors import ArtifactError, ConflictError, ResourceError, UsageError
from sportsllm.models.presets import PRESETS
from sportsllm.storage.packed_weights import QuantizedWeight

ROWS, WIDTH = 8, 256


def _run(graph: ProbeGraph, path: Path, feeds: dict[str, Any]) -> list[Any]:
    graph.write(path)
    return list(ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds))


@pytest.mark.parametrize("form", CPU_FORMS)
def test_a_product_multiplies_by_the_matrix_it_stores(form: str, tmp_path: Path) -> None:
    graph = ProbeGraph()
    graph.input("x", "float32", (3, WIDTH))
    graph.output(add_product(graph, form, "x", "y", ROWS, WIDTH), "float32", (3, ROWS))
    x = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)
    (found,) = _run(graph, tmp_path / "m.onnx", {"x": x})
    data = graph.data
    if form == "fp32":
        dense_NK = data["y.weight"]
    elif form == "int8_rows":
        dense_NK = (data["y.weight"].astype(np.float32) * data["y.scale"]).T
    else:
        bits = 4 if form == "int4" else 8
        packed = QuantizedWeight(data["y.weight"], data["y.scale"], None, bits, calibrate_figures.BLOCK, WIDTH)
        dense_NK = packed.dequantize()
    expected = x.astype(np.float64) @ dense_NK.astype(np.float64).T
    # The quantized operators round x to 8 bits too: up to 1/254 of its range for each of 256 numbers, at random.
    tolerance = 1e-5 if form == "fp32" else 0.03
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    assert 0.1 < np.abs(expected).std() < 10  # a chain of them neither vanishes nor explodes


def test_every_graph_is_valid_onnx_with_fixed_shapes(tmp_path: Path) -> None:
    """`onnx` reads what was written byte by byte; its checker knows standard operators and the structure."""
    for name, probe in probes().items():
        if name.startswith(("footprint", "read", "product", "layers.768")):
            continue  # the same graphs, larger
        probe.make().write(tmp_path / "m.onnx")
        model = onnx.load(str(tmp_path / "m.onnx"))
        onnx.checker.check_model(model)
        assert all(d.dim_value > 0 for i in model.graph.input for d in i.type.tensor_type.shape.dim), name
        assert {entry.domain: entry.version for entry in model.opset_import} == {"": 21, "com.microsoft": 1}


@pytest.mark.parametrize("cache", ["fp32", "int8"])
def test_attention_attends_to_the_cache(cache: str, tmp_path: Path) -> None:
    """The last of 9 tokens, against softmax by hand; 4 query heads share 2 key heads."""
    heads, shared, size, end = 4, 2, 16, 9
    random = np.random.default_rng(0)
    query = random.standard_normal((1, 1, heads * size)).astype(np.float32)
    new = random.uniform(-1, 1, (2, 1, 1, shared * size)).astype(np.float32)
    past = random.integers(-50, 51, (2, 1, shared, end, size)).astype(np.int8)
    scale = np.float32(0.02)
    held = past if cache == "int8" else past * scale
    feeds = {"query": query, "key": new[0], "value": new[1], "past_key": held[0], "past_value": held[1]}
    feeds |= {"seqlens_k": np.array([end - 1], np.int32), "total": np.array(end, np.int32)}
    found = _run(attention(cache, 1, end, heads, shared, size), tmp_path / "m.onnx", feeds)[0]
    both = past.astype(np.float64) * scale
    both[:, :, :, -1] = new.reshape(2, 1, shared, size)
    expected = []
    for head in range(heads):
        keys, values = both[0, 0, head // 2], both[1, 0, head // 2]
        scores = keys @ query[0, 0, head * size : (head + 1) * size] / size**0.5
        weights = np.exp(scores - scores.max())
        expected.append(weights / weights.sum() @ values)
    # The int8 cache rounds the new token's keys and values to steps of 0.02.
    assert np.abs(found[0, 0] - np.concatenate(expected)).max() < (1e-5 if cache == "fp32" else 0.03)


def test_layers_are_norm_product_attention_norm_and_gate(tmp_path: Path) -> None:
    """Two layers of one token against float64 by hand; six heads share two of keys and values."""
    width, size, shared, kept = 384, calibrate_figures.LAYER_HEAD_DIM, 2, calibrate_figures.LAYER_DEPTH
    graph, random = layers(width, 2), np.random.default_rng(0)
    feeds: dict[str, Any] = {"x": random.standard_normal((1, 1, width)).astype(np.float32)}
    feeds |= {"seqlens_k": np.array([kept - 1], np.int32), "total": np.array(kept, np.int32)}
    for layer in range(2):
        for part in ("key", "value"):
            feeds[f"{part}{layer}"] = random.standard_normal((1, 1, shared * size)).astype(np.float32)
            feeds[f"past_{part}{layer}"] = random.standard_normal((1, shared, kept, size)).astype(np.float32)
    found = _run(graph, tmp_path / "m.onnx", feeds)[0]

    def norm(x: Any) -> Any:
        return x / np.sqrt((x**2).mean())

    x = residual = feeds["x"][0, 0].astype(np.float64)
    for layer in range(2):
        residual = x + residual
        x = norm(residual) @ graph.data[f"y{layer}.weight"].astype(np.float64).T
        heads = []
        for head in range(width // size):
            group = head // (width // size // shared)
            keys, values = (
                np.concatenate([feeds[f"past_{part}{layer}"][0, group, :-1],
                                feeds[f"{part}{layer}"].reshape(shared, 1, size)[group]]).astype(np.float64)
                for part in ("key", "value")
            )  # fmt: skip
            weights = np.exp(keys @ x[head * size : (head + 1) * size] / size**0.5)
            heads.append(weights / weights.sum() @ values)
        x = np.concatenate(heads)
        residual = x + residual
        x = norm(residual)
        x = x**2 / (1 + np.exp(-1.702 * x))
    assert np.abs(found[0, 0] - x).max() < 1e-4 * np.abs(x).max()


def test_a_graph_is_timed_and_weighed(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    gated(2, 128, 2).write(path)
    specification = {"graph": str(path), "threads": 1, "seconds_per_figure": 0.0}
    timed = time_graph(specification)
    assert timed["seconds"] > 0 and timed["runs"] >= 7
    assert measure_footprint(specification)["peak_rss_bytes"] > 10e6  # Python and the runtime alone


# A machine whose every figure is known: the probes' times follow from them.
GFLOP, GOP, BANDWIDTH = 300e9, 400e9, 200e9
READ_BYTES = [4 * count * width**2 for width, count in calibrate_figures.READS]
CURVE = {size: bandwidth_at({READ_BYTES[9]: 2 * BANDWIDTH, 90e6: BANDWIDTH}, size) for size in READ_BYTES}
EMPTY_S = 2e-6
LAYER_S, TOUCHED_BYTES = 9e-6, 1.5e6
ROUNDING_S = {"fp32": 0.0, "int8": 0.25e-6, "int4": 0.5e-6, "int8_rows": 1e-6}
READ_SHARE = {"fp32": 1.0, "int8": 0.8, "int4": 0.6, "int8_rows": 0.9}
STEP_SHARE = {"fp32": float("inf"), "int8": 0.2, "int4": 0.4, "int8_rows": 0.3}  # float32 is what the curve is made of
# The peak counts multiplications alone, so that what is counted besides comes on top of it.
ROWS_SHARE = 1 + OUTPUT_NUMBERS["int8_rows"] / calibrate_figures.PRODUCT[1]
PREFILL_SHARE = {"fp32": 1.0, "int8": 0.5, "int4": 0.6, "int8_rows": ROWS_SHARE}


def _readings() -> Readings:
    f, seconds = calibrate_figures, {}
    peak = {form: GFLOP if form == "fp32" else GOP for form in CPU_FORMS}
    scales = {form: 1 + SCALE_NUMBERS / f.BLOCK if form in ("int8", "int4") else 1.0 for form in CPU_FORMS}

    def step_s(form: str, numbers: int, bandwidth: float) -> float:
        multiplying = 2 * numbers * scales[form] / (peak[form] * STEP_SHARE[form])
        return multiplying + numbers * f.BYTES[form] / (bandwidth * READ_SHARE[form])

    for form in CPU_FORMS:
        for count in f.EMPTY_COUNTS:
            seconds[f"empty.{form}.{count}"] = 5e-6 + count * (EMPTY_S + ROUNDING_S[form])
        for rows in f.PROMPT_ROWS:
            work = 2 * rows * f.PRODUCT[0] * (f.PRODUCT[1] * scales[form] + OUTPUT_NUMBERS[form])
            seconds[f"product.{form}.{rows}"] = work / (peak[form] * PREFILL_SHARE[form])
        for count in f.STEP_COUNTS:
            seconds[f"step.{form}.{count}"] = 5e-6 + count * (
                EMPTY_S + ROUNDING_S[form] + step_s(form, f.STEP_WIDTH**2, 2 * BANDWIDTH)
            )
    for form in f.FAR_FORMS:
        matrix = EMPTY_S + ROUNDING_S[form] + step_s(form, f.STEP_WIDTH**2, BANDWIDTH)
        seconds[f"far.{form}"] = 5e-6 + f.far_count(form) * matrix
    for (wide, count), bandwidth in zip(f.READS, CURVE.values(), strict=True):
        seconds[f"read.{wide}.{count}"] = 5e-6 + count * (EMPTY_S + step_s("fp32", wide**2, bandwidth))
    for wide, count in f.LAYERS:
        slower = 1 / bandwidth_at(CURVE, 4 * count * wide**2) - 1 / max(CURVE.values())
        seconds[f"layers.{wide}.{count}"] = seconds[f"read.{wide}.{count}"] + count * (LAYER_S + TOUCHED_BYTES * slower)
    rows, width, times = f.GATED
    seconds["between"] = 20 * rows * width * times / (0.25 * (2 * BANDWIDTH))
    for cache, size in (("fp32", 4), ("int8", 1)):
        scores = 4 * f.HEADS * f.HEAD_DIM
        prompt = 4 * f.HEADS * (f.HEAD_DIM + SCORE_NUMBERS) * f.PROMPT_NEW * f.PROMPT_END
        seconds[f"prompt.{cache}"] = EMPTY_S + prompt / (0.3 * GFLOP)
        for heads in f.KV_HEADS:
            read = 2 * f.DEEP * heads * f.HEAD_DIM * size / (0.6 * (2 * BANDWIDTH))
            seconds[f"attention.{cache}.{heads}"] = EMPTY_S + longer(read, scores * f.DEEP / (0.1 * GFLOP))
    footprints = dict.fromkeys(CPU_FORMS, (70000000 + 60000000, 50000000)) | {"none": (70_000_000, 9_000)}
    return Readings(seconds, footprints, 0.0)


def test_figures_of_a_machine_that_is_known() -> None:
    found = describe(_readings(), "made-up", 2, load_device("host"))[0]
    own, hardware = found.efficiency, found.hardware
    assert own is not None and own.kind == "measured"
    assert hardware.int8_matmul_rate.value == pytest.approx(GOP / 1e9, rel=1e-3)
    assert hardware.fp32_matmul_rate.value == pytest.approx(GFLOP / 1e9, rel=1e-3)
    for form in CPU_FORMS:
        assert getattr(own.bandwidth_share, form) == pytest.approx(READ_SHARE[form], rel=1e-3)
        # Four digits of the other leave less of this one.
        assert getattr(own.decode_share, form) == pytest.approx(min(STEP_SHARE[form], MOST_OF_A_RATE), rel=2e-3)
        assert getattr(own.prefill_share, form) == pytest.approx(PREFILL_SHARE[form], rel=1e-3)
        assert getattr(own.weight_copies, form) == pytest.approx(60 / 50, rel=1e-3)
        assert getattr(own.product_overhead_us, form) == pytest.approx(1e6 * ROUNDING_S[form], abs=1e-3)
    for cache in ("fp32", "int8"):
        assert getattr(own.cache_share, cache) == pytest.approx(0.6, rel=2e-3)
        assert getattr(own.attention_step_share, cache) == pytest.approx(0.1, rel=2e-3)
        assert getattr(own.attention_share, cache) == pytest.approx(0.3, rel=1e-3)
    expected = {"working_set_scale": 1, "between_share": 0.25, "runtime_mb": 70, "pass_overhead_us": 5}
    # Four products, where the probe has one, and what takes gate and up apart.
    expected |= {"layer_overhead_us": 1e6 * (LAYER_S + 5 * EMPTY_S), "layer_touched_kb": TOUCHED_BYTES / 1e3}
    expected |= {"growing_share": 0.25, "standard_overhead_us": 5 * expected["layer_overhead_us"]}
    for name, value in expected.items():
        assert getattr(own, name) == pytest.approx(value, rel=1e-3), name


def test_noise_gives_the_largest_share_and_never_a_negative_one() -> None:
    readings = _readings()
    readings.seconds |= {"attention.fp32.12": 1e-9, "step.int4.8": 5e-6, "empty.fp32.32": 1e-9}
    readings.seconds |= dict.fromkeys(("layers.384.4", "layers.768.41"), 1e-9)
    own = describe(readings, "noisy", 2, load_device("host"))[0].efficiency
    assert own is not None
    assert own.cache_share.fp32 == 1.0 and 0 < own.decode_share.int4 <= MOST_OF_A_RATE
    assert own.layer_overhead_us == own.layer_touched_kb == 0
    for far in (1e-9, 1.0):  # read in no time, and hardly at all
        readings.seconds["far.int8"] = far
        own = describe(readings, "noisy", 2, load_device("host"))[0].efficiency
        assert own is not None and 0 < own.bandwidth_share.int8 <= MOST_OF_A_RATE and own.decode_share.int8 > 0
    readings.footprints["int4"] = (1, 50_000_000)  # weights that take no memory
    with pytest.raises(ResourceError, match=r"int4.*repeat"):
        describe(readings, "noisy", 2, load_device("host"))


def test_bandwidth_between_two_working_sets() -> None:
    curve = {1e6: 80e9, 100e6: 20e9}
    assert bandwidth_at(curve, 1e3) == 80e9 and bandwidth_at(curve, 1e9) == 20e9
    assert bandwidth_at(curve, 10e6) == pytest.approx(40e9)  # the geometric middle of both


@pytest.fixture
def written(tmp_path: Path) -> Path:
    device, absent = describe(_readings(), "made-up", 2, load_device("raspberry-pi-5"))
    assert "power" in absent
    write_device(device, tmp_path / "mine.toml", "A comment.")
    return tmp_path / "mine.toml"


def test_the_file_says_what_was_measured_and_what_was_decided(written: Path) -> None:
    device = load_device(str(written))
    assert device.limits == load_device("raspberry-pi-5").limits and device.hardware.power is None
    assert device == describe(_readings(), "made-up", 2, load_device("raspberry-pi-5"))[0].model_copy(
        update={"hardware": device.hardware}  # free memory and clock move on
    )
    assert efficiency_of(device) is device.efficiency
    assert not list(written.parent.glob("*.partial*"))
    rule = device.recognise
    named = processor_name() != platform.machine()
    assert is_this_machine(device) == named and (rule.processor if rule else None) == (
        processor_name() if named else None
    )
    # `small` in blocks of 128 by hand: its matrices read once, and multiplied at the machine's rate for one row.
    numbers, table = 12 * (4 * 768**2 + 3 * 768 * 2_048), 16_000 * 768
    size = numbers * (1 / 2 + 4 / 128) + table * (1 + 4 / 128)
    multiplying = (2 * numbers / (0.4 * GOP) + 2 * table / (0.2 * GOP)) * (1 + 16 / 128)
    rate = bandwidth_at(CURVE, size)
    reading = numbers * (1 / 2 + 4 / 128) / (0.6 * rate) + table * (1 + 4 / 128) / (0.8 * rate)
    touched = TOUCHED_BYTES * (1 / rate - 1 / max(CURVE.values()))
    seconds = reading + multiplying + 5e-6 + 12 * (LAYER_S + 5 * EMPTY_S + touched)
    seconds += 12 * 4 * ROUNDING_S["int4"] + ROUNDING_S["int8"]
    assert tpot_ms(PRESETS["small"], device, Stored("int4", 128), 0) == pytest.approx(1_000 * seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        (f"format = {FORMAT}", f"format = {FORMAT + 1}", "format", "upgrade"),
        (f"format = {FORMAT}", "format = 3", "efficiency", "calibrate"),
        ("between_share = 0.25", "between_share = 2.5", "efficiency.between_share", "less than or equal to 1"),
        ("between_share = 0.25", "between_share = -1.0", "efficiency.between_share", "greater than 0"),
        ("between_share = 0.25", 'between_share = "a lot"', "efficiency.between_share", "not 'a lot'"),
        ("pass_overhead_us = 5.0", "pass_overhead_ms = 5.0", "efficiency.pass_overhead_ms", "is no field"),
        ("runtime_mb = 70.0", "runtime_mb = 7e7", "efficiency.runtime_mb", "100000"),
        ("working_set_mb = 2.359", "working_set_mb = 1.0", "hardware.bandwidth_by_working_set", "must rise"),
        ("working_set_mb = 2.359", "working_set_kb = 5.0", "by_working_set.1.working_set_mb", "missing"),
        ('processor = "cpu"', 'processor = "tpu"', "processor", "not 'tpu'"),
        ("[limits]", "[bounds]", "limits", "is missing"),
    ],
)  # fmt: skip
def test_mistakes_in_a_calibrated_file(written: Path, old: str, new: str, field: str, words: str) -> None:
    text = written.read_text(encoding="utf-8")
    assert old in text
    written.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ArtifactError) as caught:
        load_device(str(written))
    message = str(caught.value)
    assert f"{field}: " in message and words in message and "\n" not in message


def test_all_mistakes_come_at_once_with_their_lines(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    for old, new in {
        "\nbetween_share = 0.25": "\nbetween_share = 25.0",
        'unit = "GFLOP/s"': 'unit = "TFLOP/s"',
        "working_set_mb = 2.359": "working_set_mb = -1.0",
        "ttft_ms = 2000.0": "ttft_ms = 1.0",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    text = text.replace("[efficiency.decode_share]\nfp32 = 4.0\n", "[efficiency.decode_share]\n")
    text += (
        "\n[hardware.bandwidth_share]\nvalue = 0.5\nunit = 'share'\nsource = 'x'\ndate = 2026-11-22\nkind = 'spec'\n"
    )
    written.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError) as caught:
        load_device(str(written))
    lines, message = text.splitlines(), str(caught.value)
    for line, field in {
        "between_share = 25.0": "efficiency.between_share",
        'unit = "TFLOP/s"': "hardware.fp32_matmul_rate.unit",
        "[efficiency.decode_share]": "efficiency.decode_share.fp32",
        "working_set_mb = -1.0": "hardware.bandwidth_by_working_set.1.working_set_mb",
        "tpot_p50_ms = 30.0": "limits.tpot_p50_ms",
    }.items():
        assert f"{written}:{lines.index(line) + 1}: {field}: " in message, field


def test_the_same_thing_is_said_once(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    text += "\n[hardware.layer_overhead]\nvalue = 5\nunit = 'us'\nsource = 'x'\ndate = 2026-11-22\nkind = 'spec'\n"
    written.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"efficiency: hardware\.layer_overhead says the same thing again"):
        load_device(str(written))


def test_refusals_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mine\.toml"):
        run_calibrate(tmp_path / "mine.txt")
    with pytest.raises(UsageError, match="shipped device"):
        run_calibrate(tmp_path / "host.toml")
    with pytest.raises(UsageError, match="small letters"):
        run_calibrate(tmp_path / "mine.toml", name="My machine")
    with pytest.raises(UsageError, match="toaster"):
        run_calibrate(tmp_path / "mine.toml", limits_from="toaster")
    (tmp_path / "mine.toml").write_text("", encoding="utf-8")
    with pytest.raises(ConflictError, match="exists already"):
        run_calibrate(tmp_path / "mine.toml")


def test_the_lower_quartile_of_the_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"empty.fp32.2": [3.0, 1.0, 2.0], "footprint.none": [0.0]}

    def run(_: Readings, specification: dict[str, Any], what: str) -> dict[str, Any]:
        return {"seconds": runs[what].pop(0), "peak_rss_bytes": 5}

    real = probes()
    monkeypatch.setattr(calibrate, "probes", lambda: {name: real[name] for name in runs})
    monkeypatch.setattr(calibrate, "_run", run)
    monkeypatch.setattr(calibrate, "wait_for_quiet", lambda: None)
    found = calibrate.read_machine(1, rounds=3)
    assert found.seconds == {"empty.fp32.2": 1.5} and found.footprints["none"][0] == 5
    assert runs == {"empty.fp32.2": [], "footprint.none": []}  # memory is looked at once


def test_a_curve_of_bandwidth_is_found_again() -> None:
    """What operators and a run cost is taken off."""
    found = calibrate_figures.read_curve(_readings().seconds)
    assert list(found) == pytest.approx(READ_BYTES)
    assert list(found.values()) == pytest.approx(list(CURVE.values()), rel=1e-6)


def test_noise_makes_no_reading_take_no_time() -> None:
    seconds, f = _readings().seconds, calibrate_figures
    seconds["read.768.4"] = 5e-6 + 3.99 * EMPTY_S  # less than its operators alone
    found = f.read_curve(seconds)
    size = f.read_bytes("fp32", 768, 4)
    assert found[size] == pytest.approx(size / (0.1 * seconds["read.768.4"]))


@pytest.mark.parametrize("change", ["none is read", "no cache"])
def test_reading_is_taken_to_be_float32s_where_nothing_tells(change: str) -> None:
    """Without matrices beyond the caches, or without caches, what a product takes beside reading is multiplying."""
    seconds, f = _readings().seconds, calibrate_figures
    if change == "none is read":
        del seconds["far.int4"]
    else:
        for width, count in f.READS:
            matrix = EMPTY_S + f.read_bytes("fp32", width, 1) / (2 * BANDWIDTH)
            seconds[f"read.{width}.{count}"] = 5e-6 + count * matrix
    own = describe(Readings(seconds, _readings().footprints), "flat", 2, load_device("host"))[0].efficiency
    assert own is not None and own.bandwidth_share.int4 == 1.0
    numbers = f.STEP_WIDTH**2
    scales = 1 + SCALE_NUMBERS / f.BLOCK
    beside = numbers * f.BYTES["int4"] * (1 / 0.6 - 1) / (2 * BANDWIDTH)
    multiplying = 2 * numbers * scales / (0.4 * GOP) + beside
    assert own.decode_share.int4 == pytest.approx(2 * numbers * scales / multiplying / GOP, rel=1e-3)


def test_small_machines_read_what_they_have_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Little:
        total, available = 500_000_000, 200_000_000

    monkeypatch.setattr(calibrate.psutil, "virtual_memory", Little)
    read = [name for name in probes() if name.startswith("read.")]
    assert read == [f"read.{width}.{count}" for width, count in calibrate_figures.READS[: len(read)]]
    assert 16e6 < READ_BYTES[len(read) - 1] <= 20e6 and not any(name.startswith("far.") for name in probes())
    # What a layer waits for beyond the caches is not known then.
    assert [name for name in probes() if name.startswith("layers.")] == ["layers.384.4"]
    readings = _readings()
    del readings.seconds["layers.768.41"]
    own = describe(readings, "little", 2, load_device("host"))[0].efficiency
    assert own is not None and own.layer_touched_kb == 0
    assert own.layer_overhead_us == pytest.approx(1e6 * (LAYER_S + 5 * EMPTY_S), rel=1e-3)
    Little.available = 20_000_000
    assert {"read.384.2", "read.384.4", "layers.384.4"} <= set(probes())


@pytest.mark.parametrize("threads", [2, 8])
def test_heads_that_wait_are_counted_where_rates_come_from_and_where_they_are_used(threads: int) -> None:
    """What the attention probe took is what a model of its 12 heads is predicted to take, on any number of cores."""
    f, readings = calibrate_figures, _readings()
    device = describe(readings, "wide", threads, load_device("host"))[0]
    assert device.hardware.cores.value == threads
    config = PRESETS["small"].with_changes(
        num_attention_heads=f.HEADS,
        num_key_value_heads=f.KV_HEADS[0],
        head_dim=f.HEAD_DIM,
        max_position_embeddings=2_048,
    )
    stored = Stored("int4", 128)
    flat = device.hardware.model_copy(update={"bandwidth_by_working_set": device.hardware.bandwidth_by_working_set[:1]})
    device = device.model_copy(update={"hardware": flat})
    taken = tpot_ms(config, device, stored, f.DEEP) - tpot_ms(config, device, stored, 0)
    once = readings.seconds[f"attention.fp32.{f.KV_HEADS[0]}"] - EMPTY_S
    assert taken == pytest.approx(1_000 * config.num_hidden_layers * once, rel=2e-3)


def test_limits_that_cannot_hold_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class Little:
        total, available = 2_000_000_000, 100_000_000

    monkeypatch.setattr(calibrate.psutil, "virtual_memory", Little)
    with pytest.raises(UsageError, match=r"--limits-from rtx-3060.*peak_memory_mb 4000 is more than"):
        describe(_readings(), "little", 2, load_device("rtx-3060"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real probes in real processes; the others' times are those of the machine above."""
    real = probes()
    few = {name: real[name] for name in ("empty.fp32.2", "footprint.none")}
    monkeypatch.setattr(calibrate, "probes", lambda: few)
    rest = _readings()
    monkeypatch.setattr(calibrate, "Readings", lambda: Readings(rest.seconds, rest.footprints))
    out = tmp_path / "new" / "mine.toml"
    with pytest.raises(SystemExit) as stop:
        cli.main(
            [
                "calibrate",
                "--out",
                str(out),
                "--name",
                "bench-2",
                "--threads",
                "1",
                "--limits-from",
                "rasp",
                "--rounds",
                "1",
                "--json",
            ]
        )
    captured = capsys.readouterr()
    assert stop.value.code == 0, captured.err
    result = json.loads(captured.out.splitlines()[-1])
    assert (result["device"], result["limits_from"], result["threads"]) == ("bench-2", "raspberry-pi-5-8gb", 1)
    assert set(result["gop_per_s"]) == set(CPU_FORMS) and len(result["bandwidth_gb_per_s"]) == len(READ_BYTES)
    device = load_device(str(out))
    assert device.efficiency is not None and device.efficiency.runtime_mb == result["efficiency"]["runtime_mb"] > 20
    assert ("1 threads" in device.hardware.memory_bandwidth.source and "noisy" in captured.err) or result["clean"]


def test_instruction_sets(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags : fpu avx2 avx512f avx512_vnni\n", encoding="utf-8")
    assert instruction_set(file).endswith("with AVX2, AVX-512, AVX512-VNNI")
    file.write_text("Features\t: fp asimd asimddp\n", encoding="utf-8")
    assert instruction_set(file).endswith("with NEON, int8 dot product")
    assert "not readable" in instruction_set(tmp_path / "missing")
