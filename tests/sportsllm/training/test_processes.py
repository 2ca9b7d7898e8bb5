"""Several processes that train one model, against one process."""

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from sportsllm import processes
from sportsllm.cli import main
from sportsllm.errors import ArtifactError, ConflictError, UsageError
from sportsllm.formats.artifact import partial_directory
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.models.description import block_matrices
from sportsllm.models.presets import preset
from sportsllm.models.training_memory import TrainingStep, training_memory
from sportsllm.training import base_model, sharding
from sportsllm.training.lora import add_adapters
from sportsllm.training.settings import TrainConfig
from tests.support.command_line import CommandLine
from tests.support.forked import forked, process_group, program
from tests.support.models import tiny_model

STEPS = 60
MODEL = "layers=1 hidden=32 heads=2 intermediate=48 precision=fp32 optimizer=adamw accumulation=1 log_every=1"


def arguments(corpus: Path, out: Path) -> list[str]:
    settings = [word for pair in MODEL.split() for word in ("--set", pair)]
    run = ["--steps", STEPS, "--batch-size", 4, "--sequence", 32, "--vocab-size", 300, "--context", 64]
    run += ["--learning-rate", 0.003]
    return list(map(str, ["train", "--model", "tiny-300k", "--corpus", corpus, "--out", out, *settings, *run]))


def wait_for(run: subprocess.Popen[str], metrics: Path, size: int) -> None:
    while run.poll() is None and not (metrics.exists() and metrics.stat().st_size > size):
        time.sleep(0.01)


def interrupt(run: subprocess.Popen[str]) -> None:
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=60)[1]
    assert said.count("the state is saved in") == 1, said


def losses(directory: Path) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def same_run(found: Path, wanted: Path, steps: int, of_loss: float, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    """Two runs have the same losses and the same weights, within tolerances."""
    assert losses(found) == pytest.approx(losses(wanted), rel=of_loss) and len(losses(found)) == steps
    trained = load_checkpoint(found).state_dict()
    for name, weight in load_checkpoint(wanted).state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "rounds", "tensor_parallel", "tolerance"),
    # Muon iterates in bfloat16. AdamW without tensor_parallel is in the next test.
    [("muon", "4:3,2:5,1", 1, 1e-4), ("adamw", "2:2,4:4,1", 2, 1e-5)],
)
def test_killed_processes_lose_nothing_and_any_number_goes_on(
    cli: CommandLine,
    corpus_file: Path,
    tmp_path: Path,
    optimizer: str,
    rounds: str,
    tensor_parallel: int,
    tolerance: float,
) -> None:
    """Two begin, four are started after one of the two was killed, and one finishes after another was.

    With `tensor_parallel`, four are 2 x 2 and two share every matrix.
    """
    one, many = tmp_path / "one", tmp_path / "many"
    further = ["--set", f"optimizer={optimizer}", "--set", "shard=true", "--steps", "7"]
    further += ["--set", f"tensor_parallel={tensor_parallel}", "--set", "kv_heads=2"]
    assert cli(*arguments(corpus_file, one), *further)[0] == 0
    said = forked(rounds, *arguments(corpus_file, many), *further)
    assert re.findall(r"resumed at step (\d+) of 7", said) == re.findall(r":(\d+)", rounds)
    same_run(many, one, 7, tolerance, atol=1e-2 if optimizer == "muon" else 1e-4)


@pytest.mark.slow
def test_one_of_four_killed_at_random_moments_loses_nothing(
    cli: CommandLine, corpus_file: Path, tmp_path: Path
) -> None:
    """Any of the four, also while the state is saved. SPORTSLLM_KILLS sets how often; a step makes about ten calls."""
    draw, kills = random.Random(0), int(os.environ.get("SPORTSLLM_KILLS", "3"))
    moments = [(draw.randrange(4), draw.randrange(1, 40)) for _ in range(kills)]
    further = ["--set", "shard=true", "--steps", str(4 * kills + 4)]
    assert cli(*arguments(corpus_file, tmp_path / "one"), *further)[0] == 0
    rounds = ",".join([*(f"4@{rank}:{call}" for rank, call in moments), "1"])
    said = forked(rounds, *arguments(corpus_file, tmp_path / "many"), *further)
    steps = [int(step) for step in re.findall(r"resumed at step (\d+) of", said)]
    assert steps == sorted(steps) and len(steps) >= 2, said
    same_run(tmp_path / "many", tmp_path / "one", 4 * kills + 4, 1e-5)


