"""What a text costs in tokens, and how it is cut into them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from tokenizers import Tokenizer

from sportsllm.console import progress_bar
from sportsllm.text.conversations import Document, plain_text
from sportsllm.text.tokenizer import BYTE_OF, TextTokenizer

_DOCUMENTS_AT_ONCE = 256
_SPACE = "▁"  # SentencePiece's


def count_tokens(
    tokenizers: Sequence[TextTokenizer], documents: Iterable[Document]
) -> tuple[Counter[str], list[Counter[int]]]:
    """Documents, UTF-8 bytes and words of a text, and how often each tokenizer's tokens occur in it.

    Begin and end tokens are left out. Conversations are read as the chat template writes them.
    """
    size, counts, rest = Counter[str](), [Counter[int]() for _ in tokenizers], iter(documents)
    with progress_bar("tokens", None) as bar:
        while part := list(islice(rest, _DOCUMENTS_AT_ONCE)):
            for tokenizer, count in zip(tokenizers, counts, strict=True):
                for each in tokenizer.encode_documents(part):
                    count.update(each.ids[each.scored is None :])
            for text in map(plain_text, part):
                size.update(documents=1, bytes=len(text.encode()), words=len(text.split()))
            bar.advance(note=f"{size['bytes'] / 1e6:.1f} MB")
    return size, counts


def token_pieces(tokenizer: Tokenizer, text: str, count: int) -> list[str]:
    """The first `count` tokens of a text in readable form: their text, or bytes as `<0xE6>` for part of a character."""
    tokenizer.encode_special_tokens = True
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens[:count]
    if tokenizer.decoder is not None and b"ByteLevel" in tokenizer.decoder.__getstate__():
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
