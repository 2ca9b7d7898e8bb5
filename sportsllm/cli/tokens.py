"""The command `tokens`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenizers import Tokenizer

    from sportsllm.text.token_counts import TokenCounts

_PRINTED_CACHE = "fp32"


def tokens(
    tokenizer: Annotated[
        Path, typer.Argument(help="A directory with tokenizer.json, or such a file.", show_default=False)
    ],
    files: Annotated[
        list[Path], typer.Argument(help="Text: .txt, .md, .jsonl, .parquet, .gz files or folders.", show_default=False)
    ],
    against: Annotated[
        Path | None, typer.Option(help="Another tokenizer to compare with, in the same forms.", show_default="none")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Show the first N tokens of the text with their borders.")] = 0,
) -> dict[str, Any]:
    """Count the tokens of a text: bytes a token, tokens a word, the vocabulary in use, and the cost beside another."""
    from sportsllm.console import output, table
    from sportsllm.text.documents import read_documents
    from sportsllm.text.token_counts import count_tokens, visible_piece
    from sportsllm.text.tokenizer import read_tokenizer

    sources = [tokenizer] if against is None else [tokenizer, against]
    opened = [read_tokenizer(_file(source)) for source in sources]
    counts = count_tokens(opened, read_documents(files))
    if not all(count.tokens for count in counts):
        raise ArtifactError(f"{', '.join(map(str, files))}: no text in it; give a text to count")
    first = next(iter(read_documents(files))) if show else ""
    results = [
        _figures(source, one, count, first, show) for source, one, count in zip(sources, opened, counts, strict=True)
    ]
    result = results[0] | {key: getattr(counts[0], key) for key in ("documents", "bytes", "words")}
    if against is not None:
        result["against"] = results[1] | _relative(results[0], results[1])
    headers = ("", *map(str, sources), *(["ratio"] if against else []))
    output().print(table(headers, _rows(result, results)))
    for one in results if show else []:
        output().print(
            f"{one['tokenizer']}: {'│'.join(map(visible_piece, one['shown']))}", markup=False, soft_wrap=True
        )
    if against is not None:
        output().print(_summary(result, tokenizer, against), markup=False, soft_wrap=True)
    return result


def _file(source: Path) -> Path:
    return source if source.is_file() else source / "tokenizer.json"


def _figures(source: Path, tokenizer: Tokenizer, counts: TokenCounts, first: str, show: int) -> dict[str, Any]:
    """One tokenizer's part of the result."""
    from sportsllm.formats.huggingface.config import load_config
    from sportsllm.models.size import kv_cache_bytes_per_token
    from sportsllm.text.token_counts import token_pieces

    vocabulary = len(tokenizer.get_vocab(with_added_tokens=True))
    found: dict[str, Any] = {
        "tokenizer": str(source),
        "tokens": counts.tokens,
        "bytes_per_token": counts.bytes / counts.tokens,
        "tokens_per_word": counts.tokens / max(1, counts.words),
        "vocab_size": vocabulary,
        "vocab_used": len(counts.used),
        "vocab_used_share": len(counts.used) / vocabulary,
    }
    directory = _file(source).parent
    if (directory / "config.json").exists():
        per_token = kv_cache_bytes_per_token(load_config(directory))
        if any(per_token.values()):  # an LSTM's state is of one size for any text
            found["kv_cache_bytes_per_token"] = per_token
            found["kv_cache_bytes"] = {name: size * counts.tokens for name, size in per_token.items()}
    if show:
        found["shown"] = token_pieces(tokenizer, first, show)
    return found


def _relative(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """What the same text costs, as a share of what it costs with the other; a token takes the same time in both."""
    ratio = one["tokens"] / other["tokens"]
    shares = {"relative_tokens": ratio, "relative_decode_time": ratio}
    caches = [figures.get("kv_cache_bytes", {}).get(_PRINTED_CACHE) for figures in (one, other)]
    if all(caches):
        shares["relative_kv_cache_bytes"] = caches[0] / caches[1]
    return shares


def _rows(result: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each figure, with a ratio where there are two."""
    same = [[key, *[f"{result[key]:,}"] * len(results)] for key in ("documents", "bytes", "words")]
    rows = [[*row, ""] if len(results) > 1 else row for row in same]

    def add(name: str, values: Sequence[float], style: str) -> None:
        ratio = [f"{values[0] / values[1]:.3f}"] if len(values) > 1 else []
        rows.append([name, *(format(value, style) for value in values), *ratio])

    add("tokens", [one["tokens"] for one in results], ",")
    add("bytes a token", [one["bytes_per_token"] for one in results], ".3f")
    add("tokens a word", [one["tokens_per_word"] for one in results], ".3f")
    add("vocabulary", [one["vocab_size"] for one in results], ",")
    add("of it in use", [one["vocab_used_share"] for one in results], ".1%")
    if all("kv_cache_bytes" in one for one in results):
        name = f"cache bytes a token, {_PRINTED_CACHE}"
        add(name, [one["kv_cache_bytes_per_token"][_PRINTED_CACHE] for one in results], ",")
        per_byte = [one["kv_cache_bytes"][_PRINTED_CACHE] / result["bytes"] for one in results]
        add(f"cache bytes a byte of text, {_PRINTED_CACHE}", per_byte, ",.1f")
    return rows


def _summary(result: Mapping[str, Any], tokenizer: Path, against: Path) -> str:
    other = result["against"]
    line = f"{tokenizer} writes the same text in {other['relative_tokens']:.3f} times the tokens of {against}: "
    line += f"{other['relative_decode_time']:.3f} times the decode time, where a token takes the same time in both"
    if "relative_kv_cache_bytes" in other:
        line += f", and {other['relative_kv_cache_bytes']:.3f} times the key/value cache"
    return line
