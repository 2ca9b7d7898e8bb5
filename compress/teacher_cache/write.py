"""Make a teacher cache: run a teacher over a corpus once and store what students learn from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.teacher_cache.batches import CachedBatches
from compress.teacher_cache.files import ROWS_PER_SHARD, CachedRow, CacheInfo, shard_name, write_info, write_shard
from compress.teacher_cache.loss import TeacherLogits
from compress.teacher_cache.sparse import BitBudget, concatenate, sample_sparse
from sportsllm.console import ProgressBar, log, progress_bar
from sportsllm.errors import ArtifactError, InterruptedRun, UsageError
from sportsllm.formats.artifact import STATE_DIRECTORY, Stage, replace_state, run_stage
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.json_files import read_json
from sportsllm.formats.manifest import digest, directory_bytes, file_sha256
from sportsllm.text.documents import load_corpus
from sportsllm.text.packing import IGNORE, Batch, tokenize
from sportsllm.text.provenance import held_out_setting
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.settings import check_sequence

BYTES_PER_TOKEN = 40
"""Of a token's ids and codes where ids are packed bit by bit; files are up to half as large again."""
_COUNT_BYTES = 2  # how many ids and how many codes a token has
_ROW_BYTES = 20  # what a row is charged beside them
PIECE_TOKENS = 1_024  # tokens of a row whose distributions are in memory at once, and share a threshold
Teacher = Callable[[Batch], TeacherLogits]
"""Reads a batch; its logits are made for one chunk at a time, when asked."""


