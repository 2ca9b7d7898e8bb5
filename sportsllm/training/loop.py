"""The only training loop. The loss is an argument, so distillation and recovery add no second one."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from sportsllm import processes
from sportsllm.console import log, log_once, progress_bar
from sportsllm.errors import ArtifactError, DivergedError, UsageError
from sportsllm.files import STATE_DIRECTORY, JsonObject, parse_json
from sportsllm.models.experts import balance_biases, pop_expert_load
from sportsllm.models.language_model import SportsLLM
from sportsllm.process_memory import peak_rss_bytes, reset_peak_rss
from sportsllm.results import TrainingFigures
from sportsllm.text.packing import IGNORE, Batch, PackedSequences
from sportsllm.training.loss import cross_entropy
from sportsllm.training.optimizers import build_optimizers, computes_in, rate_factor
from sportsllm.training.pipeline import Pipeline, Stage
from sportsllm.training.settings import TrainConfig
from sportsllm.training.sharding import clip_gradients
from sportsllm.training.state import RunState, Validation

# (model, batch) -> loss summed over the batch's scored tokens, in nats
Loss = Callable[[SportsLLM, Batch], Tensor]
METRICS = "metrics.jsonl"
_SAVE_EVERY_S = 600.0


def training_record(figures: TrainingFigures, model: SportsLLM, batches: PackedSequences) -> JsonObject:
    """What every training verb reports, by the names of `TrainingResult`."""
    parameters = model.config.parameters
    return {
        "parameters": parameters,
        "tokens_per_parameter": float(f"{figures.tokens / parameters:.3g}"),
        "epochs": round(figures.tokens / batches.tokens_per_epoch, 2),
        **asdict(figures),
    }


def language_model_loss(model: SportsLLM, batch: Batch) -> Tensor:
    """Next-token cross-entropy, summed over the scored tokens."""
    hidden, cap = model.hidden(batch.tokens, batch.documents), model.config.logit_softcap
    return cross_entropy(hidden, model.head_weight, batch.targets, softcap=cap)


def resolve_precision(name: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype for a precision setting; None is plain float32."""
    if name == "auto":
        name = "bf16" if computes_in(torch.bfloat16, device) else "fp32"
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if dtype is not None and not computes_in(dtype, device):
        log_once(f"this processor has no {name} products and is many times as fast with --set precision=auto")
    return dtype


def train_model(
    model: SportsLLM,
    batches: PackedSequences,
    loss: Loss,
    config: TrainConfig,
    directory: Path,
    *,
    validation: Validation | None = None,
    identity: JsonObject | None = None,
    resume: bool = False,
    description: str = "train",
) -> TrainingFigures:
    """Train `model` in place.

    Args:
        model: float32 weights, on the device to train on.
        batches: step i reads batches i * accumulation and following.
        loss: summed loss of one batch; its mean over the step's scored tokens is minimised.
        directory: gets metrics.jsonl, and `state/` when the run is interrupted or every ten minutes.
        validation: scores held-out text every `validate_every` steps and at the end; the best weights stay.
        identity: of the run's `artifact.Stage`, saved with its state.
        resume: continue from `directory`/state if there is one, bit for bit on a CPU.

    Raises:
        DivergedError: the loss is not finite, at the first step or with no scored step to go back to.
        InterruptedRun: Ctrl-C or SIGTERM; the state is saved.
    """
    reset_peak_rss()
    state = (run := _Run(model, config, directory, identity or {})).state
    if resume and (directory / STATE_DIRECTORY).exists():
        state.load()
        _drop_metrics_after(directory / METRICS, state.step)
        log(f"resumed at step {state.step:,} of {config.steps:,}")
    if not run.divided:
        processes.share(model.parameters())
    first_step, paused = state.step, 0.0  # seconds of scoring and saving
    started = time.perf_counter()
    model.checkpoint_activations = config.checkpoint_activations

    def shown(nats: float) -> str:
        if loss is language_model_loss:
            return f"{nats / math.log(2) / batches.bytes_per_token:.3f} bits per byte"
        return f"loss {nats:.3f}"

    def tokens_per_s() -> float:
        seconds = max(time.perf_counter() - started - paused, 1e-9)
        return (state.step - first_step) * config.tokens_per_step / seconds

    with (
        (directory / METRICS).open("a", buffering=1, encoding="utf-8") as run.metrics,
        progress_bar(description, config.steps * config.tokens_per_step, first_step * config.tokens_per_step) as bar,
        _interrupt_flag() as run.interrupted,
    ):
        if validation is not None and state.step == 0 and (score := state.start(validation)) is not None:
            run.write(valid_bits_per_byte=score)
            paused += time.perf_counter() - started
        while state.step < config.steps:
            try:
                step_loss, learning_rate, norm = run.take_step(batches, loss)
            except DivergedError as error:
                if state.best_step is None or not state.step:
                    raise
                log(f"{error}; training ends here")
                break
            last, rate = state.step == config.steps, tokens_per_s()
            bar.advance(config.tokens_per_step, f"{shown(step_loss)} · {rate:,.0f} tokens/s")
            pause = time.perf_counter()
            run.log_step(last, validation, lr=learning_rate, grad_norm=norm, tokens_per_s=round(rate, 1))
            if run.stopping and not last:
                raise state.interrupted()
            if run.saving:
                state.save()
                run.last_save = time.perf_counter()
            paused += time.perf_counter() - pause
    model.eval()
    return run.result(tokens_per_s(), validation, started)


