"""Tiny real models and texts that every test may use. Nothing is downloaded."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests often share the machine; see sportsllm.cli

import pytest
import torch

from sportsllm import console
from sportsllm.checkpoint import save_checkpoint
from sportsllm.config import ModelConfig
from sportsllm.data import PackedSequences, tokenize
from sportsllm.model import SportsLLM
from sportsllm.simulator import simulate
from sportsllm.tokenizer import load_tokenizer, train_tokenizer

torch.set_num_threads(2)
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
STORIES = DATA / "models" / "stories260K"
TINY_VOCAB = 384


def tiny_config(**changes: object) -> ModelConfig:
    """Two layers, grouped heads, head_dim 16."""
    base = ModelConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    return base.with_changes(**changes)


def tiny_model(seed: int = 0, std: float = 0.2, **changes: object) -> SportsLLM:
    """Random weights, large enough that every part of the model shows in the logits."""
    model = SportsLLM(tiny_config(**changes))
    model.initialize(seed, std=std)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise) if "norm" in name else parameter.copy_(0.1 * noise)
    return model.eval()


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


def fresh(**changes: object) -> SportsLLM:
    """A tiny model with the weights of seed 0."""
    model = SportsLLM(tiny_config(**changes))
    model.initialize(0)
    return model


def weights(model: SportsLLM) -> torch.Tensor:
    """All parameters in one row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
