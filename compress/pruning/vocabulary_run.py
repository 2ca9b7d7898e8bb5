"""Vocabulary pruning as a stage: count a domain's tokens, and cut model and tokenizer together.

Text comes back from the smaller vocabulary unchanged, but some words are cut into more tokens, and into tokens that
the model has seldom seen there; what that costs is measured in bits per byte, which does not depend on the
tokenizer. To win it back, train the result on (`train --init`): distilling from the unpruned model is refused, since
the two no longer agree on what a token is. Prune first, quantize afterwards.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from compress.pruning.vocabulary import kept_tokens, read_vocabulary, saved_tokens, with_halves
from compress.pruning.vocabulary_files import MODEL_IDS, named_ids, renumber, write_tokenizer
from sportsllm.console import progress_bar, say
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.inference.evaluate import score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.hf_config import load_config, read_json
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.artifact import Stage, run_stage
from sportsllm.storage.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.storage.safetensors_files import quantization_config
from sportsllm.text.documents import read_documents
from sportsllm.text.packing import TokenizedDocuments, tokenize
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from sportsllm.training.setup import manifest_setting

_STEP = 32  # rows come in multiples of this, the smallest block of the integer kernels
_SCORED_TOKENS = 65_536


def prune_embedding(model: SportsLLM, kept: Sequence[int]) -> SportsLLM:
    """A model with only the kept tokens' rows in embedding and head; the logits of those tokens stay what they were.

    Args:
        model: float32 and unquantized; read, never changed.
        kept: old ids, rising; those that the config names are among them.
    """
    new = {old: place for place, old in enumerate(kept)}
    named = {key: renumber(getattr(model.config, key), new) for key in MODEL_IDS}
    pruned = SportsLLM(model.config.with_changes(vocab_size=len(kept), **named))
    state = model.state_dict()
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & state.keys():
        state[name] = state[name][list(kept)]
    pruned.load_state_dict(state)
    return pruned.eval()


def target_size(vocab_size: int | None, min_count: int | None, saved: npt.NDArray[np.int64], fixed: set[int]) -> int:
    """How many rows stay: a multiple of 32, at most all of them. A line says so if that is not the number asked for.

    Args:
        vocab_size: tokens to keep, or None for `min_count`.
        min_count: keep tokens that save the calibration text at least this many tokens.
        saved: (V,) from `saved_tokens`.
        fixed: ids that always stay.

    Raises:
        UsageError: fewer than the fixed ones, or more than there are.
    """
    if vocab_size is None:
        wanted = len(fixed | set(np.flatnonzero(saved >= (min_count or 1)).tolist()))
    elif len(fixed) <= vocab_size <= len(saved):
        wanted = vocab_size
    else:
        raise UsageError(
            f"--vocab-size is {vocab_size}; the model has {len(saved)} tokens, and {len(fixed)} of them always stay "
            f"(256 bytes and special tokens), choose {len(fixed)} to {len(saved)}"
        )
    size = min(len(saved), -(-wanted // _STEP) * _STEP)
    if size != wanted:
        say(f"{size:,} tokens stay, not {wanted:,}: kernels want a multiple of {_STEP}")
    return size


@dataclass(frozen=True)
class Counted:
    """A figure of the model before and after."""

    before: float
    after: float


@dataclass(frozen=True)
class VocabularyResult:
    """What pruning a vocabulary did.

    Attributes:
        parameters: of the result.
        vocab_size, vocab_size_before: rows of the embedding.
        bits_per_byte: of held-out text, or None where there is none.
        tokens_per_byte: of that text, or else of the calibration text.
        seconds: it took.
    """

    parameters: int
    vocab_size: int
    vocab_size_before: int
    bits_per_byte: Counted | None
    tokens_per_byte: Counted
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As `prune-vocabulary --json` prints it."""
        values: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Counted):
                values |= {f"{item.name}_{key}": number for key, number in dataclasses.asdict(value).items()}
            elif value is not None:
                values[item.name] = value
        return values


