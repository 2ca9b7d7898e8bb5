"""The flags of `train` that make a model or a training of one's own."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from sportsllm.commands import load_command
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import read_manifest
from sportsllm.inference.sampling import Sampling
from sportsllm.models.presets import changed_shape, preset
from tests.support.command_line import CommandLine

SHAPE = {"layers": 2, "hidden": 48, "heads": 3, "intermediate": 64}
SMALL: list[object] = ["--context", 64, "--vocab-size", 300]
for item in SHAPE.items():
    SMALL += ["--set", "{}={}".format(*item)]


def run(cli: CommandLine, *arguments: object) -> dict[str, Any]:
    return cli.result("train", *arguments, "--threads", 2)


def test_a_shape_of_ones_own(cli: CommandLine, corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "own"
    flags = ["--set", "tied=false", "--set", "dropout=0.2", "--steps", 0, "--corpus", corpus_file, "--out", out]
    result, err = cli.says("train", *SMALL, *flags)
    shape = {**SHAPE, "context": 64, "vocab_size": 300}
    expected = changed_shape(preset("small"), {**shape, "tied": False, "dropout": 0.2})
    assert load_config(out) == expected and result["parameters"] == expected.parameters
    counted = sum(weight.numel() for weight in load_checkpoint(out).parameters())
    assert counted == expected.parameters and "2 layers of 48, FFN 64, 3 heads of 16 on 3" in err
    assert f"{counted:,} parameters" in err
    assert read_manifest(out).settings["shape"] == {**shape, "tied": False, "dropout": 0.2}


def test_a_folder_with_config_json_alone_is_a_model(
    cli: CommandLine, checkpoint: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    result = run(cli, "--model", tmp_path / "shape", "--set", "layers=1", "--steps", 0, "--corpus", corpus_file)
    assert result["out"] == "runs/custom"
    result = run(cli, "--model", tmp_path / "shape", "--steps", 0, "--corpus", corpus_file)
    assert result["out"] == "runs/shape" and load_config(Path("runs/shape")) == load_config(checkpoint)
    cli.refuses(3, "config.json: not found", "train", "--model", tmp_path, "--corpus", corpus_file)


def test_a_checkpoint_is_tuned_on_its_own_text_by_default(
    cli: CommandLine, checkpoint: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.refuses(2, "no training text is known; give --corpus", "train", checkpoint, "--steps", 0)
    run(cli, *SMALL, "--steps", 0, "--corpus", corpus_file, "--out", "base")
    assert "training from random weights" in cli.says("train", "base", "--steps", 1, "--out", "tuned")[1]
    assert read_manifest(Path("tuned")).settings["corpus"] == [str(corpus_file)]
    assert not Path("runs").exists()


def test_muons_settings_and_the_fall_of_the_rate_are_recorded(
    cli: CommandLine, corpus_file: Path, tmp_path: Path
) -> None:
    pairs = "optimizer=muon muon_nesterov=false"
    pairs += " muon_learning_rate=0.01 min_lr_ratio=0 schedule=wsd decay_fraction=0.5 digits=single"
    flags = [word for pair in pairs.split() for word in ("--set", pair)]
    flags += ["--steps", "2", "--batch-size", "2", "--corpus", str(corpus_file), "--out", str(tmp_path / "out")]
    result = run(cli, *SMALL, *flags)
    settings = read_manifest(Path(result["out"])).settings
    assert (settings["muon_nesterov"], settings["muon_learning_rate"]) == (False, 0.01)
    assert (settings["min_lr_ratio"], settings["decay_fraction"], settings["digits"]) == (0, 0.5, "single")
    assert settings["sequence"] == 64, "the context, where that is shorter than 512"
    rates = [json.loads(line).get("lr") for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < next(rate for rate in rates if rate is not None) <= settings["learning_rate"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model tiny-1m --set optimizer=adamw --set muon_learning_rate=1", "add --set optimizer="),
        ("--model tiny-1m --set decay_fraction=0.5", "add --set schedule=wsd"),
        ("--model tiny-1m --tokenizer CHECKPOINT --set digits=single", "digits belongs to training"),
        ("--model tiny-1m --tokenizer CHECKPOINT --vocab-size 300", "--vocab-size belongs to training"),
        ("CHECKPOINT --set digits=single", "digits belongs to training"),
        ("CHECKPOINT --set layers=1 --set kv_heads=1", "layers, kv_heads: "),
        ("CHECKPOINT --tokenizer CHECKPOINT", "was trained with its own"),
        ("CHECKPOINT --sequence 129", "context of 128"),
        ("", "either --model PRESET to train from scratch or a CHECKPOINT to fine-tune"),
        ("CHECKPOINT --model tiny-1m", "give either --model PRESET"),
        ("--model tiny-1m --lora-rank 2", "instead of --model"),
        ("CHECKPOINT --lora-rank 2 --set optimizer=muon", "muon trains whole matrices"),
        ("CHECKPOINT --lora-rank 33", "--lora-rank is 33; this model's matrices allow 1 to 32"),
        ("CHECKPOINT --lora-rank 0", "--lora-rank: must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    flags: str, message: str, cli: CommandLine, checkpoint: Path, corpus_file: Path, tmp_path: Path
) -> None:
    given = flags.replace("CHECKPOINT", str(checkpoint)).split()
    cli.refuses(2, message, "train", *given, "--corpus", corpus_file, "--out", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_quantized_model_is_not_trained(cli: CommandLine, int4: Path, corpus_file: Path, tmp_path: Path) -> None:
    cli.refuses(3, "is quantized", "train", int4, "--corpus", corpus_file, "--out", tmp_path / "out")


def test_the_documented_set_up(cli: CommandLine, corpus_file: Path, tmp_path: Path) -> None:
    """5,000 steps of batch 4 x accumulation 4 x 512 tokens, AdamW 3e-4, warm-up 50, dropout 0.1."""
    out = tmp_path / "out"
    run(cli, "--model", "tiny-300k", "--set", "documented=true", "--steps", 0, "--corpus", corpus_file, "--out", out)
    settings = read_manifest(out).settings
    names = ("batch_size", "accumulation", "sequence", "learning_rate", "warmup", "optimizer", "weight_decay")
    assert [settings[name] for name in names] == [4, 4, 512, 3e-4, 50, "adamw", 0.1]
    assert load_config(out).dropout == 0.1


def test_the_documented_sampling(checkpoint: Path) -> None:
    """Temperature 0.7, top-k 50, top-p 0.9 and 100 new tokens, in `generate` and in a checkpoint's own file."""
    data = json.loads((checkpoint / "generation_config.json").read_text(encoding="utf-8"))
    names = ("temperature", "top_k", "top_p", "max_new_tokens")
    assert [data[name] for name in names] == [0.7, 50, 0.9, 100]
    parameters = inspect.signature(load_command("generate")).parameters
    assert [parameters[name].default for name in names] == [0.7, 50, 0.9, 100]
    assert (Sampling().temperature, Sampling().top_k, Sampling().top_p) == (0.7, 50, 0.9)


