"""Vocabulary pruning: count a domain's tokens, keep the most useful, and cut model and tokenizer together.

Text comes back unchanged, but some words are split into more tokens, which the model has seldom seen there. Bits per
byte, which do not depend on the tokenizer, measure the cost. Fine-tuning the result (`train CHECKPOINT`) wins it back.

A BPE token is made by merging two halves, so it can stay only if both halves do, and theirs. Inside the span that
becomes a token, merges run as they would on that span alone, so a token is always made in the same way. Therefore:

1. One count of a text's tokens, passed on from each token to its halves, tells how often every token is made on
   the way. Without the token those places keep its halves, so that is also how many tokens the text grows by. The
   count never rises from a half to a whole: the N tokens that have the highest are closed under merges, and no
   closed set of N loses less. One sort gives the set that dropping leaf after leaf and counting again gives
   (https://arxiv.org/abs/2512.03989).
2. A word that is made of kept tokens only, on the way too, is split as before: no merge that is gone was its next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from compress.pruning.tokenizer_files import (
    RESERVED,
    Vocabulary,
    named_ids,
    read_vocabulary,
    renumbered,
    write_tokenizer,
)
from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject, read_json
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.formats.huggingface import SPECIAL_IDS, load_config
from sportsllm.inference.scoring import score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.description import EMBEDDING, HEAD
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.conversations import Document
from sportsllm.text.documents import USUAL, Reading, manifest_setting, read_documents
from sportsllm.text.split import training_side
from sportsllm.text.tokenizer import TextTokenizer, leave_out, load_tokenizer
from sportsllm.text.tokens import TokenizedDocuments, token_cache, tokenize

_STEP = 32  # rows come in multiples of this, the smallest block of the integer kernels
_SCORED_TOKENS = 65_536
_COUNTED_AT_ONCE = 2**22  # tokens


def saved_tokens(vocabulary: Vocabulary, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many tokens more a text would have without each token, the others kept.

    `counts` (V,) says how often each id is in the text. The result, (V,), is -1 for ids that no text can make: rows
    without a token and the reserved tokens of `train`.
    """
    made = counts.astype(np.int64)
    saved = np.full_like(made, -1)
    for token, number in vocabulary.ids.items():
        for half in vocabulary.halves.get(number, ()):
            made[half] += made[number]
        if not RESERVED.fullmatch(token):
            saved[number] = made[number] * vocabulary.growth[number]
    return saved


def with_halves(vocabulary: Vocabulary, ids: Iterable[int]) -> set[int]:
    """The ids and all that they are made of."""
    found = set(ids)
    for number in vocabulary.ids.values():
        if number in found:
            found.update(vocabulary.halves.get(number, ()))
    return found


def kept_tokens(vocabulary: Vocabulary, saved: npt.NDArray[np.int64], size: int, fixed: Collection[int]) -> list[int]:
    """The `size` ids that stay: fixed ones, then those that save most; equal ones as the tokenizer learnt them.

    `fixed` are ids `with_halves`, the vocabulary's own among them. The old ids are returned in rising order: the place
    of each is its new id.
    """
    age = {number: (number, 1) for number in range(len(saved))}  # a whole is never older than its halves
    for token, number in reversed(vocabulary.ids.items()):
        age[number] = max([number, *(age[half][0] for half in vocabulary.halves.get(number, ()))]), len(token)
    order = sorted(range(len(saved)), key=lambda number: (number not in fixed, -int(saved[number]), age[number]))
    return sorted(order[:size])


