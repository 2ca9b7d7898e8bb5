"""A teacher's next-token distributions over a corpus, stored once for every student that learns from them.

For each token the `TOP` most probable ids are stored with their probabilities, and `DRAWS` ids drawn from the others.
Id v is drawn DRAWS * p[v] / m times on average, where m is the others' mass (a systematic draw: Madow,
https://doi.org/10.1214/aoms/1177729988). The target t of a student has the top ids' probabilities and m / DRAWS for
each draw, so E[t] = p: random-sampling distillation (https://arxiv.org/abs/2503.16870) with the large probabilities
kept. A step costs about as much as plain cross-entropy.

    signals.json                `CacheInfo`
    signals-NNNNN.safetensors   of 256 rows of T tokens: ids (R, T, TOP + DRAWS), probabilities (R, T, TOP) float16,
                                entropy (R, T) float16, in nats

Shape suffixes: R rows, N tokens, C tokens of a chunk, V vocabulary, K stored ids, J draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.distillation.teacher import resolve_teacher_precision
from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.files import read_json, validate
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import digest, file_sha256, read_manifest
from sportsllm.processors import training_device
from sportsllm.text.packing import Batch, PackedSequences
from sportsllm.text.split import known_sides
from sportsllm.text.tokens import TokenizedDocuments
from sportsllm.training.loss import ChunkLoss, cross_entropy_chunk, scored_sum_

if TYPE_CHECKING:
    from compress.distillation.student import StudentTraining

SIGNALS = "signals.json"
FORMAT = 6
TOP, DRAWS = 8, 16
ROWS_PER_SHARD = 256
_OPEN_SHARDS = 2
_AGAIN = "copy the directory again, or make it again"


@dataclass(frozen=True)
class CacheInfo:
    """What signals.json records.

    Attributes:
        teacher, corpus, valid, left_out: digests of the checkpoint, of the files that the rows were cut from, of the
            held-out files, and of all files that were left out of the corpus, with `known_sides`.
        tokenizer: SHA-256 of tokenizer.json.
        vocab_size: ids are below it.
        precision: of the teacher's weights.
        reading: how the corpus was read, if not as usual.
        sequence, seed, rows: rows 0 to rows - 1 of `PackedSequences` are stored.
    """

    tokenizer: str
    teacher: str
    vocab_size: int
    corpus: tuple[str, ...]
    valid: tuple[str, ...]
    left_out: tuple[str, ...]
    sequence: int
    precision: str
    seed: int
    rows: int
    reading: dict[str, str | bool] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of all stored rows."""
        return self.rows * self.sequence

    @property
    def shards(self) -> list[range]:
        """The rows of each shard."""
        return [range(start, min(start + ROWS_PER_SHARD, self.rows)) for start in range(0, self.rows, ROWS_PER_SHARD)]


def wanted_info(training: StudentTraining) -> CacheInfo:
    """What a training's cache records, which has as many tokens as are trained on."""
    config, distillation = training.config, training.distillation
    return CacheInfo(
        tokenizer=file_sha256(training.teacher / "tokenizer.json"),
        teacher=digest(training.teacher),
        vocab_size=load_config(training.teacher).vocab_size,
        corpus=tuple(digest(path) for path in training.corpus),
        valid=tuple(digest(path) for path in training.valid),
        left_out=tuple(sorted([*map(digest, training.left_out), *map(str, known_sides(training.checkpoints).items())])),
        sequence=config.sequence,
        precision=resolve_teacher_precision(distillation.teacher_precision, training_device()),
        seed=config.seed,
        rows=max(1, config.steps * config.batch_size * config.accumulation),
        reading=training.reading.record(),
    )


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"signals-{number:05d}.safetensors"


def read_info(directory: Path) -> CacheInfo:
    """Read signals.json of a finished directory.

    Raises:
        ArtifactError: no teacher cache, of another version, or damaged.
    """
    path = directory / SIGNALS
    data = read_json(path)
    version = data.pop("format", None)
    if version != FORMAT:
        raise ArtifactError(f"{path}: has format {version}, this version reads {FORMAT}; make the cache again")
    info = validate(CacheInfo, data, path, _AGAIN)
    for name, entry in read_manifest(directory).files.items():
        if not (directory / name).exists() or file_sha256(directory / name) != entry.sha256:
            raise ArtifactError(
                f"{directory / name}: missing, or content differs from the manifest's SHA-256; {_AGAIN}"
            )
    return info