def test_another_text_field_is_recorded_and_read_by_later_commands(
    cli: CommandLine, corpus_file: Path, tmp_path: Path
) -> None:
    texts = [json.loads(line)["text"] for line in corpus_file.read_text(encoding="utf-8").splitlines()]
    named, out = tmp_path / "named.jsonl", tmp_path / "out"
    named.write_text("".join(json.dumps({"id": 1, "body": text}) + "\n" for text in texts), encoding="utf-8")
    flags = [*SMALL, "--steps", 0, "--threads", 1]
    cli.refuses(3, "line 1 has no 'text' string; it has id, body", "train", *flags, "--corpus", named, "--out", out)
    cli.result("--text-field", "body", "train", *flags, "--corpus", named, "--out", out)
    plain = run(cli, *flags[:-2], "--corpus", corpus_file, "--out", tmp_path / "plain")["out"]
    assert (out / "model.safetensors").read_bytes() == (Path(plain) / "model.safetensors").read_bytes()
    assert read_manifest(out).settings["text_field"] == "body"
    code, _, err = cli("eval", out, "--text", named, "--text", corpus_file, "--threads", 1)
    assert code == 0 and f"{corpus_file.name}: reading 'text' of records without a field 'body'" in err, err
    assert "documents are training text" in err
    code, _, err = cli("quantize", out, "--set", "samples=4", "--out", tmp_path / "int4", "--threads", 1)
    assert code == 0 and "writes itself" not in err and "no field" not in err, err
    assert read_manifest(tmp_path / "int4").settings["text_field"] == "body"
