"""Which tokens of a BPE vocabulary stay when a domain needs fewer, and the tokenizer.json that has only those.

A BPE token is made by merging two halves, so it can stay only if both halves do, and theirs. Inside the span that
becomes a token, merges run as they would on that span alone, so a token is always made in the same way. Therefore:

1. One count of a text's tokens, passed on from each token to its halves, tells how often every token is made on
   the way. Without the token those places keep its halves, so that is also how many tokens the text grows by. The
   number never rises from a half to a whole: the N tokens that have the highest are closed under merges, and no
   closed set of N loses less. One sort so gives the set that dropping leaf after leaf and counting again gives
   (https://arxiv.org/abs/2512.03989).
2. A word that is made of kept tokens only, on the way too, is cut as before: no merge that is gone was its next.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, pre_tokenizers

from sportsllm.errors import ArtifactError

_FILLER = re.compile(r"<\|reserved_\d+\|>")  # what `train` fills a small corpus's vocabulary up with
_CHILDREN = ("normalizers", "pretokenizers", "processors", "decoders")  # a Sequence's parts

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
    meant = {token for token in added if not _FILLER.fullmatch(token)}
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


def saved_tokens(vocabulary: Vocabulary, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many tokens more a text would have without each token, the others kept.

    `counts` (V,) says how often each id is in the text. The result, (V,), is -1 for ids that no text can make: rows
    without a token and the reserved tokens of `train`.
    """
    made = counts.astype(np.int64)
    saved = np.full_like(made, -1)
    for token, number in vocabulary.ids.items():
        for half in vocabulary.halves.get(number, ()):
            made[half] += made[number]
        if not _FILLER.fullmatch(token):
            saved[number] = made[number] * vocabulary.growth[number]
    return saved


def with_halves(vocabulary: Vocabulary, ids: Iterable[int]) -> set[int]:
    """The ids and all that they are made of."""
    found = set(ids)
    for number in vocabulary.ids.values():
        if number in found:
            found.update(vocabulary.halves.get(number, ()))
    return found


def kept_tokens(vocabulary: Vocabulary, saved: npt.NDArray[np.int64], size: int, fixed: Collection[int]) -> list[int]:
    """The `size` ids that stay: fixed ones, then those that save most; equal ones as the tokenizer learnt them.

    `fixed` are ids `with_halves`, the vocabulary's own among them. The old ids are returned in rising order: the place
    of each is its new id.
    """
    age = {number: (number, 1) for number in range(len(saved))}  # a whole is never older than its halves
    for token, number in reversed(vocabulary.ids.items()):
        age[number] = max([number, *(age[half][0] for half in vocabulary.halves.get(number, ()))]), len(token)
    order = sorted(range(len(saved)), key=lambda number: (number not in fixed, -int(saved[number]), age[number]))
    return sorted(order[:size])


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
