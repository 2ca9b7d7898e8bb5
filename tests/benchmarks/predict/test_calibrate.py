"""`calibrate`: the fit on a machine that is known and on recorded figures, and the command with real models."""

import json
import platform
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import device_commands
from benchmarks.devices.load import is_this_machine, load_device, processor_name
from benchmarks.devices.schema import Coefficients
from benchmarks.labels import read_csv
from benchmarks.model_size import ModelFormat
from benchmarks.plan import plan
from benchmarks.predict import calibrate
from benchmarks.predict.calibrate import (
    FORMATS,
    INT8_CACHE,
    MOST_CHANGE,
    SHAPES,
    Figure,
    Probe,
    band_of,
    choose_threads,
    fit,
    read_bandwidth,
    shape,
    this_device,
    thread_counts,
)
from benchmarks.predict.latency import costs, resolve, total
from benchmarks.studies.prediction_error import DIMENSIONS
from sportsllm.errors import ConflictError, UsageError
from sportsllm.verbs.run import run
from tests.support.command_line import CommandLine
from tests.support.devices import reference_machine

START = resolve(reference_machine())
RECORDED = Path(__file__).parents[3] / "benchmarks" / "results" / "prediction" / "zen5.csv"
# A machine that differs from the start by factors between a half and two, each by another.
TRUE = START.model_copy(
    update={name: getattr(START, name) * 2.0 ** np.sin(3.0 * index) for index, name in enumerate(costs(START))}
)


def _planted() -> list[Figure]:
    """What the true machine would show of every model that is measured."""
    found = list[Figure]()
    for config, stored in [*product(SHAPES, FORMATS), *((config, INT8_CACHE) for config in SHAPES[:2])]:
        for kind, tokens in (("ttft", 512), ("tpot", 512), ("memory", 1_024)):
            exact = total(Figure(kind, config, stored, tokens, 1.0).terms(), costs(TRUE))
            found.append(Figure(kind, config, stored, tokens, exact))
    return found


def test_a_fit_finds_the_machine() -> None:
    """Without noise only the ridge, which draws towards the start, keeps coefficients from being exact."""
    fitted = fit(_planted(), START)
    assert max(band_of(fitted, _planted()).values()) < 1.04 < min(band_of(START, _planted()).values())
    for name in costs(TRUE):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name


def test_noise_gives_no_absurd_coefficients() -> None:
    """Times that are a thousandth and a thousand times what they should be."""
    wild = [replace(each, value=each.value * 1_000.0 ** (-1) ** place) for place, each in enumerate(_planted())]
    before, after = costs(START), costs(fit(wild, START))
    assert all(0.999 / MOST_CHANGE <= after[name] / before[name] <= 1.001 * MOST_CHANGE for name in before)


def test_calibrating_improves_predictions_of_recorded_figures() -> None:
    """276 figures of ten shapes that a quiet Zen 5 showed; three of the shapes are fitted, the others are predicted."""
    figures = _recorded()
    widths = sorted({figure.config.parameters for figure in figures})
    chosen = {widths[0], *(size for size in widths if 23e6 < size < 26e6), widths[-1]}
    fitting = [figure for figure in figures if figure.config.parameters in chosen]
    fitting = [figure for figure in fitting if figure.stored in (*FORMATS, INT8_CACHE)]
    others = [figure for figure in figures if figure.config.parameters not in chosen]
    assert len(others) > 130
    calibrated, shipped = band_of(fit(fitting, START), others), band_of(START, others)
    assert calibrated["ttft"] < shipped["ttft"] and calibrated["memory"] <= shipped["memory"]
    # The bands that are shipped hold there too: those of `prediction_error` on a noisy machine are wider.
    band = calibrate.CALIBRATED_BAND
    assert all(calibrated[kind] <= getattr(band, kind) for kind in ("tpot", "ttft", "memory")), calibrated
    assert all(shipped[kind] <= getattr(START.band, kind) for kind in ("tpot", "ttft", "memory")), shipped


