"""The command `data tokens`, as a person runs it."""

import json
from pathlib import Path

import pytest

from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import ModelConfig
from sportsllm.text.tokenizer import load_tokenizer
from tests.sportsllm.test_cli import call, complains


def test_a_text_is_counted(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, texts: list[str], corpus_file: Path
) -> None:
    code, out, err = call(capsys, "data", "tokens", checkpoint, corpus_file, "--show", 4, "--json")
    result, words = json.loads(out), load_tokenizer(checkpoint)
    assert code == 0 and "bytes per token" in err
    ids = [words.encode(text) for text in texts]
    size = sum(len(text.encode()) for text in texts)
    assert result["tokens"] == sum(map(len, ids)) and result["documents"] == len(texts)
    assert result["bytes_per_token"] == pytest.approx(size / result["tokens"])
    assert result["tokens_per_word"] == pytest.approx(result["tokens"] / result["words"])
    assert result["vocab_used_share"] == pytest.approx(len({i for row in ids for i in row}) / words.vocab_size)
    assert "".join(result["shown"]) == words.decode(ids[0][:4])
    config: ModelConfig = load_config(checkpoint)
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert result["kv_cache_bytes_per_token"]["fp32"] == per_token
    assert result["kv_cache_bytes"]["fp32"] == per_token * result["tokens"]
    code, out, _ = call(capsys, "data", "tokens", checkpoint, corpus_file, "--show", 4)
    assert "│".join(result["shown"]).replace("\n", "\\n") in out


def test_two_tokenizers_are_compared(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, stories: Path, corpus_file: Path
) -> None:
    code, out, err = call(capsys, "data", "tokens", checkpoint, corpus_file, "--against", stories, "--json")
    one, other = json.loads(out), json.loads(out)["against"]
    assert code == 0 and "times the decode time" in err
    assert other["relative_tokens"] == other["relative_decode_time"] == one["tokens"] / other["tokens"]
    assert other["relative_kv_cache_bytes"] == pytest.approx(
        one["tokens"] * one["kv_cache_bytes_per_token"]["int8"]
        / (other["tokens"] * other["kv_cache_bytes_per_token"]["int8"])
    )  # fmt: skip
    alone = json.loads(call(capsys, "data", "tokens", stories / "tokenizer.json", corpus_file, "--json")[1])
    assert alone["tokens"] == other["tokens"]


def test_without_a_model_there_is_no_cache(
    capsys: pytest.CaptureFixture[str], tokenizer_directory: Path, checkpoint: Path, corpus_file: Path
) -> None:
    code, out, _ = call(capsys, "data", "tokens", tokenizer_directory, corpus_file, "--against", checkpoint, "--json")
    result = json.loads(out)
    assert code == 0 and result["kv_cache_bytes"] is result["against"]["relative_kv_cache_bytes"] is None


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    latin, blank = tmp_path / "latin.txt", tmp_path / "blank.md"
    latin.write_bytes("Zürich".encode("latin-1"))
    blank.write_text(" \n", encoding="utf-8")
    complains(call(capsys, "data", "tokens", checkpoint, latin), 3, "not UTF-8 at byte 1")
    complains(call(capsys, "data", "tokens", checkpoint, blank), 3, "no text in it")
    complains(call(capsys, "data", "tokens", tmp_path, latin), 3, "tokenizer.json: not found")
    complains(call(capsys, "data", "tokens", checkpoint / "config.json", latin), 3, "not a readable tokenizer")
    complains(call(capsys, "data", "tokens", checkpoint, tmp_path / "none.txt"), 3, "none.txt: not found")
    complains(call(capsys, "data", "tokens", checkpoint, blank, "--against", tmp_path), 3, "tokenizer.json: not found")
    assert call(capsys, "data", "tokens", checkpoint)[0] == 2
