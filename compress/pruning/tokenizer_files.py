"""The tokenizer.json of a BPE, checked and written again with fewer tokens, and the files beside it that hold ids."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, as_object, read_json, write_json
from sportsllm.formats.huggingface import SPECIAL_IDS
from sportsllm.models.config import ModelConfig

MAP_FILE = "vocabulary_map.json"
RESERVED = re.compile(r"<\|reserved_\d+\|>")
"""Tokens that `train` fills a small corpus's vocabulary up with."""
_CHILDREN = ("normalizers", "pretokenizers", "processors", "decoders")  # a Sequence's parts
# Lists of ids in generation_config.json whose meaning a dropped token would change.
_ID_LISTS = (
    "bad_words_ids", "begin_suppress_tokens", "force_words_ids", "forced_decoder_ids", "sequence_bias",
    "suppress_tokens",
)  # fmt: skip
Ids = int | Sequence[int] | None


@dataclass(frozen=True)
class Vocabulary:
    """A BPE tokenizer.json that was checked.

    Attributes:
        data: the parsed file.
        ids: id of every token, added ones included; longest first, so that a token comes before its halves.
        halves: the two ids that each merged token is made of.
        growth: tokens that a text grows by at each place of a dropped token: 1, or the bytes of a character less 1.
        fixed: ids that always stay: the 256 bytes, added tokens (except the reserved ones of `train`), the unknown
            token, the tokens that are put around texts, and the characters that stand for a space.
    """

    data: JsonObject
    ids: dict[str, int]
    halves: Mapping[int, tuple[int, int]]
    growth: Mapping[int, int]
    fixed: frozenset[int]


def read_vocabulary(data: JsonObject, where: str) -> Vocabulary:
    """Check a readable tokenizer.json, named `where` in messages, and find how its tokens are made.

    Raises:
        ArtifactError: it is not a BPE that can write every byte, it has something that cannot be rewritten, or its
            ids disagree.
    """
    tokenizer, model = Tokenizer.from_str(json.dumps(data)), data["model"]
    if (kind := type(tokenizer.model).__name__) != "BPE":
        raise ArtifactError(f"{where}: its model is {kind}; only BPE vocabularies can be pruned")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ArtifactError(f"{where}: BPE with {key} {model[key]!r} is not supported; keep the vocabulary whole")
    added = {item["content"]: item["id"] for item in data.get("added_tokens", [])}
    ids: dict[str, int] = model["vocab"] | added
    read, around = tokenizer.get_vocab(with_added_tokens=True), set(_ids_around(data, where))
    for token, number in ids.items():  # the library numbers added tokens itself and says nothing
        if read.get(token) != number:
            raise ArtifactError(f"{where}: gives {token!r} id {number}, but is read as {read.get(token)}; fix it")
    if len(set(ids.values())) < len(ids) or not around <= set(ids.values()):
        raise ArtifactError(f"{where}: two tokens have one id, or an id that is put around texts has none; fix it")
    meant = {token for token in added if not RESERVED.fullmatch(token)}
    fixed = {*_byte_tokens(data, where), *meant, model.get("unk_token"), *_space_characters(data.get("decoder"))}
    ranks = {pair: rank for rank, pair in enumerate(_merges(model))}
    halves: dict[int, tuple[int, int]] = {}
    growth: dict[int, int] = {}
    for token, number in ids.items():
        pieces, last = _merge(list(token), ranks)
        if last is not None and pieces == [token]:
            halves[number] = ids[last[0]], ids[last[1]]
        growth[number] = max(1, (len(pieces) if len(token) > 1 else len(token.encode())) - 1)
    longest_first = dict(sorted(ids.items(), key=lambda item: -len(item[0])))
    return Vocabulary(data, longest_first, halves, growth, frozenset({ids[t] for t in fixed & ids.keys()} | around))


def _merges(model: JsonObject) -> list[tuple[str, str]]:
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


def _components(item: JsonObject | None) -> Iterator[JsonObject]:
    """A normalizer, pre-tokenizer, post-processor or decoder, and what a Sequence of them holds."""
    if item is not None:
        yield item
        for key in _CHILDREN:
            for child in item.get(key, []):
                yield from _components(child)


def _byte_tokens(data: JsonObject, where: str) -> list[str]:
    """The tokens of the 256 bytes, as this tokenizer writes them. Byte-level BPE may lack some, which it then never
    writes, with this vocabulary or a smaller one; with a byte fallback each can be needed.
    """
    model = data["model"]
    kinds = {item["type"] for part in ("normalizer", "pre_tokenizer") for item in _components(data.get(part))}
    if "ByteLevel" in kinds:
        return sorted({*pre_tokenizers.ByteLevel.alphabet()} & model["vocab"].keys())
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if not model.get("byte_fallback") or not model["vocab"].keys() >= set(names):
        raise ArtifactError(f"{where}: BPE without tokens for all bytes would lose text when pruned; keep it whole")
    return names


