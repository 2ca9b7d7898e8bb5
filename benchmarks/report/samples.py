"""Text before and after: the same prompts gone on with by the first and the last stage, always the likeliest token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.report.inputs import Sample, StageSummary
from sportsllm.console import ProgressBar, progress_bar, say
from sportsllm.errors import ArtifactError, SportsLLMError, UsageError
from sportsllm.inference.decoder import Decoder, open_decoder
from sportsllm.inference.sampling import Sampling, generate
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer

NEW_TOKENS = 60
Opened = tuple[Decoder, TextTokenizer]


def before_and_after(
    stages: Sequence[StageSummary], prompts: Sequence[str], threads: int | None = None, new_tokens: int = NEW_TOKENS
) -> tuple[list[Sample], list[str]]:
    """Greedy continuations of `prompts` by the first and by the last stage that can be opened.

    Args:
        stages: in the order they were given.
        prompts: texts to go on from.
        threads: CPU threads.
        new_tokens: at most so many tokens each.

    Returns:
        For each prompt the text before and the one after, and a line for every stage on the way that could not be
        opened. Where only one stage opens there is one text a prompt, and a line says so.

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
    with progress_bar("samples", 2 * len(prompts)) as progress:
        first = _texts(stages, prompts, threads, new_tokens, skipped, progress)
        if first is None:
            reasons = "; ".join(skipped) or "none was given"
            raise ArtifactError(f"--sample: no stage can be opened to write text with: {reasons}")
        rest = stages[list(stages).index(first[0]) + 1 :]
        last = _texts(reversed(rest), prompts, threads, new_tokens, skipped, progress)
    if last is None:
        skipped.append(f"There is no text to compare with: {first[0].name} alone could be opened.")
    for line in skipped:
        say(line)
    samples = []
    for index, prompt in enumerate(prompts):
        samples.append(Sample(f"Before: {first[0].name}", first[1][index], prompt))
        if last is not None:
            samples.append(Sample(f"After: {last[0].name}", last[1][index], prompt))
    return samples, skipped


def _texts(
    stages: Iterable[StageSummary],
    prompts: Sequence[str],
    threads: int | None,
    new_tokens: int,
    skipped: list[str],
    progress: ProgressBar,
) -> tuple[StageSummary, list[str]] | None:
    """The first stage that opens, with its continuations; reasons of those before it go into `skipped`."""
    for stage in stages:
        progress.advance(0, stage.name)
        opened = _open(stage, threads, skipped)
        if opened is not None:
            texts = []
            for prompt in prompts:
                texts.append(_continued(opened, prompt, new_tokens))
                progress.advance(1)
            return stage, texts
    return None


def _open(stage: StageSummary, threads: int | None, skipped: list[str]) -> Opened | None:
    try:
        decoder = open_decoder(Path(stage.directory), threads)
        return decoder, load_tokenizer(Path(stage.directory), decoder.config)
    except SportsLLMError as error:
        reason = str(error)
    except ModuleNotFoundError as error:
        reason = f"it needs the package {error.name!r}"
    skipped.append(f"No sample from {stage.name}: {reason}")
    return None


def _continued(opened: Opened, prompt: str, new_tokens: int) -> str:
    decoder, tokenizer = opened
    begin = [tokenizer.begin_id, *tokenizer.encode(prompt)]
    tokens = generate(decoder, begin, new_tokens, Sampling(temperature=0), decoder.config.stop_token_ids)
    return "".join(tokenizer.decode_stream(begin, tokens))