def open_teacher_cache(training: StudentTraining, wanted: CacheInfo, directory: Path) -> TeacherCache:
    """Open a finished teacher cache for a training; `wanted` is its `wanted_info`, with the student's `vocab_size`.

    Raises:
        ArtifactError: made by or for something else, damaged, or of another version; the message says which.
    """
    info = read_info(directory)
    corpus, valid, held_out = (
        ", ".join(map(str, paths)) or "nothing" for paths in (training.corpus, training.valid, training.left_out)
    )
    for name, difference, remedy in (
        ("tokenizer", f"with another tokenizer than {training.teacher}'s", "use a student with theirs"),
        ("teacher", f"by another teacher than {training.teacher}", "name the teacher of theirs"),
        ("vocab_size", f"for {info.vocab_size} tokens, not {wanted.vocab_size}", "use a student with that vocabulary"),
        ("corpus", f"with another --corpus than {corpus}", "give the same --corpus files in the same order"),
        ("valid", f"with another --valid than {valid}", "give the same --valid files in the same order"),
        ("left_out", f"while other text was held out than {held_out}", "put it back where it was"),
        ("reading", f"from text read with {info.reading}, not {wanted.reading}", "give the same options"),
        ("sequence", f"with --sequence {info.sequence}, not {wanted.sequence}", "use that"),
        ("precision", f"by a teacher in {info.precision}, not {wanted.precision}", "use its teacher_precision"),
        ("seed", f"with --seed {info.seed}, not {wanted.seed}", "use that"),
    ):
        if getattr(info, name) != getattr(wanted, name):
            raise ArtifactError(
                f"{directory}: the signals were made {difference}; {remedy}, or make signals for this run"
            )
    passes = training.config.steps * training.config.tokens_per_step / info.tokens
    if passes > 1.005:
        log(f"{directory}: {info.tokens:,} tokens, read {passes:.1f} times")
    return TeacherCache(directory, info)


class CachedBatches(PackedSequences):
    """Rows 0 to `rows` - 1 of a packed corpus, over and over."""

    def __init__(self, documents: TokenizedDocuments, length: int, batch_size: int, seed: int, rows: int) -> None:
        super().__init__(documents, length, batch_size, seed)
        self.rows = rows

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens seen in one pass over the stored rows."""
        return self.rows * self.length

    def gather(self, numbers: Sequence[int], index: int = 0) -> Batch:
        """A batch of the given rows, counted from 0 over all passes."""
        return super().gather([number % self.rows for number in numbers], index)


@dataclass(frozen=True)
class SparseTargets:
    """Stored distributions of N tokens.

    Attributes:
        ids_NK: int64.
        weights_NK: float32 target of each id; an id that is there twice has both.
        entropy_N: float32, of the teacher's distribution in nats.
    """

    ids_NK: Tensor
    weights_NK: Tensor
    entropy_N: Tensor


def sample_sparse(p_NV: Tensor, rng: np.random.Generator) -> dict[str, Tensor]:
    """What is stored of some tokens' probabilities, float32, which are overwritten; `rng` decides the draws."""
    entropy_N = -torch.einsum("nv,nv->n", p_NV, p_NV.clamp(min=torch.finfo(p_NV.dtype).tiny).log_())
    top = p_NV.topk(min(TOP, p_NV.shape[1]), dim=-1)
    cumulated_NV = p_NV.scatter_(1, top.indices, 0.0).cumsum_(dim=-1)
    places_NJ = (torch.arange(DRAWS) + torch.from_numpy(rng.random((len(p_NV), 1)))).to(p_NV.device) / DRAWS
    # Below the total also after rounding to float32, so that what is found has a weight.
    places_NJ = (places_NJ.clamp(max=1 - 2.0**-23) * cumulated_NV[:, -1:]).float().contiguous()
    drawn_NJ = torch.searchsorted(cumulated_NV, places_NJ, right=True).clamp(max=p_NV.shape[1] - 1)
    ids_NK = torch.cat([top.indices, drawn_NJ], dim=-1).cpu()
    return {
        "ids": ids_NK.to(torch.uint16 if p_NV.shape[1] <= 1 << 16 else torch.int32),
        "probabilities": top.values.half().cpu(),
        "entropy": entropy_N.half().cpu(),
    }


