"""`--rope-scaling` and `--context` as a person gives them to train, eval and export."""

import json
import math
from pathlib import Path

import pytest
import torch

from sportsllm.formats.huggingface import load_config
from sportsllm.inference.scoring import windows
from sportsllm.models.rope import RopeScaling
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.command_line import CommandLine
from tests.support.models import tiny_model

YARN4 = RopeScaling("yarn", 4.0, original_max_position_embeddings=128)
SHORT = ["--batch-size", 2, "--learning-rate", "1e-3", "--set", "accumulation=1", "--set", "optimizer=adamw"]


@pytest.fixture(scope="module")
def held_out(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One document longer than four times the context of 128."""
    path = tmp_path_factory.mktemp("text") / "long.jsonl"
    path.write_text(json.dumps({"text": texts[0][:2_500]}) + "\n", encoding="utf-8")
    return path


def test_fine_tuning_stretches_the_context(
    checkpoint: Path, corpus_file: Path, tmp_path: Path, cli: CommandLine
) -> None:
    """Once with all weights, once with adapters; sequences are longer than the original context."""
    for out, more in ((tmp_path / "all", ()), (tmp_path / "lora", ("--lora-rank", 2))):
        flags = ["--rope-scaling", "yarn:4", "--sequence", 300, "--steps", 2, *SHORT, *more]
        made = cli.result("train", checkpoint, "--corpus", corpus_file, "--out", out, *flags)
        assert made["out"] == str(out)
        config = load_config(out)
        assert (config.max_position_embeddings, config.rope_scaling) == (512, YARN4)
        assert json.loads((out / "manifest.json").read_text())["settings"]["rope_scaling"] == "yarn:4"
    again = ["train", tmp_path / "all", "--corpus", corpus_file, "--out", tmp_path / "again"]
    cli.refuses(2, "by yarn:4 already, to 512 tokens", *again, "--rope-scaling", "yarn:2")


def test_a_new_model_may_start_with_a_longer_context(
    checkpoint: Path, corpus_file: Path, tmp_path: Path, cli: CommandLine
) -> None:
    shape = ["--model", checkpoint, "--tokenizer", checkpoint, "--rope-scaling", "yarn:2"]
    flags = ["--corpus", corpus_file, "--out", tmp_path / "out", "--sequence", 256, "--steps", 0]
    assert cli("train", *shape, *flags)[0] == 0
    config = load_config(tmp_path / "out")
    scaling = RopeScaling("yarn", 2.0, original_max_position_embeddings=128)
    assert (config.max_position_embeddings, config.rope_scaling) == (256, scaling)


def test_eval_reads_beyond_the_trained_length(checkpoint: Path, held_out: Path, cli: CommandLine) -> None:
    """Each against a sum over a model of that context and scaling, window by window."""
    words = load_tokenizer(checkpoint)
    ids = [words.begin_id, *words.encode(json.loads(held_out.read_text())["text"])]
    assert len(ids) > 512
    cases = (
        (["--context", 64], 64, None),
        (["--rope-scaling", "yarn:4"], 512, YARN4),
        (["--rope-scaling", "yarn:4", "--context", 200], 200, YARN4),
    )
    for flags, context, scaling in cases:
        found = cli.result("eval", checkpoint, "--text", held_out, "--threads", 2, *flags)
        assert found["context"] == context and found["tokens"] == len(ids) - 1
        model, nats = tiny_model(max_position_embeddings=512, rope_scaling=scaling), 0.0
        for start, stop, scored in windows(len(ids), context):
            with torch.inference_mode():
                logs = torch.log_softmax(model(torch.tensor([ids[start:stop]]))[0].double(), -1)
            nats -= sum(float(logs[place - start - 1, ids[place]]) for place in range(scored, stop))
        # A mean over 700 float32 log-probabilities.
        assert math.log(float(str(found["perplexity"]))) == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert cli.result("eval", checkpoint, "--text", held_out)["context"] == 128


def test_an_export_gets_the_longer_table(checkpoint: Path, held_out: Path, tmp_path: Path, cli: CommandLine) -> None:
    out, before = tmp_path / "onnx", (checkpoint / "config.json").read_bytes()
    flags = ["--rope-scaling", "yarn:4", "--threads", 2]
    assert cli("export", checkpoint, "--out", out, *flags)[0] == 0
    config = load_config(out)
    assert (config.max_position_embeddings, config.rope_scaling) == (512, YARN4)
    assert (checkpoint / "config.json").read_bytes() == before
    assert json.loads((out / "manifest.json").read_text())["settings"]["rope_scaling"] == "yarn:4"
    scores = [
        cli.result("eval", where, "--text", held_out, *more)["perplexity"]
        for where, more in ((out, ()), (checkpoint, ("--rope-scaling", "yarn:4")))
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)  # float32 in another order
    other = ["--context", 1024, "--text", held_out]
    cli.refuses(2, "reads 512 tokens; export the checkpoint with --rope-scaling yarn:8", "eval", out, *other)
    scaled = ["--text", held_out, "--rope-scaling", "yarn:2"]
    cli.refuses(2, "is in its graph; export the checkpoint with --rope-scaling, or score", "eval", out, *scaled)
    assert cli("export", checkpoint, "--out", out, *flags)[0] == 0, "up to date"
    cli.refuses(6, "exists", "export", checkpoint, "--out", out, "--rope-scaling", "yarn:2")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--context", 300], "reads 128 tokens; give --rope-scaling yarn:3"),
        (["--context", 600, "--rope-scaling", "yarn:4"], "reads 512 tokens with --rope-scaling yarn:4; give"),
        (["--rope-scaling", "linear:2"], "'linear' is not a type"),
        (["--rope-scaling", "yarn:0.9"], "from 1 to"),
    ],
)
def test_what_the_model_cannot_read_is_refused_in_a_line(
    flags: list[object], said: str, checkpoint: Path, held_out: Path, cli: CommandLine
) -> None:
    cli.refuses(2, said, "eval", checkpoint, "--text", held_out, *flags)


def test_errors_name_the_checkpoint_and_not_the_view(
    checkpoint: Path, held_out: Path, tmp_path: Path, cli: CommandLine
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (broken / name).write_bytes((checkpoint / name).read_bytes())
    cli.refuses(3, str(broken), "eval", broken, "--text", held_out, "--rope-scaling", "yarn:2")
    for command in ("train", "export"):
        flags = [checkpoint, "--out", tmp_path / "out", "--rope-scaling", "yarn:x"]
        cli.refuses(2, "--rope-scaling yarn:x: no factor; give TYPE:FACTOR", command, *flags)
