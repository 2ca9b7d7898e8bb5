import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sportsllm.errors import ArtifactError
from sportsllm.inference import scoring
from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.scoring import (
    Question,
    question_accuracy,
    ratio_interval,
    read_questions,
    score_documents,
    wilson_interval,
    windows,
)
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.command_line import CommandLine
from tests.support.models import DATA, saved, tiny_model


def test_windows_score_every_token_but_the_first_once() -> None:
    for length in (1, 2, 7, 8, 9, 12, 13, 31):
        scored = []
        for start, stop, first in windows(length, 8):
            assert start < first < stop or length == 1
            assert stop - start <= 8
            if start:
                assert first - start == 4, "half a window of context"
            scored += range(first, stop)
        assert scored == list(range(1, length))
        apart = list(windows(length, 8, 7))
        assert [place for _, stop, first in apart for place in range(first, stop)] == scored
        assert all(first == start + 1 for start, _, first in apart)


@pytest.mark.parametrize("window", [None, 48])
def test_scores_equal_a_brute_force_sum(
    checkpoint: Path, texts: list[str], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token in float64, with the context the protocol gives it."""
    monkeypatch.setattr(scoring, "ROWS_AT_ONCE", 2)
    decoder = open_decoder(checkpoint)
    tokenizer = load_tokenizer(checkpoint, decoder.config)
    model = tiny_model()
    documents = [texts[0][:600], "ok", texts[1][:100]]
    result = score_documents(decoder, tokenizer, documents, window=window)
    reached = score_documents(decoder, tokenizer, documents, max_tokens=len(tokenizer.encode(documents[0])))
    assert len(reached.documents) == 1
    nats, tokens = 0.0, 0
    for text in documents:
        ids = [0, *tokenizer.encode(text)]
        for start, stop, first in windows(len(ids), window or 128, window and window - 1):
            with torch.inference_mode():
                scores_TV = model(torch.tensor([ids[start:stop]]))[0].double().log_softmax(-1)
            for position in range(first, stop):
                nats -= float(scores_TV[position - 1 - start, ids[position]])
                tokens += 1
    assert result.tokens == tokens and result.bytes == sum(len(text.encode()) for text in documents)
    assert result.nats == pytest.approx(nats, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / result.bytes, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)


def test_stories260k_has_its_published_perplexity(stories: Path) -> None:
    text = DATA / "tinystories_sample" / "test.jsonl"
    if not text.exists():
        pytest.skip("needs tinystories_sample of the shared data folder")
    decoder = open_decoder(stories)
    tokenizer, most = load_tokenizer(stories, decoder.config), decoder.config.max_position_embeddings - 1
    documents = list(read_documents([text]))[::4]  # a quarter differs from the published whole by 0.03
    beginnings = [tokenizer.decode(tokenizer.encode(str(document))[:most]) for document in documents]
    score = score_documents(decoder, tokenizer, beginnings)
    assert score.perplexity == pytest.approx(4.66, abs=0.05)
    assert score.bits_per_byte == pytest.approx(1.115, abs=0.005)


def test_choices_are_compared_per_byte(checkpoint: Path, texts: list[str]) -> None:
    """-4.5 nats of five bytes are more than -3 of three, but not by characters. Of a long question the end is read."""
    decoder = open_decoder(checkpoint)
    tokenizer = load_tokenizer(checkpoint, decoder.config)
    choices, read = ("\u00e9\u00e9", "ab"), list[list[int]]()

    def score(rows: list[list[int]]) -> list[np.ndarray]:
        read.extend(rows)
        return [np.append(np.zeros(len(row) - 2), nats) for row, nats in zip(rows, (-4.5, -3.0), strict=True)]

    decoder.score = score
    for answer in (0, 1):
        assert question_accuracy(decoder, tokenizer, [Question(texts[0], choices, answer)]) == 1 - answer
    ends = [tokenizer.encode(" " + choice) for choice in choices]
    assert read[:2] == [[0, *tokenizer.encode(texts[0])[-(127 - len(end)) :], *end] for end in ends]


def test_scores_that_are_no_numbers_are_refused(tokenizer_directory: Path, tmp_path: Path, cli: CommandLine) -> None:
    model = tiny_model()
    model.model.norm.weight.data *= 1e38
    saved(tmp_path / "model", model, tokenizer_directory)
    questions, text = tmp_path / "questions.jsonl", tmp_path / "text.txt"
    text.write_text("The home side won.", encoding="utf-8")
    questions.write_text('{"question": "Won?", "choices": ["yes", "no"], "answer": 0}\n', encoding="utf-8")
    for flag, file in (("--text", text), ("--questions", questions)):
        cli.refuses(3, "the model's logits are not finite", "eval", tmp_path / "model", flag, file)
    cli.refuses(3, "the model's logits are not finite", "generate", tmp_path / "model", "--prompt", "The match")
    model.model.norm.weight.data *= 1e-33
    saved(tmp_path / "large", model, tokenizer_directory)
    for more in ((), ("--against", tmp_path / "large")):
        cli.refuses(3, "nats per token has no perplexity", "eval", tmp_path / "large", "--text", text, *more)


def test_documents_with_nothing_to_score_give_no_interval_or_no_score(checkpoint: Path) -> None:
    over, under = [3.0, 2.0, 4.0, 3.0] * 5, [2, 2, 3, 2] * 5
    wanted = ratio_interval(over, under)
    assert wanted is not None and ratio_interval([*over, 0.0], [*under, 0]) == wanted
    assert ratio_interval([*over[:5], *[0.0] * 15], [*under[:5], *[0] * 15]) is None
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=5e-5)  # five of ten
    with pytest.raises(ArtifactError, match="empty"):
        score_documents(open_decoder(checkpoint), load_tokenizer(checkpoint), [])


@pytest.mark.parametrize(
    "fields", ["oops", '"answer": 0', '"choices": ["a"], "answer": 0', '"choices": ["a", "b"], "answer": -1']
)
def test_bad_questions_are_named(tmp_path: Path, fields: str) -> None:
    path = tmp_path / "q.jsonl"
    good = json.dumps({"question": "q", "choices": ["a", "b"], "answer": 1})
    path.write_text(f'{good}\n{{"question": "q", {fields}}}\n', encoding="utf-8")
    with pytest.raises(ArtifactError, match="line 2"):
        read_questions(path)
