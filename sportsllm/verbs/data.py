"""The verbs `data simulate` and `data tokens`: make training text, or count its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sportsllm import options
from sportsllm.errors import ArtifactError
from sportsllm.results import Result
from sportsllm.settings import TEXT, parse_settings

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from tokenizers import Tokenizer

DEFAULT_CORPUS = Path("runs/corpus")
SIMULATED_MEGABYTES = 20.0


@dataclass(frozen=True, kw_only=True)
class SimulateResult(Result):
    """A simulated corpus.

    Attributes:
        out: path of the directory.
        cached: whether it existed already.
        train_documents, valid_documents: number of documents.
        train_bytes, valid_bytes, size_bytes: UTF-8 bytes of text, and of the whole corpus.
        questions, chats: number of questions and of conversations.
        seconds: time of the work.
    """

    out: Path
    cached: bool = False
    train_documents: int = 0
    valid_documents: int = 0
    train_bytes: int = 0
    valid_bytes: int = 0
    size_bytes: int = 0
    questions: int = 0
    chats: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """What a text costs with one tokenizer.

    `kv_cache_bytes_per_token` is by precision of the cache, None if the tokenizer is no model's; `shown` are the first
    tokens of the text.
    """

    tokenizer: Path
    tokens: int
    bytes_per_token: float
    tokens_per_word: float
    vocab_size: int
    vocab_used_share: float
    kv_cache_bytes_per_token: dict[str, int] | None
    shown: list[str]


@dataclass(frozen=True, kw_only=True)
class TokensResult(Result):
    """Counts of a text.

    Attributes:
        documents, bytes, words: size of the text.
        costs: tokens and cache size with the tokenizer, then with that of `--against`.
    """

    documents: int
    bytes: int
    words: int
    costs: list[TokenCost]


def simulate(
    out: options.Out = DEFAULT_CORPUS,
    megabytes: Annotated[float, typer.Option(min=0.01, help="UTF-8 megabytes of training text.")] = SIMULATED_MEGABYTES,
    questions: Annotated[int, typer.Option(min=0, help="Questions about held-out matches.")] = 500,
    chats: Annotated[int, typer.Option(min=0, help="Conversations about training matches, in chats.jsonl.")] = 0,
    seed: options.Seed = 0,
) -> SimulateResult:
    """Write a corpus of simulated matches, and questions about them with known answers."""
    from sportsllm.console import output, progress_bar
    from sportsllm.formats.artifact import Stage, run_stage
    from sportsllm.simulator import write_corpus

    def make(directory: Path) -> dict[str, int]:
        with progress_bar("simulate", megabytes * 1e6) as bar:
            counts = write_corpus(
                directory, seed=seed, megabytes=megabytes, questions=questions, chats=chats, progress=bar.advance
            )
        return {**counts, "size_bytes": counts["train_bytes"] + counts["valid_bytes"]}

    settings = {"megabytes": megabytes, "questions": questions} | ({"chats": chats} if chats else {})
    result = SimulateResult.of(run_stage(out, Stage("data simulate", settings, seed=seed), make))
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
        list[Path],
        typer.Argument(help="Text: .txt, .md, .jsonl (also .gz) or .parquet files, or folders.", show_default=False),
        options.READS_TEXT,
    ],
    against: Annotated[
        Path | None, typer.Option(help="Another tokenizer to compare with, in the same forms.", show_default="none")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Show the first N tokens of the text with their borders.")] = 0,
    settings: options.Settings = None,
) -> TokensResult:
    """Count the tokens of a text: bytes per token, tokens per word, vocabulary in use; compare two tokenizers."""
    from sportsllm.console import output, table
    from sportsllm.text.conversations import plain_text
    from sportsllm.text.documents import read_documents, take_reading
    from sportsllm.text.token_counts import count_tokens, visible_piece
    from sportsllm.text.tokenizer import TextTokenizer, read_tokenizer

    reading = take_reading(parse_settings(settings, TEXT))
    sources = [tokenizer] if against is None else [tokenizer, against]
    paths = [each if each.is_file() else each / "tokenizer.json" for each in sources]
    opened = [read_tokenizer(path) for path in paths]
    encoders = [TextTokenizer(each, 0, None, path.parent, reading) for path, each in zip(paths, opened, strict=True)]
    size, counts = count_tokens(encoders, read_documents(files, reading.text_field))
    if not all(counts):
        raise ArtifactError(f"{', '.join(map(str, files))}: no text in it; give a text to count")
    text = plain_text(next(iter(read_documents(files, reading.text_field)))) if show else ""
    costs = [_cost(*item, size, text, show) for item in zip(sources, opened, counts, strict=True)]
    output().print(f"{size['documents']:,} documents, {size['bytes']:,} bytes, {size['words']:,} words")
    headers = ("", *map(str, sources), *(["ratio"] if against else []))
    output().print(table(headers, _rows(costs)))
    for cost in costs if show else []:
        output().print(f"{cost.tokenizer}: {'│'.join(map(visible_piece, cost.shown))}", soft_wrap=True)
    return TokensResult(documents=size["documents"], bytes=size["bytes"], words=size["words"], costs=costs)


def _cost(
    source: Path, tokenizer: Tokenizer, counts: Counter[int], size: Counter[str], text: str, show: int
) -> TokenCost:
    from sportsllm.formats.huggingface import load_config
    from sportsllm.models.memory import kv_cache_bytes_per_token
    from sportsllm.text.token_counts import token_pieces

    directory = source.parent if source.is_file() else source
    vocabulary = len(tokenizer.get_vocab(with_added_tokens=True))
    cache = kv_cache_bytes_per_token(load_config(directory)) if (directory / "config.json").exists() else {}
    return TokenCost(
        tokenizer=source,
        tokens=counts.total(),
        bytes_per_token=size["bytes"] / counts.total(),
        tokens_per_word=counts.total() / max(1, size["words"]),
        vocab_size=vocabulary,
        vocab_used_share=len(counts) / vocabulary,
        kv_cache_bytes_per_token=cache if any(cache.values()) else None,  # an LSTM's state has one size for any text
        shown=token_pieces(tokenizer, text, show) if show else [],
    )


def _rows(costs: Sequence[TokenCost]) -> list[list[str]]:
    """A row for each figure, with a ratio if there are two tokenizers."""
    rows: list[tuple[str, Sequence[float], str]] = [
        ("tokens", [cost.tokens for cost in costs], ","),
        ("bytes per token", [cost.bytes_per_token for cost in costs], ".3f"),
        ("tokens per word", [cost.tokens_per_word for cost in costs], ".3f"),
        ("vocabulary", [cost.vocab_size for cost in costs], ","),
        ("vocabulary in use", [cost.vocab_used_share for cost in costs], ".1%"),
    ]
    caches = [cost.kv_cache_bytes_per_token["fp32"] for cost in costs if cost.kv_cache_bytes_per_token]
    if len(caches) == len(costs):
        rows.append(("fp32 cache bytes per token", caches, ","))
        per_byte = [cache / cost.bytes_per_token for cache, cost in zip(caches, costs, strict=True)]
        rows.append(("fp32 cache bytes per byte of text", per_byte, ",.1f"))
    table = []
    for name, values, style in rows:
        ratio = [f"{values[0] / values[1]:.3f}"] if len(values) > 1 else []
        table.append([name, *(format(value, style) for value in values), *ratio])
    return table
