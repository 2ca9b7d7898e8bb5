"""How far a model's predictions are from a base model's on the same tokens (numpy only).

The quantities are those of llama.cpp's `llama-perplexity --kl-divergence`. Shape suffixes: T tokens, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.inference.decoder import Logits, log_probabilities
from sportsllm.inference.scoring import TextScore, document_windows, perplexity_of, ratio_interval, wilson_interval
from sportsllm.models.config import ModelConfig
from sportsllm.text.conversations import Document
from sportsllm.text.tokenizer import TextTokenizer

_LOGITS_AT_ONCE = 2**20  # in float64, of either model
_ADVICE = "KL compares models that share a tokenizer, so compare these by bits per byte"

Doubles = npt.NDArray[np.float64]


class LogitSource(Protocol):
    """The part of a `Decoder` that is compared."""

    config: ModelConfig

    def stream_logits(self, row: Sequence[int]) -> Iterator[Logits]:
        """See `Decoder.stream_logits`."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A model beside a base model. Intervals are of 95% over documents, and None for few.

    Attributes:
        base_perplexity: of the same tokens.
        perplexity_ratio: the model's over the base's.
        kl: mean over tokens of KL(base || model) in nats; `kl_error`: its standard error for independent tokens.
        kl_p99, kl_max: 99th percentile and maximum over tokens.
        top1_agreement: share of tokens before which both expect the same one most. Its interval is no narrower than
            Wilson's for independent tokens.
    """

    base_perplexity: float
    perplexity_ratio: float
    perplexity_ratio_interval: tuple[float, float] | None
    kl: float
    kl_interval: tuple[float, float] | None
    kl_error: float | None
    kl_p99: float
    kl_max: float
    top1_agreement: float
    top1_interval: tuple[float, float] | None

    def __str__(self) -> str:
        """Two lines for people."""

        def between(ends: tuple[float, float] | None, digits: str) -> str:
            few = "too few documents for an interval"
            return few if ends is None else f"95% interval {ends[0]:{digits}} to {ends[1]:{digits}}"

        return (
            f"perplexity ratio {self.perplexity_ratio:.4f} ({between(self.perplexity_ratio_interval, '.4f')}), "
            f"same likeliest token {self.top1_agreement:.2%} ({between(self.top1_interval, '.2%')})\n"
            f"mean KL {self.kl:.6f} ({between(self.kl_interval, '.6f')}), "
            f"99th percentile {self.kl_p99:.6f}, maximum {self.kl_max:.6f}"
        )


def compare_documents(
    decoder: LogitSource,
    base: LogitSource,
    tokenizer: TextTokenizer,
    base_tokenizer: TextTokenizer,
    documents: Sequence[Document],
) -> tuple[TextScore, Divergence]:
    """Score documents as `score_documents` does with both models, in windows of the shorter context.

    Logits are held for one chunk of tokens, and one number for each token.

    Raises:
        UsageError: the models do not have the same tokens.
        ArtifactError: there is nothing to score.
    """
    sizes = decoder.config.vocab_size, base.config.vocab_size
    if sizes[0] != sizes[1]:
        raise UsageError(f"the models have {sizes[0]:,} and {sizes[1]:,} tokens; {_ADVICE}")
    both = (each.encode_documents(documents) for each in (tokenizer, base_tokenizer))
    if any(own != other for own, other in zip(*both, strict=True)):
        raise UsageError(f"the models' tokenizers split the text differently; {_ADVICE}")
    context = min(decoder.config.max_position_embeddings, base.config.max_position_embeddings)
    text = document_windows(tokenizer, documents, context)
    sums, kl = np.zeros((4, len(text.tokens))), list[npt.NDArray[np.float32]]()  # sums of `_compare` by document
    with progress_bar("compare", len(text.rows)) as bar:
        for row in text.rows:
            place, ids = 1, np.array(row.ids)  # place: of the token that the next logits predict
            for own_TV, base_TV in zip(
                decoder.stream_logits(row.ids[:-1]), base.stream_logits(row.ids[:-1]), strict=True
            ):
                stop, step = place + len(own_TV), max(1, _LOGITS_AT_ONCE // sizes[0])
                scored = [at for at in np.flatnonzero(row.scored[place:stop]).tolist() if at + place >= row.first]
                for part in (scored[begin : begin + step] for begin in range(0, len(scored), step)):
                    kl_T, *others = _compare(base_TV[part], own_TV[part], ids[place:stop][part])
                    kl.append(kl_T.astype(np.float32))
                    sums[:, row.document] += float(kl_T.sum()), *others
                place = stop
            bar.advance()
    every, tokens = np.concatenate(kl), sum(text.tokens)
    distance, agree, own, theirs = sums
    ends, alike = (ratio_interval(each.tolist(), text.tokens) for each in (own - theirs, agree))
    agreement = float(agree.sum()) / tokens
    low, high = wilson_interval(agreement, tokens)
    score = TextScore(float(own.sum()), tokens, text.bytes, tuple(own.tolist()))
    return score, Divergence(
        base_perplexity=perplexity_of(float(theirs.sum()) / tokens),
        perplexity_ratio=perplexity_of(float((own - theirs).sum()) / tokens),
        perplexity_ratio_interval=None if ends is None else (perplexity_of(ends[0]), perplexity_of(ends[1])),
        kl=float(every.mean(dtype=np.float64)),
        kl_interval=ratio_interval(distance.tolist(), text.tokens),
        kl_error=float(every.std(dtype=np.float64, ddof=1)) / math.sqrt(tokens) if tokens > 1 else None,
        kl_p99=float(np.percentile(every, 99)),
        kl_max=float(every.max()),
        top1_agreement=agreement,
        top1_interval=None if alike is None else (min(low, alike[0]), max(high, alike[1])),
    )


def _compare(base_TV: Logits, own_TV: Logits, targets_T: npt.NDArray[np.int64]) -> tuple[Doubles, int, float, float]:
    """KL(base || own) before each target, how often the likeliest token agrees, and the nats of the targets by each."""
    base_logs, own_logs = log_probabilities(base_TV), log_probabilities(own_TV)
    kl_T: Doubles = (np.exp(base_logs) * (base_logs - own_logs)).sum(axis=-1)
    agree = int((base_TV.argmax(axis=-1) == own_TV.argmax(axis=-1)).sum())
    own, base = (-float(logs[np.arange(len(targets_T)), targets_T].sum()) for logs in (own_logs, base_logs))
    return kl_T, agree, own, base
