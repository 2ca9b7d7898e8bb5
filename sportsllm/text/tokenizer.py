"""A checkpoint's tokenizer.json: text and conversations to ids, and ids to text. Imports no torch."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from sportsllm.console import log, log_once
from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip, read_json, valid_text
from sportsllm.models.config import ModelConfig
from sportsllm.process_memory import give_back
from sportsllm.text.chat import ChatRenderer, find_template, render_conversations
from sportsllm.text.conversations import Conversation, Document, plain_text
from sportsllm.text.documents import USUAL, Reading

PAD = "<|pad|>"
_MOST_IDS = 2**22
_PROBE = "A Δ 1 \U0001f600"
_CHARACTERS_AT_FIRST, _CHARACTERS_AT_ONCE = 2**13, 2**20
_SLOW = ("tokenizer.model", "vocab.json")  # which `transformers` converts
_ENCODING, _PRINTING = Lock(), Lock()
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The byte behind each character of a byte-level token (https://github.com/openai/gpt-2, `bytes_to_unicode`)."""
Item = TypeVar("Item")


class EncodedDocument(NamedTuple):
    """A document's tokens.

    Attributes:
        ids: from the begin token, or as the chat template writes them.
        scored: of each token whether it is learned and scored; None for all.
        bytes: UTF-8 bytes of the scored text.
    """

    ids: list[int]
    scored: list[bool] | None
    bytes: int


def take(items: Iterator[Item], most: int, size: Callable[[Item], int]) -> Iterator[Item]:
    """The next items, until their sizes add up to `most` or more."""
    taken = 0
    while taken < most and (item := next(items, None)) is not None:
        taken += size(item)
        yield item


