"""What a text costs in tokens, and how it is cut into them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tokenizers import Tokenizer

from sportsllm.console import progress_bar
from sportsllm.text.conversations import Document, plain_text
from sportsllm.text.tokenizer import BYTE_OF, TextTokenizer

_DOCUMENTS_AT_ONCE = 256
_SPACE = "▁"  # SentencePiece's


@dataclass
class TokenCounts:
    """Counts of a text, without begin and end tokens.

    `bytes` are UTF-8, `words` are separated by white space, `used` are the ids that occur.
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


def count_tokens(tokenizers: Sequence[TextTokenizer], documents: Iterable[Document]) -> list[TokenCounts]:
    """The counts of each tokenizer on the same documents, of conversations as its chat template writes them."""
    counts = [TokenCounts() for _ in tokenizers]
    rest = iter(documents)
    with progress_bar("tokens", None) as bar:
        while part := list(islice(rest, _DOCUMENTS_AT_ONCE)):
            for tokenizer, count in zip(tokenizers, counts, strict=True):
                encoded = tokenizer.encode_documents(part)
                count.add(list(map(plain_text, part)), [each.ids[each.scored is None :] for each in encoded])
            bar.advance(note=f"{counts[0].bytes / 1e6:.1f} MB")
    return counts


def token_pieces(tokenizer: Tokenizer, text: str, count: int) -> list[str]:
    """The first `count` tokens of a text in readable form: their text, or bytes as `<0xE6>` for part of a character."""
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
        data = bytes(BYTE_OF[character] for character in token)
    except KeyError:  # an added token is plain text
        return token
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in data)