def _recorded() -> list[Figure]:
    formats = (*FORMATS, INT8_CACHE, ModelFormat("int4", 32))
    formats = {stored.name: stored for stored in (*formats, ModelFormat("int4", 128, standard=True))}
    rows = read_csv(RECORDED)
    assert len(rows) == 276
    return [
        Figure(
            row["figure"],
            shape(*(int(row[name]) for name in DIMENSIONS)).with_changes(max_position_embeddings=2_048),
            formats[row["format"]],
            int(row["tokens"]),
            float(row["measured"]),
        )
        for row in rows
        if row["format"] in formats  # the file also has formats that exports no longer offer
    ]


def test_the_band_holds_nine_tenths() -> None:
    """Of ten figures that are off by factors of 1.1 to 2.0 either way, nine are within 1.91."""
    (one, *_) = _planted()
    off = [1 + step / 10 for step in range(1, 11)]
    figures = [replace(one, value=one.value * factor ** (-1) ** place) for place, factor in enumerate(off)]
    # Between the ninth and the tenth, a tenth of the way, on a scale of logarithms.
    assert band_of(TRUE, figures) == {one.kind: pytest.approx(1.9 * (2.0 / 1.9) ** 0.1, abs=0.01)}


def test_medians_of_rounds_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, times = Probe(SHAPES[0], FORMATS[0], tmp_path), [3.0, 1.0, 2.0]

    def measured(*_: object) -> tuple[dict[str, float | None], float]:
        figures = {"ttft_ms": 10 * times[0], "tpot_p50_ms": times.pop(0), "peak_memory_mb": 80.0}
        return {**figures, "quality_loss_percent": None}, 0.5

    monkeypatch.setattr(calibrate, "short_bench", measured)
    monkeypatch.setattr(calibrate, "wait_for_quiet", lambda cpus=None: None)
    figures, busiest = calibrate.measure_models([model], threads=1, rounds=3)
    values = {(figure.kind, figure.tokens): figure.value for figure in figures}
    assert values == {("ttft", 512): 20.0, ("tpot", 512): 2.0, ("memory", 1_024): 80e6} and busiest == 0.5


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine with known hardware, so that nothing is measured but the models."""
    hardware = reference_machine().hardware
    monkeypatch.setattr(calibrate, "this_machine", lambda threads: hardware)
    monkeypatch.setattr("benchmarks.predict.latency.this_machine", lambda: hardware)


def test_refusals_before_anything_is_measured(tmp_path: Path) -> None:
    for name, reason in (("mine.txt", r"mine\.toml"), ("host.toml", "shipped"), ("--.toml", "use letters, digits")):
        with pytest.raises(UsageError, match=reason):
            device_commands.calibrate(tmp_path / name)
    with pytest.raises(UsageError, match="toaster"):
        device_commands.calibrate(tmp_path / "mine.toml", limits_from="toaster")
    (tmp_path / "mine.toml").write_text("", encoding="utf-8")
    with pytest.raises(ConflictError, match="exists already"):
        device_commands.calibrate(tmp_path / "mine.toml")


def test_limits_that_cannot_hold_here(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = reference_machine().hardware
    assert hardware is not None
    little = hardware.memory_usable.model_copy(update={"value": 100.0})
    small = hardware.model_copy(update={"memory_usable": little})
    monkeypatch.setattr(calibrate, "this_machine", lambda threads: small)
    with pytest.raises(UsageError, match=r"--limits-from rtx-3060.*peak_memory_mb 4000 is more than"):
        this_device("little", 2, load_device("rtx-3060"))


@pytest.mark.usefixtures("small_machine")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """Two tiny models in real processes; the file is read back, recognised and used.

    Their times are replaced by a known machine's: beside other programs they say nothing of this one.
    """
    measured = calibrate.measure_models

    def on_a_known_machine(models: list[Probe], threads: int, rounds: int) -> tuple[list[Figure], float]:
        assert models[0].directory.name == "model 1, 0M parameters, fp32"  # as messages name it
        figures, busiest = measured(models, threads, rounds)
        assert {figure.kind for figure in figures} == {"ttft", "tpot", "memory"}
        assert all(figure.value > 0 for figure in figures)
        known = [replace(figure, value=total(figure.terms(), costs(START))) for figure in figures]
        return [one if one.kind == "memory" else two for one, two in zip(figures, known, strict=True)], busiest

    monkeypatch.setattr(calibrate, "measure_models", on_a_known_machine)
    monkeypatch.setattr(calibrate, "SHAPES", (shape(256, 128, 128, 1, 2, 1),))
    monkeypatch.setattr(calibrate, "FORMATS", FORMATS[:1])
    out = tmp_path / "new" / "mine.toml"
    flags = ["--threads", "1", "--limits-from", "raspberry-pi-5", "--rounds", "1"]
    result, said = cli.says("devices", "calibrate", "--out", out, *flags)
    assert (result["device"], result["limits_from"], result["threads"]) == ("mine", "raspberry-pi-5-8gb", 1)
    assert "bandwidth_gb_per_s" in said and ("noisy" in said) != result["clean"]
    device = load_device(str(out))
    assert device.limits == load_device("raspberry-pi-5").limits
    assert device.coefficients == Coefficients.model_validate_json(json.dumps(result["coefficients"]))
    assert resolve(device) is device.coefficients and device.coefficients.kind == "measured"
    assert device.coefficients.band.tpot == calibrate.CALIBRATED_BAND.tpot
    assert device.coefficients.band.ttft == calibrate.CALIBRATED_BAND.ttft
    rule, named = device.recognise, processor_name() != platform.machine()
    assert (rule.processor if rule else None) == (processor_name() if named else None)
    assert is_this_machine(device) is False  # the hardware above has another instruction set
    planned = plan(model="tiny-5m", target=str(out)).figures
    assert planned["efficiency"]["own"] and planned["efficiency"]["band"]["tpot"] == device.coefficients.band.tpot
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: (device.coefficients, 0.0))
    stages = '[[stage]]\nname = "here"\ncommand = "devices calibrate"\n[[stage]]\nname = "size"\ncommand = "plan"\n'
    (recipe := tmp_path / "recipe.toml").write_text(f'{stages}model = "tiny-5m"\ntarget = "@here"\n', encoding="utf-8")
    for kept in (False, True):
        row = run(recipe, tmp_path / "runs").stages[0]
        assert (row.out, row.cached) == (str(tmp_path / "runs" / "here.toml"), kept)


@pytest.mark.usefixtures("small_machine")
def test_times_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device file does not take a band above 10."""
    figures = [replace(one, value=one.value * (100, 0.01)[number % 4 < 2]) for number, one in enumerate(_planted())]
    monkeypatch.setattr(calibrate, "measure_models", lambda models, threads, rounds: (figures, 3.0))
    monkeypatch.setattr(calibrate, "write_models", lambda folder, wanted: [])
    with pytest.raises(UsageError, match=r"off by a factor of \d+, other programs running: nothing is written"):
        calibrate.calibrate(1, 1)


def test_threads_are_chosen_by_the_bandwidth_they_read_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thread_counts(6) == [1, 2, 4, 6] and thread_counts(1) == [1]
    assert choose_threads({1: 8.9, 2: 13.2, 4: 11.6}) == 2  # a Raspberry Pi 5, GB/s
    assert choose_threads({1: 12.0, 2: 20.0, 4: 21.0, 8: 20.5}) == 8
    monkeypatch.setattr(calibrate, "LARGEST_WORKING_SET_BYTES", 2**24)
    found = read_bandwidth([1])
    assert list(found) == [1] and found[1] > 1e8