def prune_vocabulary(
    *,
    checkpoint: Path,
    out: Path,
    vocab_size: int | None,
    min_count: int | None,
    calibration: Sequence[Path],
    text: Sequence[Path],
) -> dict[str, Any]:
    """Drop the tokens that a domain does not use from a checkpoint directory's model and tokenizer.

    The 256 bytes and all special tokens stay, so every text can still be written; the reserved tokens that `train`
    fills a vocabulary up with go first. `vocabulary_map.json` holds the old id of each new one.

    Args:
        checkpoint: unquantized.
        out: directory to make.
        vocab_size: tokens to keep, rounded up to a multiple of 32.
        min_count: instead of it: keep each token that saves the calibration text at least this many tokens, counting
            also its use on the way to longer ones.
        calibration: the domain's text, where usage is counted.
        text: held-out text, its first 65,536 tokens, to measure bits per byte on before and after; empty to leave
            that out.

    Returns:
        The results, as `prune-vocabulary --json` prints them.

    Raises:
        UsageError: neither or both of vocab_size and min_count, or an impossible one.
        ArtifactError: quantized, a tokenizer that cannot be pruned, or files that disagree.
    """
    _check_request(checkpoint, vocab_size, min_count)
    config = load_config(checkpoint)
    settings = {
        "checkpoint": str(checkpoint),
        "vocab_size": vocab_size,
        "min_count": min_count,
        "calibration": [str(path) for path in calibration],
        "text": [str(path) for path in text],
        "corpus": manifest_setting(checkpoint, "corpus"),
        "valid": manifest_setting(checkpoint, "valid"),
    }

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        words = load_tokenizer(checkpoint, config)
        where = checkpoint / "tokenizer.json"
        vocabulary = read_vocabulary(read_json(where), str(where))
        fixed = with_halves(vocabulary, vocabulary.fixed | named_ids(checkpoint, config, vocabulary))
        model = load_checkpoint(checkpoint)
        documents = list(read_documents(calibration))
        before = tokenize(documents, words)
        saved = saved_tokens(vocabulary, np.bincount(before.ids, minlength=config.vocab_size))
        kept = kept_tokens(vocabulary, saved, target_size(vocab_size, min_count, saved, fixed), fixed)
        pruned = prune_embedding(model, kept)
        save_checkpoint(directory, pruned, checkpoint)
        write_tokenizer(checkpoint, directory, vocabulary, kept)
        fewer = load_tokenizer(directory, pruned.config)
        after = tokenize(documents, fewer)
        _check_round_trip(where, (words, before), (fewer, after))
        if text:
            bits, tokens = _held_out(((model, words), (pruned, fewer)), list(read_documents(text)))
        else:
            ends = len(documents) * (1 if words.end_id is None else 2)  # begin and end tokens
            bits, tokens = None, Counted(*((side.ids.size - ends) / side.text_bytes for side in (before, after)))
        return VocabularyResult(
            parameters=pruned.config.parameters,
            vocab_size=len(kept),
            vocab_size_before=config.vocab_size,
            bits_per_byte=bits,
            tokens_per_byte=tokens,
            seconds=time.perf_counter() - started,
        ).to_json()

    stage = Stage("prune", settings, [checkpoint, *calibration, *text])
    return run_stage(out, stage, make)


def _check_request(checkpoint: Path, vocab_size: int | None, min_count: int | None) -> None:
    if (vocab_size is None) == (min_count is None):
        raise UsageError("say how small: --vocab-size N or --min-count M, one of them")
    if min_count is not None and min_count < 1:
        raise UsageError(f"--min-count is {min_count}; it must be 1 or more")
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized; prune the unquantized checkpoint, then quantize")


def _check_round_trip(where: Path, *sides: tuple[TextTokenizer, TokenizedDocuments]) -> None:
    """Every counted document must come back from the new tokens as it did from the old ones."""
    ends = [counted.ends.tolist() for _, counted in sides]
    starts = [[0, *side[:-1]] for side in ends]
    with progress_bar("check", len(ends[0])) as bar:
        for number in range(len(ends[0])):
            texts = {
                words.decode(counted.ids[starts[side][number] : ends[side][number]].tolist())
                for side, (words, counted) in enumerate(sides)
            }
            if len(texts) > 1:
                raise ArtifactError(
                    f"{where}: document {number + 1} of the calibration text does not survive the pruned tokenizer; "
                    "its normalizer or decoder is not supported, keep the vocabulary whole"
                )
            bar.advance()


def _held_out(sides: Sequence[tuple[SportsLLM, TextTokenizer]], documents: Sequence[str]) -> tuple[Counted, Counted]:
    """Bits and tokens per byte before and after, of the same documents: the first 65,536 or so of the old tokens."""
    tokens, part = 0, []
    for text in documents:
        if tokens < _SCORED_TOKENS:
            part.append(text)
            tokens += len(sides[0][1].encode(text))
    if len(part) < len(documents):
        say(f"bits per byte: on the first {len(part):,} of {len(documents):,} held-out documents")
    before, after = (
        score_documents(TorchDecoder(model), words, part, description=f"score {key}")
        for key, (model, words) in zip(("before", "after"), sides, strict=True)
    )
    bits = Counted(before.bits_per_byte, after.bits_per_byte)
    return bits, Counted(before.tokens / before.bytes, after.tokens / after.bytes)
