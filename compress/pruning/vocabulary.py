"""Vocabulary pruning: count a domain's tokens, keep the most useful, and cut model and tokenizer together.

Text comes back unchanged, but some words are split into more tokens, which the model has seldom seen there. Bits per
byte, which do not depend on the tokenizer, measure the cost. Fine-tuning the result (`train CHECKPOINT`) wins it back.

A BPE token is made by merging two halves, so it can stay only if both halves do, and theirs. Inside the span that
becomes a token, merges run as they would on that span alone, so a token is always made in the same way. Therefore:

1. One count of a text's tokens, passed on from each token to its halves, tells how often every token is made on
   the way. Without the token those places keep its halves, so that is also how many tokens the text grows by. The
   count never rises from a half to a whole: the N tokens that have the highest are closed under merges, and no
   closed set of N loses less. One sort gives the set that dropping leaf after leaf and counting again gives
   (https://arxiv.org/abs/2512.03989).
2. A word that is made of kept tokens only, on the way too, is split as before: no merge that is gone was its next.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, pre_tokenizers

from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject, as_object, read_json, write_json
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.safetensors import quantization_config
from sportsllm.inference.scoring import score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import EMBEDDING, HEAD
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.documents import held_out_files, manifest_setting, read_documents, training_side
from sportsllm.text.packing import TokenizedDocuments, tokenize
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer

MAP_FILE = "vocabulary_map.json"
_FILLER = re.compile(r"<\|reserved_\d+\|>")  # tokens that `train` fills a small corpus's vocabulary up with
_MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_STEP = 32  # rows come in multiples of this, the smallest block of the integer kernels
_SCORED_TOKENS = 65_536
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
        fixed: ids that always stay: the 256 bytes, added tokens (but for the reserved ones of `train`), the unknown
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
    kind = type(tokenizer.model).__name__
    if kind != "BPE":
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
    meant = {token for token in added if not _FILLER.fullmatch(token)}
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
    writes, with this vocabulary or a smaller one; where bytes stand in for characters, each can be needed.
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
    fields: dict[str, Ids] = {f"config.json: {key}": getattr(config, key) for key in _MODEL_IDS}
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


def target_size(vocab_size: int, least: int, most: int) -> int:
    """How many rows stay: a multiple of 32, at most all of them. A line says so if that is not the number asked for.

    Raises:
        UsageError: `vocab_size` is below the number of ids that always stay, or above that of all.
    """
    if not least <= vocab_size <= most:
        raise UsageError(
            f"--vocab-size is {vocab_size}; the model has {most} tokens, and {least} of them always stay "
            f"(256 bytes and special tokens), choose {least} to {most}"
        )
    size = min(most, -(-vocab_size // _STEP) * _STEP)
    if size != vocab_size:
        log(f"{size:,} tokens stay, not {vocab_size:,}: kernels want a multiple of {_STEP}")
    return size


def renumbered(value: Ids, new: Mapping[int, int]) -> Ids:
    """New ids for a field that holds one id, several, or none."""
    if isinstance(value, (list, tuple)):
        return type(value)(new[number] for number in value)
    return new[value] if isinstance(value, int) else None


def prune_embedding(model: SportsLLM, kept: Sequence[int]) -> SportsLLM:
    """A model with only the kept tokens' rows in embedding and head; the logits of those tokens stay the same."""
    new = {old: place for place, old in enumerate(kept)}
    named = {key: renumbered(getattr(model.config, key), new) for key in _MODEL_IDS}
    pruned = SportsLLM(model.config.with_changes(vocab_size=len(kept), **named))
    state = model.state_dict()
    for name in {f"{EMBEDDING}.weight", f"{HEAD}.weight"} & state.keys():
        state[name] = state[name][list(kept)]
    pruned.load_state_dict(state)
    return pruned.eval()


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


