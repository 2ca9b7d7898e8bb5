"""Cost of a frozen teacher in each precision: memory, speed, and how far its distributions move.

    python -m benchmarks.studies.teacher_cost --teacher DIR --text FILE --tokens 4096 [--json]

Memory: a fresh process for each precision; resident memory after loading and the peaks of loading and of reading, all
less that of the process with its libraries. Speed: the precisions take turns in one process. Distance: KL(fp32 ||
precision) in nats a token over the same text, 0 for fp32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table

from benchmarks.console_tables import megabytes
from benchmarks.studies.processes import add_integers, flag_parser, measure_apart, run_study
from compress.distillation.divergences import divergence_chunk
from compress.distillation.settings import TEACHER_PRECISIONS
from compress.distillation.teacher import load_teacher, teacher_logits
from sportsllm.console import table
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.process_memory import peak_rss_bytes, reset_peak_rss
from sportsllm.text.documents import read_documents
from sportsllm.text.packing import Batch, PackedSequences, tokenize
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.chunked_loss import head_loss

_MEASURED = tuple(name for name in TEACHER_PRECISIONS if name != "auto")


def _batch(settings: Mapping[str, Any]) -> Batch:
    words = load_tokenizer(Path(settings["teacher"]))
    documents = tokenize(list(read_documents([Path(path) for path in settings["text"]])), words)
    rows = -(-int(settings["tokens"]) // int(settings["sequence"]))
    return PackedSequences(documents, int(settings["sequence"]), rows, 0).batch(0)


def measure_memory(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of one precision in this process."""
    torch.set_num_threads(int(settings["threads"]))
    batch = _batch(settings)
    if settings["precision"] in ("int8", "nf4"):
        import bitsandbytes  # noqa: F401  a library, not the teacher
    torch.zeros(64, 64) @ torch.zeros(64, 64)
    reset_peak_rss()
    before = psutil.Process().memory_info().rss
    model = load_teacher(Path(settings["teacher"]), settings["precision"])
    loaded, peak_loading = psutil.Process().memory_info().rss, peak_rss_bytes()
    reset_peak_rss()
    teacher_logits(model, batch)(0, 64)
    sizes = {"loaded": loaded, "peak_loading": peak_loading, "peak_reading": peak_rss_bytes()}
    return {f"{name}_bytes": size - before for name, size in sizes.items()}


def measure_rest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a pass in turns, and distances, of all precisions."""
    torch.set_num_threads(int(settings["threads"]))
    batch, directory = _batch(settings), Path(settings["teacher"])
    models = {name: load_teacher(directory, name) for name in _MEASURED}
    seconds: dict[str, list[float]] = {name: [] for name in _MEASURED}
    for number in range(int(settings["rounds"]) + 1):
        for name, model in models.items():
            started = time.perf_counter()
            teacher_logits(model, batch)(0, 1)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    full, targets_N = load_checkpoint(directory), batch.targets.flatten()
    scored = int((targets_N >= 0).sum())
    distances = {}
    with torch.no_grad():
        hidden_ND = full.hidden(batch.tokens, batch.documents).flatten(0, 1)
        for name, model in models.items():
            # The full model is the teacher here, and the cheap one its student.
            reading = model.hidden(batch.tokens, batch.documents).flatten(0, 1).float()
            chunk_loss = divergence_chunk(
                "forward-kl", targets_N, lambda start, count: hidden_ND[start : start + count] @ full.head_weight.T
            )
            distances[name] = float(head_loss(reading, model.head_weight.float(), chunk_loss)) / scored
    return {"seconds": seconds, "kl": distances, "tokens": batch.tokens.numel()}


def measure(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All figures, one dict a precision."""
    child = partial(measure_apart, __spec__.name, "teacher", settings)
    rest = child("rest").payload
    return [
        {
            "precision": name,
            **child("memory", precision=name).payload,
            "tokens_per_s": round(rest["tokens"] / statistics.median(rest["seconds"][name]), 1),
            "kl_nats_per_token": rest["kl"][name],
        }
        for name in _MEASURED
    ]


def _table(results: list[dict[str, Any]]) -> Table:
    headers = ("precision", "loaded MB", "peak loading MB", "peak reading MB", "tokens/s", "KL from fp32, nats a token")
    rows = [
        (
            row["precision"],
            *(megabytes(row[f"{key}_bytes"]) for key in ("loaded", "peak_loading", "peak_reading")),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['kl_nats_per_token']:.2e}",
        )
        for row in results
    ]
    return table(headers, rows)


def main() -> None:
    """Measure every precision and print a table."""
    parser = flag_parser(__doc__)
    parser.add_argument("--teacher", metavar="DIR", required=True, help="An unquantized checkpoint.")
    parser.add_argument("--text", metavar="FILE", nargs="+", required=True, help="Text that the teacher reads.")
    lengths = {"tokens": (4096, "Tokens to read."), "sequence": (512, "Tokens of one sequence.")}
    add_integers(parser, **lengths, rounds=(3, "Timed rounds."), threads=(2, "CPU threads."))
    run_study(parser, {"memory": measure_memory, "rest": measure_rest}, measure, _table, "teachers")


if __name__ == "__main__":
    main()
