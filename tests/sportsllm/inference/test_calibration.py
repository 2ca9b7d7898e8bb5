"""Calibration text: random, distinct, and never held out."""

import json
from pathlib import Path

import pytest
import torch

from sportsllm.errors import ArtifactError
from sportsllm.inference import calibration
from sportsllm.inference.calibration import calibration_samples, check_familiar, usual_samples
from sportsllm.models.presets import preset
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from sportsllm.text.tokenizer_training import train_tokenizer

CONFIG = preset("tiny-300k").with_changes(vocab_size=400)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["line 0123456789 of the book"] * 50, CONFIG.vocab_size, directory)
    return load_tokenizer(directory)


def book_of(lines: int, folder: Path) -> Path:
    book = folder / "book.txt"
    book.write_text("".join(f"{n} line\n\n" for n in range(lines)), encoding="utf-8")
    return book


def test_no_token_is_read_twice(words: TextTokenizer, tmp_path: Path) -> None:
    found = calibration_samples([book_of(4_000, tmp_path)], [], words, CONFIG, None, 64, most=50)
    numbers = [n for piece in found for n in words.decode(piece[0].tolist()).split()[1:-1] if n.isdigit()]
    assert len(numbers) == len(set(numbers))
    assert 50 * 64 <= sum(piece.numel() for piece in found) < 51 * 64
    assert max(map(int, numbers)) > 2_000  # not the start of the file alone


def test_a_large_model_reads_less(words: TextTokenizer, tmp_path: Path) -> None:
    book, large = book_of(12_000, tmp_path), preset("large").with_changes(vocab_size=CONFIG.vocab_size)
    neurons = 4 * large.intermediate_size // 256  # four tokens each
    for model, pieces in ((CONFIG, 256), (preset("small").with_changes(vocab_size=400), 59), (large, neurons)):
        tokens = sum(piece.numel() for piece in calibration_samples([book], [], words, model, None, 256))
        assert pieces * 256 <= tokens < (pieces + 1) * 256  # 59 = 5e9 / 85.3M parameters
    assert usual_samples(large.with_changes(intermediate_size=512, num_hidden_layers=48), 512) == 16
    small = preset("tiny-1m")
    assert [usual_samples(small, 512, tokens) for tokens in (0, 100, 10**6)] == [256, 40, 40]


def test_draws_are_the_same_each_time(words: TextTokenizer, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"line {n} " * 9}) + "\n" for n in range(500)), encoding="utf-8")

    draws = (calibration_samples([corpus], [], words, CONFIG, 20, 64) for _ in range(2))
    texts, again = ([words.decode(piece[0].tolist()) for piece in found] for found in draws)
    assert texts == again and len(set(texts)) == 20
    held_out = set(load_corpus([corpus], []).held_out)
    assert not held_out & {text.strip() + " " for text in texts} and held_out


def test_documents_have_their_share(words: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_RESERVOIR_CHARACTERS", 0)  # a tenth of the text is in memory
    long, short = tmp_path / "long.jsonl", tmp_path / "short.jsonl"
    long.write_text(json.dumps({"text": ("book " * 20 + "\n\n") * 3_000}) + "\n", encoding="utf-8")
    short.write_text("".join(json.dumps({"text": f"note {n} " * 80}) + "\n" for n in range(500)), encoding="utf-8")
    found = calibration_samples([long, short], [], words, CONFIG, 64, 64)
    books = sum("book" in words.decode(piece[0].tolist()) for piece in found)
    assert 10 < books < 50  # half of the text is the book's


def test_every_piece_counts_where_text_is_short(words: TextTokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("line 12 of the book", encoding="utf-8")
    found = calibration_samples([text], [], words, CONFIG, None, 64)
    assert len(found) == 1 and found[0][0, 0] == words.begin_id
    with pytest.raises(ArtifactError, match="yields 1 of 2 samples"):
        calibration_samples([text], [], words, CONFIG, 2, 64)
    with pytest.raises(ArtifactError, match="no calibration text"):
        calibration_samples([], [], words, CONFIG, None, 64)


def test_text_of_another_kind_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 2, 3]])]  # entropy: log 4 = 1.386 nats
    check_familiar(samples, 1.38)
    assert capsys.readouterr().err == ""
    check_familiar(samples, 1.39)
    assert "looks out of domain: loss 1.39, unigram entropy 1.39 nats" in capsys.readouterr().err
    check_familiar([torch.full((1, 9), 7)], 0.1)  # one token again and again has no entropy
    assert "unigram entropy 0.00 nats" in capsys.readouterr().err