def prune_vocabulary(
    checkpoint: Path, out: Path, vocab_size: int, calibration: Sequence[Path], valid: Sequence[Path]
) -> JsonObject:
    """Drop the tokens that a domain does not use from a checkpoint directory's model and tokenizer.

    The 256 bytes and all special tokens stay, so every text can still be written; the reserved tokens that `train`
    fills a vocabulary up with go first. `vocabulary_map.json` holds the old id of each new one.

    Args:
        checkpoint, out: unquantized, and the directory to make.
        vocab_size: tokens to keep, rounded up to a multiple of 32.
        calibration: the domain's text, where usage is counted.
        valid: held-out text, its first 65,536 tokens, to measure bits per byte on before and after; may be empty.

    Raises:
        UsageError: an impossible vocab_size.
        ArtifactError: quantized, a tokenizer that cannot be pruned, or files that disagree.
    """
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized; prune the unquantized checkpoint, then quantize")
    config = load_config(checkpoint)
    settings = {
        "checkpoint": checkpoint,
        "vocab_size": vocab_size,
        "calibration": calibration,
        "scored": valid,
        "corpus": manifest_setting(checkpoint, "corpus"),
        "valid": manifest_setting(checkpoint, "valid"),
    }

    def make(directory: Path) -> JsonObject:
        started = time.perf_counter()
        tokenizer = load_tokenizer(checkpoint, config)
        where = checkpoint / "tokenizer.json"
        vocabulary = read_vocabulary(read_json(where), str(where))
        fixed = with_halves(vocabulary, vocabulary.fixed | named_ids(checkpoint, config, vocabulary))
        model = load_checkpoint(checkpoint)
        documents = training_side(calibration, [*held_out_files(checkpoint), *valid])
        before = tokenize(documents, tokenizer)
        saved = saved_tokens(vocabulary, np.bincount(before.ids, minlength=config.vocab_size))
        kept = kept_tokens(vocabulary, saved, target_size(vocab_size, len(fixed), config.vocab_size), fixed)
        pruned = prune_embedding(model, kept)
        save_checkpoint(directory, pruned, checkpoint)
        write_tokenizer(checkpoint, directory, vocabulary, kept)
        fewer = load_tokenizer(directory, pruned.config)
        after = tokenize(documents, fewer)
        _check_round_trip(where, (tokenizer, before), (fewer, after))
        if valid:
            figures = _held_out(((model, tokenizer), (pruned, fewer)), list(read_documents(valid)))
        else:
            ends = len(documents) * (1 if tokenizer.end_id is None else 2)  # begin and end tokens
            sides = {"before": before, "after": after}
            figures = {f"tokens_per_byte_{key}": (at.ids.size - ends) / at.text_bytes for key, at in sides.items()}
        return {
            "parameters": pruned.config.parameters,
            "vocab_size": len(kept),
            "vocab_size_before": config.vocab_size,
            **figures,
            "seconds": time.perf_counter() - started,
        }

    return run_stage(out, Stage("prune", settings, [checkpoint, *calibration, *valid]), make)


def _check_round_trip(where: Path, *sides: tuple[TextTokenizer, TokenizedDocuments]) -> None:
    """Every counted document must come back from the new tokens as it did from the old ones."""
    (old, before), (new, after) = ((side, np.split(counted.ids, counted.ends[:-1])) for side, counted in sides)
    with progress_bar("check", len(before)) as bar:
        for number, (first, second) in enumerate(zip(before, after, strict=True), start=1):
            if old.decode(first.tolist()) != new.decode(second.tolist()):
                raise ArtifactError(
                    f"{where}: document {number} of the calibration text does not survive the pruned tokenizer; "
                    "its normalizer or decoder is not supported, keep the vocabulary whole"
                )
            bar.advance()


def _held_out(sides: Sequence[tuple[SportsLLM, TextTokenizer]], documents: Sequence[str]) -> dict[str, float]:
    """Bits and tokens per byte before and after, of the same documents: the first 65,536 or so of the old tokens."""
    part: list[str] = []
    tokens = 0
    for text in documents:
        if tokens >= _SCORED_TOKENS:
            log(f"bits per byte: on the first {len(part):,} of {len(documents):,} held-out documents")
            break
        part.append(text)
        tokens += len(sides[0][1].encode(text))
    figures: dict[str, float] = {}
    for key, (model, tokenizer) in zip(("before", "after"), sides, strict=True):
        score = score_documents(TorchDecoder(model), tokenizer, part, description=f"score {key}")
        figures |= {f"bits_per_byte_{key}": score.bits_per_byte, f"tokens_per_byte_{key}": score.tokens / score.bytes}
    return figures
