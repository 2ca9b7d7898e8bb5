"""Measuring: statistics against numpy, failures of child processes, and a whole run on a tiny export."""

import copy
import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import psutil
import pytest
from safetensors.torch import load_file, save_file

import sportsllm
from benchmarks.bench import advice
from benchmarks.bench import bench as run
from benchmarks.devices.load import DEVICES, is_this_machine, load_device
from benchmarks.devices.verdict import LimitVerdict, Verdict, check_on_device, depths_that_fit
from benchmarks.measure import bench
from benchmarks.measure.bench import prompts_that_fit
from benchmarks.measure.machine import choose_cpus
from benchmarks.measure.process import ChildFailure, Turn, run_child, worker_turn
from benchmarks.measure.summary import bytes_read_per_token
from benchmarks.measure.worker import time_depth
from benchmarks.model_size import sizes, stored_format
from benchmarks.predict.latency import Formulas, costs, predict_directory, resolve, total
from benchmarks.reporting.bench_tables import bench_tables, describe, verdict_line, verdict_lines
from benchmarks.reporting.inputs import StageSummary
from benchmarks.reporting.measured import Bench, Budget, as_bench, as_budget, judge_bench
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.manifest import Manifest, Parent, directory_bytes
from sportsllm.inference.scoring import LEAST_DOCUMENTS, TextScore
from sportsllm.process_memory import peak_rss_bytes
from tests.support.command_line import CommandLine
from tests.support.models import BENCHED as CONFIG


@pytest.fixture(scope="module")
def result(export: Path, benched: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "SECONDS_PER_FIGURE", 0.05)
        patch.setattr(bench, "MEMORY_ROUNDS", 1)
        scores = {export: TextScore(40.8, 10, 10, (2.04,) * 20), benched: TextScore(40.0, 10, 10, (2.0,) * 20)}
        patch.setattr("benchmarks.quality.score_text", lambda model, _: scores[model.directory])
        what = {"text": [benched / "config.json"], "teacher": benched, "threads": 1}
        how = {"rounds": 2, "most_rounds": 2, "prompt_lengths": "64"}
        return run(export, target="host", minutes=0.02, **what, settings=how).to_json()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_depths_and_prompts_fit_the_context(export: Path) -> None:
    assert depths_that_fit(2048) == [32, 512, 1900]
    assert depths_that_fit(1024) == [32, 512, 876]
    assert depths_that_fit(660) == [32, 512]
    assert depths_that_fit(512) == [32, 364]
    assert depths_that_fit(128) == []
    assert prompts_that_fit(511) == [128]
    assert prompts_that_fit(512) == [128, 512]
    assert prompts_that_fit(600, "600, 64,64") == [64, 128, 512, 600]
    for wrong in ("301", "two", "0", "1;4", "-1"):  # refused before the text is read
        with pytest.raises(UsageError, match=f"prompt_lengths={wrong}"):
            run(export, text=[export / "absent"], settings={"prompt_lengths": wrong})


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 5, "memory"),
        ("x = bytearray(1 << 60)", 5, "memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 1, "SIGSEGV"),
        ("raise ValueError('broken part')", 1, "broken part"),
        ("print('{not json')", 1, "without a result"),
        ("pass", 1, "without a result"),
        ("print('{\"peak_rss_bytes\": NaN}')", 1, "without a result"),
        ("import json; print(json.dumps({'error': 'bad file', 'exit_code': 3}))", 3, "bad file"),
    ],
)
def test_a_child_that_gives_no_result_is_reported_in_one_line(code: str, exit_code: int, words: str) -> None:
    with pytest.raises(ChildFailure) as caught:
        run_child(Turn("speed", python(code), "bench tiny (speed)"), timeout_s=60)
    assert caught.value.exit_code == exit_code
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_hung_child_started_ends_with_it(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    code = f"import os; os.system('echo $$ > {started}; exec sleep 600')"
    with pytest.raises(ChildFailure, match=r"^bench tiny .*: no result within 3 s.*$") as caught:
        run_child(Turn("speed", python(code), "bench tiny (speed)"), timeout_s=3)
    assert caught.value.exit_code == 5
    with suppress(psutil.NoSuchProcess):
        sleeper = psutil.Process(int(started.read_text()))
        while sleeper.status() != psutil.STATUS_ZOMBIE:
            assert time.time() - sleeper.create_time() < 60


def test_a_damaged_model_keeps_its_own_error(tmp_path: Path, export: Path) -> None:
    for path in {*export.iterdir()} - {export / "manifest.json"}:  # without it the graph says so, in the child
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-16])
    with pytest.raises(ChildFailure, match="damaged") as caught:
        run(tmp_path, settings={"rounds": 1})
    assert caught.value.exit_code == 3


