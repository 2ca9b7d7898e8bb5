"""How near stored teacher signals come to the gradient of the full KL, at what size, and what a step costs.

    python -m benchmarks.studies.signal_quality --teacher DIR --student DIR --corpus FILE... --tokens 65536 [--json]

The angle is that between the gradients of the mean loss over all tokens. As the signals are unbiased, it falls with the
square root of the tokens; it grows as the student nears the teacher, so a figure needs both named. Steps alternate with
those of plain cross-entropy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from compress.distillation.divergences import divergence_chunk
from compress.distillation.teacher import load_teacher, running_teacher, teacher_logits
from compress.teacher_cache.read import CacheKey, TeacherCache, open_teacher_cache
from compress.teacher_cache.write import CacheRequest, make_teacher_cache
from sportsllm.console import progress_bar
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import IGNORE, Batch, PackedSequences, tokenize
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.chunked_loss import head_loss
from sportsllm.training.loop import Loss, language_model_loss

_WARM_UP = 2


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        teacher, student: checkpoints with one tokenizer.
        corpus: text; part of it is held out and not used.
        tokens: of all batches; rounded up to whole ones.
        sequence, batch_size: of the packed rows.
        rounds: timed steps of each loss.
    """

    teacher: Path
    student: Path
    corpus: tuple[Path, ...]
    tokens: int = 65_536
    sequence: int = 512
    batch_size: int = 4
    rounds: int = 15

    @property
    def batches(self) -> int:
        """How many batches hold the tokens."""
        return -(-self.tokens // (self.sequence * self.batch_size))


@dataclass(frozen=True)
class SignalQuality:
    """What a study found.

    `kl` and `loss` are nats a token, of the full KL and of the stored signals; `norm_ratio` and `relative_error`
    compare the gradients' norms and their difference with the full KL's norm.
    """

    tokens: int
    vocab_size: int
    bytes_per_token: float
    signal_tokens_per_s: float
    kl: float
    loss: float
    angle_degrees: float
    norm_ratio: float
    relative_error: float
    plain_step_s: float
    signal_step_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain figures, and the ratio of the steps."""
        return asdict(self) | {"step_ratio": self.signal_step_s / self.plain_step_s}


def full_loss(teacher: SportsLLM) -> Loss:
    """Forward KL from all of a teacher's logits, summed over scored tokens."""

    def loss(student: SportsLLM, batch: Batch) -> Tensor:
        chunk = divergence_chunk("forward-kl", batch.targets.flatten(), teacher_logits(teacher, batch))
        return head_loss(student.hidden(batch.tokens, batch.documents).flatten(0, 1), student.head_weight, chunk)

    return loss


def stored_loss(signals: TeacherCache) -> Loss:
    """The same from stored signals."""

    def loss(student: SportsLLM, batch: Batch) -> Tensor:
        hidden = student.hidden(batch.tokens, batch.documents).flatten(0, 1)
        return head_loss(hidden, student.head_weight, signals.chunk_loss(batch))

    return loss


def gradient(student: SportsLLM, batches: PackedSequences, count: int, loss: Loss, name: str) -> tuple[Tensor, float]:
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


def step_seconds(student: SportsLLM, batches: PackedSequences, losses: Sequence[Loss], rounds: int) -> list[float]:
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


def store_signals(study: Study, directory: Path, vocab_size: int) -> tuple[dict[str, Any], TeacherCache]:
    """Make a study's signals in `directory`: what making them cost, and the signals."""
    tokens = study.batches * study.sequence * study.batch_size
    request = CacheRequest(
        study.teacher, study.corpus, (), (), tokens, study.sequence, seed=0, batch_size=study.batch_size,
        teacher_precision="fp32",
    )  # fmt: skip
    made = make_teacher_cache(request, directory, lambda: running_teacher(study.teacher, "fp32"))
    key = CacheKey(study.teacher, study.corpus, (), (), study.sequence, seed=0, vocab_size=vocab_size)
    return made, open_teacher_cache(directory, key)


def measure(study: Study, directory: Path) -> SignalQuality:
    """Make signals in a new `directory` and compare their gradient with that of the full KL.

    Raises:
        ArtifactError: the checkpoints do not fit together.
    """
    student, teacher = load_checkpoint(study.student), load_teacher(study.teacher, "fp32")
    made, signals = store_signals(study, directory, student.config.vocab_size)
    documents = tokenize(load_corpus(study.corpus, []).train, load_tokenizer(study.teacher))
    batches = signals.batches(documents, study.batch_size)
    if torch.cuda.is_available():
        student, teacher = student.cuda(), teacher.cuda()
    full, divergence = gradient(student, batches, study.batches, full_loss(teacher), "full KL")
    found, loss = gradient(student, batches, study.batches, stored_loss(signals), "stored signals")
    plain, sampled = step_seconds(student, batches, [language_model_loss, stored_loss(signals)], study.rounds)
    return SignalQuality(
        tokens=study.batches * study.sequence * study.batch_size,
        vocab_size=student.config.vocab_size,
        bytes_per_token=made["bytes_per_token"],
        signal_tokens_per_s=made["tokens_per_s"],
        kl=divergence,
        loss=loss,
        angle_degrees=angle_degrees(found, full),
        norm_ratio=float(found.norm() / full.norm()),
        relative_error=float((found - full).norm() / full.norm()),
        plain_step_s=plain,
        signal_step_s=sampled,
    )


def main() -> None:
    """Measure and print the figures, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True)
    for name in ("tokens", "sequence", "batch_size", "rounds"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Study, name))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args())
    torch.set_num_threads(given.pop("threads"))
    as_json = given.pop("json")
    with tempfile.TemporaryDirectory() as folder:
        quality = measure(Study(**given | {"corpus": tuple(given["corpus"])}), Path(folder) / "signals")
    if as_json:
        sys.stdout.write(json.dumps(quality.to_json()) + "\n")
        return
    console = Console(soft_wrap=True)
    console.print(
        f"{quality.bytes_per_token:.2f} bytes a token, {quality.angle_degrees:.2f}° from the full KL's gradient, "
        f"norm ratio {quality.norm_ratio:.4f}, relative error {quality.relative_error:.4f}"
    )
    console.print(f"full KL {quality.kl:.4f}, stored {quality.loss:.4f} nats a token over {quality.tokens:,} tokens")
    console.print(f"step against plain cross-entropy: {quality.signal_step_s / quality.plain_step_s:.3f}x")


if __name__ == "__main__":
    main()
