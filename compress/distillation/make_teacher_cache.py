"""Make a teacher cache: run a teacher over a corpus once and store what students learn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from compress.distillation.teacher import load_teacher, teacher_logits
from compress.distillation.teacher_cache import FORMAT, SIGNALS, CachedBatches, CacheInfo, sample_sparse, shard_name
from sportsllm.console import ProgressBar, log, progress_bar
from sportsllm.errors import InterruptedRun
from sportsllm.files import STATE_DIRECTORY, JsonObject, has_state, write_json
from sportsllm.formats.artifact import STATE_FILE, Stage, partial_directory, replace_state, run_stage
from sportsllm.formats.checkpoint import save_tensors
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import directory_bytes
from sportsllm.inference.decoder import require_finite
from sportsllm.models.language_model import SportsLLM
from sportsllm.processors import training_device
from sportsllm.text.documents import held_out_setting
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.text.tokens import token_cache, tokenize

if TYPE_CHECKING:
    from compress.distillation.student import StudentTraining

_AT_ONCE = 1_024  # tokens of a row whose distributions are in memory together


def make_teacher_cache(training: StudentTraining, info: CacheInfo, out: Path) -> JsonObject:
    """Store what a training's teacher says about the first rows of its packed corpus; an interrupted run goes on.

    Args:
        training: its teacher, text and sequences.
        info: from `wanted_info`.
        out: directory to make.

    Raises:
        UsageError: an interrupted run with other settings is there.
        InterruptedRun: Ctrl-C; finished shards are kept.
    """
    log(f"{out}: no teacher signals there yet; computing them")
    settings = {
        "teacher": str(training.teacher),
        "corpus": [str(path) for path in training.corpus],
        "valid": [str(path) for path in training.valid],
        **held_out_setting(training.valid, training.left_out),
        "tokens": info.tokens,
        "sequence": info.sequence,
        "teacher_precision": info.precision,
        **info.reading,
    }
    inputs = [training.teacher, *training.corpus, *training.left_out]
    stage = Stage("signals", settings, inputs, seed=info.seed)

    def make(directory: Path) -> JsonObject:
        tokenizer = load_tokenizer(training.teacher, load_config(training.teacher), training.reading)
        documents = tokenize(training.read_corpus().train, tokenizer, token_cache(directory))
        batches = CachedBatches(documents, info.sequence, training.config.batch_size, info.seed, info.rows)
        if info.rows > batches.rows_per_epoch:
            log(
                f"note: the corpus has {batches.rows_per_epoch:,} rows of {info.sequence}; "
                f"{info.rows:,} rows go through it again"
            )
        missing = _missing_shards(directory, info)
        teacher = load_teacher(training.teacher, training.distillation.teacher_precision, training_device())
        with progress_bar("signals", sum(len(rows) for _, rows in missing) * info.sequence) as bar:
            for number, rows in missing:
                try:
                    stored = list(_stored_rows(teacher, batches, info, rows, bar))
                except KeyboardInterrupt:
                    if not number:
                        raise
                    raise InterruptedRun(
                        f"interrupted after row {rows.start} of {info.rows}; finished rows are kept in {directory}, "
                        "run the same command again to go on"
                    ) from None
                path = directory / shard_name(number)
                fresh = path.with_name(f"{path.name}.part")
                save_tensors(fresh, {name: torch.stack([row[name] for row in stored]) for name in stored[0]})
                fresh.replace(path)
                if not has_state(directory):  # from now on it is kept if the run is interrupted
                    (state := directory / f"{STATE_DIRECTORY}.new").mkdir()
                    write_json(state / STATE_FILE, stage.identity())
                    replace_state(directory, state)
        write_json(directory / SIGNALS, {"format": FORMAT, **dataclasses.asdict(info)})
        size = round(directory_bytes(directory) / info.tokens, 3)
        return {"tokens": info.tokens, "rows": info.rows, "bytes_per_token": size}

    return run_stage(out, stage, make, resume=has_state(partial_directory(out)))


def _stored_rows(
    teacher: SportsLLM, batches: CachedBatches, info: CacheInfo, rows: range, bar: ProgressBar
) -> Iterator[dict[str, Tensor]]:
    """What is stored of some rows. A row's random numbers depend on the seed and its own number only."""
    for first in range(rows.start, rows.stop, batches.batch_size):
        part = range(first, min(first + batches.batch_size, rows.stop))
        logits = teacher_logits(teacher, batches.gather(part).to(teacher.device))
        for place, row in enumerate(part):
            rng, chunks = np.random.default_rng([info.seed, row]), []
            for start in range(0, info.sequence, _AT_ONCE):
                count = min(_AT_ONCE, info.sequence - start)
                logits_NV = logits(place * info.sequence + start, count)
                require_finite(float(logits_NV.max()))
                chunks.append(sample_sparse(torch.softmax(logits_NV, dim=-1), rng))
            yield {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        bar.advance(len(part) * info.sequence)


def _missing_shards(directory: Path, info: CacheInfo) -> list[tuple[int, range]]:
    """Number and rows of the shards that an interrupted run did not finish; all without one."""
    for path in directory.glob("*.part"):  # half a shard of a run that was killed
        path.unlink()
    return [(number, rows) for number, rows in enumerate(info.shards) if not _is_whole(directory / shard_name(number))]


def _is_whole(shard: Path) -> bool:
    try:
        return shard.exists() and bool(load_file(shard))
    except SafetensorError:
        return False
