"""Greedy continuations of the same prompts by the first and the last stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.reporting.inputs import Sample, StageSummary
from sportsllm.console import log
from sportsllm.errors import ArtifactError, SportsLLMError, UsageError
from sportsllm.inference.decoder import Decoder, open_decoder
from sportsllm.inference.sampling import Sampling, generate
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer

Opened = tuple[StageSummary, Decoder, TextTokenizer]


def before_and_after(
    stages: Sequence[StageSummary], prompts: Sequence[str], threads: int | None = None, new_tokens: int = 60
) -> tuple[list[Sample], list[str]]:
    """Greedy continuations of `prompts` by the first and by the last stage that can be opened.

    Returns:
        Each prompt's texts, one where only one stage opens, and a line for every stage that could not be opened.

    Raises:
        UsageError: a prompt is not valid UTF-8, or fills a model's context.
        ArtifactError: no stage can be opened.
    """
    for prompt in prompts:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("--sample is not valid UTF-8") from None
    skipped: list[str] = []
    first = _first_opened(stages, threads, skipped)
    if first is None:
        reasons = "; ".join(skipped) or "none was given"
        raise ArtifactError(f"--sample: no stage can be opened to write text with: {reasons}")
    last = _first_opened(reversed(stages[list(stages).index(first[0]) + 1 :]), threads, skipped)
    if last is None:
        skipped.append(f"There is no text to compare with: {first[0].name} alone could be opened.")
    for reason in skipped:
        log(reason)
    samples = []
    for prompt, (word, opened) in itertools.product(prompts, (("Before", first), ("After", last))):
        if opened is not None:
            stage, decoder, tokenizer = opened
            begin = [tokenizer.begin_id, *tokenizer.encode(prompt)]
            tokens = generate(decoder, begin, new_tokens, Sampling(temperature=0), decoder.config.stop_token_ids)
            samples.append(Sample(f"{word}: {stage.name}", "".join(tokenizer.decode_stream(begin, tokens)), prompt))
    return samples, skipped


def _first_opened(stages: Iterable[StageSummary], threads: int | None, skipped: list[str]) -> Opened | None:
    """The first stage that opens; the reasons of those before it go into `skipped`."""
    for stage in stages:
        try:
            decoder = open_decoder(Path(stage.directory), threads)
            return stage, decoder, load_tokenizer(Path(stage.directory), decoder.config)
        except (SportsLLMError, ModuleNotFoundError) as error:
            skipped.append(f"No sample from {stage.name}: {error}")
    return None
