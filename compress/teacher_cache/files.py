"""Stored teacher signals on disk: `signals.json` and shards of some MB, each a safetensors file of a run of rows.

A shard's tensors, for R rows of T tokens each:

    id_counts, code_counts  (R, T)      ids and codes of each token
    ids                     uint8       ids of `id_bits` bits each, lowest bit first, every row from a fresh byte
    codes                   uint8       see `compress.teacher_cache.sparse`
    ends                    (R, 2)      where each row's bytes end in `ids` and `codes`
    entropy                 (R,)        of the teacher's distributions, summed over the row's scored tokens, in nats
    text, data              (R,)        CRC-32 of the row's text and of what is stored of it

A row is read through a memory map of its shard and checked when it is used; only the latest shards stay open.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from compress.teacher_cache.sparse import KINDS, Picked
from sportsllm.errors import ArtifactError
from sportsllm.models.hf_config import read_json
from sportsllm.storage.artifact import MANIFEST, read_manifest
from sportsllm.storage.checkpoint import save_tensors, write_json
from sportsllm.text.packing import Batch

SIGNALS = "signals.json"
FORMAT = 1
ROWS_PER_SHARD = 256
ROW_BYTES = 20  # ends, entropy and the two checksums
_OPEN_SHARDS = 2


@dataclass(frozen=True)
class SignalsInfo:
    """What signals.json records.

    Attributes:
        kind: one of `compress.teacher_cache.sparse.KINDS`.
        k: ids with a code each that a token has room for.
        bits: room of a token's ids and codes.
        id_bits: bits of an id.
        temperature: of the teachers' softmax.
        sequence, seed: of the packed rows, see `sportsllm.text.packing.PackedSequences`.
        rows: rows 0 to rows - 1 are stored.
        vocab_size: ids are below it.
        bytes_per_token: of the shards, for each of the rows' tokens.
        teachers: digest and weight of each teacher; their probabilities were mixed with these weights.
        tokenizer: SHA-256 of tokenizer.json.
        corpus, valid: digests of the files that the rows were cut from and of the held-out files.
    """

    kind: str
    k: int
    bits: int
    id_bits: int
    temperature: float
    sequence: int
    seed: int
    rows: int
    rows_per_shard: int
    vocab_size: int
    bytes_per_token: float
    teachers: tuple[tuple[str, float], ...]
    tokenizer: str
    corpus: tuple[str, ...]
    valid: tuple[str, ...]

    @property
    def shards(self) -> int:
        """How many files hold the rows."""
        return -(-self.rows // self.rows_per_shard)


@dataclass(frozen=True)
class StoredRow:
    """One row's signals. `entropy` is the sum over its scored tokens, `text` the checksum of the row's text."""

    picked: Picked
    entropy: float
    text: int


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"signals-{number:05d}.safetensors"


def text_checksums(batch: Batch) -> list[int]:
    """CRC-32 of each row's tokens and targets."""
    both = torch.stack([batch.tokens, batch.targets], dim=1).cpu().numpy()
    return [zlib.crc32(row.tobytes()) for row in both]


def pack_ids(ids: npt.NDArray[np.int64], bits: int) -> npt.NDArray[np.uint8]:
    """Ids below 2^bits as a row of bytes, lowest bit first."""
    return np.packbits((ids[:, None] >> np.arange(bits)) & 1 > 0, bitorder="little")


def unpack_ids(packed: npt.NDArray[np.uint8], bits: int, count: int) -> npt.NDArray[np.int64]:
    """The inverse of `pack_ids`."""
    spread = np.zeros((count, 32), dtype=np.uint8)
    spread[:, :bits] = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    return np.packbits(spread, axis=1, bitorder="little").view("<u4")[:, 0].astype(np.int64)


def write_shard(path: Path, rows: Sequence[StoredRow], id_bits: int, most_ids: int) -> None:
    """Write one shard, whole or not at all.

    Args:
        path: of the file.
        rows: in order.
        id_bits: of an id.
        most_ids: of a token; counts take one byte where that fits, else two.
    """
    counts = np.uint8 if most_ids < 255 else np.uint16  # a token has one code more than ids
    id_counts = np.stack([row.picked.id_counts for row in rows]).astype(counts)
    code_counts = np.stack([row.picked.code_counts for row in rows]).astype(counts)
    ids = [pack_ids(row.picked.ids, id_bits) for row in rows]
    codes = [row.picked.codes for row in rows]
    ends = np.cumsum([[len(part) for part in ids], [len(part) for part in codes]], axis=1).T.astype(np.uint32)
    entropy = np.array([row.entropy for row in rows], dtype=np.float32)
    arrays: dict[str, npt.NDArray[Any]] = {
        "id_counts": id_counts,
        "code_counts": code_counts,
        "ids": np.concatenate(ids),
        "codes": np.concatenate(codes),
        "ends": np.ascontiguousarray(ends),
        "entropy": entropy,
        "text": np.array([row.text for row in rows], dtype=np.uint32),
        "data": np.array(
            [_checksum(*parts) for parts in zip(id_counts, code_counts, ids, codes, entropy, strict=True)]
        ).astype(np.uint32),
    }
    fresh = path.with_name(f"{path.name}.part")
    save_tensors(fresh, {name: torch.from_numpy(array) for name, array in arrays.items()})
    fresh.replace(path)