def test_a_model_whose_logits_overflow_has_no_score(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"][:] = 3e38
    save_file(weights, damaged / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"damaged's logits are not finite"):
        run(damaged, text=[corpus_file])


def test_peak_memory_is_the_childs_own() -> None:
    held = b"x" * 300_000_000
    code = (
        "import json; from sportsllm.process_memory import peak_rss_bytes as p; {}; print(json.dumps({{'peak': p()}}))"
    )
    bodies = ("pass", "x = b'x' * 200_000_000; del x")
    small, freed = (run_child(Turn("peak", python(code.format(body)), "peak"))["peak"] for body in bodies)
    assert peak_rss_bytes() > len(held)
    assert 5e6 < small < 150e6
    assert 195e6 < freed - small < 215e6


def test_the_measured_process_imports_few_libraries(export: Path) -> None:
    """Whatever else it imports would count in the memory that is reported as the model's."""
    code = (
        "import sys, pathlib, benchmarks.measure.worker; "
        "unwanted = ['torch', 'rich', 'psutil', 'pydantic', 'filelock', 'typer']; "
        "found = [m for m in (*unwanted, 'onnxruntime') if m in sys.modules]; "
        "from sportsllm.inference.decoder import open_decoder; "
        f"open_decoder(pathlib.Path({str(export)!r}), 1); "
        "print(found + [m for m in unwanted if m in sys.modules])"
    )
    ran = subprocess.run(python(code), capture_output=True, text=True, cwd=Path(bench.__file__).parents[2], check=True)
    assert ran.stdout.strip() == "[]"


def test_every_promised_key_is_there(result: dict[str, Any], export: Path) -> None:
    assert set(result["ttft_ms"]) == {"64", "128"}
    assert set(result["tpot_ms"]) == set(result["decode_tokens_per_s"]) == {"32", "152"}
    for times in result["tpot_ms"].values():
        assert 0 < times["p50"] <= times["p90"] <= times["p95"] <= times["p99"]
    assert result["threads"] == 1
    assert result["file_bytes"] == directory_bytes(export)
    assert result["load_s"] > 0 and result["peak_rss_bytes"] > result["file_bytes"]
    assert result["prefill_tokens_per_s"] == pytest.approx(128_000 / result["ttft_ms"]["128"])
    assert result["quality_loss_percent"] == pytest.approx(2.0) and result["quality_documents"] == 20
    assert result["quality_interval_percent"] == pytest.approx((2.0, 2.0))
    assert json.loads(json.dumps(result)) == result
    assert result["cpus"] == choose_cpus(1)
    sustained = result["sustained"]
    assert sustained["depth"] == 152 and sustained["minutes"] == 0.02
    assert sustained["first_tokens_per_s"] == sustained["windows"][0]["tokens_per_s"] > 0
    rounds = result["raw"]["speed"]
    assert len(rounds) == result["rounds"] == 2 and result["clean"] in (True, False) and result["other_cpu_cores"] >= 0
    assert sum(len(one["ttft_ms"]["128"]) for one in rounds) >= 10
    assert all(sum(map(len, one["step_ms"]["152"])) >= 100 for one in rounds)


def test_one_round_has_no_interval(result: dict[str, Any]) -> None:
    for rounds, processes in ((2, "2 fresh processes"), (1, "1 fresh process")):
        shown = as_bench({**result, "rounds": rounds})
        measured = next(table for table in bench_tables(shown) if table.title == "Measured")
        assert describe(shown).endswith(processes) and any(row[2] for row in measured.rows) == (rounds > 1)


def test_timed_steps_lie_around_the_depth() -> None:
    """A decoder that says what it was asked: the two timed steps are the tokens at 31 and 32."""
    asked: list[object] = []

    class Listening:
        def prefill(self, rows: list[list[int]], max_length: int) -> None:
            asked.append((rows[0], max_length))

        def step(self, tokens: list[int]) -> None:
            asked.append(tokens[0])

    wanted = {"warm_up_steps": 1, "steps": 2, "seconds_per_figure": 0.0}
    sweeps = time_depth(cast(Any, Listening()), list(range(100)), 32, wanted)
    assert asked == [(list(range(30)), 33), 30, 31, 32]
    assert [len(sweep) for sweep in sweeps] == [2]


def test_the_bandwidth_bound_is_bytes_over_bandwidth(result: dict[str, Any], export: Path) -> None:
    floor = result["memory_floor"]
    read = bytes_read_per_token(export, CONFIG)
    assert read["weight_bytes"] == pytest.approx(4 * CONFIG.parameters, rel=0.05)  # the graph's own bytes are estimated
    assert read["kv_bytes_per_token"] == 256  # 2 layers * (key and value) * 1 head * 16 numbers * 4 bytes
    best = max(one["bandwidth_bytes_per_s"] for one in result["raw"]["bandwidth"])
    assert result["memory_floor_tpot_ms"] == pytest.approx(1e3 * (read["weight_bytes"] + 152 * 256) / best)
    assert floor["by_depth_ms"]["152"] == result["memory_floor_tpot_ms"] > floor["by_depth_ms"]["32"]
    untied = CONFIG.with_changes(tie_word_embeddings=False)
    parts, table = sizes(untied, stored_format(export)), 64 * 32 / untied.parameters  # an embedding is not read whole
    read = bytes_read_per_token(export, untied)["weight_bytes"]
    assert read == pytest.approx((1 - table) * (directory_bytes(export) - parts.rest), rel=1e-3)


def test_a_short_context_is_held_to_the_time_per_token_where_it_ends(result: dict[str, Any], export: Path) -> None:
    """A figure that does not exist is not passed: a prompt of 512 tokens does not fit."""
    limits, said = {limit["name"]: limit for limit in result["budget"]["limits"]}, as_budget(result["budget"])
    first, file = limits["ttft_ms"], limits["file_mb"]
    assert first["value"] is None and first["verdict"] == "uncertain"
    assert file["verdict"] == "pass" and file["source"] == "measured"
    assert limits["tpot_p50_ms"]["value"] == result["tpot_ms"]["152"]["p50"]
    assert (said.verdict, said.tpot_depth_tokens) == ("uncertain", 152)
    assert "time to first token (not measured)" in verdict_line(said)
    assert "time per token after 152 tokens, all that the context has room for" in verdict_line(said)
    shown = StageSummary("export", "bench", "export", bench=as_bench(result | {"budget": None})).figures()
    assert shown["tpot_p50_ms"] == result["tpot_ms"]["152"]["p50"]  # a report needs no budget for it
    pi = load_device("raspberry-pi-5-8gb")
    predicted = predict_directory(pi, CONFIG, export).figures["tpot_p50_ms"]
    assert predicted == total(Formulas(CONFIG, stored_format(export)).tpot(152), costs(resolve(pi)))


def test_elsewhere_the_prediction_decides_and_says_so(result: dict[str, Any], export: Path) -> None:
    pi = load_device("raspberry-pi-5-8gb")
    measured, predict = as_bench(result), partial(predict_directory, config=CONFIG, directory=export)
    budget = judge_bench(pi, measured, CONFIG, on_device=False, predict=predict)
    sources = {limit.name: limit.source for limit in budget.limits}
    assert budget.decided_by == "prediction"
    assert sources["peak_memory_mb"] == "predicted" and sources["file_mb"] == "measured"
    assert sources["ttft_ms"] is None  # a prompt of 512 does not fit
    assert verdict_line(budget).endswith(" (speed and memory are predicted: this machine is not the device)")
    there = judge_bench(pi, measured, CONFIG, on_device=True)
    assert there.decided_by == "measurement"
    assert {limit.source for limit in there.limits} == {"measured", None}


def test_a_graphics_card_is_judged_by_what_runs_on_one(result: dict[str, Any], export: Path) -> None:
    """All but its memory: what was measured is the process's."""
    card, there = load_device("rtx-3060"), as_bench({**result, "placement": {"processor": "gpu"}})
    predict = partial(predict_directory, config=CONFIG, directory=export)
    budget = judge_bench(card, there, CONFIG, on_device=True, predict=predict)
    sources = {limit.name: limit.source for limit in budget.limits}
    assert budget.decided_by == "measurement" and sources["tpot_p50_ms"] == "measured"
    assert sources["peak_memory_mb"] == "predicted"
    unknown = judge_bench(card, there, CONFIG, on_device=False, predict=predict)
    assert unknown.decided_by == "prediction"  # a card is not recognised
    with pytest.raises(UsageError, match=r"--on-device: .* its GPU; add --provider cuda"):
        run(export, target="rtx-3060", on_device=True)
    with pytest.raises(UsageError, match=r"on the GPU, and the budget of raspberry-pi-5-8gb is for its CPU"):
        check_on_device(load_device("raspberry-pi-5-8gb"), True, "gpu")
    board = load_device("jetson-orin-nano-super")
    assert not is_this_machine(board, "gpu") and is_this_machine(load_device("host"), "gpu")


def test_a_machine_that_looks_like_another_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    check_on_device(load_device("host"), True)
    check_on_device(load_device("rtx-3060"), False)  # the prediction decides
    assert not capsys.readouterr().err
    check_on_device(load_device("raspberry-pi-5-8gb"), True)
    said = capsys.readouterr().err.replace("\n", " ")
    assert "does not look like raspberry-pi-5-8gb; its figures decide all the same" in said


def test_a_pytorch_checkpoint_is_measured_too(benched: Path) -> None:
    asked = {"directory": str(benched), "threads": 1, "seed": 0, "context_tokens": 300, "memory_steps": 4}
    child = run_child(worker_turn(asked, "memory"))
    assert child["runtime"].startswith("torch ") and child["context_tokens"] == 300
    assert child["peak_rss_bytes"] > 50e6


def test_the_command_exits_4_when_a_limit_is_missed(
    export: Path, result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr(bench, "run_bench", lambda *_, **__: copy.deepcopy(result) | {"clean": False})
    device = tmp_path / "strict.toml"
    text = (DEVICES / "host.toml").read_text(encoding="utf-8")
    device.write_text(text.replace("file_mb = 100\n", "file_mb = 0.01\n"), encoding="utf-8")
    out = tmp_path / "bench.json"
    arguments = ["bench", export, "--target", device, "--threads", 1, "--out", out]
    printed, err = cli.says(*arguments, code=4)
    assert printed["budget"]["verdict"] == "fail" and "exit_code" not in printed
    assert json.loads(out.read_text(encoding="utf-8")) == printed
    error = err.strip().splitlines()[-1]
    assert error.startswith("error: ") and "file size" in error
    assert printed["clean"] is False and "NOISY, not a clean result" in err
    assert cli(*arguments)[0] == 6  # the result of the first run is not overwritten
    assert run(export).measured.budget is None  # without a target nothing is judged
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr("benchmarks.reporting.bench_tables.print_bench", Mock(side_effect=BrokenPipeError))
        run(export, out=tmp_path / "kept.json")
    assert json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))["tpot_ms"]
    with pytest.raises(UsageError, match="--on-device needs --target"):
        run(export, on_device=True)


