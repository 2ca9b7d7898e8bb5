"""tokenizer.json as GGUF metadata, refused if GGUF has no form for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import Tokenizer, models

from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.formats.gguf.tokenizer import PRE_TOKENIZERS, SPACE
from sportsllm.models.config import ModelConfig
from sportsllm.text.chat import find_template
from sportsllm.text.tokenizer import read_tokenizer, stop_tokens, to_json

_NEVER = -1e9  # the score of a token that no merge makes
_ENDS = ("eos", "eot", "eom")


def tokenizer_metadata(directory: Path, config: ModelConfig) -> dict[str, Any]:
    """The keys that begin with `tokenizer.`, without that.

    Raises:
        ArtifactError: tokenizer.json is missing or damaged, or llama.cpp would read it in another way.
    """
    path = directory / "tokenizer.json"
    tokenizer = read_tokenizer(path, config.vocab_size)
    data = json.loads(to_json(tokenizer))  # with every field, in the library's newest form
    kind = data["model"]["type"]
    if kind != "BPE":
        raise ArtifactError(f"{path}: is {kind}; GGUF supports byte-level and SentencePiece BPE")
    merges = data["model"]["merges"]
    added = data["added_tokens"]
    kinds = {item["id"]: TokenType.CONTROL if item["special"] else TokenType.USER_DEFINED for item in added}
    vocabulary = {number: token for token, number in data["model"]["vocab"].items()}
    vocabulary |= {item["id"]: item["content"] for item in added}
    numbers = range(config.vocab_size)
    tokens = [vocabulary.get(number, f"[PAD{number}]") for number in numbers]
    types: list[int] = [kinds.get(n, TokenType.NORMAL) if n in vocabulary else TokenType.UNUSED for n in numbers]
    found: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if data["model"]["byte_fallback"]:
        found |= _sentencepiece(data, path, tokens, types, merges)
    else:
        found |= {"model": "gpt2", "pre": _pre_tokenizer(data, path), "merges": [" ".join(pair) for pair in merges]}
    ids = {"bos": config.bos_token_id, "padding": config.pad_token_id}
    ids |= dict(zip(_ENDS, stops := stop_tokens(directory, config), strict=False))
    if beyond := [tokens[number] for number in stops[len(_ENDS) :]]:
        log(f"GGUF has keys for {len(_ENDS)} end tokens: llama.cpp will not stop at {', '.join(beyond)}")
    found |= {f"{name}_token_id": number for name, number in ids.items() if number in numbers}
    first = tokenizer.encode("a").ids[:1]
    found["add_bos_token"] = config.bos_token_id is not None and first == [config.bos_token_id]
    template, _ = find_template(directory)
    return {f"ggml.{key}": value for key, value in found.items()} | ({"chat_template": template} if template else {})


def _pre_tokenizer(data: Mapping[str, Any], path: Path) -> str:
    """llama.cpp's name of the rule that splits a text into words."""

    def without_offsets(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: without_offsets(value) for key, value in part.items() if key != "trim_offsets"}
        return [without_offsets(each) for each in part] if isinstance(part, list) else part

    normalizers = {"qwen2": {"type": "NFC"}}
    for name, rule in PRE_TOKENIZERS.items():
        probe = Tokenizer(models.BPE())
        probe.pre_tokenizer = rule
        same = without_offsets(json.loads(probe.to_str())["pre_tokenizer"]) == without_offsets(data["pre_tokenizer"])
        if same and data["normalizer"] == normalizers.get(name):
            return name
    known = ", ".join(PRE_TOKENIZERS)
    raise ArtifactError(
        f"{path}: its normalizer and pre-tokenizer are none of llama.cpp's that are known here ({known})"
    )


def _sentencepiece(
    data: Mapping[str, Any], path: Path, tokens: list[str], types: list[int], merges: list[list[str]]
) -> dict[str, Any]:
    """A score for each token, so that the order of scores is that of the merges."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefixed = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}
    if data["normalizer"] not in (replace, prefixed) or data["pre_tokenizer"] is not None:
        raise ArtifactError(f"{path}: its normalizer or pre-tokenizer is not SentencePiece's; GGUF cannot represent it")
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    unknown = data["model"]["unk_token"]
    if unknown not in tokens:
        raise ArtifactError(f"{path}: has no unknown token; GGUF's SentencePiece needs one")
    for number, token in enumerate(tokens):
        if token == unknown:
            types[number] = TokenType.UNKNOWN
        elif len(token) == 6 and token.startswith("<0x") and types[number] == TokenType.NORMAL:
            types[number] = TokenType.BYTE
    return {
        "model": "llama",
        "scores": [float(-ranks[token]) if token in ranks else _NEVER for token in tokens],
        "unknown_token_id": tokens.index(unknown),
        "add_space_prefix": data["normalizer"] == prefixed,
    }