@pytest.mark.slow
def test_a_damaged_state_of_two_processes_is_refused_and_left(
    cli: CommandLine, corpus_file: Path, tmp_path: Path
) -> None:
    words = [*arguments(corpus_file, tmp_path / "out"), "--steps", "3", "--set", "shard=true"]
    forked("2:2", *words)
    with pytest.raises(AssertionError, match=r"round 2:2: exit codes \[1, 1\]"):
        forked("2:2", "-c", "raise ValueError")  # a crash is not the kill
    state = partial_directory(tmp_path / "out") / "state"
    shard = next((state / "model").iterdir())
    whole = shard.read_bytes()
    for damaged in (None, whole[: len(whole) // 2], whole[:-8] + bytes(8)):
        shard.unlink() if damaged is None else shard.write_bytes(damaged)
        cli.refuses(
            ArtifactError.exit_code, "state: damaged (a file is missing, cut or changed); remove", *words, "--resume"
        )
        assert (state / "state.json").exists()
    shard.write_bytes(whole)
    assert cli(*words, "--resume")[0] == 0


@pytest.mark.slow
def test_processes_that_start_again_take_the_rates_of_the_first(
    cli: CommandLine, corpus_file: Path, tmp_path: Path
) -> None:
    """The folder of the run, where the trials' scores are, is the first process's alone."""
    words = arguments(corpus_file, tmp_path / "start")
    assert cli(*words, "--steps", "1")[0] == 0
    words = ["train", str(tmp_path / "start"), "--corpus", str(corpus_file), "--out", str(tmp_path / "out")]
    words += ["--steps", "400", "--batch-size", "2", "--sequence", "16", "--set", "accumulation=1"]
    said = forked("2:12,2:14", *words, timeout=100)
    assert said.count("trying learning rates on 10 steps each") == 1, said
    assert "resumed at step 12 of 400" in said


@pytest.mark.slow
def test_torchrun_starts_again_what_it_began_and_leaves_another_run_s_state_alone(
    corpus_file: Path, tmp_path: Path
) -> None:
    """torchrun starts refused processes again too; without --resume these are refused like the first."""
    words, worker = arguments(corpus_file, tmp_path / "out"), str(program(tmp_path / "program"))

    def torchrun(*more: str) -> list[str]:
        given = ["--nproc-per-node", "2", "--max-restarts", "1", "--no-python", worker, *words, *more]
        return [worker, "-c", f"from torch.distributed.run import main; main({given})"]

    forked("2:3", *words)
    partial = partial_directory(tmp_path / "out")
    saved = (partial / "state" / "state.json").read_bytes()
    with process_group(*torchrun()) as run:
        said = run.communicate(timeout=600)[1]
    assert said.count("keeps an interrupted run; add --resume") == 2 and "resumed" not in said, said
    assert (partial / "state" / "state.json").read_bytes() == saved
    with process_group(*torchrun("--resume")) as run:
        wait_for(run, partial / "metrics.jsonl", 2 * (partial / "metrics.jsonl").stat().st_size)
        running = psutil.process_iter(["cmdline"])
        next(each for each in running if {worker, "--resume"} <= set(each.info["cmdline"] or ())).kill()
        said = run.communicate(timeout=600)[1]
    assert said.count(f"resumed at step 3 of {STEPS}") == 2 and len(losses(tmp_path / "out")) == STEPS, said


def _odd_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of a library's name, on a machine whose own name has no address."""
    for name, text in (
        ("sitecustomize", "import socket; socket.getfqdn = lambda name='': 'machine.invalid'"),
        ("here/numpy", "raise SystemExit('numpy of the working folder')"),
    ):
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder / "here"


@pytest.fixture(scope="module")
def alone(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `arguments` in one process."""
    out = tmp_path_factory.mktemp("alone") / "one"
    with pytest.raises(SystemExit) as stop:
        main(arguments(corpus_file, out))
    assert stop.value.code == 0
    return out


@pytest.mark.parametrize("sharded", ["false", "true"])
def test_two_processes_take_the_steps_of_one_and_one_finishes_what_two_began(
    cli: CommandLine, corpus_file: Path, alone: Path, tmp_path: Path, sharded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the gradients' sums differs by float32 rounding, which 60 steps of AdamW enlarge below 1e-5."""
    two = tmp_path / "two"
    words = [*arguments(corpus_file, two), "--set", f"shard={sharded}"]
    start = [str(program(tmp_path / "program")), *words, "--nproc", "2"]
    real = ["-P", "-m", "sportsllm.cli", *start[1:]]
    with monkeypatch.context() as odd:
        odd.chdir(_odd_machine(tmp_path, odd))
        with process_group(*(real if sharded == "true" else start)) as run:
            wait_for(run, partial_directory(two) / "metrics.jsonl", 400)
            interrupt(run)
    if sharded == "true":  # else refused alike
        with process_group(*start) as run:
            said = run.communicate(timeout=600)[1]
        assert run.returncode == ConflictError.exit_code and said.count("error:") == 1 and "Traceback" not in said, said
    assert (partial_directory(two) / "state" / "model").is_dir() == (sharded == "true")  # a file for each process
    assert cli(*words, "--resume")[0] == 0
    same_run(two, alone, STEPS, 1e-5)


def test_what_several_processes_cannot_do_is_refused(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "3"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    assert processes.own_share(range(6, 12)) == range(8, 10)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "100")  # of an --rdzv-id that two calls have in common
    launched = processes.launch()
    with monkeypatch.context() as other:
        other.setattr(os, "getppid", lambda: 1)
        assert launched == "100" + launched.removeprefix("100") != processes.launch()
    with pytest.raises(UsageError, match="optimizer_bits=32"):
        TrainConfig(shard=True, optimizer_bits=8)
    with pytest.raises(UsageError, match="tensor_parallel: needs shard=true"):
        TrainConfig(tensor_parallel=2)
    with pytest.raises(UsageError, match="tensor_parallel=2: it must divide the number of processes, 3"):
        processes.share_sequences(2)
    add_adapters(adapted := tiny_model(), rank=2)
    with pytest.raises(UsageError, match="tensor_parallel: is for models of LLaMA's family, without adapters"):
        sharding._share_matrices(adapted, SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--nproc: torchrun has started the processes"):
        processes.start(2, [])
    with pytest.raises(UsageError, match="3 processes cannot share the 4 sequences"):
        processes.own_share(range(4))
    assert cli("verify", "nowhere")[0] == UsageError.exit_code
    code, _, said = cli("train", "nowhere")
    assert code == ArtifactError.exit_code and said.startswith("error: process 1: nowhere")
    monkeypatch.setenv("RANK", "0")
    cli.refuses(2, "runs in one process; train and distill take several", "verify", "nowhere")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    cli.refuses(2, "runs in one process; train and distill take several", "verify", "nowhere", "--nproc", 2)


@pytest.mark.parametrize(
    ("settings", "count", "busy", "step"),
    # Sixteen sequences a step: eight processes have two each, and two pairs of them eight, four at once.
    [
        ({"optimizer": "muon"}, 1, 1 / (1 + 3 * 768 / 8_192), {"batch": 4, "optimizer": "muon"}),
        ({}, 8, 8, {"batch": 2}),
        ({"shard": True}, 2, 2, {"batch": 4, "shards": 2}),
        ({"shard": True, "tensor_parallel": 2}, 4, 4, {"batch": 4, "shards": 4, "tensor_parallel": 2}),
        ({"pipeline": 2}, 2, 2 * 4 / 5, {"batch": 4, "stages": 2}),
        ({"shard": True, "tensor_parallel": 2, "pipeline": 1}, 1, 1, {"batch": 4}),
    ],
)
def test_the_cost_of_a_run_is_that_of_its_processes(
    settings: dict[str, Any],
    count: int,
    busy: float,
    step: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", str(count)), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(base_model, "_flops_per_s", lambda *_: 1e10)
    monkeypatch.setattr(base_model, "duration", lambda seconds: f"{seconds:.0f} s")
    model, config = preset("small"), TrainConfig(steps=1_000, precision="fp32", **settings)
    base_model.log_cost(model, config)
    table = model.vocab_size * model.hidden_size
    inside = sum(m.numel * layers for part, layers in model.runs() for m in block_matrices(part))
    seconds = 6 * (inside + table) * 1_000 * 16 * 512 / (0.4 * 1e10 * busy)
    memory = training_memory(model, TrainingStep(length=512, precision="fp32", **step)).total / 1e9  # type: ignore[arg-type]
    said = capsys.readouterr().err
    each = " in each process" if count > 1 else ""
    assert f"about {seconds:.0f} s here, and {memory:.1f} GB of memory{each};" in " ".join(said.split())
