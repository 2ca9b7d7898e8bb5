"""Pipeline stages in several processes, against one process."""

import re
from pathlib import Path

import pytest
import torch

from sportsllm.errors import UsageError
from sportsllm.training.loop import METRICS
from sportsllm.training.pipeline import place_stage
from sportsllm.training.settings import TrainConfig
from tests.sportsllm.training.test_processes import arguments, same_run
from tests.support.command_line import CommandLine
from tests.support.forked import forked
from tests.support.models import tiny_model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "optimizer", "tied", "clip_norm"),
    # The batches of a step are as many as the stages (1F1B), or fewer (GPipe).
    [("2:5,1", "muon", "false", 1000.0), ("3:3,3:5,1", "adamw", "true", 0.1)],
)
def test_stages_take_the_steps_of_one_process(
    cli: CommandLine, corpus_file: Path, tmp_path: Path, rounds: str, optimizer: str, tied: str, clip_norm: float
) -> None:
    """Stages are killed and resumed by as many, and these by one process. Two stages of three layers are uneven.

    The bytes are those of one process unless gradients are clipped or of a tied embedding: sums have another order.
    """
    one, many = tmp_path / "one", tmp_path / "many"
    further = [
        "--set", f"optimizer={optimizer}", "--set", "layers=3", "--set", f"tied={tied}", "--set", "validate_every=3",
    ]  # fmt: skip
    further += ["--steps", "7", "--batch-size", "2", "--set", "accumulation=2"]
    further += ["--set", f"clip_norm={clip_norm}"]
    assert cli(*arguments(corpus_file, one), *further)[0] == 0
    said = forked(rounds, *arguments(corpus_file, many), *further, "--set", f"pipeline={rounds[0]}")
    assert re.findall(r"resumed at step (\d+) of 7", said) == re.findall(r":(\d+)", rounds)
    same_run(many, one, 7, 1e-5, *((0, 0) if clip_norm > 1 else ()))
    scored = [re.findall(r'"valid_bits_per_byte": (\d\.\d{4})', (run / METRICS).read_text()) for run in (one, many)]
    assert scored[0] == scored[1] and len(scored[0]) == 3


def test_what_has_no_stages_is_refused(
    cli: CommandLine, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"shard": True}, {"shard": True, "tensor_parallel": 2}, {"optimizer_bits": 8}, {"precision": "fp16"}
    for setting in settings:
        with pytest.raises(UsageError, match="--set pipeline: not with shard, "):
            TrainConfig(pipeline=2, **setting)  # type: ignore[arg-type]
    start, stages = tmp_path / "start", ["--set", "layers=2", "--set", "pipeline=2"]
    assert cli(*arguments(corpus_file, start), "--steps", "0", *stages)[0] == 0  # in one
    tuned = ["train", start, "--corpus", corpus_file, "--out", tmp_path / "out", "--lora-rank", 2, "--steps", 1]
    forked("2", *map(str, tuned), *stages[2:])  # the embedding, which both have, is frozen
    distil = ["distill", "--teacher", start, "--student", start, "--corpus", corpus_file, "--steps", 1]
    cli.refuses(2, "--set pipeline=2: only train has stages; leave it out", *distil, "--set", "pipeline=2")
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "3"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="--set pipeline=2: torchrun started 3 processes; start 2"):
        place_stage(tiny_model(), torch.device("cpu"), 2)
    with pytest.raises(UsageError, match="--set pipeline=3: the model has 2 layers"):
        place_stage(tiny_model(), torch.device("cpu"), 3)
