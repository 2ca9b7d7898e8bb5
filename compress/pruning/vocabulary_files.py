"""The files of a checkpoint that name token ids: which tokens they need, and the same files with new ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.pruning.vocabulary import Vocabulary, pruned_tokenizer
from sportsllm.errors import ArtifactError
from sportsllm.formats.json_files import read_json, write_json
from sportsllm.models.config import ModelConfig

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
