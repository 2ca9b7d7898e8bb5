"""Counts of tokens against the library's own ids, and pieces against the text they come from."""

import re
from pathlib import Path

from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import count_tokens, load_tokenizer, read_tokenizer, token_pieces, train_tokenizer
from tests.support.models import TINY_VOCAB

TEXT = "Obura 82-84 Vestnes, naïve 東京\n🏉 <|begin|>"


def test_counts_are_sums_over_documents(tokenizer_directory: Path, texts: list[str], corpus_file: Path) -> None:
    tokenizer, words = read_tokenizer(tokenizer_directory / "tokenizer.json"), load_tokenizer(tokenizer_directory)
    [count] = count_tokens([tokenizer], read_documents([corpus_file]))
    ids = [words.encode(text) for text in texts]
    assert (count.documents, count.tokens) == (len(texts), sum(map(len, ids)))
    assert count.bytes == sum(len(text.encode()) for text in texts)
    assert count.words == sum(len(re.findall(r"\S+", text)) for text in texts)
    assert count.used == {token for row in ids for token in row}


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


def test_pieces_of_sentencepiece(stories: Path) -> None:
    pieces = token_pieces(read_tokenizer(stories / "tokenizer.json"), "Once upon a time", 10)
    assert "".join(pieces) == " Once upon a time" and "▁" not in "".join(pieces)


def test_single_digits_are_tokens_of_their_own(texts: list[str], tmp_path: Path) -> None:
    """Where digits are grouped, two or more of them become one token in the same texts."""
    tokens: dict[str, list[str]] = {}
    for digits in ("grouped", "single"):
        (tmp_path / digits).mkdir()
        words = train_tokenizer(texts, 600, tmp_path / digits, digits)
        text = "won 21-19, 1066 ½ ١٢"
        assert words.decode(words.encode(text)) == text
        tokenizer = read_tokenizer(tmp_path / digits / "tokenizer.json")
        tokens[digits] = [piece for text in texts for piece in token_pieces(tokenizer, text, len(text))]
    with_digits = {digits: {piece for piece in found if re.search(r"\d", piece)} for digits, found in tokens.items()}
    assert with_digits["single"] == set("0123456789")
    assert any(len(piece.strip()) > 1 for piece in with_digits["grouped"])


def test_transformers_splits_single_digits_alike(texts: list[str], tmp_path: Path) -> None:
    import transformers

    words = train_tokenizer(texts, TINY_VOCAB, tmp_path, "single")
    peer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert peer(TEXT.replace("<|begin|>", "1½"))["input_ids"] == [
        words.begin_id, *words.encode(TEXT.replace("<|begin|>", "1½"))
    ]  # fmt: skip
