"""The verbs `data simulate` and `data tokens`: make training text, or count its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import ArtifactError
from sportsllm.results import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from sportsllm.text.tokenizer import TokenCounts

DEFAULT_CORPUS = Path("runs/corpus")
SIMULATED_MEGABYTES = 20.0
_PRINTED_CACHE = "fp32"


@dataclass(frozen=True, kw_only=True)
class SimulateResult(Result):
    """A simulated corpus."""

    out: Path
    cached: bool = False
    train_documents: int = 0
    valid_documents: int = 0
    train_bytes: int = 0
    valid_bytes: int = 0
    size_bytes: int = 0
    questions: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TokenCost(Result):
    """What a text costs with one tokenizer.

    `kv_cache_bytes` and `kv_cache_bytes_per_token` are by precision of the cache, if the tokenizer is a model's; the
    relative figures are those of the first tokenizer divided by this one's.
    """

    tokenizer: Path
    tokens: int
    bytes_per_token: float
    tokens_per_word: float
    vocab_size: int
    vocab_used: int
    vocab_used_share: float
    kv_cache_bytes_per_token: dict[str, int] | None = None
    kv_cache_bytes: dict[str, int] | None = None
    shown: list[str] = field(default_factory=list)
    relative_tokens: float | None = None
    relative_decode_time: float | None = None
    relative_kv_cache_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class TokensResult(TokenCost):
    """The counts of a text, and with --against what it costs with the other tokenizer."""

    documents: int
    bytes: int
    words: int
    against: TokenCost | None = None


def simulate(
    out: options.Out = DEFAULT_CORPUS,
    megabytes: Annotated[float, typer.Option(min=0.01, help="UTF-8 megabytes of training text.")] = SIMULATED_MEGABYTES,
    questions: Annotated[int, typer.Option(min=0, help="Questions about held-out matches.")] = 500,
    seed: options.Seed = 0,
) -> SimulateResult:
    """Write a corpus of simulated matches, and questions about them with known answers."""
    from sportsllm.console import output, progress_bar
    from sportsllm.formats.artifact import Stage, run_stage
    from sportsllm.simulator import write_corpus

    def make(directory: Path) -> dict[str, Any]:
        done = 0
        with progress_bar("simulate", megabytes * 1e6) as bar:

            def report(written: int, _total: int) -> None:
                nonlocal done
                bar.advance(written - done)
                done = written

            counts = write_corpus(directory, seed=seed, megabytes=megabytes, questions=questions, progress=report)
        return {**counts, "size_bytes": counts["train_bytes"] + counts["valid_bytes"]}

    stage = Stage("simulate", {"megabytes": megabytes, "questions": questions}, seed=seed)
    result = SimulateResult.of(run_stage(out, stage, make))
    output().print(
        f"{out}: {result.train_documents:,} training and {result.valid_documents:,} held-out documents, "
        f"{result.size_bytes / 1e6:.1f} MB, {result.questions} questions"
    )
    return result


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
) -> TokensResult:
    """Count the tokens of a text: bytes per token, tokens per word, vocabulary in use, and the cost of another one."""
    import dataclasses

    from sportsllm.console import output, table
    from sportsllm.text.documents import read_documents
    from sportsllm.text.tokenizer import count_tokens, read_tokenizer, visible_piece

    sources = [tokenizer] if against is None else [tokenizer, against]
    opened = [read_tokenizer(_file(source)) for source in sources]
    counts = count_tokens(opened, read_documents(files))
    if not all(count.tokens for count in counts):
        raise ArtifactError(f"{', '.join(map(str, files))}: no text in it; give a text to count")
    first = next(iter(read_documents(files))) if show else ""
    costs = [_cost(*item, first, show) for item in zip(sources, opened, counts, strict=True)]
    if against is not None:
        costs[1] = _relative(costs[0], costs[1])
    result = TokensResult(
        **{item.name: getattr(costs[0], item.name) for item in dataclasses.fields(TokenCost)},
        documents=counts[0].documents,
        bytes=counts[0].bytes,
        words=counts[0].words,
        against=costs[1] if against is not None else None,
    )
    headers = ("", *map(str, sources), *(["ratio"] if against else []))
    output().print(table(headers, _rows(result, costs)))
    for cost in costs if show else []:
        output().print(f"{cost.tokenizer}: {'│'.join(map(visible_piece, cost.shown))}", markup=False, soft_wrap=True)
    if against is not None:
        output().print(_summary(costs[1], tokenizer), markup=False, soft_wrap=True)
    return result


def _file(source: Path) -> Path:
    return source if source.is_file() else source / "tokenizer.json"


def _cost(source: Path, tokenizer: Tokenizer, counts: TokenCounts, first: str, show: int) -> TokenCost:
    """One tokenizer's cost, with the first `show` tokens of the text `first`."""
    from sportsllm.formats.huggingface import load_config
    from sportsllm.models.memory import kv_cache_bytes_per_token
    from sportsllm.text.tokenizer import token_pieces

    vocabulary = len(tokenizer.get_vocab(with_added_tokens=True))
    per_token, directory = None, _file(source).parent
    if (directory / "config.json").exists():
        per_token = kv_cache_bytes_per_token(load_config(directory))
        if not any(per_token.values()):  # the state of an LSTM has one size for any text
            per_token = None
    return TokenCost(
        tokenizer=source,
        tokens=counts.tokens,
        bytes_per_token=counts.bytes / counts.tokens,
        tokens_per_word=counts.tokens / max(1, counts.words),
        vocab_size=vocabulary,
        vocab_used=len(counts.used),
        vocab_used_share=len(counts.used) / vocabulary,
        kv_cache_bytes_per_token=per_token,
        kv_cache_bytes=per_token and {name: size * counts.tokens for name, size in per_token.items()},
        shown=token_pieces(tokenizer, first, show) if show else [],
    )