def bit_budget(vocab_size: int, sequence: int) -> BitBudget:
    """What BYTES_PER_TOKEN leave for a token's ids and codes."""
    row_bits = 8 * _ROW_BYTES + 7
    id_bits = max((vocab_size - 1).bit_length(), 1)
    return BitBudget(8 * (BYTES_PER_TOKEN - _COUNT_BYTES) - -(-row_bits // sequence), id_bits)


@dataclass(frozen=True)
class CacheRequest:
    """What to store.

    Attributes:
        teacher: its checkpoint.
        corpus, valid: training and held-out text.
        left_out: everything that the training leaves out of the corpus: `valid`, and what its checkpoints hold out.
        tokens: of the packed corpus; rounded up to whole rows of `sequence` tokens.
        sequence, seed: of the packed rows; training must use the same.
        temperature: of the teacher's softmax.
        teacher_precision: see `compress.distillation.teacher.load_teacher`.
        batch_size: rows that the teacher reads at once; changes nothing but the speed, and what the rounding of
            differently shaped products changes.
    """

    teacher: Path
    corpus: tuple[Path, ...]
    valid: tuple[Path, ...]
    left_out: tuple[Path, ...]
    tokens: int
    sequence: int
    seed: int
    temperature: float = 1.0
    teacher_precision: str = "auto"
    batch_size: int = 8

    def __post_init__(self) -> None:
        for flag, value in (("--tokens", self.tokens), ("--batch-size", self.batch_size)):
            if value < 1:
                raise UsageError(f"{flag} {value}: must be at least 1")
        if not 0 < self.temperature < math.inf:
            raise UsageError(f"--temperature {self.temperature}: must be above 0")

    def info(self) -> CacheInfo:
        """What signals.json will record."""
        return CacheInfo(
            teacher=digest(self.teacher),
            tokenizer=file_sha256(self.teacher / "tokenizer.json"),
            vocab_size=load_config(self.teacher).vocab_size,
            corpus=tuple(digest(path) for path in self.corpus),
            valid=tuple(digest(path) for path in self.valid),
            left_out=tuple(digest(path) for path in self.left_out),
            temperature=self.temperature,
            precision=self.teacher_precision,
            sequence=self.sequence,
            seed=self.seed,
            rows=-(-self.tokens // self.sequence),
            rows_per_shard=ROWS_PER_SHARD,
        )

    def stage(self) -> Stage:
        """What decides the content."""
        settings = {
            "teacher": str(self.teacher),
            "corpus": [str(path) for path in self.corpus],
            "valid": [str(path) for path in self.valid],
            **held_out_setting(self.valid, self.left_out),
            "temperature": self.temperature,
            "tokens": -(-self.tokens // self.sequence) * self.sequence,
            "sequence": self.sequence,
            "teacher_precision": self.teacher_precision,
        }
        return Stage("signals", settings, [self.teacher, *self.corpus, *self.left_out], seed=self.seed)


def make_teacher_cache(
    request: CacheRequest, out: Path, open_teacher: Callable[[], Teacher], resume: bool = False
) -> dict[str, Any]:
    """Store what a teacher says about the first tokens of a packed corpus.

    Args:
        request: what to store.
        out: directory to make.
        open_teacher: loads the teacher of the request.
        resume: go on from an interrupted run.

    Returns:
        out, cached, tokens, rows, bytes_per_token, size_bytes, seconds and tokens_per_s.

    Raises:
        UsageError: settings out of range.
        ArtifactError: damaged inputs.
        InterruptedRun: Ctrl-C; finished shards are kept.
    """
    config = load_config(request.teacher)
    check_sequence(request.sequence, config)
    stage = request.stage()

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        info = request.info()
        words = load_tokenizer(request.teacher, config)
        split = load_corpus(request.corpus, request.valid, request.left_out)
        documents = tokenize(split.train, words)
        batches = CachedBatches(documents, info.sequence, request.batch_size, info.seed, info.rows)
        if info.rows > batches.rows_per_epoch:
            log(
                f"note: the corpus has {batches.rows_per_epoch:,} rows of {info.sequence}; "
                f"{info.rows:,} rows go through it again"
            )
        teacher, budget = open_teacher(), bit_budget(info.vocab_size, info.sequence)
        finished = _Finished(directory, stage.fingerprint(), resume and (directory / STATE_DIRECTORY).exists())
        missing = [(number, rows) for number, rows in enumerate(info.shards) if number >= len(finished.digests)]
        made = sum(len(rows) for _, rows in missing) * info.sequence
        with progress_bar("signals", made) as bar:
            for number, rows in missing:
                try:
                    stored = list(cached_rows(teacher, request.temperature, budget, batches, rows, bar))
                except KeyboardInterrupt:
                    if not number:
                        raise
                    raise InterruptedRun(
                        f"interrupted after row {rows.start} of {info.rows}; finished rows are kept in {directory}, "
                        "run the same command with --resume to go on"
                    ) from None
                write_shard(directory / shard_name(number), stored, info.vocab_size)
                finished.add(number)
        seconds = time.perf_counter() - started
        write_info(directory, info)
        return {
            "tokens": info.tokens,
            "rows": info.rows,
            "bytes_per_token": round(directory_bytes(directory) / info.tokens, 3),
            "seconds": seconds,
            "tokens_per_s": made / seconds,
        }

    return run_stage(out, stage, make, resume)


def cached_rows(
    teacher: Teacher, temperature: float, budget: BitBudget, batches: CachedBatches, numbers: range, bar: ProgressBar
) -> Iterator[CachedRow]:
    """What is stored of the given rows. A row's random numbers depend on the seed and its own number only."""
    length = batches.length
    for first in range(0, len(numbers), batches.batch_size):
        part = numbers[first : first + batches.batch_size]
        batch = batches.gather(part)
        logits = teacher(batch)
        for place, number in enumerate(part):
            rng = np.random.default_rng([batches.seed, number])
            pieces, entropy = [], 0.0
            for start in range(0, length, PIECE_TOKENS):
                count = min(PIECE_TOKENS, length - start)
                p_NV = torch.softmax(logits(place * length + start, count).div_(temperature), dim=-1)
                scored_N = (batch.targets[place, start : start + count] != IGNORE).to(p_NV.device)
                entropy += float((entropy_of(p_NV) * scored_N).sum())
                pieces.append(sample_sparse(p_NV, scored_N, budget, rng))
            yield CachedRow(concatenate(pieces), entropy)
        bar.advance(len(part) * length)


def entropy_of(p_NV: Tensor) -> Tensor:
    """(N,) entropy in nats."""
    log_p = p_NV.clamp(min=torch.finfo(p_NV.dtype).tiny).log_()
    return -torch.einsum("nv,nv->n", p_NV, log_p)


class _Finished:
    """The shards that are finished: `state/` has their digests, they lie where the finished directory has them."""

    def __init__(self, directory: Path, identity: str, resume: bool) -> None:
        """Read what an interrupted run finished.

        Raises:
            UsageError: that run had other settings or inputs.
            ArtifactError: a finished shard was damaged since.
        """
        self._directory, self._identity = directory, identity
        self.digests: list[str] = []
        if not resume:
            return
        path = directory / STATE_DIRECTORY / "state.json"
        state = read_json(path)
        if state.get("identity") != identity:
            raise UsageError(
                f"{path.parent}: was saved by a run with other settings or inputs; resume with the same ones, "
                f"or remove {directory}"
            )
        self.digests = [str(value) for value in state["shards"]]
        for number, value in enumerate(self.digests):
            shard = directory / shard_name(number)
            if not shard.exists() or file_sha256(shard) != value:
                raise ArtifactError(f"{shard}: damaged or missing; remove {directory} and start again")
        for path in directory.glob("*.part"):  # half a shard of a run that was killed
            path.unlink()

    def add(self, number: int) -> None:
        """Shard `number`, the one after the last, is written."""
        self.digests.append(file_sha256(self._directory / shard_name(number)))
        fresh = self._directory / f"{STATE_DIRECTORY}.new"
        fresh.mkdir()
        state = {"identity": self._identity, "shards": self.digests}
        (fresh / "state.json").write_text(json.dumps(state), encoding="utf-8")
        replace_state(self._directory, fresh)