def test_a_gguf_file_is_judged_by_its_own_size_and_by_no_copy_of_it(
    benched: Path, result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """What PyTorch takes for its float32 copy says nothing of the file."""
    monkeypatch.setattr(bench, "run_bench", lambda *_, **__: {**copy.deepcopy(result), "runtime": "torch 2"})
    (file := tmp_path / "model.gguf").write_bytes(bytes(1_000))
    converted = shutil.copytree(benched, tmp_path / "converted")
    Manifest(command="gguf", parents=(Parent(str(file), ""),)).write(converted)
    printed, err = cli.says("bench", converted, "--target", "host", code=4)
    assert printed["directory"] == str(file) and printed["file_bytes"] == 1_000
    verdicts = {one["name"]: (one["value"], one["verdict"]) for one in printed["budget"]["limits"]}
    assert verdicts["file_mb"] == (0.001, "pass")
    assert verdicts["peak_memory_mb"] == verdicts["tpot_p50_ms"] == (None, "uncertain")
    assert f"--against llama.cpp={file}" in err and "are predicted" not in err
    assert f"error: {file}: host: uncertain" in err and err.endswith("bench the ONNX export of its checkpoint\n")
    assert "measure the quality: `teacher` and `text`" in str(sportsllm.bench(benched, target="host").complaint)


def test_limits_of_the_distance_from_the_teacher_are_held_to_what_eval_measures(
    int4: Path,
    checkpoint: Path,
    texts: list[str],
    result: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: CommandLine,
) -> None:
    monkeypatch.setattr(bench, "run_bench", lambda *_, **__: copy.deepcopy(result))
    documents = "".join(json.dumps({"text": text[:100]}) + "\n" for text in texts[:LEAST_DOCUMENTS])
    (text := tmp_path / "text.jsonl").write_text(documents, encoding="utf-8")
    limits = ["--limit", "kl_nats=0.000001", "--limit", "top1_changed_percent=99"]
    printed, _ = cli.says("bench", int4, *limits, "--text", text, "--teacher", checkpoint, code=4)
    eval_found = cli.result("eval", int4, "--against", checkpoint, "--text", text)["divergence"]
    found = {one["name"]: one for one in printed["budget"]["limits"]}
    assert found["kl_nats"]["value"] == pytest.approx(eval_found["kl"]) and found["kl_nats"]["verdict"] == "fail"
    changed = found["top1_changed_percent"]
    assert changed["value"] == pytest.approx(100 - 100 * eval_found["top1_agreement"]) and changed["verdict"] == "pass"
    assert "kl_nats" not in json.loads(cli("bench", int4, "--limit", "file_mb=1", "--json")[1].splitlines()[-1])


@pytest.mark.parametrize(
    ("names", "verdict", "clean", "decided_by", "words"),
    [
        ("tpot_p50_ms", "fail", False, "measurement", "quiet machine"),
        ("peak_memory_mb tpot_p50_ms", "fail", False, "measurement", "compress it further"),
        ("file_mb ttft_ms", "fail", True, "measurement", "compress it further"),
        ("quality_loss_percent", "fail", False, "measurement", "prune less"),
        ("quality_loss_percent", "uncertain", True, "measurement", "--teacher and --text"),
        ("tpot_p50_ms", "uncertain", True, "prediction", "bench the ONNX export of its checkpoint"),
        ("tpot_p50_ms", "uncertain", True, "measurement", "more rounds"),
    ],
)
def test_the_advice_is_about_what_was_missed(
    names: str, verdict: Verdict, clean: bool, decided_by: str, words: str
) -> None:
    limits = [LimitVerdict(name, 1.0, "ms", None, None, None, None, verdict) for name in names.split()]
    budget = Budget("host", verdict, limits, decided_by=decided_by)
    assert words in advice(budget, clean)
    predicted = advice(replace(budget, efficiency={}), clean)
    assert ("measure it on the device" in predicted) == (decided_by == "prediction")


def test_a_wide_interval_asks_for_more_text_and_a_quality_without_teacher_is_shown() -> None:
    limit = LimitVerdict("quality_loss_percent", 1.0, "%", 0.9, None, 0.5, 1.5, "uncertain")
    bench = Bench("export", {}, budget=Budget("host", "uncertain", [limit]), bits_per_byte=1.25)
    assert advice(bench.budget, True) == "give more held-out text" and "1.2500 bits per byte" in verdict_lines(bench)[1]
