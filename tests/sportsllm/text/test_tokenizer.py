import json
import os
import re
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import read_json
from sportsllm.formats.huggingface import load_config
from sportsllm.serving.sampler import Constraints
from sportsllm.text.documents import read_documents
from sportsllm.text.token_counts import count_tokens, token_pieces
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer, read_tokenizer
from sportsllm.text.tokenizer_training import train_tokenizer
from tests.support.models import TINY_VOCAB, tiny_config

HARD = [
    "Full-time: 2-1!", "  two  spaces\tand\n\nlines\r\n", "naïve Žalgiris 東京 🏉👩‍👩‍👧 \u200b\ufeff",
    "<|begin|> spelled out, <|end|> too <|pad|>", "\x00\x01\x7f", "",
]  # fmt: skip


@pytest.fixture
def tokenizer(tokenizer_directory: Path) -> TextTokenizer:
    return load_tokenizer(tokenizer_directory)


@pytest.mark.parametrize("text", HARD)
def test_any_text_survives(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2} & set(ids), "text that spells a special token is text"
    assert next(tokenizer.encode_documents([text])).ids == [tokenizer.begin_id, *ids]


def test_stream_is_the_text_and_never_half_a_character(tokenizer: TextTokenizer) -> None:
    text = "Goal! 東京 🏉 wins."
    prompt, rest = tokenizer.encode("Report: "), tokenizer.encode(text)
    pieces = list(tokenizer.decode_stream(prompt, rest))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_vocabulary_with_holes_prints_nothing(
    tokenizer_directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = read_json(tokenizer_directory / "tokenizer.json")
    data["model"]["merges"] = data["model"]["merges"][:-2]
    data["model"]["vocab"] = {token: n for token, n in data["model"]["vocab"].items() if n != TINY_VOCAB - 2}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    holed = TextTokenizer(read_tokenizer(tmp_path / "tokenizer.json"), 0, 1)
    assert json.loads(holed.to_json()) and holed.fingerprint()
    assert capfd.readouterr().out == ""


def test_other_threads_may_print_meanwhile(tokenizer: TextTokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        printing = pool.submit(lambda: [os.write(1, b"line\n") for _ in range(2_000)])
        while not printing.done():
            tokenizer.to_json()
    assert capfd.readouterr().out == "line\n" * 2_000


def test_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="259"):
        train_tokenizer(["text"], 100, tmp_path)


def test_a_small_corpus_is_filled_up_with_reserved_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer(["text"], 400, tmp_path)
    assert tokenizer.vocab_size == 400 and load_tokenizer(tmp_path).vocab_size == 400
    assert "reserved" in capsys.readouterr().err
    text = "text <|reserved_0|> 東京"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < 300


def test_ids_beyond_the_embedding_are_refused(tokenizer_directory: Path) -> None:
    with pytest.raises(ArtifactError, match="embedding has 300 rows"):
        load_tokenizer(tokenizer_directory, tiny_config(vocab_size=300))


def test_the_parsed_file_is_freed_before_the_tokenizer_is_made(
    tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parsed(dict[str, Any]):
        """A dictionary that can be watched."""

    read = list[weakref.ref[Parsed]]()

    def parse(path: Path) -> Parsed:
        read.append(weakref.ref(data := Parsed(read_json(path))))
        return data

    def from_str(text: str) -> Tokenizer:
        assert read[0]() is None
        return Tokenizer.from_str(text)

    monkeypatch.setattr("sportsllm.text.tokenizer.read_json", parse)
    monkeypatch.setattr("sportsllm.text.tokenizer.Tokenizer", SimpleNamespace(from_str=from_str))
    assert read_tokenizer(tokenizer_directory / "tokenizer.json").get_vocab_size() == TINY_VOCAB


@pytest.mark.parametrize("template", ["", "{{ messages }}<|image|>"])
def test_an_added_token_without_a_row_is_left_out(
    tokenizer_directory: Path, template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Gemma 3's for images; but not one that the chat template writes."""
    data = json.loads((tokenizer_directory / "tokenizer.json").read_text(encoding="utf-8"))
    data["added_tokens"].append({**data["added_tokens"][0], "id": TINY_VOCAB, "content": "<|image|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    if template:
        with pytest.raises(ArtifactError, match=f"makes ids up to {TINY_VOCAB}, but the embedding has {TINY_VOCAB}"):
            load_tokenizer(tmp_path, tiny_config())
        return
    tokenizer = load_tokenizer(tmp_path, tiny_config())
    assert "ignoring <|image|>; the embedding has only 384 rows" in capsys.readouterr().err
    assert tokenizer.vocab_size == TINY_VOCAB
    assert tokenizer.encode("an <|image|>", special=True) == load_tokenizer(tokenizer_directory).encode("an <|image|>")
    for stops in ([1], []):
        assert Constraints(tokenizer, tiny_config(), stops).make("regex", "a+")


TEXT = "Obura 82-84 Vestnes, naïve 東京\n🏉 <|begin|>"


def test_counts_are_sums_over_documents(tokenizer: TextTokenizer, texts: list[str], corpus_file: Path) -> None:
    size, [count] = count_tokens([tokenizer], read_documents([corpus_file]))
    assert size == {
        "documents": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "words": sum(len(re.findall(r"\S+", text)) for text in texts),
    }
    assert count == Counter(token for text in texts for token in tokenizer.encode(text))


def test_pieces_are_the_text(tokenizer_directory: Path) -> None:
    tokenizer = read_tokenizer(tokenizer_directory / "tokenizer.json")
    pieces = token_pieces(tokenizer, TEXT, 1_000)
    assert len(pieces) == len(load_tokenizer(tokenizer_directory).encode(TEXT))
    joined = b"".join(
        bytes.fromhex(re.sub(r"<0x|>", "", piece)) if re.fullmatch(r"(<0x[0-9A-F]{2}>)+", piece) else piece.encode()
        for piece in pieces
    )
    assert joined == TEXT.encode()
    assert "<0xE6>" in pieces, "a byte of a character that no token holds whole"
    assert token_pieces(tokenizer, TEXT, 3) == pieces[:3]


def test_a_piece_does_not_disturb_what_another_thread_encodes(tokenizer: TextTokenizer) -> None:
    token = tokenizer.encode(" ball")[-1]
    with tokenizer._special_tokens(True):
        assert tokenizer.piece(token)
        assert not tokenizer._tokenizer.encode_special_tokens


@pytest.mark.parametrize("kind", ["tokenizer_directory", "stories"])
def test_bytes_of_pieces_make_up_characters_that_no_token_holds(kind: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    tokenizer = load_tokenizer(directory, load_config(directory) if kind == "stories" else None)
    pieces = [tokenizer.piece_bytes(token) for token in tokenizer.encode(TEXT)]
    assert b"".join(pieces).strip() == TEXT.encode().strip() and b"\xe6" in pieces


def test_pieces_of_sentencepiece(stories: Path) -> None:
    pieces = token_pieces(read_tokenizer(stories / "tokenizer.json"), "Once upon a time", 10)
    assert "".join(pieces) == " Once upon a time" and "▁" not in "".join(pieces)


def test_a_stream_goes_on_after_bytes_that_are_no_character(stories: Path) -> None:
    tokenizer = load_tokenizer(stories, load_config(stories))
    pieces = tokenizer.decode_stream([214, 151, 209, 168, 228], [193, 178, 238, 135, 403, 407])
    assert "".join(pieces).endswith(" Once upon")


def test_digits_are_grouped_or_single_and_transformers_reads_both_alike(texts: list[str], tmp_path: Path) -> None:
    """Where digits are grouped, two or more of them become one token in the same texts."""
    tokens: dict[str, list[str]] = {}
    for digits in ("grouped", "single"):
        (out := tmp_path / digits).mkdir()
        words = train_tokenizer(texts, 600, out, digits)
        text = "Final score: Obura 82-84 Vestnes, 1066, naïve 東京\n🏉 1½ ١٢"
        assert words.decode(words.encode(text)) == text
        peer = transformers.AutoTokenizer.from_pretrained(str(out))
        assert peer(text)["input_ids"] == [words.begin_id, *words.encode(text)]
        tokenizer = read_tokenizer(out / "tokenizer.json")
        tokens[digits] = [piece for text in texts for piece in token_pieces(tokenizer, text, len(text))]
    with_digits = {digits: {piece for piece in found if re.search(r"\d", piece)} for digits, found in tokens.items()}
    assert with_digits["single"] == set("0123456789")
    assert any(len(piece.strip()) > 1 for piece in with_digits["grouped"])