def target_size(vocab_size: int, least: int, most: int) -> int:
    """How many rows stay: a multiple of 32, at most all of them. A line says so if that is not the number asked for.

    Raises:
        UsageError: `vocab_size` is below the number of ids that always stay, or above that of all.
    """
    if not least <= vocab_size <= most:
        raise UsageError(
            f"--vocab-size is {vocab_size}; the model has {most} tokens, and {least} of them always stay "
            f"(256 bytes and special tokens), choose {least} to {most}"
        )
    size = min(most, -(-vocab_size // _STEP) * _STEP)
    if size != vocab_size:
        log(f"keeping {size:,} tokens, not {vocab_size:,}: kernels need a multiple of {_STEP}")
    return size


def prune_embedding(model: SportsLLM, kept: Sequence[int]) -> SportsLLM:
    """A model with only the kept tokens' rows in embedding and head; the logits of those tokens stay the same."""
    new = {old: place for place, old in enumerate(kept)}
    named = {key: renumbered(getattr(model.config, key), new) for key in SPECIAL_IDS}
    pruned = SportsLLM(model.config.with_changes(vocab_size=len(kept), **named))
    state = model.state_dict()
    for name in {f"{EMBEDDING}.weight", f"{HEAD}.weight"} & state.keys():
        state[name] = state[name][list(kept)]
    pruned.load_state_dict(state)
    return pruned.eval()


def prune_vocabulary(
    checkpoint: Path,
    out: Path,
    vocab_size: int,
    calibration: Sequence[Path],
    valid: Sequence[Path],
    reading: Reading = USUAL,
) -> JsonObject:
    """Drop the tokens that a domain does not use from a checkpoint directory's model and tokenizer.

    The 256 bytes and all special tokens stay, so every text can still be written; the reserved tokens that `train`
    fills a vocabulary up with go first. `vocabulary_map.json` holds the old id of each new one.

    Args:
        vocab_size: tokens to keep, rounded up to a multiple of 32.
        calibration: the domain's text, where usage is counted.
        valid: held-out text, its first 65,536 tokens, to measure bits per byte on before and after; may be empty.

    Raises:
        UsageError: an impossible vocab_size.
        ArtifactError: a tokenizer that cannot be pruned, or files that disagree.
    """
    config = load_config(checkpoint)
    settings = {"checkpoint": checkpoint, "vocab_size": vocab_size, "calibration": calibration, "scored": valid}
    settings |= {name: manifest_setting(checkpoint, name) for name in ("corpus", "valid")} | reading.record()

    def make(directory: Path) -> JsonObject:
        tokenizer = load_tokenizer(checkpoint, config, reading)
        where = checkpoint / "tokenizer.json"
        leave_out(data := read_json(where), where, config.vocab_size)
        vocabulary = read_vocabulary(data, str(where))
        fixed = with_halves(vocabulary, vocabulary.fixed | named_ids(checkpoint, config, vocabulary))
        model = load_checkpoint(checkpoint)
        documents = training_side(calibration, valid, reading.text_field, [checkpoint])
        before = tokenize(documents, tokenizer, token_cache(directory))
        parts = np.array_split(before.ids, 1 + before.ids.size // _COUNTED_AT_ONCE)
        counts = sum(np.bincount(part, minlength=config.vocab_size) for part in parts)
        saved = saved_tokens(vocabulary, np.asarray(counts))
        kept = kept_tokens(vocabulary, saved, target_size(vocab_size, len(fixed), config.vocab_size), fixed)
        pruned = prune_embedding(model, kept)
        save_checkpoint(directory, pruned, checkpoint)
        write_tokenizer(checkpoint, directory, vocabulary, kept)
        fewer = load_tokenizer(directory, pruned.config, reading)
        after = tokenize(documents, fewer, token_cache(directory))
        _check_round_trip(where, (tokenizer, before), (fewer, after))
        if valid:
            figures = _held_out(((model, tokenizer), (pruned, fewer)), list(read_documents(valid, reading.text_field)))
        else:
            ends = 0 if before.scored is not None else len(documents) * (1 if tokenizer.end_id is None else 2)
            sides = {"before": before, "after": after}
            figures = {f"tokens_per_byte_{key}": (at.scored_tokens - ends) / at.text_bytes for key, at in sides.items()}
        sizes = {"vocab_size": len(kept), "vocab_size_before": config.vocab_size}
        return {"parameters": pruned.config.parameters, **sizes, **figures}

    return run_stage(out, Stage("prune", settings, [checkpoint, *calibration, *valid]), make)


def _check_round_trip(where: Path, *sides: tuple[TextTokenizer, TokenizedDocuments]) -> None:
    """Every counted document must come back from the new tokens as it did from the old ones."""
    (old, before), (new, after) = ((side, np.split(counted.ids, counted.ends[:-1])) for side, counted in sides)
    with progress_bar("check", len(before)) as bar:
        for number, (first, second) in enumerate(zip(before, after, strict=True), start=1):
            if old.decode(first.tolist()) != new.decode(second.tolist()):
                raise ArtifactError(
                    f"{where}: document {number} of the calibration text does not survive the pruned tokenizer; "
                    "its normalizer or decoder is not supported, keep the vocabulary whole"
                )
            bar.advance()


def _held_out(sides: Sequence[tuple[SportsLLM, TextTokenizer]], documents: Sequence[Document]) -> dict[str, float]:
    """Bits and tokens per byte before and after, of the same documents: the first 65,536 or so of the old tokens."""
    part: list[Document] = []
    tokens = 0
    for text, encoded in zip(documents, sides[0][1].encode_documents(documents), strict=True):
        if tokens >= _SCORED_TOKENS:
            log(f"bits per byte: on the first {len(part):,} of {len(documents):,} held-out documents")
            break
        part.append(text)
        tokens += len(encoded.ids) - 1
    figures: dict[str, float] = {}
    for key, (model, tokenizer) in zip(("before", "after"), sides, strict=True):
        score = score_documents(TorchDecoder(model), tokenizer, part, description=f"score {key}")
        figures |= {f"bits_per_byte_{key}": score.bits_per_byte, f"tokens_per_byte_{key}": score.tokens / score.bytes}
    return figures
