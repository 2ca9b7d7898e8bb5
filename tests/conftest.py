"""Tiny real models and texts that every test may use. Nothing is downloaded."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests often share the machine; see sportsllm.cli

import pytest
import torch

from sportsllm import console
from sportsllm.formats.checkpoint import save_checkpoint
from sportsllm.simulator import simulate
from sportsllm.text.packing import PackedSequences, tokenize
from sportsllm.text.tokenizer import load_tokenizer, train_tokenizer
from tests.support.models import STORIES, TINY_VOCAB, tiny_model

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # workers share the cores


@pytest.fixture(autouse=True)
def _words_to_standard_output() -> None:
    """A test that ran a command with --json leaves the process as it was."""
    console.use_stderr(False)


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
def corpus_file(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The forty matches as .jsonl."""
    import json

    path = tmp_path_factory.mktemp("corpus") / "matches.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def stories() -> Path:
    """The trained LLaMA checkpoint that somebody else made."""
    if not STORIES.exists():
        pytest.skip(f"needs the shared data folder ({STORIES.parent.name}/{STORIES.name})")
    return STORIES


@pytest.fixture
def batches(texts: list[str], tokenizer_directory: Path) -> PackedSequences:
    """Two packed rows of 32 tokens at a time."""
    return PackedSequences(tokenize(texts, load_tokenizer(tokenizer_directory)), 32, 2, seed=0)
