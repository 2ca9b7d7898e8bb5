"""Make teacher signals: run one or more teachers over a corpus once and store what students learn from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.distillation.teacher import load_teacher, teacher_logits
from compress.teacher_cache.batches import SignalBatches
from compress.teacher_cache.files import (
    ROW_BYTES,
    ROWS_PER_SHARD,
    SignalsInfo,
    StoredRow,
    shard_name,
    text_checksums,
    write_info,
    write_shard,
)
from compress.teacher_cache.sparse import CODE_BITS, KINDS, Room, joined, pick
from sportsllm.console import ProgressBar, progress_bar, say
from sportsllm.errors import ArtifactError, InterruptedRun, UsageError
from sportsllm.models.hf_config import load_config, read_json
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.artifact import (
    STATE_DIRECTORY,
    Stage,
    digest,
    directory_bytes,
    file_sha256,
    replace_state,
    run_stage,
)
from sportsllm.text.packing import IGNORE, Batch, tokenize
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer, same_tokenizer
from sportsllm.training.pretrain import check_sequence
from sportsllm.training.setup import training_device

BYTES_PER_TOKEN = 40
_COUNT_BYTES = 2  # how many ids and how many codes a token has
PIECE_TOKENS = 1_024  # tokens of a row whose distributions are in memory at once, and share a threshold


def room_for(k: int | None, vocab_size: int, sequence: int) -> Room:
    """Room for k ids with a code each, or without k for as much as BYTES_PER_TOKEN allow."""
    id_bits = max((vocab_size - 1).bit_length(), 1)
    if k is not None:
        return Room(k * (id_bits + CODE_BITS) + CODE_BITS, id_bits)
    row_bits = 8 * ROW_BYTES + 7  # the last 7 fill up the ids' last byte
    return Room(8 * (BYTES_PER_TOKEN - _COUNT_BYTES) - -(-row_bits // sequence), id_bits)


def make_signals(
    *,
    teachers: Sequence[tuple[Path, float]],
    corpus: Sequence[Path],
    valid: Sequence[Path],
    out: Path,
    tokens: int,
    sequence: int,
    seed: int,
    kind: str = "sampled",
    k: int | None = None,
    temperature: float = 1.0,
    teacher_precision: str = "auto",
    batch_size: int = 8,
    resume: bool = False,
) -> dict[str, Any]:
    """Store what teachers say about the first `tokens` tokens of a packed corpus.

    Args:
        teachers: checkpoints and their weights in the mixture of their probabilities.
        corpus, valid: training and held-out text; held-out documents get no signals.
        out: directory to make.
        tokens: rounded up to whole rows of `sequence` tokens.
        sequence, seed: of the packed rows; training must use the same.
        kind: one of `compress.teacher_cache.sparse.KINDS`.
        k: room of a token in ids with a code each; what 40 bytes a token hold if None.
        temperature: of the teachers' softmax.
        teacher_precision: see `compress.distillation.teacher.load_teacher`.
        batch_size: rows that a teacher reads at once; changes nothing but the speed, and what the rounding of
            differently shaped products changes.
        resume: go on from an interrupted run.

    Returns:
        out, cached, tokens, rows, bytes_per_token, size_bytes, seconds and tokens_per_s.

    Raises:
        UsageError: settings out of range.
        ArtifactError: teachers that do not fit together, or damaged inputs.
        InterruptedRun: Ctrl-C; finished shards are kept.
    """
    _check(teachers, tokens, kind, k, temperature, batch_size)
    paths = [path for path, _ in teachers]
    shares = [weight / sum(weight for _, weight in teachers) for _, weight in teachers]
    vocab_size = _common_vocabulary(paths, sequence)
    rows = -(-tokens // sequence)
    room = room_for(k, vocab_size, sequence)
    settings = {
        "teachers": [[str(path), share] for path, share in zip(paths, shares, strict=True)],
        "corpus": [str(path) for path in corpus],
        "valid": [str(path) for path in valid],
        "kind": kind,
        "k": k,
        "temperature": temperature,
        "tokens": rows * sequence,
        "sequence": sequence,
        "teacher_precision": teacher_precision,
    }
    stage = Stage("signals", settings, [*paths, *corpus, *valid], seed=seed)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        words = load_tokenizer(paths[0], load_config(paths[0]))
        documents = tokenize(load_corpus(corpus, valid).train, words)
        batches = SignalBatches(documents, sequence, batch_size, seed, rows)
        if rows > batches.rows_per_epoch:
            say(
                f"note: the corpus has {batches.rows_per_epoch:,} rows of {sequence}; {rows:,} rows go through it again"
            )
        device = training_device()
        mixture = Mixture([load_teacher(path, teacher_precision).to(device) for path in paths], shares, temperature)
        done = _finished_shards(directory, stage.fingerprint()) if resume else []
        before = min(len(done) * ROWS_PER_SHARD, rows)
        with progress_bar("signals", (rows - before) * sequence) as bar:
            for start in range(before, rows, ROWS_PER_SHARD):
                numbers = range(start, min(start + ROWS_PER_SHARD, rows))
                try:
                    stored = list(signal_rows(mixture, batches, numbers, kind, room, bar))
                except KeyboardInterrupt:
                    if not done:
                        raise
                    raise InterruptedRun(
                        f"interrupted after row {start} of {rows}; finished rows are kept in {directory}, "
                        "run the same command with --resume to go on"
                    ) from None
                path = directory / shard_name(len(done))
                write_shard(path, stored, room.id_bits, room.most_ids(vocab_size))
                done.append(file_sha256(path))
                _save_state(directory, stage.fingerprint(), done)
        seconds = time.perf_counter() - started
        info = SignalsInfo(
            kind=kind,
            k=room.coded_ids,
            bits=room.bits,
            id_bits=room.id_bits,
            temperature=temperature,
            sequence=sequence,
            seed=seed,
            rows=rows,
            rows_per_shard=ROWS_PER_SHARD,
            vocab_size=vocab_size,
            bytes_per_token=round(directory_bytes(directory) / (rows * sequence), 3),
            teachers=tuple((digest(path), share) for path, share in zip(paths, shares, strict=True)),
            tokenizer=file_sha256(paths[0] / "tokenizer.json"),
            corpus=tuple(digest(path) for path in corpus),
            valid=tuple(digest(path) for path in valid),
        )
        write_info(directory, info)
        return {
            "tokens": rows * sequence,
            "rows": rows,
            "bytes_per_token": info.bytes_per_token,
            "seconds": seconds,
            "tokens_per_s": (rows - before) * sequence / seconds,
        }

    return run_stage(out, stage, make, resume)


def _check(
    teachers: Sequence[tuple[Path, float]], tokens: int, kind: str, k: int | None, temperature: float, batch_size: int
) -> None:
    if kind not in KINDS:
        raise UsageError(f"--kind {kind!r} is not known; use one of {', '.join(KINDS)}")
    if not teachers:
        raise UsageError("there is no teacher; give --teacher DIR")
    for path, weight in teachers:
        if not 0 < weight < math.inf:
            raise UsageError(f"{path}: its weight is {weight}; it must be above 0")
    for flag, value in (("--tokens", tokens), ("--batch-size", batch_size), ("--k", 1 if k is None else k)):
        if value < 1:
            raise UsageError(f"{flag} {value}: must be at least 1")
    if not 0 < temperature < math.inf:
        raise UsageError(f"--temperature {temperature}: must be above 0")


def _common_vocabulary(teachers: Sequence[Path], sequence: int) -> int:
    """Entries of the vocabulary that all teachers share."""
    configs = [load_config(path) for path in teachers]
    for path, config in zip(teachers, configs, strict=True):
        check_sequence(sequence, config)
        if config.vocab_size != configs[0].vocab_size or not same_tokenizer(path, teachers[0]):
            raise ArtifactError(
                f"{path}: its tokenizer differs from {teachers[0]}'s; only teachers with one can be mixed"
            )
    return configs[0].vocab_size


@dataclass(frozen=True)
class Mixture:
    """Teachers whose probabilities are mixed: p = sum of share * softmax(logits / temperature)."""

    models: Sequence[SportsLLM]
    shares: Sequence[float]
    temperature: float

    def probabilities(self, batch: Batch) -> Callable[[int, int], Tensor]:
        """Run the teachers once on a batch; (first token, number of tokens) -> (N, V) float32 is made when asked."""
        device = self.models[0].head_weight.device
        teachers = [teacher_logits(model, batch.to(device)) for model in self.models]

        def probabilities(start: int, count: int) -> Tensor:
            parts = [torch.softmax(logits(start, count).div_(self.temperature), dim=-1) for logits in teachers]
            for part, share in zip(parts, self.shares, strict=True):
                part.mul_(share)
            return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)

        return probabilities


def signal_rows(
    mixture: Mixture, batches: SignalBatches, numbers: range, kind: str, room: Room, bar: ProgressBar
) -> Iterator[StoredRow]:
    """What is stored of the given rows. A row's random numbers depend on the seed and its own number only."""
    length = batches.length
    for first in range(0, len(numbers), batches.batch_size):
        part = numbers[first : first + batches.batch_size]
        batch = batches.gather(part)
        probabilities = mixture.probabilities(batch)
        for place, (number, text) in enumerate(zip(part, text_checksums(batch), strict=True)):
            rng = np.random.default_rng([batches.seed, number])
            pieces, entropy = [], 0.0
            for start in range(0, length, PIECE_TOKENS):
                count = min(PIECE_TOKENS, length - start)
                p_NV = probabilities(place * length + start, count)
                scored_N = (batch.targets[place, start : start + count] != IGNORE).to(p_NV.device)
                entropy += float((entropy_of(p_NV) * scored_N).sum())
                pieces.append(pick(kind, p_NV, scored_N, room, rng))
            yield StoredRow(joined(pieces), entropy, text)
        bar.advance(len(part) * length)


