"""How near stored teacher signals come to the gradient of the full KL, at what size, and what a step costs.

    python -m benchmarks.studies.signal_quality --teacher DIR --student DIR --corpus FILE... --tokens 65536 [--json]

For every kind of signal: bytes a token on disk, and the angle between the gradient of the mean loss over all those
tokens and that of the full KL. The angle of an unbiased kind falls with the square root of the tokens and grows as the
student nears the teacher, so a figure needs both named. Step times alternate with plain cross-entropy's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.measure.tables import table
from compress.distillation.settings import Objective
from compress.distillation.student_loss import distillation_loss, guided_loss
from compress.distillation.teacher import load_teacher
from compress.teacher_cache.batches import SignalBatches
from compress.teacher_cache.loss import sparse_chunk
from compress.teacher_cache.read import Signals, open_signals
from compress.teacher_cache.sparse import KINDS
from compress.teacher_cache.write import make_signals
from sportsllm.console import progress_bar
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.checkpoint import load_checkpoint
from sportsllm.text.packing import IGNORE, Batch, tokenize
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.chunked_loss import head_loss
from sportsllm.training.loop import Loss, language_model_loss

_WARM_UP = 2


def gradient(student: SportsLLM, batches: SignalBatches, count: int, loss: Loss, name: str) -> tuple[Tensor, float]:
    """Gradient of the mean loss over `count` batches, all parameters in one float64 row, and that mean in nats."""
    student.zero_grad(set_to_none=True)
    total, scored = 0.0, 0
    with progress_bar(name, count) as bar:
        for index in range(count):
            batch = batches.batch(index).to(student.head_weight.device)
            summed = loss(student, batch)
            summed.backward()  # type: ignore[no-untyped-call]
            total += float(summed.detach())
            scored += int((batch.targets != IGNORE).sum())
            bar.advance()
    parts = [parameter.grad.flatten() for parameter in student.parameters() if parameter.grad is not None]
    return torch.cat(parts).double() / scored, total / scored


def angle_degrees(first: Tensor, second: Tensor) -> float:
    """Angle between two vectors, exact also where it is small: 2 atan2(|a - b|, |a + b|) of unit vectors."""
    a, b = first / first.norm(), second / second.norm()
    return math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))


def renormalised_top_k(signals: Signals) -> Loss:
    """The usual shortcut, and wrong: the k most probable ids, scaled to a sum of 1, as if there were no others."""

    def loss(student: SportsLLM, batch: Batch) -> Tensor:
        stored = signals.targets(batch)
        counts = torch.from_numpy(stored.starts).diff().to(stored.ids_M.device)
        token_M = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        mass_N = torch.zeros_like(stored.entropy_N).index_add_(0, token_M, stored.weights_M)
        targets = dataclasses.replace(stored, weights_M=stored.weights_M / mass_N[token_M], tail_N=None)
        hidden = student.hidden(batch.tokens, batch.documents).flatten(0, 1)
        chunk_loss = sparse_chunk(targets, batch.targets.flatten(), temperature=signals.info.temperature)
        return head_loss(hidden, student.head_weight, chunk_loss)

    return loss


def step_seconds(student: SportsLLM, batches: SignalBatches, losses: Sequence[Loss], rounds: int) -> list[float]:
    """Median time of reading a batch, forward and backward with each loss; the losses take turns."""
    times: list[list[float]] = [[] for _ in losses]
    for number in range(rounds + _WARM_UP):
        for loss, seconds in zip(losses, times, strict=True):
            started = time.perf_counter()
            student.zero_grad(set_to_none=True)
            loss(student, batches.batch(number).to(student.head_weight.device)).backward()  # type: ignore[no-untyped-call]
            if student.head_weight.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds[_WARM_UP:]) for seconds in times]


def measure(
    teacher: Path,
    student: Path,
    corpus: Sequence[Path],
    tokens: int,
    sequence: int,
    batch_size: int,
    rounds: int,
    k: int | None,
    folder: Path,
) -> dict[str, Any]:
    """Make signals of every kind in `folder` and compare them.

    Args:
        teacher, student: checkpoints with one tokenizer.
        corpus: text; part of it is held out and not used.
        tokens: in all; a multiple of sequence * batch_size, or it is rounded up to one.
        sequence, batch_size: of the packed rows.
        rounds: steps timed of each loss.
        k: see `make_signals`.
        folder: empty.
    """
    count = -(-tokens // (sequence * batch_size))
    opened: dict[str, Signals] = {}
    made: dict[str, dict[str, Any]] = {}
    network = load_checkpoint(student)
    for kind in KINDS:
        made[kind] = make_signals(
            teachers=[(teacher, 1.0)],
            corpus=corpus,
            valid=[],
            out=folder / kind,
            tokens=count * sequence * batch_size,
            sequence=sequence,
            seed=0,
            kind=kind,
            k=k,
            teacher_precision="fp32",
            batch_size=batch_size,
        )
        opened[kind] = open_signals(
            folder / kind,
            teacher=teacher,
            tokenizer=student,
            corpus=corpus,
            valid=[],
            sequence=sequence,
            seed=0,
            vocab_size=network.config.vocab_size,
        )
    documents = tokenize(load_corpus(corpus, []).train, load_tokenizer(teacher))
    batches = opened["sampled"].batches(documents, batch_size)
    frozen = load_teacher(teacher, "fp32")
    if torch.cuda.is_available():
        network, frozen = network.cuda(), frozen.cuda()
    full, divergence = gradient(network, batches, count, distillation_loss(frozen, 1.0, 1.0), "full KL")
    losses = {kind: guided_loss(Objective(), [], 1, signals=signals) for kind, signals in opened.items()}
    losses["top-k, renormalised"] = renormalised_top_k(opened["top-k"])
    rows = []
    for name, loss in losses.items():
        found, mean = gradient(network, batches, count, loss, name)
        files = made[name.partition(",")[0]]
        rows.append(
            {
                "kind": name,
                "bytes_per_token": files["bytes_per_token"],
                "angle_degrees": angle_degrees(found, full),
                "norm_ratio": float(found.norm() / full.norm()),
                "relative_error": float((found - full).norm() / full.norm()),
                "loss": mean,
            }
        )
    timed = [language_model_loss, losses["sampled"], losses["top-k"]]
    plain, sampled, bucket = step_seconds(network, batches, timed, rounds)
    return {
        "tokens": count * sequence * batch_size,
        "vocab_size": network.config.vocab_size,
        "kl": divergence,
        "kinds": rows,
        "signal_tokens_per_s": made["sampled"]["tokens_per_s"],
        "step_s": {"cross-entropy": plain, "sampled": sampled, "top-k": bucket},
        "step_ratio": {"sampled": sampled / plain, "top-k": bucket / plain},
    }


def main() -> None:
    """Measure and print a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--k", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(
            given.teacher,
            given.student,
            given.corpus,
            given.tokens,
            given.sequence,
            given.batch_size,
            given.rounds,
            given.k,
            Path(folder),
        )
    if given.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    headers = ("kind", "bytes/token", "angle", "norm ratio", "relative error", "loss")
    cells = [
        (
            row["kind"],
            f"{row['bytes_per_token']:.2f}",
            f"{row['angle_degrees']:.2f}°",
            f"{row['norm_ratio']:.4f}",
            f"{row['relative_error']:.4f}",
            f"{row['loss']:.4f}",
        )
        for row in result["kinds"]
    ]
    console = Console(soft_wrap=True)
    console.print(table(headers, cells, [0]))
    console.print(f"full KL {result['kl']:.4f} nats a token over {result['tokens']:,} tokens")
    ratios = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in result["step_ratio"].items())
    console.print(f"step against plain cross-entropy: {ratios}")


if __name__ == "__main__":
    main()
