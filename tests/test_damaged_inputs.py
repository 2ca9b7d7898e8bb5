"""A thousand seeded mutations of good files: every reader ends well or in one short line, and in time."""

import copy
import json
import random
import shutil
import signal
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tomli_w
import torch

from benchmarks.devices.load import DEVICES, read_device
from benchmarks.report import report as run_report
from benchmarks.reporting.inputs import collect
from compress.distillation.loss import DistillationConfig
from compress.distillation.student import StudentTraining
from compress.distillation.teacher_cache import SIGNALS, read_info
from export.gguf.tokenizer import tokenizer_metadata
from export.gguf.write import write_gguf
from sportsllm.errors import SportsLLMError
from sportsllm.formats.artifact import STATE_DIRECTORY, Stage, run_stage
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.gguf.convert import convert_gguf
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import MANIFEST, ancestors, read_manifest, verify_directory
from sportsllm.formats.model_card import write_card
from sportsllm.formats.safetensors import INDEX, WEIGHTS
from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.scoring import read_questions
from sportsllm.text.chat import render_chats
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.optimizers import build_optimizers
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import RunState
from sportsllm.verbs.run import load_recipe
from tests.benchmarks.reporting.test_report import bench_result
from tests.support.models import fresh

LONGEST, SECONDS = 800, 10  # the command line leaves out the middle of a line beyond 400 characters
VALUES: list[Any] = [
    None, True, -1, 0, 3, 1.5, 1e300, 2**31, 2**40, 2**63, "", "x", "x" * 10_000, "../../x", "\0", [], {}, [[]],
    [1, "a"], {"a": 1}, ["x" * 300], "NaN", -(2**31),
]  # fmt: skip
RAW = [b'"\xff\xfe"', b"[" * 1_000 + b"]" * 1_000, b"9" * 5_000, b'"\\ud800"', b"NaN", b"1e999", b""]
MARK = "MARKED FIELD"


@dataclass(frozen=True)
class Target:
    """A file, how it is read, and how often it is mutated."""

    file: Path
    read: Callable[[], object]
    count: int
    kind: str = "json"


def _paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    for key, value in items if len(items) <= 40 else items[:20] + items[-20:]:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _mutated_fields(data: Any, draw: random.Random, dump: Callable[[Any], bytes]) -> bytes:
    """One field replaced, removed, or written as something that is no value."""
    data = copy.deepcopy(data)
    *parents, last = draw.choice(list(_paths(data)))
    holder = data
    for key in parents:
        holder = holder[key]
    choice = draw.random()
    if choice < 0.15:
        del holder[last]
        return dump(data)
    holder[last] = draw.choice(VALUES) if choice < 0.8 else MARK
    return dump(data).replace(f'"{MARK}"'.encode(), draw.choice(RAW))