def entropy_of(p_NV: Tensor) -> Tensor:
    """(N,) entropy in nats."""
    log_p = p_NV.clamp(min=torch.finfo(p_NV.dtype).tiny).log_()
    return -torch.einsum("nv,nv->n", p_NV, log_p)


def _save_state(directory: Path, identity: str, done: Sequence[str]) -> None:
    """Say which shards are finished. They lie beside `state/`, where the finished directory has them."""
    fresh = directory / f"{STATE_DIRECTORY}.new"
    fresh.mkdir()
    (fresh / "state.json").write_text(json.dumps({"identity": identity, "shards": list(done)}), encoding="utf-8")
    replace_state(directory, fresh)


def _finished_shards(directory: Path, identity: str) -> list[str]:
    """SHA-256 of the shards that an interrupted run finished.

    Raises:
        UsageError: that run had other settings or inputs.
        ArtifactError: a finished shard was damaged since.
    """
    path = directory / STATE_DIRECTORY / "state.json"
    state = read_json(path)
    if state.get("identity") != identity:
        raise UsageError(
            f"{path.parent}: was saved by a run with other settings or inputs; resume with the same ones, "
            f"or remove {directory}"
        )
    done = [str(value) for value in state["shards"]]
    for number, value in enumerate(done):
        shard = directory / shard_name(number)
        if not shard.exists() or file_sha256(shard) != value:
            raise ArtifactError(f"{shard}: damaged or missing; remove {directory} and start again")
    for path in directory.glob("*.part"):  # half a shard of a run that was killed
        path.unlink()
    return done
