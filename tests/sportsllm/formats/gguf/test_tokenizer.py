"""Tokenizers of GGUF files against slow ones written from their descriptions."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import transformers

from sportsllm.errors import ArtifactError
from sportsllm.formats.gguf.config import GGUFFile, open_gguf
from sportsllm.formats.gguf.tokenizer import PRE_TOKENIZERS, write_tokenizer
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.gguf_files import byte_level, write_file

TEXTS = [
    "The home side won 3-1, 12345 people SAW it; they'll and THEY'LL return.",
    " two  spaces,\na\ttab\r\n\r\n  and “quotes”   \n",
    "Zoë ran 57½ metres in Ⅷ! ⚽⚽ ümlaut 한국 日本語 ١٢٣",
    "x",
    " ",
    "under_score's\u00a0don't...?!\n\n\n   end ",
]
# The expressions as llama.cpp's vocabulary code lists them, one after the other on what the former left.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
QWEN2 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "refact": [r"\p{N}", GPT2],
    "llama-bpe": [QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")],
    "qwen2": [QWEN2],
    "deepseek-r1-qwen": [QWEN2],
}


def pieces_of(text: str, expressions: Sequence[str]) -> list[str]:
    """Matches, and what lies between them."""
    pieces = [text]
    for expression in expressions:
        pieces = [part for piece in pieces for part in regex.split(f"({expression})", piece) if part]
    return pieces


def slow_ids(text: str, tokenizer: dict[str, Any]) -> list[int]:
    """GPT-2's published BPE: join the pair of the lowest rank, leftmost first, until none is left."""
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    names, ids = bytes_to_unicode(), {token: number for number, token in enumerate(tokenizer["tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(tokenizer["merges"])}
    found = []
    for piece in pieces_of(text, EXPRESSIONS[tokenizer["pre"]]):
        symbols = [names[byte] for byte in piece.encode()]
        while pairs := [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]:
            place = min(pairs)[1]
            symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
        found += [ids[symbol] for symbol in symbols]
    return found


def imported(path: Path, tokenizer: dict[str, Any], out: Path) -> GGUFFile:
    file = open_gguf(write_file(path, "llama", {}, tokenizer, {"token_embd.weight": np.zeros((4, 4), np.float32)}))
    out.mkdir(exist_ok=True)
    write_tokenizer(file, out)
    return file


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_byte_level_tokens(name: str, tokenizer_directory: Path, tmp_path: Path) -> None:
    tokenizer = byte_level(tokenizer_directory, pre=name)
    imported(tmp_path / "model.gguf", tokenizer, tmp_path / "out")
    found = load_tokenizer(tmp_path / "out")
    for text in TEXTS:
        assert found.encode(text) == slow_ids(text, tokenizer), (name, text)
        assert found.decode(found.encode(text)) == text
    if name == "gpt-2":
        ours = load_tokenizer(tokenizer_directory)
        assert [found.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_digits_are_single_or_in_threes(tokenizer_directory: Path, tmp_path: Path) -> None:
    """A vocabulary with the token 12, which only rules that keep digits together can make."""
    ids = {}
    for name in PRE_TOKENIZERS:
        tokenizer = byte_level(tokenizer_directory, pre=name)
        tokenizer["tokens"][-1], tokenizer["merges"] = "12", [*tokenizer["merges"][:-1], "1 2"]
        imported(tmp_path / f"{name}.gguf", tokenizer, tmp_path / name)
        ids[name] = load_tokenizer(tmp_path / name).encode("1212")
        assert ids[name] == slow_ids("1212", tokenizer)
    assert [len(ids[name]) for name in PRE_TOKENIZERS] == [2, 4, 4, 4, 3, 4, 4]


def slow_sentencepiece(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """SentencePiece's BPE: join the neighbours whose union scores highest; characters without a token as bytes."""
    ids = {token: number for number, token in enumerate(tokens)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while pairs := [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]:
        place = min(pairs)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def sentencepiece(pieces: Sequence[str]) -> dict[str, Any]:
    """Special tokens, bytes, then `pieces` with falling scores, as SentencePiece trains them."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(number) for number in range(len(pieces))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def test_sentencepiece_tokens(tmp_path: Path) -> None:
    """Random vocabularies over three letters, where nearly every pair of neighbours could be joined."""
    rng = random.Random(0)
    for round_ in range(10):
        pieces = {"".join(rng.choices("▁ab", k=rng.choice([2, 2, 2, 3, 3, 4, 5]))) for _ in range(40)}
        order = sorted(pieces)
        rng.shuffle(order)
        tokenizer = sentencepiece([*order, "▁", "a", "b"])
        imported(tmp_path / f"{round_}.gguf", tokenizer, tmp_path / str(round_))
        found = load_tokenizer(tmp_path / str(round_))
        for _ in range(50):
            text = "".join(rng.choices(" abé", weights=[2, 4, 4, 1], k=rng.randrange(1, 30)))
            assert found.encode(text) == slow_sentencepiece(text, tokenizer["tokens"], tokenizer["scores"]), text
            assert found.decode(found.encode(text)) == text


def test_special_tokens_and_template(tokenizer_directory: Path, tmp_path: Path) -> None:
    tokenizer = byte_level(tokenizer_directory, add_bos_token=True)
    tokenizer["tokens"][-2:] = ["<turn>", "[PAD383]"]
    tokenizer["token_type"][-2:], tokenizer["merges"] = [4, 5], tokenizer["merges"][:-2]
    file = write_file(tmp_path / "m.gguf", "llama", {}, tokenizer, {"token_embd.weight": np.zeros((4, 4), np.float32)})
    template = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
    opened = open_gguf(file)
    write_tokenizer(GGUFFile(file, {**opened.metadata, "tokenizer.chat_template": template}, opened.tensors), tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<|begin|>", "<|end|>", "<|pad|>")
    assert theirs("Goal<turn>").input_ids == [0, *load_tokenizer(tmp_path).encode("Goal"), 382]
    assert theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi<|end|>"
    assert len(theirs) == 383


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' (tokenizer.ggml.pre) is not known"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["never seen"]}, "'never seen' is no merge"),
        ({"merges": [1]}, "'1' is no merge"),
        ({"token_type": [1]}, "has no type"),
        ({"tokens": [*range(384)]}, "is not a string"),
        ({"eos_token_id": 9999}, "eos_token_id is 9999"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [0.0] * 384}, "lacks byte tokens"),
        (sentencepiece("ab") | {"scores": ["0"] * 261}, "lacks byte tokens, scores"),
    ],
)
def test_what_cannot_be_read_right_is_refused_by_name(
    changes: dict[str, Any], message: str, tokenizer_directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=regex.escape(message)):
        imported(tmp_path / "model.gguf", byte_level(tokenizer_directory, **changes), tmp_path / "out")
