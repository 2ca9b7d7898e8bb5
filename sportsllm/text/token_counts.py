"""What a text costs in tokens. Imports no torch: the device install reads it too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tokenizers import Tokenizer

from sportsllm.console import progress_bar

_DOCUMENTS_AT_ONCE = 256
_SPACE = "▁"  # SentencePiece's


@dataclass
class TokenCounts:
    """Counts of a text: begin and end tokens are left out, words are what white space separates.

    `bytes` are those of the text in UTF-8, `used` the ids that occur.
    """

    documents: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0
    used: set[int] = field(default_factory=set)

    def add(self, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        """Count some documents and their ids."""
        self.documents += len(texts)
        self.bytes += sum(len(text.encode()) for text in texts)
        self.words += sum(len(text.split()) for text in texts)
        for row in ids:
            self.tokens += len(row)
            self.used.update(row)


def count_tokens(tokenizers: Sequence[Tokenizer], documents: Iterable[str]) -> list[TokenCounts]:
    """The counts of each tokenizer on the same documents; text that spells a special token is counted as text."""
    counts = [TokenCounts() for _ in tokenizers]
    rest = iter(documents)
    with progress_bar("tokens", None) as bar:
        while texts := list(islice(rest, _DOCUMENTS_AT_ONCE)):
            for tokenizer, count in zip(tokenizers, counts, strict=True):
                tokenizer.encode_special_tokens = True
                encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                count.add(texts, [item.ids for item in encoded])
            bar.advance(note=f"{counts[0].bytes / 1e6:.1f} MB")
    return counts


def token_pieces(tokenizer: Tokenizer, text: str, count: int) -> list[str]:
    """The first `count` tokens of a text as they can be read: their text, or their bytes as `<0xE6>` where a token
    holds a part of a character.
    """
    tokenizer.encode_special_tokens = True
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens[:count]
    if "ByteLevel" in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        return [_from_bytes(token) for token in tokens]
    return [token.replace(_SPACE, " ") for token in tokens]


def visible_piece(piece: str) -> str:
    """Line breaks and other control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in piece)


def _from_bytes(token: str) -> str:
    try:
        data = bytes(_BYTES[character] for character in token)
    except KeyError:  # an added token, which is written as it is
        return token
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in data)


def _byte_characters() -> dict[str, int]:
    """The byte behind each character of a byte-level token (https://github.com/openai/gpt-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
