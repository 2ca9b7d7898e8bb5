"""What a run changes, saved when it is interrupted: a CPU run continues bit for bit.

Held-out text is scored on the way; the model keeps the weights of the best step.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sportsllm import processes
from sportsllm.console import log
from sportsllm.errors import ArtifactError, InterruptedRun
from sportsllm.files import STATE_DIRECTORY, JsonObject, read_json
from sportsllm.formats.artifact import LAUNCHES, STATE_FILE, replace_state
from sportsllm.formats.checkpoint import save_tensors
from sportsllm.inference.decoder import require_finite
from sportsllm.inference.scoring import TextScore, ratio_interval, score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.conversations import Document
from sportsllm.text.split import TextSplit
from sportsllm.text.tokenizer import TextTokenizer
from sportsllm.text.tokens import crc32
from sportsllm.training.pipeline import Stage, StageDecoder
from sportsllm.training.settings import TrainConfig
from sportsllm.training.sharding import forget_gathered, read_tensors, write_tensors

_PROGRESS = ("step", "losses", "best_step", "best_bits_per_byte", "last_bits_per_byte", "nats_before")
_BEFORE_TOKENS, _REPORT_TOKENS = 16_384, 65_536
_LEAST_SELECTION, _MOST_SELECTION = 4_096, 32_768  # tokens
_SAME = 1.0001  # ratio of nats up to which the result counts as the start: rounding
_FILES = "files"  # in state.json: the checksums of the others
Validate = Callable[[SportsLLM], float]  # bits per byte of held-out text
Report = Callable[[SportsLLM, int], TextScore]  # of the first documents that have so many tokens


@dataclass(frozen=True)
class Validation:
    """How a run is scored.

    Attributes:
        selection: chooses the best step and the learning rates.
        report: other text, for the figures that are reported.
        keep_start: the start has useful weights: score it too, and keep it if no step is better.
        reported: whether the report split is scored.
    """

    selection: Validate
    report: Report
    keep_start: bool = False
    reported: bool = True


def validation(corpus: TextSplit, tokenizer: TextTokenizer, config: TrainConfig, keep_start: bool) -> Validation | None:
    """How a run is scored; None if it has no steps.

    Choices are made on as many tokens as 1/128 of the run, in windows of the training sequence: positions beyond it are
    never trained. The report has windows of the whole context.
    """
    if not config.steps:
        return None
    tokens = min(_MOST_SELECTION, max(_LEAST_SELECTION, config.steps * config.tokens_per_step // 128))
    selection_split, report_split = corpus.parts()
    if selection_split == report_split:
        log("the held-out text is one short document: the best step is chosen on the text that is reported")
    selection = _scorer(selection_split, tokenizer, config.sequence)
    report = _scorer(report_split, tokenizer)
    return Validation(lambda model: selection(model, tokens).bits_per_byte, report, keep_start)


def _scorer(texts: Sequence[Document], tokenizer: TextTokenizer, window: int | None = None) -> Report:
    def score(model: SportsLLM, tokens: int) -> TextScore:
        decoder = StageDecoder(model) if isinstance(model, Stage) else TorchDecoder(model)
        scores = score_documents(decoder, tokenizer, texts, max_tokens=tokens, window=window, description="validate")
        forget_gathered(model)
        return scores

    return score


@dataclass
class RunState:
    """Everything that a run changes, and the `Stage.identity` and `config` that a saved state must agree with.

    Attributes:
        directory: of the run; the state is saved in the `state/` of the first process's.
        step: steps taken.
        losses: of the last few steps.
        best_step, best_bits_per_byte, best: the step with the best score on held-out text, and its trained weights.
        last_bits_per_byte: of the step that was scored last.
        nats_before: of the report split's first documents, enough to compare the start with what training makes of it.
    """

    directory: Path
    model: SportsLLM
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    identity: JsonObject
    config: TrainConfig
    step: int = 0
    losses: list[float] = field(default_factory=list)
    best_step: int | None = None
    best_bits_per_byte: float | None = None
    last_bits_per_byte: float | None = None
    nats_before: Sequence[float] = ()
    best: dict[str, Tensor] | None = None

    def start(self, validation: Validation) -> float | None:
        """Score weights that are useful before the first step: for the report, and as step 0.

        Raises:
            ArtifactError: the score is not finite.
        """
        if not validation.keep_start:
            return None
        log("scoring held-out text before training")
        if validation.reported:
            self.nats_before = validation.report(self.model, _BEFORE_TOKENS).documents
        require_finite(score := self.consider(validation))
        return score

    def consider(self, validation: Validation) -> float:
        """Score the current weights and keep them if they are the best, by the first process's score; returns that."""
        bits_per_byte = float(processes.from_first(str(validation.selection(self.model))))
        if self.best_bits_per_byte is None or bits_per_byte < self.best_bits_per_byte:
            self.best_step, self.best_bits_per_byte = self.step, bits_per_byte
            self.best = {name: weight.detach().clone() for name, weight in self._trained().items()}
        self.last_bits_per_byte = bits_per_byte
        return bits_per_byte

    @torch.no_grad()
    def finish(self, validation: Validation) -> tuple[float | None, float | None, str | None]:
        """Give the model its best weights, say so if those are not the last ones.

        Returns:
            Bits per byte after and before on the report split, None if it was not scored. The latter is the former
            times the ratio of nats of the documents that were scored before. Then `TrainingResult.worse_than_start`.
        """
        if self.best_step not in (None, self.step):
            figures = f"{self.best_bits_per_byte:.4f} bits per byte, {self.last_bits_per_byte:.4f} when last scored"
            if self.best_step == 0:
                log(f"no step was better than the start on held-out text ({figures}): keeping the start")
            else:
                log(f"step {self.best_step} of {self.step} was the best on held-out text ({figures}): keeping it")
            trained = self._trained()
            for name, weight in (self.best or {}).items():
                trained[name].copy_(weight)
        if not validation.reported:
            return None, None, None
        after, before = validation.report(self.model, _REPORT_TOKENS), self.nats_before
        if not before:
            return after.bits_per_byte, None, None
        same = after.documents[: len(before)]
        ratio, worse = sum(same) / sum(before), None
        if ratio > _SAME:
            interval = ratio_interval(same, before)
            worse = "yes" if interval is not None and interval[0] > 1 else "uncertain"
        return after.bits_per_byte, after.bits_per_byte / ratio, worse

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    @property
    def mean_loss(self) -> float | None:
        """Mean of `losses`, in nats per token."""
        return sum(self.losses) / len(self.losses) if self.losses else None

    def save(self) -> None:
        """Write `state/`, replacing an older one only when the new one is whole; all processes call this."""
        directory, first = Path(processes.from_first(str(self.directory.resolve()))), processes.rank() == 0
        fresh, launches = directory / f"{STATE_DIRECTORY}.new", processes.launches()
        if first:
            fresh.mkdir()
        processes.wait()
        write_tensors(fresh, "model", self.model.state_dict())
        if self.best is not None:
            write_tensors(fresh, "best", self.best)
        for number, optimizer in enumerate(self.optimizers):
            tensors = {
                f"{parameter}.{key}": torch.as_tensor(value)
                for parameter, weight in enumerate(_parameters(optimizer))
                for key, value in optimizer.state[weight].items()
            }
            write_tensors(fresh, f"optimizer{number}", tensors)
        if first:
            save_tensors(fresh / "rng.safetensors", {"torch": torch.get_rng_state()})
            state = {**self.identity, "config": asdict(self.config), "scaler": self.scaler.state_dict()}
            state[LAUNCHES] = launches
            state |= {name: getattr(self, name) for name in _PROGRESS}
            state[_FILES] = _checksums(fresh)
            (fresh / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            replace_state(directory, fresh)
        processes.wait()

    def interrupted(self) -> InterruptedRun:
        """Save, and return the error that reports it."""
        self.save()
        at = f"interrupted after step {self.step} of {self.config.steps}; the state is saved in {self.directory}"
        return InterruptedRun(f"{at}, run the same command with --resume to continue")

    def load(self) -> None:
        """Restore what `save` wrote, in place.

        Raises:
            ArtifactError: it is damaged.
        """
        source = self.directory / STATE_DIRECTORY
        state = read_json(source / STATE_FILE)
        try:
            if state["config"] != json.loads(json.dumps(asdict(self.config))):
                raise ValueError("its settings are not those of its run")
            if processes.rank() == 0 and state[_FILES] != _checksums(source):
                raise ValueError("a file is missing, cut or changed")
            processes.wait()
            weights, trained = self.model.state_dict(), self._trained()
            elsewhere = {name: weight for name, weight in weights.items() if weight.is_meta}
            self.model.load_state_dict(elsewhere | read_tensors(source, "model", weights.__getitem__))
            for number, optimizer in enumerate(self.optimizers):
                _restore(optimizer, source, f"optimizer{number}")
            torch.set_rng_state(load_file(str(source / "rng.safetensors"))["torch"])
            for name in _PROGRESS:
                setattr(self, name, state[name])
            if self.best_step is not None:
                self.best = read_tensors(source, "best", trained.__getitem__)
            if state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])
        except (SafetensorError, OSError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise ArtifactError(f"{source}: damaged ({error}); remove {self.directory} and start again") from None


def _checksums(directory: Path) -> JsonObject:
    """CRC-32 of a state's files of tensors: missing parts of a matrix would be read as arbitrary values."""
    files = sorted(directory.rglob("*.safetensors"))
    return {str(path.relative_to(directory)): crc32(path, path.stat().st_size) for path in files}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """In the groups' order; states are saved by their numbers. `state_dict` would change types, and names of 8 bits."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _restore(optimizer: torch.optim.Optimizer, source: Path, saved_as: str) -> None:
    """Put saved states back with their dtypes; scalars stay on the CPU, bitsandbytes' steps are plain integers."""
    parameters = _parameters(optimizer)
    tensors = read_tensors(source, saved_as, lambda name: parameters[int(name.partition(".")[0])])
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        parameter = parameters[int(number)]
        if tensor.ndim:
            value: Any = tensor.to(parameter.device)
        else:
            value = tensor if tensor.is_floating_point() else int(tensor)
        optimizer.state[parameter][key] = value
