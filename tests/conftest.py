"""Tiny real models and texts that every test may use. Nothing is downloaded."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests often share the machine; see sportsllm.cli
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of this process and those that tests start: more gain nothing here

import pytest
import torch

import sportsllm
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from sportsllm import console
from sportsllm.formats.checkpoint import save_checkpoint
from sportsllm.simulator import simulate
from sportsllm.text.packing import PackedSequences
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.text.tokenizer_training import train_tokenizer
from sportsllm.text.tokens import tokenize
from tests.support import gelu_kind
from tests.support.command_line import CommandLine
from tests.support.models import STORIES, TINY_VOCAB, tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files and those with slow tests first, so that no worker is left alone with one at the end."""
    longest = ("test_tutorials.py", "test_how_to.py", "test_random_shapes.py")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name not in longest, item.path not in slow))


@pytest.fixture(autouse=True)
def _undo_options() -> None:
    """What --json and --threads of a command change for the whole process."""
    console.use_stderr(False)
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _frozen_imports() -> None:
    """Commands call `gc.collect` to give memory back: it takes 0.3 s with all packages loaded, and visits none now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Forty simulated matches."""
    return [simulate(0, index).text for index in range(40)]


@pytest.fixture(scope="session")
def tokenizer_directory(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tokenizer of TINY_VOCAB entries."""
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts, TINY_VOCAB, directory)
    return directory


@pytest.fixture(scope="session")
def checkpoint(tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint directory with its tokenizer; read, never changed."""
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(directory, tiny_model(), tokenizer_directory)
    return directory


@pytest.fixture(scope="session")
def int4(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint in INT4, rounded to nearest."""
    out = tmp_path_factory.mktemp("quantized") / "int4"
    quantize_checkpoint(checkpoint=checkpoint, out=out, config=QuantizationConfig(), method="rtn")
    return out


@pytest.fixture(scope="session")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's ONNX export."""
    return export_of(checkpoint, tmp_path_factory)


@pytest.fixture(scope="session")
def exported_int4(int4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of its INT4 form, which calls kernels."""
    return export_of(int4, tmp_path_factory)


def export_of(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "onnx"
    sportsllm.export(source, out=out, threads=1)
    return out


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The program's commands."""
    return CommandLine(capsys)


@pytest.fixture
def gelu() -> Iterator[str]:
    """The name of a second kind of feed-forward: two matrices with biases."""
    with gelu_kind.registered() as name:
        yield name


@pytest.fixture(scope="session")
def corpus_file(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The forty matches as .jsonl."""
    path = tmp_path_factory.mktemp("corpus") / "matches.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def stories() -> Path:
    """The trained LLaMA checkpoint that somebody else made."""
    if not STORIES.exists():
        pytest.skip(f"needs the shared data folder ({STORIES.parent.name}/{STORIES.name})")
    return STORIES


@pytest.fixture(scope="session")
def batches(texts: list[str], tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedSequences:
    """Two packed rows of 32 tokens at a time."""
    tokens = tokenize(texts, load_tokenizer(tokenizer_directory), tmp_path_factory.mktemp("tokens"))
    return PackedSequences(tokens, 32, 2, seed=0)