def _relative(first: TokenCost, other: TokenCost) -> TokenCost:
    """`other` with the first one's cost divided by its own; a token takes the same time in both."""
    import dataclasses

    ratio, cache = first.tokens / other.tokens, None
    if first.kv_cache_bytes and other.kv_cache_bytes:
        cache = first.kv_cache_bytes[_PRINTED_CACHE] / other.kv_cache_bytes[_PRINTED_CACHE]
    return dataclasses.replace(other, relative_tokens=ratio, relative_decode_time=ratio, relative_kv_cache_bytes=cache)


def _rows(result: TokensResult, costs: Sequence[TokenCost]) -> list[list[str]]:
    """A row for each figure, with a ratio if there are two tokenizers."""
    rows = []

    def add(name: str, values: Sequence[float], style: str, ratio: bool = True) -> None:
        last = [f"{values[0] / values[1]:.3f}" if ratio else ""] if len(values) > 1 else []
        rows.append([name, *(format(value, style) for value in values), *last])

    for name in ("documents", "bytes", "words"):
        add(name, [getattr(result, name)] * len(costs), ",", ratio=False)
    add("tokens", [cost.tokens for cost in costs], ",")
    add("bytes per token", [cost.bytes_per_token for cost in costs], ".3f")
    add("tokens per word", [cost.tokens_per_word for cost in costs], ".3f")
    add("vocabulary", [cost.vocab_size for cost in costs], ",")
    add("vocabulary in use", [cost.vocab_used_share for cost in costs], ".1%")
    caches = [cost.kv_cache_bytes for cost in costs if cost.kv_cache_bytes]
    if len(caches) == len(costs):
        per_token = [(cost.kv_cache_bytes_per_token or {})[_PRINTED_CACHE] for cost in costs]
        add(f"{_PRINTED_CACHE} cache bytes per token", per_token, ",")
        per_byte = [cache[_PRINTED_CACHE] / result.bytes for cache in caches]
        add(f"{_PRINTED_CACHE} cache bytes per byte of text", per_byte, ",.1f")
    return rows


def _summary(other: TokenCost, tokenizer: Path) -> str:
    line = f"{tokenizer} writes the same text in {other.relative_tokens:.3f} times the tokens of {other.tokenizer}: "
    line += f"{other.relative_decode_time:.3f} times the decode time, if a token takes the same time in both"
    if other.relative_kv_cache_bytes is not None:
        line += f", and {other.relative_kv_cache_bytes:.3f} times the key/value cache"
    return line
