"""The command `data tokens`, as a person runs it."""

import json
from pathlib import Path

import pytest

from sportsllm.formats.huggingface import load_config
from sportsllm.text.tokenizer import load_tokenizer
from tests.sportsllm.test_cli import call, complains


def test_a_text_is_counted(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, texts: list[str], corpus_file: Path
) -> None:
    code, out, err = call(capsys, "data", "tokens", checkpoint, corpus_file, "--show", 4, "--json")
    result, words = json.loads(out), load_tokenizer(checkpoint)
    assert code == 0 and "bytes per token" in err
    ids, [cost] = [words.encode(text) for text in texts], result["costs"]
    size, count = sum(len(text.encode()) for text in texts), sum(map(len, ids))
    assert (cost["tokens"], result["documents"], result["bytes"]) == (count, len(texts), size)
    assert cost["bytes_per_token"] == pytest.approx(size / count)
    assert cost["tokens_per_word"] == pytest.approx(count / result["words"])
    assert cost["vocab_used_share"] == pytest.approx(len({i for row in ids for i in row}) / words.vocab_size)
    assert "".join(cost["shown"]) == words.decode(ids[0][:4])
    config = load_config(checkpoint)
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert cost["kv_cache_bytes_per_token"]["fp32"] == per_token
    assert "│".join(cost["shown"]).replace("\n", "\\n") in err


def test_two_tokenizers_are_compared(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tokenizer_directory: Path, stories: Path, corpus_file: Path
) -> None:
    code, out, err = call(capsys, "data", "tokens", checkpoint, corpus_file, "--against", stories, "--json")
    one, other = json.loads(out)["costs"]
    assert code == 0 and f"{one['tokens'] / other['tokens']:.3f}" in err and "fp32 cache" in err
    alone = json.loads(call(capsys, "data", "tokens", stories / "tokenizer.json", corpus_file, "--json")[1])
    assert alone["costs"][0]["tokens"] == other["tokens"]
    code, out, err = call(capsys, "data", "tokens", tokenizer_directory, corpus_file, "--against", checkpoint, "--json")
    assert code == 0 and json.loads(out)["costs"][0]["kv_cache_bytes_per_token"] is None and "fp32 cache" not in err


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    latin, blank = tmp_path / "latin.txt", tmp_path / "blank.md"
    latin.write_bytes("Zürich".encode("latin-1"))
    blank.write_text(" \n", encoding="utf-8")
    complains(call(capsys, "data", "tokens", checkpoint, latin), 3, "not UTF-8 at byte 1")
    complains(call(capsys, "data", "tokens", checkpoint, blank), 3, "no text in it")
    complains(call(capsys, "data", "tokens", checkpoint / "config.json", latin), 3, "not a readable tokenizer")
    complains(call(capsys, "data", "tokens", checkpoint, blank, "--against", tmp_path), 3, "tokenizer.json: not found")