def _mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes changed, most of them near the start, removed, or put in."""
    place = draw.randrange(min(len(data), draw.choice([16, 200, 3_000, len(data)])))
    match draw.randrange(5):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + bytes(draw.randrange(256) for _ in range(8)) + data[place:]
        case 2:
            return data[:place] + data[place + draw.randrange(1, 9) :]
        case 3:
            return data[:place] + b"\xff" * 8 + data[place + 8 :]
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


def _toml(data: Any) -> bytes:
    try:
        return tomli_w.dumps(data).encode()
    except (TypeError, ValueError):  # null is no TOML
        return b"= 3"


def _mutate(kind: str, data: bytes, draw: random.Random) -> bytes:
    if kind == "bytes" or draw.random() < 0.15:
        return _mutated_bytes(data, draw)
    if kind == "toml":
        return _mutated_fields(tomllib.loads(data.decode()), draw, _toml)
    if kind == "lines":
        first, _, rest = data.partition(b"\n")
        return _mutated_fields(json.loads(first), draw, lambda each: json.dumps(each).encode()) + b"\n" + rest
    if kind == "template":
        return _mutated_template(data, draw)
    return _mutated_fields(json.loads(data), draw, lambda each: json.dumps(each).encode())


def _mutated_template(data: bytes, draw: random.Random) -> bytes:
    parts = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages | tojson(indent=10**10) }}", "{{ messages }}",
        "{{ messages[0].content.ljust(10**10) }}", "{{ 'x' * 10**10 }}", "{{ undefined.field }}", "{{ 1 / 0 }}",
        "{% if %}", "{{ raise_exception('x' * 9999) }}", "{{ ''.__class__ }}", "{% include 'a' %}", "{{ '%s %s' % 1 }}",
    ]  # fmt: skip
    lines = data.decode().splitlines(keepends=True)
    lines[draw.randrange(len(lines))] = draw.choice(parts)
    return "".join(lines).encode()


@pytest.fixture(scope="module")
def made(
    checkpoint: Path, int4: Path, exported: Path, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """One good file or directory of every kind."""
    root = tmp_path_factory.mktemp("damaged")
    run_stage(root / "model", Stage("train", {"corpus": ["a.jsonl"]}), lambda out: _copied(checkpoint, out))
    run_stage(root / "next", Stage("quantize", {"checkpoint": str(root / "model")}, [root / "model"]), _small)
    _copied(checkpoint, root / "sharded")
    (root / "sharded" / WEIGHTS).rename(root / "sharded" / "model-1.safetensors")
    names = load_checkpoint(checkpoint).state_dict()
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (root / "sharded" / INDEX).write_text(json.dumps(index))
    _copied(checkpoint, root / "plain")
    _copied(int4, root / "packed", ("config.json", WEIGHTS))
    template = "{% for m in messages %}\n{{ m.role }}: {{ m.content | trim }}\n{% endfor %}\n{{ bos_token }}\n"
    (root / "plain" / "chat_template.jinja").write_text(template)
    _copied(exported, root / "onnx")
    config = TrainConfig(steps=1, batch_size=4, accumulation=1, sequence=32)
    taught = DistillationConfig(signals=root / "signals", teacher_precision="fp32")
    StudentTraining(checkpoint, config, (corpus_file,), distillation=taught).prepare(load_config(checkpoint))
    (root / "partial" / STATE_DIRECTORY).mkdir(parents=True)
    _state(root / "partial").save()
    (root / "questions.jsonl").write_text('{"question": "Who won?", "choices": ["They", "We"], "answer": 1}\n')
    (root / "text.jsonl").write_text('{"text": "They won.", "meta": {"id": 3}}\n{"text": "We lost."}\n')
    shutil.copy(DEVICES / "raspberry-pi-5-8gb.toml", root / "device.toml")
    recipe = {
        "name": "r", "out": "runs/r", "defaults": {"train": {"seed": 1}},
        "stage": [
            {"name": "a", "command": "train", "model": "tiny-1m", "corpus": ["text.jsonl"], "steps": 3},
            {"name": "b", "command": "export", "checkpoint": "@a"},
        ],
    }  # fmt: skip
    (root / "recipe.toml").write_text(tomli_w.dumps(recipe))
    bench = bench_result(str(root / "next")) | {"file_bytes": 1_000, "bits_per_byte": 1.25, "text": ["valid.jsonl"]}
    (root / "bench.json").write_text(json.dumps(bench))
    write_gguf(checkpoint, root / "model.gguf", tokenizer_metadata(checkpoint, load_config(checkpoint)), half=True)
    return root


def _copied(source: Path, target: Path, names: tuple[str, ...] = ()) -> dict[str, Any]:
    target.mkdir(exist_ok=True, parents=True)
    for path in source.iterdir():
        if path.is_file() and (not names or path.name in names):
            shutil.copy(path, target)
    return {"parameters": 1_000, "tokens": 500, "steps": 2, "valid_bits_per_byte": 1.5}


def _small(out: Path) -> dict[str, Any]:
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "tokens": 3, "lr": 0.1}\n')
    return {"parameters": 1_000, "bits": 4, "shape": {"layers": 2}}


def _state(directory: Path) -> RunState:
    config, model = TrainConfig(steps=2), fresh()
    optimizers = build_optimizers(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    return RunState(directory, model, optimizers, torch.amp.GradScaler(enabled=False), {}, config)


def _targets(root: Path) -> dict[str, Target]:
    plain, packed, onnx, signals = root / "plain", root / "packed", root / "onnx", root / "signals"

    def run_onnx() -> None:
        decoder = open_decoder(onnx, threads=1, kernels="portable")
        decoder.score([[0, 5, 6]])

    def card() -> None:
        write_card(root / "model", [root / "bench.json"])

    def manifest() -> None:
        verify_directory(root / "model")
        ancestors(read_manifest(root / "next"), root / "next")
        card()
        collect([root / "model"])

    def gguf() -> None:
        shutil.rmtree(root / "converted", ignore_errors=True)
        convert_gguf(root / "model.gguf", root / "converted")

    def report() -> None:
        for kind in ("html", "md", "csv"):
            (page := root / f"r.{kind}").unlink(missing_ok=True)
            run_report([root / "next", root / "bench.json"], page)
        card()

    state = root / "partial" / STATE_DIRECTORY
    return {
        "corpus": Target(root / "text.jsonl", lambda: list(read_documents([root / "text.jsonl"])), 80, "lines"),
        "questions": Target(root / "questions.jsonl", lambda: read_questions(root / "questions.jsonl"), 60, "lines"),
        "index of shards": Target(root / "sharded" / INDEX, lambda: load_checkpoint(root / "sharded"), 70),
        "recipe": Target(root / "recipe.toml", lambda: load_recipe(root / "recipe.toml"), 80, "toml"),
        "config.json": Target(plain / "config.json", lambda: load_checkpoint(plain), 110),
        "config.json of INT4": Target(packed / "config.json", lambda: load_checkpoint(packed), 60),
        "report inputs": Target(root / "bench.json", report, 60),
        "metrics": Target(root / "next" / "metrics.jsonl", report, 20, "lines"),
        "manifest": Target(root / "model" / MANIFEST, manifest, 90),
        "tokenizer.json": Target(plain / "tokenizer.json", lambda: load_tokenizer(plain).encode("They won 2-1."), 90),
        "tokenizer_config.json": Target(plain / "tokenizer_config.json", lambda: load_tokenizer(plain), 20),
        "device file": Target(root / "device.toml", lambda: read_device(root / "device.toml"), 60, "toml"),
        "training state": Target(state / "state.json", lambda: _state(state.parent).load(), 30),
        "optimizer state": Target(
            state / "optimizer0.safetensors", lambda: _state(state.parent).load(), 20, "bytes"
        ),
        "chat template": Target(
            plain / "chat_template.jinja", lambda: list(render_chats(plain, [[{"role": "user", "content": "Hi"}]])), 16,
            "template",
        ),
        "ONNX": Target(onnx / "model.onnx", run_onnx, 80, "bytes"),
        "safetensors": Target(plain / WEIGHTS, lambda: load_checkpoint(plain), 60, "bytes"),
        "teacher cache": Target(signals / SIGNALS, lambda: read_info(signals), 40),
        "GGUF": Target(root / "model.gguf", gguf, 40, "bytes"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _targets(Path()))
def test_damage_ends_in_one_line(name: str, made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = _targets(made)[name]
    good, draw = target.file.read_bytes(), random.Random(name)
    target.read()
    before = signal.signal(signal.SIGALRM, Mock(side_effect=AssertionError(f"no end within {SECONDS} s")))
    failures = []
    try:
        for number in range(target.count):
            bad = _mutate(target.kind, good, draw)
            target.file.write_bytes(bad)
            signal.alarm(SECONDS)
            try:
                target.read()
            except SportsLLMError as error:
                text = str(error)
                if "\n" in text or len(text) > LONGEST:
                    failures.append(f"{number}: {len(text)} characters: {text[:120]}")
            except BaseException as error:  # panics are no exceptions
                failures.append(f"{number}: {type(error).__name__}: {str(error)[:200]}")
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
        target.file.write_bytes(good)
    capfd.readouterr()
    assert not failures, "\n".join(failures[:10]) + f"\n{len(failures)} of {target.count}"


def test_a_thousand_mutations() -> None:
    assert sum(target.count for target in _targets(Path()).values()) >= 1_000