def _ids_around(data: JsonObject, where: str) -> Iterator[int]:
    """Ids that the post-processor and the padding put around a text."""
    for part in _components(data.get("post_processor")):
        kind = part["type"]
        if kind == "TemplateProcessing":
            for entry in part["special_tokens"].values():
                yield from entry["ids"]
        elif kind not in ("ByteLevel", "Sequence"):
            raise ArtifactError(f"{where}: post-processor {kind} is not supported; keep the vocabulary whole")
    if data.get("padding"):
        yield data["padding"]["pad_id"]


def _space_characters(decoder: JsonObject | None) -> Iterator[str]:
    """Characters that the decoder turns into others: their bytes would not be, so they cannot fall back."""
    for part in _components(decoder):
        if part["type"] == "Metaspace":
            yield part["replacement"]
        elif part["type"] == "Replace":
            yield from part["pattern"].get("String", "")


def named_ids(checkpoint: Path, config: ModelConfig, vocabulary: Vocabulary) -> set[int]:
    """Ids that the files beside tokenizer.json name, which therefore stay.

    Raises:
        ArtifactError: one names an id that is not there, or holds ids that cannot be renumbered.
    """
    fields: dict[str, Ids] = {f"config.json: {key}": getattr(config, key) for key in SPECIAL_IDS}
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
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in _optional_json(checkpoint / name).items():
            if key.endswith(("_token", "_special_tokens")):
                found |= {vocabulary.ids[text] for text in _texts(value) if text in vocabulary.ids}
    return found


def _texts(value: object) -> Iterator[str]:
    """The tokens in a field of a tokenizer's config: a text, a record with its `content`, or several of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(value["content"] if "content" in value else list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _optional_json(path: Path) -> JsonObject:
    return read_json(path) if path.exists() else {}


def renumbered(value: Ids, new: Mapping[int, int]) -> Ids:
    """New ids for a field that holds one id, several, or none."""
    if isinstance(value, (list, tuple)):
        return type(value)(new[number] for number in value)
    return new[value] if isinstance(value, int) else None


def write_tokenizer(checkpoint: Path, directory: Path, vocabulary: Vocabulary, kept: Sequence[int]) -> None:
    """Write tokenizer.json and every file beside it that holds ids into `directory`, with the new ids.

    `named_ids` has checked the files of `checkpoint`; `kept` are old ids, rising. Merges keep their order.
    """
    new = {old: place for place, old in enumerate(kept)}
    data: JsonObject = copy.deepcopy(vocabulary.data)
    model = data["model"]
    pairs = zip(model["merges"], _merges(model), strict=True)
    vocab = {token: new[number] for token, number in model["vocab"].items() if number in new}
    model["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    model["merges"] = [item for item, pair in pairs if {*pair, "".join(pair)} <= vocab.keys()]
    added = data.get("added_tokens", [])
    data["added_tokens"] = [{**item, "id": new[item["id"]]} for item in added if item["id"] in new]
    for part in _components(data.get("post_processor")):
        for entry in part.get("special_tokens", {}).values():
            entry["ids"] = [new[number] for number in entry["ids"]]
    if data.get("padding"):
        data["padding"]["pad_id"] = new[data["padding"]["pad_id"]]
    text = json.dumps(data, ensure_ascii=False, indent=2)
    (directory / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    settings = _optional_json(checkpoint / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        where = f"{checkpoint / 'tokenizer_config.json'}: added_tokens_decoder"
        table = as_object(settings["added_tokens_decoder"], where)
        ids = {token: new[number] for token, number in vocabulary.ids.items() if number in new}
        entries = [entry for entry in table.values() if isinstance(entry, dict) and entry.get("content") in ids]
        settings["added_tokens_decoder"] = {str(ids[entry["content"]]): entry for entry in entries}
        write_json(directory / "tokenizer_config.json", settings)
    generation = _optional_json(checkpoint / "generation_config.json")
    if generation:
        named = {key: renumbered(value, new) for key, value in generation.items() if key.endswith("_token_id")}
        write_json(directory / "generation_config.json", generation | named)
    (directory / MAP_FILE).write_text(json.dumps({"old_ids": list(kept)}) + "\n", encoding="utf-8")
