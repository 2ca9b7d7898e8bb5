import json
from pathlib import Path

import pytest
import torch

from compress.cli.sample import sample
from compress.distillation.synthetic_text import CORPUS, sample_continuations, write_corpus
from sportsllm.errors import UsageError
from sportsllm.models.hf_config import load_config
from sportsllm.storage.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.models import tiny_model


def test_a_model_writes_a_corpus(checkpoint: Path, tmp_path: Path) -> None:
    result = sample(checkpoint, tmp_path / "own", tokens=300, sequence=24, batch_size=8)
    lines = (tmp_path / "own" / CORPUS).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert len(texts) == result["documents"] and result["tokens"] >= 300
    assert result["bytes"] == sum(len(text.encode()) for text in texts)
    assert all(texts) and len(set(texts)) > len(texts) // 2
    words = load_tokenizer(checkpoint, load_config(checkpoint))
    special = words.decode([words.begin_id])
    assert not special or not any(special in text for text in texts)
    again = write_corpus(checkpoint=checkpoint, out=tmp_path / "again", tokens=300, length=24, batch_size=8)
    assert (tmp_path / "again" / CORPUS).read_bytes() == (tmp_path / "own" / CORPUS).read_bytes()
    assert again["tokens"] == result["tokens"]
    other = write_corpus(checkpoint=checkpoint, out=tmp_path / "other", tokens=300, length=24, batch_size=8, seed=1)
    assert (tmp_path / "other" / CORPUS).read_bytes() != (tmp_path / "own" / CORPUS).read_bytes() and other["tokens"]


def test_texts_end_at_a_stop_token(checkpoint: Path, tokenizer_directory: Path, tmp_path: Path) -> None:
    model = load_checkpoint(checkpoint)
    assert model.config.stop_token_ids
    model.head_weight.data.mul_(0.01)  # all tokens about as likely as each other
    (tmp_path / "flat").mkdir()
    save_checkpoint(tmp_path / "flat", model, tokenizer_directory)
    flat = write_corpus(checkpoint=tmp_path / "flat", out=tmp_path / "own", tokens=2_000, length=64, batch_size=32)
    # Every token ends a text with a chance of 2 of 384 (end and begin token): 1 - (382 / 384) ** 63 = 28% of them.
    assert 0.1 < flat["ended"] / flat["documents"] < 0.5


def test_a_length_beyond_the_context_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="context"):
        write_corpus(checkpoint=checkpoint, out=tmp_path / "x", tokens=10, length=100_000)


def test_what_is_written_follows_the_models_probabilities() -> None:
    # One prompt, many rows: the second token drawn must be distributed as softmax(model) says.
    model = tiny_model(3, vocab_size=16).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.3)  # so that several tokens are likely, and none surely
    rows = 4_000
    text = sample_continuations(model, torch.full((rows, 3), 5), 2, torch.Generator().manual_seed(0))
    first = text[:, 3]
    common = int(first.mode().values)
    second = text[first == common, 4]
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([[5, 5, 5, common]]))[0, -1], -1)
    counts = torch.bincount(second, minlength=16)
    # Chi-squared with 15 degrees of freedom is above 45 once in ten thousand draws.
    enough = expected * len(second) > 5
    assert enough.sum() >= 4
    statistic = ((counts - expected * len(second)) ** 2 / (expected * len(second)))[enough].sum()
    assert statistic < 45
