"""The command `data tokens`, as a person runs it."""

from pathlib import Path

import pytest

from sportsllm.formats.huggingface import load_config
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.command_line import CommandLine


def test_a_text_is_counted(cli: CommandLine, checkpoint: Path, texts: list[str], corpus_file: Path) -> None:
    result, err = cli.says("data", "tokens", checkpoint, corpus_file, "--show", 4)
    words = load_tokenizer(checkpoint)
    assert "bytes per token" in err
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
    cli: CommandLine, checkpoint: Path, tokenizer_directory: Path, stories: Path, corpus_file: Path
) -> None:
    result, err = cli.says("data", "tokens", checkpoint, corpus_file, "--against", stories)
    one, other = result["costs"]
    assert f"{one['tokens'] / other['tokens']:.3f}" in err and "fp32 cache" in err
    alone = cli.result("data", "tokens", stories / "tokenizer.json", corpus_file)
    assert alone["costs"][0]["tokens"] == other["tokens"]
    result, err = cli.says("data", "tokens", tokenizer_directory, corpus_file, "--against", checkpoint)
    assert result["costs"][0]["kv_cache_bytes_per_token"] is None and "fp32 cache" not in err


def test_bad_input_is_one_line(cli: CommandLine, checkpoint: Path, tmp_path: Path) -> None:
    latin, blank = tmp_path / "latin.txt", tmp_path / "blank.md"
    latin.write_bytes("Zürich".encode("latin-1"))
    blank.write_text(" \n", encoding="utf-8")
    cli.refuses(3, "not UTF-8 at byte 1", "data", "tokens", checkpoint, latin)
    cli.refuses(3, "no text in it", "data", "tokens", checkpoint, blank)
    cli.refuses(3, "not a readable tokenizer", "data", "tokens", checkpoint / "config.json", latin)
    cli.refuses(3, "tokenizer.json: not found", "data", "tokens", checkpoint, blank, "--against", tmp_path)
