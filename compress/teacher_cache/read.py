"""Teacher signals: a teacher's next-token distributions over a corpus, stored once and reused by every student.

Random-sampling distillation (https://arxiv.org/abs/2503.16870) with the better sample of
`compress.teacher_cache.sparse`: a student
trains at about the cost of plain cross-entropy, on an unbiased estimate of the gradient of the full KL.
`compress.teacher_cache.write` makes them, this file reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compress.teacher_cache.batches import SignalBatches
from compress.teacher_cache.files import SignalRows, SignalsInfo, read_info, text_checksums
from compress.teacher_cache.loss import SparseTargets, sparse_chunk
from compress.teacher_cache.sparse import joined, weights
from sportsllm.errors import ArtifactError
from sportsllm.storage.artifact import digest, file_sha256
from sportsllm.text.packing import Batch, TokenizedDocuments
from sportsllm.training.chunked_loss import ChunkLoss


class Signals:
    """The signals of a directory, read row by row as training asks for them."""

    def __init__(self, directory: Path, info: SignalsInfo) -> None:
        self.directory, self.info = directory, info
        self._rows = SignalRows(directory, info)

    def batches(self, documents: TokenizedDocuments, batch_size: int) -> SignalBatches:
        """The training batches that the signals belong to; `documents` are the corpus's that they were made from."""
        info = self.info
        return SignalBatches(documents, info.sequence, batch_size, info.seed, info.rows)

    def targets(self, batch: Batch) -> SparseTargets:
        """What is stored for a batch of `SignalBatches`, on the batch's device.

        Raises:
            ArtifactError: a row is damaged, or was stored for other text than the batch holds.
        """
        count, length = batch.tokens.shape
        stored = []
        for position, text in enumerate(text_checksums(batch)):
            number = (batch.index * count + position) % self.info.rows
            row = self._rows.row(number)
            if row.text != text:
                raise ArtifactError(
                    f"{self.directory}: row {number} was stored for other text; "
                    "train on the corpus, tokenizer, sequence and seed that the signals were made with"
                )
            stored.append(row)
        picked = joined([row.picked for row in stored])
        weights_M, tail_N = weights(self.info.kind, picked)
        scored = (picked.id_counts > 0).reshape(count, length)
        entropy = np.array([row.entropy for row in stored]) / np.maximum(scored.sum(-1), 1)
        device = batch.tokens.device

        def tensor(array: npt.NDArray[np.float64]) -> Tensor:
            return torch.from_numpy(array.astype(np.float32)).to(device)

        return SparseTargets(
            starts=np.concatenate([[0], np.cumsum(picked.id_counts)]),
            ids_M=torch.from_numpy(picked.ids).to(device),
            weights_M=tensor(weights_M),
            entropy_N=tensor((entropy[:, None] * scored).ravel()),
            tail_N=None if tail_N is None else tensor(tail_N),
        )

    def chunk_loss(self, batch: Batch, kl_weight: float = 1.0) -> ChunkLoss:
        """kl_weight * T^2 KL(teacher || student) + (1 - kl_weight) * cross-entropy of a batch, see `sparse_chunk`."""
        return sparse_chunk(self.targets(batch), batch.targets.flatten(), kl_weight, self.info.temperature)


def open_signals(
    directory: Path,
    *,
    teacher: Path | None,
    tokenizer: Path,
    corpus: Sequence[Path],
    valid: Sequence[Path],
    sequence: int,
    seed: int,
    vocab_size: int,
) -> Signals:
    """Open signals for a training run, or refuse them where they were made for another one.

    Args:
        directory: what `compress.teacher_cache.write.make_signals` made.
        teacher: a teacher that must be among those that made them, or None for whichever did.
        tokenizer: directory of the student's tokenizer.
        corpus, valid: training and held-out files of the run, in order.
        sequence, seed: of the run's packed rows.
        vocab_size: of the student.

    Raises:
        ArtifactError: made by or for something else, damaged, or written by a newer version; the message says which.
    """
    info = read_info(directory)

    def refuse(what: str, remedy: str) -> ArtifactError:
        return ArtifactError(f"{directory}: the signals were made {what}; {remedy}, or make signals for this run")

    if teacher is not None and digest(teacher) not in [sha256 for sha256, _ in info.teachers]:
        raise refuse(f"by another teacher than {teacher}", "name the teacher that made them")
    if file_sha256(tokenizer / "tokenizer.json") != info.tokenizer:
        raise refuse(f"with another tokenizer than {tokenizer}'s", "use a student with theirs")
    if vocab_size != info.vocab_size:
        raise refuse(f"for {info.vocab_size} tokens, not {vocab_size}", "use a student with so many")
    for flag, paths, known in (("--corpus", corpus, info.corpus), ("--valid", valid, info.valid)):
        if tuple(digest(path) for path in paths) != known:
            given = ", ".join(map(str, paths)) or "nothing"
            raise refuse(f"with another {flag} than {given}", f"give the same {flag} files in the same order")
    if sequence != info.sequence:
        raise refuse(f"with --sequence {info.sequence}, not {sequence}", "use that")
    if seed != info.seed:
        raise refuse(f"with --seed {info.seed}, not {seed}", "use that")
    return Signals(directory, info)