class _Run:
    """A model, its state, and how to take a step."""

    def __init__(self, model: SportsLLM, config: TrainConfig, directory: Path, identity: JsonObject) -> None:
        self.model, self.config = model, config
        self.device = model.device
        self.dtype = resolve_precision(config.precision, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.optimizers = build_optimizers(model, config)
        self.divided = isinstance(model, Stage) or processes.is_sharded(model.head_weight)
        self.pipeline: Pipeline | None = None  # made at the first step
        self.state = RunState(directory, model, self.optimizers, self.scaler, identity, config)
        self.metrics: IO[str] | None = None
        self.interrupted, self.stopping = threading.Event(), False  # this process, and any of them
        self.last_save, self.saving = time.perf_counter(), False  # the first process's clock counts
        if processes.count() > 1:  # which would take another step than one
            if model.config.dropout:
                raise UsageError("several processes draw dropout in another order; train the model in one process")
            if model.config.experts is not None or model.config.selection is not None:
                raise UsageError("experts and selection are balanced over the whole step; train them in one process")
        torch.manual_seed(config.seed)

    def write(self, **record: float | list[list[float]] | None) -> None:
        """A line of the metrics file."""
        assert self.metrics is not None, "the run has begun"
        step = {"step": self.state.step, "tokens": self.state.step * self.config.tokens_per_step}
        self.metrics.write(json.dumps(step | record) + "\n")

    def log_step(self, last: bool, validation: Validation | None, **figures: float | None) -> None:
        """Log every few steps, and score held-out text when it is time, both after the `last` step too."""
        step, every = self.state.step, self.config.validate_every
        if step % self.config.log_every == 0 or last:
            self.write(loss=self.state.mean_loss, **figures)
            if self.model.config.experts and (shares := pop_expert_load(self.model)):
                self.write(expert_shares=shares)  # each expert's fraction of the tokens, by layer
        if validation is not None and (last or (every and step % every == 0)):
            self.write(valid_bits_per_byte=self.state.consider(validation))

    def result(self, tokens_per_s: float, validation: Validation | None, started: float) -> TrainingFigures:
        """Give the model its best weights and report the run."""
        state, config = self.state, self.config
        after, before, worse = (None, None, None) if validation is None else state.finish(validation)
        return TrainingFigures(
            steps=state.step,
            tokens=state.step * config.tokens_per_step,
            tokens_per_s=tokens_per_s,
            loss=state.mean_loss,
            valid_bits_per_byte=after,
            best_step=state.best_step,
            best_bits_per_byte=state.best_bits_per_byte,
            bits_per_byte_before=before,
            worse_than_start=worse,
            learning_rate=config.learning_rate,
            muon_learning_rate=config.muon_learning_rate,
            seconds=time.perf_counter() - started,
            peak_rss_bytes=peak_rss_bytes(),
        )

    def take_step(self, batches: PackedSequences, loss: Loss) -> tuple[float, float, float | None]:
        """One optimizer step: its loss in nats per token, the learning rate and, if finite, the gradient norm."""
        config = self.config
        self.model.train()
        factor = rate_factor(config, self.state.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        chosen = [batch.to(self.device) for batch in batches.step(self.state.step, config.accumulation)]
        (scored,) = self._summed(sum(int((batch.targets != IGNORE).sum()) for batch in chosen))
        total = self._together(self._add_gradients(chosen, int(scored), loss))
        if not self.divided:
            processes.add_up([p.grad for p in self.model.parameters() if p.grad is not None])
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = clip_gradients(self.model, config.clip_norm)
        if not math.isfinite(norm) and not self.scaler.is_enabled():
            raise DivergedError(f"step {self.state.step + 1}: the gradient norm is {norm}; use a lower --learning-rate")
        for optimizer in self.optimizers:
            if math.isfinite(norm):  # else all wait for a smaller scale, also those whose gradients are finite
                self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        if self.model.config.experts is not None:
            balance_biases(self.model)
        self.state.step += 1
        self.state.losses = [*self.state.losses, total][-config.log_every :]
        return total, config.learning_rate * factor, norm if math.isfinite(norm) else None

    def _summed(self, *values: float) -> list[float]:
        """Sums over all processes that compute other sequences."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        processes.add_up([sums])
        return (sums / processes.copies()).tolist()

    def _together(self, loss: float) -> float:
        """The loss of all processes, which also agree here whether to stop and whether to save."""
        due = processes.rank() == 0 and time.perf_counter() - self.last_save > _SAVE_EVERY_S
        total, stopping, saving = self._summed(loss, self.interrupted.is_set(), due)
        if not math.isfinite(total):
            raise DivergedError(
                f"step {self.state.step + 1}: the loss of a process is {total}; use a lower --learning-rate"
            )
        self.stopping, self.saving = stopping > 0, saving > 0
        return total

    def _add_gradients(self, chosen: list[Batch], scored: int, loss: Loss) -> float:
        """Add the gradient of each batch's share of the mean loss, in their order; returns the mean loss."""
        if isinstance(self.model, Stage):
            self.pipeline = self.pipeline or Pipeline(self.model, chosen, self._autocast)
            return processes.stages() * self.pipeline.add_gradients(chosen, scored)
        total = 0.0
        for batch in chosen:
            with self._autocast():
                summed = loss(self.model, batch)
                auxiliary = self.model.auxiliary_loss()
            objective = summed / scored
            if auxiliary is not None:
                objective = objective + auxiliary / self.config.accumulation
            value = float(objective.detach())
            if not math.isfinite(value) and processes.count() == 1:  # several processes meet in the backward pass
                raise DivergedError(
                    f"step {self.state.step + 1}: the loss of batch {batch.index} is {value}; the step was not taken, "
                    "use a lower --learning-rate or look at that batch's text"
                )
            total += value
            self.scaler.scale(objective).backward()  # type: ignore[no-untyped-call]
        return total

    def _autocast(self) -> torch.autocast:
        """Products in the run's dtype. A cache would keep 16-bit copies of all weights, which are whole if sharded."""
        return torch.autocast(self.device.type, self.dtype, self.dtype is not None, cache_enabled=not self.divided)


def _drop_metrics_after(path: Path, step: int) -> None:
    """Drop lines that a killed run logged after its last saved step; these steps are trained and logged again."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else ():
        with suppress(ArtifactError):  # a killed run may leave half a line
            record = parse_json(line, path)
            if isinstance(record, dict) and isinstance(logged := record.get("step"), int) and logged <= step:
                kept.append(line)
    path.write_text("".join(kept), encoding="utf-8")


@contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C or SIGTERM into a flag, so that a step is never cut in half; the second ends at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handle(_signal: int, _frame: object) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()
        log("finishing this step, then saving; press Ctrl-C again to stop at once")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