class TextTokenizer:
    """Text to ids and back, without special tokens, which callers place themselves.

    Attributes:
        begin_id: the token a document starts with: the begin token, or the end token if there is none (Qwen).
        end_id: the token a document ends with, or None.
        directory: with the chat template; None without one.
        reading: which tokens of a document count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        begin_id: int,
        end_id: int | None,
        directory: Path | None = None,
        reading: Reading = USUAL,
    ) -> None:
        self._tokenizer, self.directory, self.reading = tokenizer, directory, reading
        # Text that merely spells a special token stays text.
        self._tokenizer.encode_special_tokens = True
        self.begin_id, self.end_id = begin_id, end_id
        self.pad_id: int | None = tokenizer.token_to_id(PAD)

    @property
    def vocab_size(self) -> int:
        """Entries, special tokens included; every id is below it."""
        return int(max(self._tokenizer.get_vocab(with_added_tokens=True).values())) + 1

    def to_json(self) -> str:
        """The tokenizer.json that is in use."""
        return to_json(self._tokenizer)

    def fingerprint(self) -> str:
        """Equal for two tokenizers that give the same ids and scored tokens."""
        template = None if self.directory is None else find_template(self.directory)
        return f"{self.to_json()} {self.begin_id} {self.end_id} {template} {self.reading}"

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`; with `special`, text that spells a special token becomes it (a chat template's does)."""
        with self._special_tokens(special):
            return list(self._tokenizer.encode(valid_text(text), add_special_tokens=False).ids)

    @contextmanager
    def _special_tokens(self, meant: bool) -> Iterator[None]:
        """Inside, text that spells a special token becomes it if that is meant; for one thread at a time."""
        with _ENCODING:
            self._tokenizer.encode_special_tokens = not meant
            try:
                yield
            finally:
                self._tokenizer.encode_special_tokens = True

    def encode_documents(self, documents: Iterable[Document], end: bool = False) -> Iterator[EncodedDocument]:
        """Tokens of documents; those of plain text from the begin token, with `end` to the end token.

        Raises:
            ArtifactError: a conversation cannot be rendered, or has no assistant turn to score.
        """
        rest, size = iter(documents), _CHARACTERS_AT_FIRST  # few: not every caller reads on
        while part := list(take(rest, size := min(2 * size, _CHARACTERS_AT_ONCE), lambda each: len(plain_text(each)))):
            yield from self._encode_some(part, [self.end_id] if end and self.end_id is not None else [])

    def _encode_some(self, documents: Sequence[Document], last: list[int]) -> Iterator[EncodedDocument]:
        texts = [valid_text(document) for document in documents if isinstance(document, str)]
        with self._special_tokens(self.reading.parse_special):
            plain = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        chats = self._encode_conversations([each for each in documents if isinstance(each, Conversation)])
        for document in documents:
            if isinstance(document, str):
                yield EncodedDocument([self.begin_id, *next(plain).ids, *last], None, len(document.encode()))
            else:
                yield next(chats)

    def _encode_conversations(self, conversations: Sequence[Conversation]) -> Iterator[EncodedDocument]:
        if not conversations:
            return
        if self.directory is None:
            raise ArtifactError(f"{conversations[0].where}: the tokenizer has no chat template; give plain text")
        messages, where = [each.records() for each in conversations], [each.where for each in conversations]
        rendered = list(render_conversations(self.directory, messages, where, self.special_texts))
        with self._special_tokens(True):
            encodings = self._tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        everything = self.reading.loss_on == "all"
        for conversation, encoding, (text, replies) in zip(conversations, encodings, rendered, strict=True):
            if conversation.unlearned and len(replies) != sum(role == "assistant" for role, _ in conversation.messages):
                raise ArtifactError(
                    f"{conversation.where}: the template leaves turns out; delete the row, or its weights"
                )
            muted = [replies[number] for number in conversation.unlearned]
            scored = [(everything or _inside(span, replies)) and not _inside(span, muted) for span in encoding.offsets]
            if not any(scored[1:]):
                raise ArtifactError(
                    f"{conversation.where}: no assistant turn, so there is nothing to learn; delete the row"
                )
            size = len((text if everything else conversation.replies).encode())
            size -= sum(len(text[at:to].encode()) for at, to in muted) if everything else 0
            yield EncodedDocument(list(encoding.ids), scored, size)

    @cached_property
    def special_texts(self) -> list[str]:
        """Spellings of the special tokens."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def special_ids(self, texts: Iterable[str]) -> list[int]:
        """Ids of the texts that spell a special token, which decoding leaves out."""
        return [self._tokenizer.token_to_id(text) for text in texts if valid_text(text) in self.special_texts]

    @cached_property
    def turn_ends(self) -> list[int]:
        """The special token that the chat template ends a reply with, if it does: not every config.json names it."""
        turns = ("user", "Hi"), ("assistant", "Hi"), ("user", "Hi")  # behind the last one Phi-3.5's also ends the text
        with suppress(ArtifactError):
            usual = copy(self)
            usual.reading = USUAL  # others may score more than the reply
            (encoded,) = usual.encode_documents([Conversation(turns)])
            last = [token for token, scored in zip(encoded.ids, encoded.scored or [], strict=True) if scored][-1]
            return [last] if self._tokenizer.id_to_token(last) in self.special_texts else []
        return []

    @cached_property
    def render_chat(self) -> ChatRenderer:
        """The directory's chat template."""
        assert self.directory is not None, "read from a directory"
        return ChatRenderer(self.directory)

    def warn_if_special(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents; then log how often they spell a special token, and what becomes of it."""
        spelled, counts = re.compile("|".join(map(re.escape, self.special_texts)) or "(?!)"), Counter[bool]()
        for document in documents:
            counts[isinstance(document, str)] += len(spelled.findall(plain_text(document)))
            yield document
        if counts[True] and not self.reading.parse_special:
            meaning = "they are read as ordinary characters; give --set parse_special=true to read them as tokens"
            log(f"the text spells special tokens {counts[True]:,} times; {meaning}")
        if counts[False]:
            log(f"messages spell special tokens {counts[False]:,} times; the chat template turns them into the tokens")

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of ids; special tokens give nothing, or their spelling with `special`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def piece(self, token: int) -> str:
        """Text of one token behind others, with its space; what a special token is spelled like."""
        anchor = self._anchor()
        text = self.decode([*anchor, token])[len(self.decode(anchor)) :]
        return text or self._tokenizer.id_to_token(token) or ""

    def piece_bytes(self, token: int) -> bytes:
        """UTF-8 of `piece`; if the token is a part of a character, its own bytes."""
        text, spelled = self.piece(token), self._tokenizer.id_to_token(token) or ""
        if "\ufffd" not in text:
            return text.encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", spelled):
            return bytes.fromhex(spelled[3:5])
        known = all(character in BYTE_OF for character in spelled)
        return bytes(map(BYTE_OF.__getitem__, spelled)) if known else text.encode()

    def decode_stream(self, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
        """Text as its tokens arrive, never half a character; `prompt` is context and is not yielded."""
        yield from filter(None, map(self.decoder(prompt), tokens))

    def decoder(self, prompt: Sequence[int]) -> Callable[[int], str]:
        """A function from the next token to the text that it completes, never half a character."""
        stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)

        def text_of(token: int) -> str:
            nonlocal stream
            try:
                return stream.step(self._tokenizer, token) or ""
            except Exception:  # bytes before it are no character after all; the library knows no other error
                stream = DecodeStream(ids=self._anchor(), skip_special_tokens=True)
                return stream.step(self._tokenizer, token) or ""

        return text_of

    def _anchor(self) -> list[int]:
        """A letter, behind which a token has its space; unlike `encode` this changes nothing that others read."""
        return list(self._tokenizer.encode("a", add_special_tokens=False).ids[-1:])


def to_json(tokenizer: Tokenizer, pretty: bool = False) -> str:
    """`Tokenizer.to_str` without the line that the library prints of a vocabulary in which ids are missing.

    For such a vocabulary alone, standard output is closed for a moment, to other threads too.
    """
    ids = tokenizer.get_vocab(with_added_tokens=False).values()
    if len(ids) == max(ids, default=-1) + 1:
        return str(tokenizer.to_str(pretty))
    with _PRINTING, Path(os.devnull).open("wb") as nowhere:
        try:
            printed = os.dup(1)
        except OSError:  # standard output is closed
            return str(tokenizer.to_str(pretty))
        os.dup2(nowhere.fileno(), 1)
        try:
            return str(tokenizer.to_str(pretty))
        finally:
            os.dup2(printed, 1)
            os.close(printed)


def _inside(span: tuple[int, int], parts: Iterable[tuple[int, int]]) -> bool:
    """Whether a token has characters of one of the parts of a text."""
    return any(span[0] < to and span[1] > at for at, to in parts)


def read_tokenizer(path: Path, rows: int | None = None) -> Tokenizer:
    """Read a tokenizer.json; added tokens beyond the `rows` of the embedding are left out, see `leave_out`.

    Raises:
        ArtifactError: missing or damaged.
    """
    if not path.exists():
        other = next((name for name in _SLOW if (path.parent / name).exists()), None)
        advice = f"write it from {other} by AutoTokenizer of transformers and its save_pretrained"
        raise ArtifactError(f"{path}: not found; {advice if other else 'the directory needs its tokenizer'}")
    data = read_json(path)
    _check_ids(data, path)
    try:
        changed = rows is not None and leave_out(data, path, rows)
        text = json.dumps(data) if changed else path.read_text(encoding="utf-8")
        del data  # takes more memory than the tokenizer
        tokenizer = Tokenizer.from_str(text)
        ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        tokenizer.decode(ids)
        if not tokenizer.get_vocab_size():
            raise ValueError("it has no tokens")
    except BaseException as error:  # the library raises plain Exception for faults of the file, and panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ArtifactError(f"{path}: not a readable tokenizer ({clip(error, 200)}); copy or train it again") from None
    give_back()  # its JSON took fifteen times the file's size: 0.5 GB for a vocabulary of 262,144
    return tokenizer


def _check_ids(data: JsonObject, path: Path) -> None:
    """Refuse ids for which the library would allocate more memory than there is, and abort the process."""
    model, added = data.get("model"), data.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    records = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    ids += [token.get("id") for token in records]
    (text, times), *_ = [*Counter(repr(token.get("content")) for token in records).most_common(1), ("", 0)]
    if times > 1:
        raise ArtifactError(f"{path}: {times} added tokens are spelled {clip(text)}; copy it again")
    wrong = next((each for each in ids if type(each) is not int or not 0 <= each < _MOST_IDS), None)
    if wrong is not None:
        raise ArtifactError(f"{path}: token id {clip(repr(wrong))} is not a number below {_MOST_IDS:,}; copy it again")


def leave_out(data: JsonObject, path: Path, rows: int) -> bool:
    """Remove added tokens that the embedding has no row for, as Gemma 3's of images; whether there were any.

    Those that the chat template writes stay, and are refused later: the tokenizer is another model's.
    """
    template, _ = find_template(path.parent)
    added = data.get("added_tokens") or []
    beyond = [token for token in added if token["id"] >= rows and token["content"] not in (template or "")]
    if beyond:
        texts = clip(", ".join(str(token["content"]) for token in beyond))
        log_once(f"{path}: ignoring {texts}; the embedding has only {rows:,} rows")
        data["added_tokens"] = [token for token in added if token not in beyond]
    return bool(beyond)


def load_tokenizer(directory: Path, config: ModelConfig | None = None, reading: Reading = USUAL) -> TextTokenizer:
    """Read the tokenizer.json of a checkpoint or an export.

    The model's config names the begin and end tokens and bounds the ids; without it tokenizer_config.json names them.

    Raises:
        ArtifactError: missing, damaged, or it makes ids the embedding does not have.
    """
    path = directory / "tokenizer.json"
    tokenizer = read_tokenizer(path, None if config is None else config.vocab_size)
    begin, end = _special_ids(directory, tokenizer, config)
    if begin is None:
        raise ArtifactError(f"{directory}: no begin or end token is named; set bos_token_id in config.json")
    result = TextTokenizer(tokenizer, begin, end, directory, reading)
    if config is not None and max(result.vocab_size, begin + 1, (end or 0) + 1) > config.vocab_size:
        raise ArtifactError(
            f"{path}: makes ids up to {result.vocab_size - 1}, but the embedding has {config.vocab_size} rows; "
            "use the tokenizer the model was trained with"
        )
    return result


def _special_ids(directory: Path, tokenizer: Tokenizer, config: ModelConfig | None) -> tuple[int | None, int | None]:
    if config is not None:
        begin, end = config.bos_token_id, next(iter(config.stop_token_ids), None)
    else:
        names = read_json(directory / "tokenizer_config.json")

        def identify(key: str) -> int | None:
            token = names.get(key)
            text = token.get("content") if isinstance(token, dict) else token
            return tokenizer.token_to_id(text) if isinstance(text, str) and text else None

        begin, end = identify("bos_token"), identify("eos_token")
    return (end if begin is None else begin), end


def stop_tokens(directory: Path, config: ModelConfig) -> tuple[int, ...]:
    """The config's stop tokens, and the token that the chat template ends a reply with, if there is one."""
    ends = list[int]()
    with suppress(ArtifactError):  # an export may have no tokenizer
        ends = load_tokenizer(directory, config).turn_ends
    return tuple(dict.fromkeys([*config.stop_token_ids, *ends]))


def same_tokenizer(first: Path, second: Path) -> bool:
    """Whether two directories turn text into the same ids (equal vocabularies and merges)."""
    a, b = (read_json(path / "tokenizer.json") for path in (first, second))
    return all(a.get(key) == b.get(key) for key in ("model", "normalizer", "pre_tokenizer", "added_tokens"))
