"""Calibration samples: text for importance scores, refits and scales. Never held-out text.

It is given, known from training, or written by the model itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.text.conversations import Document, plain_text
from sportsllm.text.documents import USUAL, Reading, cut_document, manifest_setting
from sportsllm.text.split import training_side
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer

SAMPLE_TOKENS = 512
_LEAST_TEXTS, _TEXTS_TIMES_PARAMETERS = 16, 4e9  # that a model writes: few for a large one
_LEAST_SAMPLES, _MOST_SAMPLES = 16, 256  # by default
_BEFORE_TRAINING = 40  # samples: a training mends what more text would have, not a wrong layer
_SAMPLES_TIMES_PARAMETERS = 5e9  # pruning runs the model about ten times: minutes, also for a large one
_TOKENS_PER_NEURON = 4  # a refit solves for one weight per neuron and output
JUDGED_SAMPLES = 8  # for `check_familiar`
GENERAL_TEXT = Path(__file__).parents[1] / "text" / "general.jsonl"
"""70 texts of many subjects, formats and languages, written for this package and dedicated to the public domain."""
_GENERAL_PART = 4  # of calibration text, one part is GENERAL_TEXT
_RESERVOIR_CHARACTERS, _CHARACTERS_A_TOKEN = 2**26, 16  # of text to draw from, in memory
_LEAST_TOKENS = 8  # shorter remainders of a document are dropped


def calibration_samples(
    files: Sequence[Path],
    valid: Sequence[Path],
    tokenizer: TextTokenizer,
    config: ModelConfig,
    count: int | None,
    length: int,
    most: int | None = None,
    checkpoints: Sequence[Path] = (),
) -> list[Tensor]:
    """Token ids of random samples of training text, each (1, T) with T at most `length`.

    No token is read twice, and no held-out document is read. Documents are drawn in proportion to their length, and
    give a second sample only when every document has given one.

    Args:
        valid, checkpoints: what is held out, see `sportsllm.text.split.training_side`.
        count: number of samples; None for `most` times `length` tokens, or all that there are.
        length: tokens of a sample, cut to the context.
        most: see `count`; None for `usual_samples`.

    Raises:
        ArtifactError: no text, or fewer samples than `count`.
    """
    length = min(length, config.max_position_embeddings)
    if most is None:
        most = usual_samples(config, length)
    field = USUAL.text_field if list(files) == [GENERAL_TEXT] else tokenizer.reading.text_field
    documents = training_side(files, valid, field, checkpoints) if files else []
    samples: list[Tensor] = []
    tokens, rng = 0, np.random.default_rng(0)
    reservoir = max(_RESERVOIR_CHARACTERS, _CHARACTERS_A_TOKEN * length * (count or most))
    parts = _drawn(tokenizer.warn_if_special(documents), reservoir, rng)
    for sample in _cut_samples(parts, tokenizer, length, rng):
        if len(samples) == count or (count is None and tokens >= most * length):
            break
        samples.append(sample)
        tokens += sample.numel()
    if not samples:
        raise ArtifactError("there is no calibration text; give --calibration FILE with text in it")
    if count is not None and len(samples) < count:
        raise ArtifactError(
            f"the calibration text yields {len(samples)} of {count} samples; give more text, or ask for fewer samples"
        )
    return samples


def usual_samples(config: ModelConfig, length: int, training_tokens: int = 0) -> int:
    """Default number of samples of `length` tokens for pruning.

    256 up to 20M parameters, then fewer in proportion; 40 before a training. At least 16, and four tokens for each
    feed-forward neuron.
    """
    fewest = max(_LEAST_SAMPLES, math.ceil(_TOKENS_PER_NEURON * config.intermediate_size / length))
    most = _BEFORE_TRAINING if training_tokens else _MOST_SAMPLES
    return max(fewest, min(most, round(_SAMPLES_TIMES_PARAMETERS / config.parameters)))


def check_familiar(samples: Sequence[Tensor], nats: float) -> None:
    """Warn if calibration text looks out of domain: the model predicts it no better than its token frequencies do.

    Args:
        samples: token ids, (1, T) each.
        nats: the model's mean cross-entropy per token on them; compared with the entropy of the frequencies, which is
            smaller in a short text.
    """
    counts = torch.cat([tokens.flatten() for tokens in samples]).bincount().double()
    entropy = float(torch.special.entr(counts / counts.sum()).sum())
    if nats >= entropy:
        log(
            f"calibration text looks out of domain: loss {nats:.2f}, unigram entropy {entropy:.2f} nats a token; give "
            "--calibration text like the training text, or train the model longer"
        )


def _drawn(documents: Iterable[Document], characters: int, rng: np.random.Generator) -> list[tuple[Document, bool]]:
    """Parts of documents in a random order that prefers long ones, and whether a document begins with the part.

    Only the first of them are in memory, about so many `characters`.
    """
    # The largest of u ** (1 / w) is drawn with probability w / sum of w, and so on (doi.org/10.1016/j.ipl.2005.11.003).
    heap, size, number = list[tuple[float, int, Document, bool]](), 0, 0
    for document in documents:
        for place, part in enumerate(cut_document(document)):
            number, weight = number + 1, max(1, len(plain_text(part)))
            heapq.heappush(heap, (rng.random() ** (1 / weight), -number, part, not place))
            size += weight
            while size - (smallest := len(plain_text(heap[0][2]))) > characters:
                heapq.heappop(heap)
                size -= smallest
    return [(part, begins) for _, _, part, begins in sorted(heap, reverse=True)]


def _cut_samples(
    parts: Sequence[tuple[Document, bool]], tokenizer: TextTokenizer, length: int, rng: np.random.Generator
) -> Iterator[Tensor]:
    """A random chunk of each part, in their order; then another chunk of each, and so on."""
    left: list[list[Tensor]] = []
    for (part, begins), encoded in zip(parts, tokenizer.encode_documents(part for part, _ in parts), strict=True):
        ids = encoded.ids[isinstance(part, str) and not begins :]
        cut = [torch.tensor([ids[start : start + length]]) for start in range(0, len(ids), length)]
        cut = [chunk for chunk in cut if chunk.numel() >= min(_LEAST_TOKENS, len(ids), length) > 1]
        order = rng.permutation(len(cut))
        if len(cut):
            yield cut[order[0]]
            left.append([cut[place] for place in order[:0:-1]])
    while left:
        left = [chunks for chunks in left if chunks]
        for chunks in left:
            yield chunks.pop()


@dataclass(frozen=True)
class CalibrationText:
    """Files of calibration text, and the number of samples.

    Held-out text of the checkpoint's manifest and of `valid` is never read. Without files the checkpoint's training
    text is read. A quarter of the samples is GENERAL_TEXT, which reaches channels that text of one domain does not,
    unless the number of samples is given. If no text is known, half or more is GENERAL_TEXT, and the rest is text that
    the checkpoint writes itself, which is always in its domain. By default the method chooses the number of samples.
    """

    files: tuple[Path, ...] = ()
    samples: int | None = None
    valid: tuple[Path, ...] = ()
    reading: Reading = USUAL

    def found(self, checkpoint: Path) -> CalibrationText:
        """The same with the checkpoint's training text, if no files are given and all of it exists."""
        if self.files:
            return self
        made_from = tuple(Path(name) for name in manifest_setting(checkpoint, "corpus") or ())
        missing = [path for path in made_from if not path.exists()]
        if missing:
            log(f"{missing[0]}: training text of {checkpoint}, not found")
            return self
        return replace(self, files=made_from)

    def read(self, checkpoint: Path, model: ModelConfig, most: int, least: int = 0) -> list[Tensor]:
        """Token ids of samples of at most 512 tokens, each (1, T); by default about `most` of that length.

        If there are fewer than `least` tokens, the model writes more, unless a number of samples is given.

        Raises:
            ArtifactError: there is no text, or less than asked for.
        """
        from sportsllm.inference.batch_sampling import self_generated_text

        length = min(SAMPLE_TOKENS, model.max_position_embeddings)
        tokenizer = load_tokenizer(checkpoint, model, self.reading)
        if not self.files:
            count = self.samples or most
            written = min(max(_LEAST_TEXTS, round(_TEXTS_TIMES_PARAMETERS / model.parameters)), (count + 1) // 2)
            others = " and a general text" if count > written else ""
            log(f"no calibration text: using {written} texts that the model writes itself{others}")
            own = self_generated_text(checkpoint, model, written, length)
            general = calibration_samples([GENERAL_TEXT], (), tokenizer, model, None, length, count - written)
            return [*own, *general] if count > written else own
        mixed_in = 0 if self.samples else most // _GENERAL_PART
        sizes = self.samples, SAMPLE_TOKENS, max(most - mixed_in, -(-least // length))  # a context may be short
        found = calibration_samples(self.files, self.valid, tokenizer, model, *sizes, checkpoints=[checkpoint])
        tokens = sum(sample.numel() for sample in found)
        if mixed_in:
            found += calibration_samples([GENERAL_TEXT], (), tokenizer, model, None, SAMPLE_TOKENS, mixed_in)
        if tokens >= least or self.samples is not None:
            return found
        log(
            f"{tokens:,} tokens of calibration text are too few: adding {_LEAST_TEXTS} texts that the model "
            "writes itself"
        )
        return [*found, *self_generated_text(checkpoint, model, _LEAST_TEXTS, length)]
