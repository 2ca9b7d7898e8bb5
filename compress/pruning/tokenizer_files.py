"""The files of a checkpoint that name token ids: how a BPE tokenizer makes its tokens, and the same files with fewer.

`read_vocabulary` checks tokenizer.json, `named_ids` finds the tokens that other files need, and `write_tokenizer`
writes them all with new ids.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from sportsllm.errors import ArtifactError
from sportsllm.formats.json_files import read_json, write_json
from sportsllm.models.config import ModelConfig

FILLER = re.compile(r"<\|reserved_\d+\|>")
"""Tokens that `train` fills a small corpus's vocabulary up with."""
MAP_FILE = "vocabulary_map.json"
MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CHILDREN = ("normalizers", "pretokenizers", "processors", "decoders")  # a Sequence's parts
_NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Lists of ids in generation_config.json whose meaning a dropped token would change.
_ID_LISTS = (
    "bad_words_ids", "begin_suppress_tokens", "force_words_ids", "forced_decoder_ids", "sequence_bias",
    "suppress_tokens",
)  # fmt: skip

Json = dict[str, Any]


@dataclass(frozen=True)
class Vocabulary:
    """A BPE tokenizer.json that was checked.

    Attributes:
        data: the parsed file.
        ids: id of every token, added ones included; longest first, so that a token comes before its halves.
        halves: the two ids that each merged token is made of.
        growth: tokens that a text grows by at each place of a dropped token: 1, or the bytes of a character less 1.
        fixed: ids that always stay: the 256 bytes, added tokens (but for the reserved ones of `train`), the unknown
            token, the tokens that are put around texts, and the characters that stand for a space.
    """

    data: Json
    ids: dict[str, int]
    halves: Mapping[int, tuple[int, int]]
    growth: Mapping[int, int]
    fixed: frozenset[int]


def read_vocabulary(data: Json, where: str) -> Vocabulary:
    """Check a tokenizer.json, named `where` in messages, and find how its tokens are made.

    Raises:
        ArtifactError: it is not a BPE that can write every byte, it has something that cannot be rewritten, or its
            parts disagree.
    """
    try:
        tokenizer = Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise ArtifactError(f"{where}: not a readable tokenizer ({error}); copy or train it again") from None
    model, kind = data["model"], type(tokenizer.model).__name__
    if kind != "BPE":
        raise ArtifactError(f"{where}: its model is {kind}; only BPE vocabularies can be pruned")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ArtifactError(f"{where}: BPE with {key} {model[key]!r} is not supported; keep the vocabulary whole")
    added = {item["content"]: item["id"] for item in data.get("added_tokens", [])}
    ids: dict[str, int] = model["vocab"] | added
    _check_ids(ids, tokenizer.get_vocab(with_added_tokens=True), where)
    put = dict(_put_tokens(data, where))
    for token, number in put.items():
        if ids.get(token) != number:
            raise ArtifactError(f"{where}: puts {token!r} around texts as id {number}, but its id is {ids.get(token)}")
    meant = {token for token in added if not FILLER.fullmatch(token)}
    fixed = {*_byte_tokens(data, where), *meant, *put, model.get("unk_token"), *_space_characters(data.get("decoder"))}
    ranks = {pair: rank for rank, pair in enumerate(_merges(model))}
    halves: dict[int, tuple[int, int]] = {}
    growth: dict[int, int] = {}
    for token, number in ids.items():
        pieces, last = _merge(list(token), ranks)
        if last is not None and pieces == [token]:
            halves[number] = ids[last[0]], ids[last[1]]
        growth[number] = max(1, (len(pieces) if len(token) > 1 else len(token.encode())) - 1)
    longest_first = dict(sorted(ids.items(), key=lambda item: -len(item[0])))
    return Vocabulary(data, longest_first, halves, growth, frozenset(ids[token] for token in fixed & ids.keys()))


def _merges(model: Json) -> list[tuple[str, str]]:
    """Merges by rank, from either way in which the file writes them."""
    pairs = (item.split(" ") if isinstance(item, str) else item for item in model["merges"])
    return [(first, second) for first, second in pairs]


