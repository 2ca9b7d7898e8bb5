"""Learn from a teacher cache: a teacher's next-token distributions over a corpus, stored once for every student.

Random-sampling distillation (https://arxiv.org/abs/2503.16870) with the better sample of
`compress.teacher_cache.sparse`: a student trains at about the cost of plain cross-entropy, on an unbiased estimate of
the gradient of the full KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from compress.teacher_cache.batches import CachedBatches
from compress.teacher_cache.files import CachedRows, CacheInfo, read_info
from compress.teacher_cache.loss import SparseTargets, sparse_chunk
from compress.teacher_cache.sparse import concatenate
from sportsllm.errors import ArtifactError
from sportsllm.formats.manifest import digest, file_sha256
from sportsllm.text.packing import Batch, TokenizedDocuments
from sportsllm.training.loss import ChunkLoss


@dataclass(frozen=True)
class CacheKey:
    """The run that a teacher cache has to fit.

    Attributes:
        teacher: checkpoint that must have made it.
        corpus, valid: training and held-out files, in order.
        left_out: all files that are left out of the corpus.
        sequence, seed: of the packed rows.
        vocab_size: of the student.
        temperature, precision: of the teacher.
    """

    teacher: Path
    corpus: tuple[Path, ...]
    valid: tuple[Path, ...]
    left_out: tuple[Path, ...]
    sequence: int
    seed: int
    vocab_size: int
    temperature: float = 1.0
    precision: str | None = None


class TeacherCache:
    """The stored rows of a directory, read as training asks for them."""

    def __init__(self, directory: Path, info: CacheInfo) -> None:
        self.directory, self.info = directory, info
        self._rows = CachedRows(directory, info)

    def batches(self, documents: TokenizedDocuments, batch_size: int) -> CachedBatches:
        """The training batches that it belongs to; `documents` are those of the corpus that it was made from."""
        return CachedBatches(documents, self.info.sequence, batch_size, self.info.seed, self.info.rows)

    def targets(self, batch: Batch) -> SparseTargets:
        """What is stored for a batch of `CachedBatches`, on the batch's device.

        Raises:
            ArtifactError: a shard is damaged.
        """
        count, length = batch.tokens.shape
        rows = [self._rows[(batch.index * count + position) % self.info.rows] for position in range(count)]
        sparse = concatenate([row.sparse for row in rows])
        scored = (sparse.id_counts > 0).reshape(count, length)
        entropy = np.array([row.entropy for row in rows]) / np.maximum(scored.sum(-1), 1)
        device = batch.tokens.device
        return SparseTargets(
            starts=np.concatenate([[0], np.cumsum(sparse.id_counts)]),
            ids_M=torch.from_numpy(sparse.ids).to(device),
            weights_M=torch.from_numpy(sparse.weights().astype(np.float32)).to(device),
            entropy_N=torch.from_numpy((entropy[:, None] * scored).ravel().astype(np.float32)).to(device),
        )

    def chunk_loss(self, batch: Batch, kl_weight: float = 1.0) -> ChunkLoss:
        """kl_weight * T^2 KL(teacher || student) + (1 - kl_weight) * cross-entropy of a batch, see `sparse_chunk`."""
        return sparse_chunk(self.targets(batch), batch.targets.flatten(), kl_weight, self.info.temperature)


def open_teacher_cache(directory: Path, run: CacheKey) -> TeacherCache:
    """Open a teacher cache for a training run, or refuse it where it was made for another one.

    Raises:
        ArtifactError: made by or for something else, damaged, or of another version; the message says which.
    """
    info = read_info(directory)

    def check(same: bool, difference: str, remedy: str) -> None:
        if not same:
            raise ArtifactError(
                f"{directory}: the signals were made {difference}; {remedy}, or make signals for this run"
            )

    tokenizer = file_sha256(run.teacher / "tokenizer.json")
    check(tokenizer == info.tokenizer, f"with another tokenizer than {run.teacher}'s", "use a student with theirs")
    check(digest(run.teacher) == info.teacher, f"by another teacher than {run.teacher}", "name the teacher of theirs")
    check(
        run.vocab_size == info.vocab_size,
        f"for {info.vocab_size} tokens, not {run.vocab_size}",
        "use a student with that vocabulary",
    )
    files: tuple[tuple[str, Sequence[Path], tuple[str, ...]], ...] = (
        ("--corpus", run.corpus, info.corpus),
        ("--valid", run.valid, info.valid),
    )
    for flag, paths, known in files:
        given = ", ".join(map(str, paths)) or "nothing"
        same = tuple(digest(path) for path in paths) == known
        check(same, f"with another {flag} than {given}", f"give the same {flag} files in the same order")
    left_out = {digest(path) for path in run.left_out}
    given = ", ".join(map(str, run.left_out)) or "nothing"
    check(left_out == set(info.left_out), f"while other text was held out than {given}", "put it back where it was")
    check(run.sequence == info.sequence, f"with --sequence {info.sequence}, not {run.sequence}", "use that")
    warm, precise = run.temperature == info.temperature, run.precision in (None, info.precision)
    check(warm, f"with --temperature {info.temperature:g}, not {run.temperature:g}", "use that")
    remedy = f"use --set teacher_precision={info.precision}"
    check(precise, f"by a teacher in {info.precision}, not {run.precision}", remedy)
    check(run.seed == info.seed, f"with --seed {info.seed}, not {run.seed}", "use that")
    return TeacherCache(directory, info)
