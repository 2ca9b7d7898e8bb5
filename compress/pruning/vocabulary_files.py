"""The files of a checkpoint that name token ids: which tokens they need, and the same files with new ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.pruning.vocabulary import Vocabulary, pruned_tokenizer
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import read_json
from sportsllm.storage.checkpoint import write_json

MAP_FILE = "vocabulary_map.json"
MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Lists of ids in generation_config.json whose meaning a dropped token would change.
_ID_LISTS = (
    "bad_words_ids", "begin_suppress_tokens", "force_words_ids", "forced_decoder_ids", "sequence_bias",
    "suppress_tokens",
)  # fmt: skip


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
    fields |= {f"generation_config.json: {key}": value for key, value in generation.items() if _holds_ids(key)}
    found: set[int] = set()
    for where, value in fields.items():
        for number in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
            if not isinstance(number, int) or not 0 <= number < config.vocab_size:
                raise ArtifactError(
                    f"{checkpoint}/{where} is {number!r}; the model has ids 0 to {config.vocab_size - 1}"
                )
            found.add(number)
    lists = [key for key in _ID_LISTS if generation.get(key)]
    if lists:
        raise ArtifactError(f"{checkpoint}/generation_config.json: {lists[0]} holds ids that may go; remove the field")
    for name in _NAMING_FILES:
        found |= _tokens_named_by(checkpoint / name, vocabulary)
    return found


def _tokens_named_by(path: Path, vocabulary: Vocabulary) -> set[int]:
    data = _optional_json(path)
    try:
        decoder = {entry["content"]: int(number) for number, entry in data.get("added_tokens_decoder", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ArtifactError(f"{path}: added_tokens_decoder is not a table of ids and tokens; fix it") from None
    wrong = next((token for token, number in decoder.items() if vocabulary.ids.get(token) != number), None)
    if wrong is not None:
        raise ArtifactError(
            f"{path}: gives {wrong!r} id {decoder[wrong]}, tokenizer.json {vocabulary.ids.get(wrong)}; "
            "use the files the model came with"
        )
    named = list(_named_tokens(data))
    for key, token in named:
        if token not in vocabulary.ids:
            raise ArtifactError(f"{path}: {key} is {token!r}, which tokenizer.json lacks; use the files it came with")
    return {vocabulary.ids[token] for _, token in named}


def _named_tokens(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields of a tokenizer's config that name tokens: each a text, a record with its `content`, or several."""
    for key, value in data.items():
        if key.endswith(("_token", "_special_tokens")):
            several = isinstance(value, list) or (isinstance(value, dict) and "content" not in value)
            for item in (value.values() if isinstance(value, dict) else value) if several else [value]:
                text = item.get("content") if isinstance(item, dict) else item
                if isinstance(text, str):
                    yield key, text


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _holds_ids(key: str) -> bool:
    return key.endswith("_token_id")


def write_tokenizer(checkpoint: Path, directory: Path, vocabulary: Vocabulary, kept: Sequence[int]) -> None:
    """Write tokenizer.json and every file beside it that holds ids, with the new ids.

    Args:
        checkpoint: where the old files are; `named_ids` has checked them.
        directory: where the new ones go.
        vocabulary: the old tokenizer.json.
        kept: old ids, rising.
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
        ids = {key: renumber(value, new) for key, value in generation.items() if _holds_ids(key)}
        write_json(directory / "generation_config.json", generation | ids)
    (directory / MAP_FILE).write_text(json.dumps({"old_ids": list(kept)}) + "\n", encoding="utf-8")