def _merge(pieces: list[str], ranks: Mapping[tuple[str, str], int]) -> tuple[list[str], tuple[str, str] | None]:
    """What BPE leaves of `pieces`, and the last two that it merged."""
    last = None
    while True:
        found = [(ranks[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not found:
            return pieces, last
        place = min(found)[1]
        last = (pieces[place], pieces[place + 1])
        pieces[place : place + 2] = ["".join(last)]


def _check_ids(ids: Mapping[str, int], read: Mapping[str, int], where: str) -> None:
    """The file's ids must be those it is read with: the library numbers added tokens itself and says nothing."""
    owners: dict[int, str] = {}
    for token, number in ids.items():
        if read.get(token) != number:
            raise ArtifactError(f"{where}: gives {token!r} id {number}, but is read as {read.get(token)}; fix it")
        owner = owners.setdefault(number, token)
        if owner != token:
            raise ArtifactError(f"{where}: {owner!r} and {token!r} both have id {number}; fix it")


def _components(item: Json | None) -> Iterator[Json]:
    """A normalizer, pre-tokenizer, post-processor or decoder, and what a Sequence of them holds."""
    if item is not None:
        yield item
        for key in _CHILDREN:
            for child in item.get(key, []):
                yield from _components(child)


def _byte_tokens(data: Json, where: str) -> list[str]:
    """The tokens of the 256 bytes, as this tokenizer writes them. Byte-level BPE may lack some, which it then never
    writes, with this vocabulary or a smaller one; where bytes stand in for characters, each can be needed.
    """
    model = data["model"]
    kinds = {item["type"] for part in ("normalizer", "pre_tokenizer") for item in _components(data.get(part))}
    if "ByteLevel" in kinds:
        return sorted({*pre_tokenizers.ByteLevel.alphabet()} & model["vocab"].keys())
    if not model.get("byte_fallback"):
        raise ArtifactError(f"{where}: BPE without tokens for bytes would lose text when pruned; keep it whole")
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    missing = [name for name in names if name not in model["vocab"]]
    if missing:
        raise ArtifactError(f"{where}: lacks {len(missing)} of the 256 byte tokens ({missing[0]!r}); keep it whole")
    return names


def _put_tokens(data: Json, where: str) -> Iterator[tuple[str, int]]:
    """Tokens and ids that the post-processor and the padding put around a text."""
    for part in _components(data.get("post_processor")):
        kind = part["type"]
        if kind == "TemplateProcessing":
            for entry in part["special_tokens"].values():
                yield from zip(entry["tokens"], entry["ids"], strict=True)
        elif kind not in ("ByteLevel", "Sequence"):
            raise ArtifactError(f"{where}: post-processor {kind} is not supported; keep the vocabulary whole")
    if data.get("padding"):
        yield data["padding"]["pad_token"], data["padding"]["pad_id"]


def _space_characters(decoder: Json | None) -> Iterator[str]:
    """Characters that the decoder turns into others: their bytes would not be, so they cannot fall back."""
    for part in _components(decoder):
        if part["type"] == "Metaspace":
            yield part["replacement"]
        elif part["type"] == "Replace":
            yield from part["pattern"].get("String", "")


def pruned_tokenizer(vocabulary: Vocabulary, kept: Sequence[int]) -> Json:
    """The tokenizer.json that has the tokens of `kept_tokens` only, under new ids; merges keep their order."""
    new = {old: place for place, old in enumerate(kept)}
    data: Json = copy.deepcopy(vocabulary.data)
    model = data["model"]
    pairs = zip(model["merges"], _merges(model), strict=True)
    vocab = {token: new[number] for token, number in model["vocab"].items() if number in new}
    model["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    model["merges"] = [item for item, pair in pairs if {*pair, "".join(pair)} <= vocab.keys()]
    data["added_tokens"] = [
        {**item, "id": new[item["id"]]} for item in data.get("added_tokens", []) if item["id"] in new
    ]
    for part in _components(data.get("post_processor")):
        for entry in part.get("special_tokens", {}).values():
            entry["ids"] = [new[number] for number in entry["ids"]]
    if data.get("padding"):
        data["padding"]["pad_id"] = new[data["padding"]["pad_id"]]
    return data


def renumber(value: Any, new: Mapping[int, int]) -> Any:
    """New ids for a field that holds one id, several, or none."""
    if isinstance(value, (list, tuple)):
        return type(value)(new[number] for number in value)
    return None if value is None else new[value]


def named_ids(checkpoint: Path, config: ModelConfig, vocabulary: Vocabulary) -> set[int]:
    """Ids that the files beside tokenizer.json name, which therefore stay.

    Raises:
        ArtifactError: one names a token or an id that is not there, or holds ids that cannot be renumbered.
    """
    fields = {f"config.json: {key}": getattr(config, key) for key in MODEL_IDS}
    generation = _optional_json(checkpoint / "generation_config.json")
    fields |= {f"generation_config.json: {key}": generation[key] for key in generation if key.endswith("_token_id")}
    found: set[int] = set()
    for where, value in fields.items():
        for number in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
            if not isinstance(number, int) or not 0 <= number < config.vocab_size:
                most = config.vocab_size - 1
                raise ArtifactError(f"{checkpoint}/{where} is {number!r}; the model has ids 0 to {most}")
            found.add(number)
    lists = [key for key in _ID_LISTS if generation.get(key)]
    if lists:
        raise ArtifactError(f"{checkpoint}/generation_config.json: {lists[0]} holds ids that may go; remove the field")
    for name in _NAMING_FILES:
        found |= _tokens_named_by(checkpoint / name, vocabulary.ids)
    return found


def _tokens_named_by(path: Path, ids: Mapping[str, int]) -> set[int]:
    data = _optional_json(path)
    try:
        decoder = {entry["content"]: int(number) for number, entry in data.get("added_tokens_decoder", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ArtifactError(f"{path}: added_tokens_decoder is not a table of ids and tokens; fix it") from None
    for token, number in decoder.items():
        if ids.get(token) != number:
            raise ArtifactError(
                f"{path}: gives {token!r} id {number}, tokenizer.json {ids.get(token)}; "
                "use the files the model came with"
            )
    named = {key: _texts(value) for key, value in data.items() if key.endswith(("_token", "_special_tokens"))}
    for key, token in ((key, token) for key, tokens in named.items() for token in tokens):
        if token not in ids:
            raise ArtifactError(f"{path}: {key} is {token!r}, which tokenizer.json lacks; use the files it came with")
    return {ids[token] for tokens in named.values() for token in tokens}


def _texts(value: Any) -> list[str]:
    """The tokens in a field of a tokenizer's config: a text, a record with its `content`, or several of them."""
    if isinstance(value, dict):
        value = value["content"] if "content" in value else list(value.values())
    items = value if isinstance(value, list) else [value]
    texts = [item.get("content") if isinstance(item, dict) else item for item in items]
    return [text for text in texts if isinstance(text, str)]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def write_tokenizer(checkpoint: Path, directory: Path, vocabulary: Vocabulary, kept: Sequence[int]) -> None:
    """Write tokenizer.json and every file beside it that holds ids into `directory`, with the new ids.

    `named_ids` has checked the files of `checkpoint`; `kept` are old ids, rising.
    """
    new = {old: place for place, old in enumerate(kept)}
    text = json.dumps(pruned_tokenizer(vocabulary, kept), ensure_ascii=False, indent=2)
    (directory / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    settings = _optional_json(checkpoint / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        entries = {int(number): entry for number, entry in settings["added_tokens_decoder"].items()}
        settings["added_tokens_decoder"] = {str(new[old]): entry for old, entry in entries.items() if old in new}
        write_json(directory / "tokenizer_config.json", settings)
    generation = _optional_json(checkpoint / "generation_config.json")
    if generation:
        ids = {key: renumber(value, new) for key, value in generation.items() if key.endswith("_token_id")}
        write_json(directory / "generation_config.json", generation | ids)
    (directory / MAP_FILE).write_text(json.dumps({"old_ids": list(kept)}) + "\n", encoding="utf-8")