def targets_of(stored: dict[str, Tensor], device: torch.device) -> SparseTargets:
    """The targets of what `sample_sparse` stored, its tokens in one row."""
    top = stored["probabilities"].flatten(0, -2).float()
    tail = (1 - top.sum(dim=-1, keepdim=True)).clamp(min=0) / DRAWS
    weights = torch.cat([top, tail.expand(-1, DRAWS)], dim=-1)
    ids, entropy = stored["ids"].flatten(0, -2).to(torch.int64), stored["entropy"].flatten().float()
    return SparseTargets(ids.to(device), weights.to(device), entropy.to(device))


class TeacherCache:
    """The stored rows of a directory, read as training asks for them; the latest shards stay in memory."""

    def __init__(self, directory: Path, info: CacheInfo) -> None:
        self.directory, self.info = directory, info
        self._shard = lru_cache(_OPEN_SHARDS)(lambda number: load_file(directory / shard_name(number)))

    def batches(self, documents: TokenizedDocuments, batch_size: int) -> CachedBatches:
        """The training batches that it belongs to; `documents` are those of the corpus that it was made from."""
        return CachedBatches(documents, self.info.sequence, batch_size, self.info.seed, self.info.rows)

    def targets(self, batch: Batch) -> SparseTargets:
        """What is stored for a batch of `CachedBatches`, on the batch's device."""
        numbers = range(batch.index * len(batch.tokens), (batch.index + 1) * len(batch.tokens))
        places = [divmod(number % self.info.rows, ROWS_PER_SHARD) for number in numbers]
        rows = [{name: tensor[place] for name, tensor in self._shard(shard).items()} for shard, place in places]
        with torch.autocast("cpu", enabled=False):  # which cannot stack float16
            stored = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return targets_of(stored, batch.tokens.device)

    def chunk_loss(self, batch: Batch, kl_weight: float = 1.0) -> ChunkLoss:
        """kl_weight * KL(teacher || student) + (1 - kl_weight) * cross-entropy of a batch, see `sparse_chunk`."""
        return sparse_chunk(self.targets(batch), batch.targets.flatten(), kl_weight)


def sparse_chunk(sparse: SparseTargets, targets_N: Tensor, kl_weight: float = 1.0) -> ChunkLoss:
    """kl_weight * KL from stored targets + (1 - kl_weight) * cross-entropy, 0 if the target is IGNORE.

    The naive code for one token's KL, with its target t over the vocabulary:

        loss = (t * -log_softmax(logits)).sum() - entropy
        gradient = t.sum() * softmax(logits) - t

    Args:
        sparse: with weights that are unbiased the loss is an unbiased estimate of the KL.
        targets_N: the tokens that followed.
        kl_weight: share of the KL.
    """
    ids_NK, weights_NK, entropy_N = sparse.ids_NK, sparse.weights_NK, sparse.entropy_N
    if kl_weight == 0.0:
        return cross_entropy_chunk(targets_N)
    if kl_weight < 1.0:  # the token that followed is one more id, so that one pass gives both losses
        ids_NK = torch.cat([ids_NK, targets_N.clamp(min=0)[:, None]], dim=1)
        truth_N1 = weights_NK.new_full((len(weights_NK), 1), 1 - kl_weight)
        weights_NK, entropy_N = torch.cat([kl_weight * weights_NK, truth_N1], dim=1), kl_weight * entropy_N

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        part = slice(start, start + len(logits_CV))
        ids_CK, weights_CK = ids_NK[part], weights_NK[part]
        log_z_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
        losses_C = (weights_CK * (log_z_C1 - logits_CV.gather(1, ids_CK))).sum(dim=-1) - entropy_N[part]
        gradient_CV = logits_CV.sub_(log_z_C1).exp_().mul_(weights_CK.sum(dim=-1, keepdim=True))
        gradient_CV.scatter_add_(1, ids_CK, -weights_CK)
        return scored_sum_(losses_C, gradient_CV, targets_N[part]), gradient_CV

    return chunk_loss
