"""The commands as a person runs them: in a process, with exit codes and one-line errors."""

import ast
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer

from sportsllm.cli import _os_error, build_app
from sportsllm.commands import COMMANDS
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.decoder import open_decoder
from sportsllm.settings import TRAINING
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.settings import TrainConfig
from tests.support.command_line import CommandLine
from tests.support.disk import full_disk
from tests.support.training import interrupted_in_step

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "sportsllm.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def train(corpus: Path, out: Path, *more: object) -> list[object]:
    more = (*more,) if "--tokenizer" in more else (*more, "--vocab-size", 400)
    model = ["train", "--model", "tiny-300k", "--corpus", corpus, "--out", out, "--threads", 1]
    return [*model, "--batch-size", 2, "--set", "accumulation=1", "--sequence", 32, *more]


@pytest.fixture(scope="module")
def matches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated corpus with a vocabulary rich enough for the tiny presets."""
    from sportsllm.simulator import write_corpus

    directory = tmp_path_factory.mktemp("matches")
    write_corpus(directory, seed=0, megabytes=0.2, questions=8)
    return directory


def test_help_and_version(cli: CommandLine) -> None:
    code, out, _ = cli("--help")
    assert code == 0 and all(name.partition(" ")[0] in out for name in COMMANDS)
    assert cli("--version")[1].startswith("0.")
    for name in COMMANDS:
        code, out, _ = cli(*name.split(), "--help")
        assert code == 0 and "Raises:" not in out and "<bool>" not in out
    code, shown, err = cli("devices")
    assert code == 2 and "calibrate" in shown
    assert err == "error: a command is missing (see sportsllm-compress devices --help)\n"


def test_json_is_one_object_and_words_go_to_stderr(cli: CommandLine, checkpoint: Path, corpus_file: Path) -> None:
    code, out, err = cli("eval", checkpoint, "--text", corpus_file, "--json")
    assert code == 0 and "bits per byte" in err
    assert {"perplexity", "bits_per_byte", "tokens", "bytes"} <= set(json.loads(out))
    goal = ("generate", checkpoint, "--prompt", "Goal", "--max-new-tokens", 5)
    result = cli.result(*goal)
    assert {"text", "tokens", "ttft_ms", "tokens_per_s"} <= set(result) and result["tokens"] == 5
    text = result["text"]
    assert cli.result(*goal, "--stop", text[1:3])["text"] == text[: text.index(text[1:3])]
    cli.refuses(2, "--stop is empty", "generate", checkpoint, "--stop", "")
    cli.refuses(2, "is not valid UTF-8; correct it", "generate", checkpoint, "--stop", "\udcff")
    (file := corpus_file.with_name("prompt.txt")).write_text("Goal\n", encoding="utf-8-sig")
    from_file = ("generate", checkpoint, "--prompt-file", file, "--max-new-tokens", 5, "--json")
    for code, out, err in (cli("--quiet", *from_file), cli(*from_file, "--quiet")):
        assert json.loads(out)["text"] == text and err == f"Goal{text}\n", code
    cli.refuses(2, "give --prompt or --prompt-file", *from_file, "--prompt", "a")
    cli.refuses(2, "give --quiet or --verbose", "--verbose", *from_file, "--quiet")
    cli.refuses(2, "unexpected extra argument", *from_file, "--", "--quiet")
    code, out, _ = cli("generate", checkpoint, "--ids", "--temperature", 0, "--max-new-tokens", 3)
    assert len([int(token) for token in out.split()]) == 3


def test_generated_text_joins_its_prompt_up_to_the_end_of_the_context(
    cli: CommandLine, checkpoint: Path, stories: Path
) -> None:
    told = cli.result("generate", stories, "--prompt", "Once upon a time, there", "--temperature", 0)["text"]
    assert told.startswith(" was a little")
    endless = ("generate", checkpoint, "--temperature", 0, "--repetition-penalty", 1, "--max-new-tokens")
    (result, err), context = cli.says(*endless, 9_999), load_config(checkpoint).max_position_embeddings
    assert result["context_full"] is True and result["tokens"] == context - 1
    assert f"the context of {context:,} tokens is full: {context - 1:,} of 9,999" in err
    result, err = cli.says(*endless, 3)
    assert result["context_full"] is False and "is full" not in err


def test_chat(cli: CommandLine, checkpoint: Path, tmp_path: Path) -> None:
    chatty = shutil.copytree(checkpoint, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}", encoding="utf-8")
    tokenizer, decoder = load_tokenizer(chatty), open_decoder(chatty, 1)
    first = int(decoder.prefill([[*tokenizer.encode("Hi"), 1]])[0].argmax())
    result = cli.result("generate", chatty, "--chat", "--prompt", "Hi", "--temperature", 0)
    assert result["ids"][:1] == [first]


def test_train_distill_quantize_prune_verify(
    cli: CommandLine, matches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = cli.result
    small = train(matches / "train.jsonl", "runs/tiny-300k")
    keys = {"out", "parameters", "size_bytes", "seconds", "tokens", "tokens_per_s", "loss", "valid_bits_per_byte"}
    assert keys | {"peak_rss_bytes"} <= run(*small, "--steps", 2).keys()
    assert run(*small, "--steps", 2)["cached"] is True
    # The bare command: teacher by preset name, corpus from its manifest, output from the student's name.
    few = ["--steps", 1, "--batch-size", 2, "--set", "accumulation=1", "--sequence", 32]
    distill = ["distill", "--teacher", "tiny-300k", "--student"]
    cli.refuses(2, "larger than the teacher", *distill, "tiny-1m", *few)
    assert run(*distill, "runs/tiny-300k", "--out", "runs/again", *few)["out"] == "runs/again"
    run("quantize", "runs/again", "--out", "runs/q", "--method", "rtn")
    prune = ["prune", "runs/tiny-300k", "--out", "runs/p", "--intermediate", 96, "--set", "samples=4"]
    assert run(*prune, "--calibration", matches / "train.jsonl")["shape"]["intermediate"] == 96
    assert run("verify", "runs/q")["ok"] is True
    weights = Path("runs/q/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    problems = cli.says("verify", "runs/q", code=3)[0]["problems"]
    assert problems == ["model.safetensors: content differs from the manifest's SHA-256"]
    assert run("eval", "runs/p", "--questions", matches / "questions.jsonl")["questions"] == 8


def test_interrupt_saves_and_resume_finishes(
    matches: Path, tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(a) for a in train(matches / "train.jsonl", tmp_path / "out", "--steps", 40)]
    with interrupted_in_step(6):
        code, _, err = cli(*arguments)
    assert code == 130 and "after step 6 of 40" in err, err
    assert "--resume" in err and not (tmp_path / "out").exists()
    (tmp_path / "other.partial").mkdir()
    for given, again in (("out", " with --resume"), ("out.partial", " with --resume"), ("other", "")):
        code, _, err = cli("quantize", tmp_path / given, "--out", tmp_path / "int4")
        name = tmp_path / given.removesuffix(".partial")
        assert (code, err) == (3, f"error: {name}: not finished yet; repeat the command that makes it{again}\n")
    cli.result(*arguments, "--resume")
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] == 40 and not (tmp_path / "out" / "state").exists()
    monkeypatch.setattr("benchmarks.quality.text_quality", Mock(side_effect=KeyboardInterrupt))
    assert cli("bench", tmp_path / "out")[2].endswith("error: interrupted\n")  # without an output none is missing
    cli.refuses(130, "nothing was published", "bench", tmp_path / "out", "--out", tmp_path / "bench.json")


def test_full_disk_and_read_only_folder_leave_nothing(checkpoint: Path, tmp_path: Path, cli: CommandLine) -> None:
    quantize = ["quantize", checkpoint, "--method", "rtn", "--out"]
    with full_disk():
        cli.refuses(5, "grew over the allowed size", *quantize, tmp_path / "out")
        gguf = "export", checkpoint, "--format", "gguf", "--out"
        cli.refuses(5, f"{tmp_path}/out: the disk is full", *gguf, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with full_disk(), pytest.raises(OSError) as caught:
        shutil.copy(ROOT / "tests" / "sportsllm" / "serving" / "test_server.py", tmp_path / "copy")
    assert str(_os_error(caught.value)).startswith(f"{tmp_path / 'copy'}: the file grew")
    cli.refuses(5, "/sys/nothing", *quantize, "/sys/nothing/out")
    (gone := tmp_path / "gone").mkdir()
    with contextlib.chdir(gone):
        gone.rmdir()
        cli.refuses(3, "the working directory: no such file or directory; check the path", "devices", "list")


def test_a_missing_package_names_the_extra_and_a_hidden_one_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')", encoding="utf-8")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = "from sportsllm.cli import main; import sys; main(sys.argv[1:])"
    for arguments, message in (
        (["generate", str(checkpoint)], "pip install 'sportsllm-compress[compress]'"),
        (["plan", "small"], "environment of its own"),
    ):
        command = [sys.executable, "-P", "-c", code, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert result.returncode == 5 and message in result.stderr and result.stderr.count("\n") == 1


def test_a_tokenizer_keeps_its_own_special_tokens(
    cli: CommandLine, stories: Path, corpus_file: Path, tmp_path: Path
) -> None:
    cli.result(*train(corpus_file, tmp_path / "out", "--tokenizer", stories, "--steps", 0))
    config = load_config(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.vocab_size) == (1, 2, 512)


@pytest.mark.parametrize("words", ["generate MODEL", "devices list", "plan small --json 2>/dev/null"])
def test_a_closed_pipe_is_no_bug(words: str, checkpoint: Path) -> None:
    script = f"set -o pipefail; {' '.join(CLI)} {words.replace('MODEL', str(checkpoint))} | true"
    piped = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=ENVIRONMENT)
    assert piped.returncode == 0 and piped.stderr == ""


@cache
def whole_app() -> Any:
    return typer.main.get_command(build_app())


def flags_of(command: str) -> list[Any]:
    found = whole_app()
    for word in command.split():
        found = found.commands[word]
    return [p for p in found.params if p.name != "help"]


def test_every_flag_says_its_type_and_what_it_is_without_it() -> None:
    for command in COMMANDS:
        for flag in flags_of(command):
            assert flag.help or flag.hidden, (command, flag.name)
            assert flag.metavar or getattr(flag, "is_flag", False), (command, flag.name)
            if command in ("prune", "export", "bench", "fit", "plan", "inspect", "report"):  # some are derived
                continue
            says = flag.required or flag.default is not None or isinstance(flag.show_default, str)
            assert says or getattr(flag, "is_flag", False), (command, flag.name)


def test_flags_that_errors_name_are_there() -> None:
    flags = [flag for command in ("", *COMMANDS) for flag in flags_of(command)]
    there = {"--help", "--merge"}  # the latter is llama-gguf-split's
    there.update(*(flag.opts + flag.secondary_opts for flag in flags))
    for package in ("sportsllm", "compress", "export", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            if "--" not in (text := path.read_text(encoding="utf-8")):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Raise):
                    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", ast.unparse(node)))
                    assert named <= there, (path.name, named - there)


def test_the_help_lists_the_settings_that_a_command_takes(cli: CommandLine, checkpoint: Path, tmp_path: Path) -> None:
    out, fit = ["--out", str(tmp_path / "out")], ["--teacher", str(checkpoint), "--target", "host"]
    lines = {"plan": ["small"], "bench": [checkpoint], "fit": [*fit, *out], "export": [checkpoint, *out]}
    lines["eval"] = [checkpoint, "--text", checkpoint]
    for command, line in lines.items():
        listed = next(flag.help for flag in flags_of(command) if flag.name == "settings").partition("Names: ")[2]
        _, _, err = cli(command, *line, "--set", "zzzz=1")
        assert sorted(listed.rstrip(".").split(", ")) == sorted(err.partition("choose one of ")[2].strip().split(", "))


def test_defaults_in_the_help_are_those_of_training() -> None:
    """They are written out there, since torch would have to be loaded for the real ones."""
    config = TrainConfig()
    shown = {flag.name: flag.show_default for flag in flags_of("train")}
    assert shown["steps"] == str(config.steps)
    for name in ("batch_size", "sequence"):
        assert shown[name] == f"up to {getattr(config, name)}", name
    for name in ("precision", "schedule", "min_lr_ratio", "decay_fraction", "clip_norm", "log_every"):
        value = getattr(config, name)
        assert TRAINING[name].default == (value if isinstance(value, str) else f"{value:g}"), name
    assert TRAINING["accumulation"].default.endswith(f"{config.accumulation} with --steps")
    assert set(TRAINING) - {"documented"} <= {field.name for field in dataclasses.fields(TrainConfig)}


def test_there_are_at_most_200_options() -> None:
    """Those of the program count once; --help, --json, --version and completion do not."""
    usual = {"json_output", "version", "install_completion", "show_completion"}
    flags = [flag for command in ("", *COMMANDS) for flag in flags_of(command) if flag.param_type_name == "option"]
    assert len([flag for flag in flags if flag.name not in usual]) <= 200