def _checksum(*parts: npt.NDArray[Any]) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part.tobytes(), value)
    return value


def write_info(directory: Path, info: SignalsInfo) -> None:
    """Write signals.json."""
    write_json(directory / SIGNALS, {"format": FORMAT, **dataclasses.asdict(info)})


def read_info(directory: Path) -> SignalsInfo:
    """Read signals.json of a finished directory and compare the files' sizes with its manifest.

    Raises:
        ArtifactError: no signals, not finished, written by a newer version, or damaged.
    """
    path = directory / SIGNALS
    if not path.exists():
        raise ArtifactError(f"{directory}: holds no {SIGNALS}; give a finished directory of teacher signals")
    data = read_json(path)
    version = data.pop("format", None)
    if not isinstance(version, int) or version > FORMAT:
        raise ArtifactError(f"{path}: written by a newer version (format {version}); upgrade this program")
    try:
        lists = {key: tuple(data[key]) for key in ("corpus", "valid")}
        teachers = tuple((str(digest), float(weight)) for digest, weight in data["teachers"])
        info = SignalsInfo(**{**data, **lists, "teachers": teachers})
        whole = info.kind in KINDS and min(info.rows, info.rows_per_shard, info.sequence) > 0
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ArtifactError(f"{path}: damaged or incomplete; copy the directory again, or make it again")
    files = read_manifest(directory)["files"]
    for name in [SIGNALS, *(shard_name(number) for number in range(info.shards))]:
        expected = files.get(name, {}).get("bytes")
        found = (directory / name).stat().st_size if (directory / name).exists() else None
        if expected is None or found != expected:
            state = "missing" if found is None else f"{found} bytes, {MANIFEST} says {expected}"
            raise ArtifactError(f"{directory / name}: {state}; copy the directory again, or make it again")
    return info


class SignalRows:
    """The stored rows of a directory, read one at a time."""

    def __init__(self, directory: Path, info: SignalsInfo) -> None:
        self._directory, self._info = directory, info
        self._open: OrderedDict[int, Any] = OrderedDict()

    def row(self, number: int) -> StoredRow:
        """Row `number`, checked against its checksum.

        Raises:
            ArtifactError: what is stored is damaged.
        """
        shard, place = divmod(number, self._info.rows_per_shard)
        path = self._directory / shard_name(shard)
        try:
            return self._read(shard, place)
        except (SafetensorError, OSError, KeyError, ValueError, IndexError) as error:
            raise ArtifactError(
                f"{path}: row {number} is damaged ({error}); copy the directory again, or make it again"
            ) from None

    def _read(self, shard: int, place: int) -> StoredRow:
        handle = self._shard(shard)

        def tensor(name: str, start: int, stop: int) -> npt.NDArray[Any]:
            return np.asarray(handle.get_slice(name)[start:stop])

        ends = tensor("ends", max(place - 1, 0), place + 1).astype(np.int64)
        (first_id, first_code), (last_id, last_code) = (ends[0] if place else np.zeros(2, dtype=np.int64)), ends[-1]
        id_counts, code_counts = (tensor(name, place, place + 1)[0] for name in ("id_counts", "code_counts"))
        packed, codes = tensor("ids", first_id, last_id), tensor("codes", first_code, last_code)
        entropy, text, data = (tensor(name, place, place + 1)[0] for name in ("entropy", "text", "data"))
        if _checksum(id_counts, code_counts, packed, codes, entropy) != int(data):
            raise ValueError("its checksum differs")
        ids = unpack_ids(packed, self._info.id_bits, int(id_counts.sum()))
        picked = Picked(id_counts.astype(np.int64), code_counts.astype(np.int64), ids, codes)
        return StoredRow(picked, float(entropy), int(text))

    def _shard(self, number: int) -> Any:
        """A mapped shard. Old ones are closed, so that memory does not grow with the directory."""
        if number not in self._open:
            path = self._directory / shard_name(number)
            self._open[number] = safe_open(str(path), framework="np")
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        return self._open[number]
