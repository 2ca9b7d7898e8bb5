"""The teacher cache on disk: `signals.json` and shards of some MB, each a safetensors file of a run of rows.

A shard's tensors, for R rows of T tokens each:

    id_counts, code_counts  (R, T)  ids and codes of each token
    ids, codes              (M,), (C,)  of all tokens, see `compress.teacher_cache.sparse`
    entropy                 (R,)    of the teacher's distributions, summed over the row's scored tokens

Whole numbers are stored in the narrowest type: ids in uint16 up to a vocabulary of 65,536, counts in uint8 as a rule.

A shard is held against its SHA-256 in the manifest before it is used; only the latest shards stay in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file

from compress.teacher_cache.sparse import SparseProbabilities
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import save_tensors
from sportsllm.formats.json_files import read_json, validate, write_json
from sportsllm.formats.manifest import MANIFEST, file_sha256, read_manifest

SIGNALS = "signals.json"
FORMAT = 4
ROWS_PER_SHARD = 256
_OPEN_SHARDS = 2
_MOST_ROWS = 1 << 40


@dataclass(frozen=True)
class CacheInfo:
    """What signals.json records.

    Attributes:
        teacher: digest of the checkpoint.
        tokenizer: SHA-256 of tokenizer.json.
        vocab_size: ids are below it.
        corpus, valid: digests of the files that the rows were cut from and of the held-out files.
        left_out: of all files that were left out of the corpus.
        temperature: of the teacher's softmax.
        precision: of the teacher's weights, resolved.
        sequence, seed: of the packed rows, see `sportsllm.text.packing.PackedSequences`.
        rows: rows 0 to rows - 1 are stored.
        rows_per_shard: of every shard but the last.
    """

    teacher: str
    tokenizer: str
    vocab_size: int
    corpus: tuple[str, ...]
    valid: tuple[str, ...]
    left_out: tuple[str, ...]
    temperature: float
    precision: str
    sequence: int
    seed: int
    rows: int
    rows_per_shard: int

    @property
    def tokens(self) -> int:
        """Tokens of all stored rows."""
        return self.rows * self.sequence

    @property
    def shards(self) -> list[range]:
        """The rows of each shard."""
        step = self.rows_per_shard
        return [range(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]


@dataclass(frozen=True)
class CachedRow:
    """What is stored of one row; `entropy` is the sum over its scored tokens."""

    sparse: SparseProbabilities
    entropy: float


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"signals-{number:05d}.safetensors"


def write_shard(path: Path, rows: Sequence[CachedRow], vocab_size: int) -> None:
    """Write one shard, whole or not at all."""
    id_counts, code_counts = (
        np.stack([getattr(row.sparse, name) for row in rows]) for name in ("id_counts", "code_counts")
    )
    arrays: dict[str, npt.NDArray[Any]] = {
        "id_counts": id_counts.astype(np.min_scalar_type(id_counts.max())),
        "code_counts": code_counts.astype(np.min_scalar_type(code_counts.max())),
        "ids": np.concatenate([row.sparse.ids for row in rows]).astype(np.min_scalar_type(vocab_size - 1)),
        "codes": np.concatenate([row.sparse.codes for row in rows]),
        "entropy": np.array([row.entropy for row in rows], dtype=np.float32),
    }
    fresh = path.with_name(f"{path.name}.part")
    save_tensors(fresh, {name: torch.from_numpy(array) for name, array in arrays.items()})
    fresh.replace(path)


def write_info(directory: Path, info: CacheInfo) -> None:
    """Write signals.json."""
    write_json(directory / SIGNALS, {"format": FORMAT, **dataclasses.asdict(info)})


def read_info(directory: Path) -> CacheInfo:
    """Read signals.json of a finished directory.

    Raises:
        ArtifactError: no teacher cache, not finished, of another version, or damaged.
    """
    path = directory / SIGNALS
    if not path.exists():
        raise ArtifactError(f"{directory}: holds no {SIGNALS}; give a finished teacher cache")
    data = read_json(path)
    version = data.pop("format", None)
    if version != FORMAT:
        raise ArtifactError(f"{path}: has format {version}, this version reads {FORMAT}; make the cache again")
    info = validate(CacheInfo, data, path, "copy the directory again, or make it again")
    if not 0 < min(info.rows, info.rows_per_shard, info.sequence) <= info.rows < _MOST_ROWS:
        raise ArtifactError(f"{path}: damaged or incomplete; copy the directory again, or make it again")
    files = read_manifest(directory).files
    for name in (SIGNALS, *(shard_name(number) for number in range(len(info.shards)))):
        expected = files[name].bytes if name in files else None
        found = (directory / name).stat().st_size if (directory / name).exists() else None
        if expected is None or found != expected:
            state = "missing" if found is None else f"{found} bytes, {MANIFEST} says {expected}"
            raise ArtifactError(f"{directory / name}: {state}; copy the directory again, or make it again")
    return info


class CachedRows:
    """The stored rows of a directory, read one at a time."""

    def __init__(self, directory: Path, info: CacheInfo) -> None:
        self._directory, self._info = directory, info
        self._files = read_manifest(directory).files
        self._shard = lru_cache(_OPEN_SHARDS)(self._read_shard)

    def __getitem__(self, number: int) -> CachedRow:
        """Row `number`.

        Raises:
            ArtifactError: its shard is damaged.
        """
        shard, place = divmod(number, self._info.rows_per_shard)
        arrays = self._shard(shard)
        id_counts, code_counts = (arrays[name][place].astype(np.int64) for name in ("id_counts", "code_counts"))
        first_id, first_code = (int(arrays[name][:place].sum()) for name in ("id_counts", "code_counts"))
        ids = arrays["ids"][first_id : first_id + int(id_counts.sum())].astype(np.int64)
        codes = arrays["codes"][first_code : first_code + int(code_counts.sum())]
        return CachedRow(SparseProbabilities(id_counts, code_counts, ids, codes), float(arrays["entropy"][place]))

    def _read_shard(self, number: int) -> dict[str, npt.NDArray[Any]]:
        name = shard_name(number)
        if file_sha256(self._directory / name) != self._files[name].sha256:
            raise ArtifactError(
                f"{self._directory / name}: content differs from the manifest's SHA-256; "
                "copy the directory again, or make it again"
            )
        return cast("dict[str, npt.NDArray[Any]]", load_file(self._directory / name))
