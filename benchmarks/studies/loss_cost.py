"""Cost of a loss over the vocabulary: plain torch, which makes all logits, against the chunked and fused one.

    python -m benchmarks.studies.loss_cost --tokens 4096 --vocab 32000 --hidden 768

Memory: each variant in a fresh process, the peak resident memory during loss and gradients less that before; the
gradients themselves count. Time: medians of both variants in turns in one process, so that a machine whose speed drifts
changes both. Everything is float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from benchmarks.console_tables import megabytes
from benchmarks.studies.processes import add_integers, flag_parser, measure_apart, run_study
from compress.distillation.divergences import divergence_chunk, mixed_chunk
from sportsllm.console import table
from sportsllm.errors import SportsLLMError
from sportsllm.process_memory import peak_rss_bytes, reset_peak_rss
from sportsllm.training.chunked_loss import cross_entropy_chunk, head_loss

LOSSES = ("cross-entropy", "forward-kl", "mixed")
VARIANTS = ("naive", "fused")
_KL_WEIGHT = 0.9
_AGREE_WITHIN = 1e-3  # relative distance of the gradients that is rounding: float32 sums over tokens and vocabulary


class Case:
    """Random student and teacher states and heads, and one loss on them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens, vocab, hidden = (int(settings[name]) for name in ("tokens", "vocab", "hidden"))

        def drawn(rows: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, hidden, generator=generator).mul_(scale)

        scale = 2 * hidden**-0.5  # logits of about 2
        self.loss_name, self.chunk = str(settings["loss"]), settings["chunk"]
        self.hidden, self.weight = drawn(tokens).requires_grad_(), drawn(vocab, scale).requires_grad_()
        if self.loss_name != "cross-entropy":
            self.teacher_hidden, self.teacher_weight = drawn(tokens), drawn(vocab, scale)
        self.targets = torch.randint(0, vocab, (tokens,), generator=generator)

    def naive(self) -> Tensor:
        """All logits of both models, and autograd."""
        log_q = F.log_softmax(self.hidden @ self.weight.T, dim=-1)
        if self.loss_name == "cross-entropy":
            return F.nll_loss(log_q, self.targets, reduction="sum")
        log_p = F.log_softmax(self.teacher_hidden @ self.teacher_weight.T, dim=-1)
        divergence = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
        if self.loss_name == "forward-kl":
            return divergence
        return _KL_WEIGHT * divergence + (1 - _KL_WEIGHT) * F.nll_loss(log_q, self.targets, reduction="sum")

    def fused(self) -> Tensor:
        """Chunk by chunk, as training does."""
        if self.loss_name == "cross-entropy":
            chunk_loss = cross_entropy_chunk(self.targets)
        elif self.loss_name == "forward-kl":
            chunk_loss = divergence_chunk("forward-kl", self.targets, self._teacher)
        else:
            chunk_loss = mixed_chunk(self.targets, self._teacher, _KL_WEIGHT)
        return head_loss(self.hidden, self.weight, chunk_loss, self.chunk)

    def _teacher(self, start: int, count: int) -> Tensor:
        return self.teacher_hidden[start : start + count] @ self.teacher_weight.T

    def run(self, variant: str) -> float:
        """Loss and gradients; returns seconds."""
        self.hidden.grad = self.weight.grad = None
        loss: Callable[[], Tensor] = getattr(self, variant)
        started = time.perf_counter()
        (loss() / self.targets.numel()).backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - started

    def gradients(self, variant: str) -> tuple[Tensor, Tensor]:
        """Both gradients, which the next run replaces."""
        self.run(variant)
        assert self.hidden.grad is not None and self.weight.grad is not None
        return self.hidden.grad, self.weight.grad


def measure_memory(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Extra resident bytes of one variant, in this process."""
    torch.set_num_threads(int(settings["threads"]))
    Case({**settings, "tokens": 8, "vocab": 64}).run(settings["variant"])  # libraries and their threads
    case = Case(settings)
    reset_peak_rss()
    before = peak_rss_bytes()
    case.run(settings["variant"])
    return {"extra_bytes": peak_rss_bytes() - before}


def measure_time(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of both variants in turns; the first round warms up and is checked for equal gradients."""
    torch.set_num_threads(int(settings["threads"]))
    case = Case(settings)
    # One variant's gradients are held at a time beside the other's.
    for naive, fused in zip(case.gradients("naive"), case.gradients("fused"), strict=True):
        distance = float((naive - fused).norm() / naive.norm())
        if not distance < _AGREE_WITHIN:
            raise SportsLLMError(f"{settings['loss']}: the gradients differ by {distance:.1e}; no time is worth that")
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(int(settings["rounds"])):
        for variant in VARIANTS:
            seconds[variant].append(case.run(variant))
    return {"seconds": seconds}


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Both figures of one loss, each from processes of their own."""
    child = partial(measure_apart, __spec__.name, settings["loss"], settings)
    memory = {variant: child("memory", variant=variant).payload["extra_bytes"] for variant in VARIANTS}
    timed = child("time")
    rounds = timed.payload["seconds"]
    seconds = {variant: statistics.median(samples) for variant, samples in rounds.items()}
    return {
        **settings,
        "extra_bytes": memory,
        "times_less_memory": round(memory["naive"] / memory["fused"], 2),
        "seconds": seconds,
        "times_faster": round(seconds["naive"] / seconds["fused"], 2),
        "rounds_s": rounds,
        "other_cpu_cores": round(timed.other_cpu_cores, 2),
    }


def _table(results: list[dict[str, Any]]) -> Table:
    first = results[0]
    title = f"{first['tokens']:,} tokens, vocabulary {first['vocab']:,}, hidden {first['hidden']:,}, float32, "
    headers = ("loss", "naive MB", "fused MB", "less memory", "naive s", "fused s", "faster", "others' cores")
    rows = [
        (
            result["loss"],
            *(megabytes(result["extra_bytes"][variant]) for variant in VARIANTS),
            f"{result['times_less_memory']:.1f}x",
            *(f"{result['seconds'][variant]:.3f}" for variant in VARIANTS),
            f"{result['times_faster']:.2f}x",
            f"{result['other_cpu_cores']:.2f}",
        )
        for result in results
    ]
    return table(headers, rows, title=f"{title}{first['threads']} threads")


def main() -> None:
    """Measure the losses named on the command line and print a table."""
    parser = flag_parser(__doc__)
    shape = {"tokens": (4096, "Tokens of one batch."), "vocab": (32_000, "Size of the vocabulary.")}
    shape["hidden"] = (768, "Hidden size.")
    add_integers(parser, **shape, rounds=(5, "Timed rounds."), threads=(2, "CPU threads."))
    parser.add_argument("--chunk", type=int, help="Tokens of one chunk. [default: as in training]")
    parser.add_argument("--loss", choices=LOSSES, action="append", help="A loss; may be repeated. [default: all]")

    def measure_each(settings: dict[str, Any]) -> list[dict[str, Any]]:
        return [measure({**settings, "loss": loss}) for loss in settings["loss"] or LOSSES]

    run_study(parser, {"memory": measure_memory, "time": measure_time}, measure_each, _table, "losses")


if __name__ == "__main__":
    main()
