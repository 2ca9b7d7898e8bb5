"""A checkpoint to prune: its inputs, its record for the manifest, and the calibration that every cut shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from compress.layerwise import KnownStates
from compress.pruning.cut import SAMPLE_LENGTH, LayerRun, PrunedModel, kept_layers, loss_per_token, prune_model
from compress.pruning.experts import reduce_experts
from compress.pruning.scores import Scores, load_scores, measure_scores
from compress.pruning.shapes import Shape, fewer_experts
from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject
from sportsllm.formats.artifact import Stage
from sportsllm.formats.checkpoint import load_checkpoint, open_layers
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.calibration import JUDGED_SAMPLES, calibration_samples, check_familiar, usual_samples
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.process_memory import available_bytes
from sportsllm.processors import training_device
from sportsllm.text.documents import HELD_OUT, USUAL, Reading, held_out_files, manifest_setting
from sportsllm.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from compress.distillation.student import StudentText, StudentTraining


_IN_MEMORY, _SHARE = 1e9, 0.25  # bytes of weights, and of free memory; a cut takes up to four times the weights


@dataclass(frozen=True)
class PruneJob:
    """A checkpoint to prune, whatever its new shape.

    Attributes:
        checkpoint, calibration: the full model, and the text for scores and refits.
        samples: of calibration text; up to 256 if None, fewer for a large model.
        scores: those of an earlier run on the same checkpoint.
        recovery: the training after the cut.
        experts: to keep, cut first, see `compress.pruning.experts`.
        reading: of all text.
        search: for the shape: the share of the parameters, with a recovery also its tokens and finalists.
    """

    checkpoint: Path
    calibration: Sequence[Path]
    samples: int | None = None
    scores: Path | None = None
    recovery: StudentTraining | None = None
    experts: int | None = None
    reading: Reading = USUAL
    search: JsonObject | None = None

    def model_config(self) -> ModelConfig:
        """The config whose shape is cut: the checkpoint's, with fewer experts if asked for."""
        config = load_config(self.checkpoint)
        return config if self.experts is None else fewer_experts(config, self.experts)

    def stage(self, shape: Shape) -> Stage:
        """The run that prunes to a shape."""
        scores = [self.scores] if self.scores else []
        recovery = [self.recovery.teacher, *self.recovery.inputs()] if self.recovery else []
        seed = None if self.recovery is None else self.recovery.config.seed
        return Stage("prune", self.settings(shape), [self.checkpoint, *self.calibration, *scores, *recovery], seed)

    def settings(self, shape: Shape) -> JsonObject:
        """For the manifest, under the names of the options."""
        # A later recovery of a checkpoint that is not recovered finds its text here.
        inherited = {"recover": None} | {key: manifest_setting(self.checkpoint, key) for key in ("corpus", "valid")}
        if (held_out := manifest_setting(self.checkpoint, HELD_OUT)) is not None:
            inherited[HELD_OUT] = held_out
        return {
            "checkpoint": self.checkpoint,
            **shape.sizes(),
            "samples": self.samples,
            "scores": self.scores,
            "calibration": self.calibration,
            **self.reading.record(),
            **({} if self.experts is None else {"experts": self.experts}),
            **({} if self.search is None else {"search": self.search}),
            **(inherited if self.recovery is None else self.recovery.recovery_settings()),
        }


@dataclass
class Calibration:
    """What every cut of a job starts from, each made when first asked for, and once.

    `stored` is a file of scores that an earlier search on the same inputs left behind, `text` reads that of recoveries.
    Without a recovery, one layer of a large model is in memory at a time, if there is a directory for `scratch` files.
    """

    job: PruneJob
    scratch: Path | None = None
    stored: Path | None = None
    text: Callable[[], StudentText] | None = None
    _layers: dict[int, tuple[list[int], list[LayerRun]]] = field(default_factory=dict)  # by their number

    @property
    def model(self) -> SportsLLM:
        """The full model, with the experts of `PruneJob.model_config`."""
        return self._full[0]

    @property
    def samples(self) -> list[Tensor]:
        """Calibration token ids, (1, T) each."""
        return self._full[1]

    @cached_property
    def scores(self) -> Scores:
        """Importance of the model's units: measured, or of an earlier run."""
        if (known := self.job.scores or self.stored) is not None:
            return load_scores(known, self.model.config)
        return measure_scores(self.model, self.samples, self._known)

    def cut(self, smaller: ModelConfig, samples: Sequence[Tensor], refit: bool) -> PrunedModel:
        """`prune_model`; which layers stay is tried once for each depth, on the same text for all cuts."""
        count = smaller.num_hidden_layers
        if count not in self._layers:
            self._layers[count] = kept_layers(self.model, self.scores, count, self.samples, self._known)
        return prune_model(self.model, self.scores, smaller, samples, refit, self._layers[count], self._known)

    @cached_property
    def _known(self) -> KnownStates:
        return KnownStates(self.model)

    @cached_property
    def _full(self) -> tuple[SportsLLM, list[Tensor]]:
        job, recovery = self.job, self.job.recovery
        model = self._opened().to(training_device(quiet=True))
        length, most = SAMPLE_LENGTH, None
        if recovery is not None:
            length = recovery.config.sequence
            most = usual_samples(model.config, length, recovery.tokens)
        tokenizer = load_tokenizer(job.checkpoint, model.config, job.reading)
        valid = held_out_files(job.checkpoint) if recovery is None else recovery.left_out
        models = (job.checkpoint,) if recovery is None else recovery.checkpoints
        source = job.calibration, valid, tokenizer, model.config
        drawn = calibration_samples(*source, job.samples, length, most, checkpoints=models)
        samples = [tokens.to(model.head_weight.device) for tokens in drawn]
        log(f"calibration on {len(samples)} samples of text, {sum(one.numel() for one in samples):,} tokens")
        loss = loss_per_token(model, samples[:JUDGED_SAMPLES])
        if not math.isfinite(loss):
            raise ArtifactError(f"{job.checkpoint}: its loss on the calibration text is {loss}; it is damaged")
        check_familiar(samples, loss)
        if job.experts is not None:
            model = reduce_experts(model, fewer_experts(model.config, job.experts), samples)
        return model, samples

    def _opened(self) -> SportsLLM:
        job, size = self.job, 4 * load_config(self.job.checkpoint).parameters
        if self.scratch is None or job.recovery is not None or size <= min(_IN_MEMORY, _SHARE * available_bytes()):
            return load_checkpoint(job.checkpoint)
        log(f"{job.checkpoint}: {size / 1e9:.1f} GB of float32 weights are read and cut layer by layer")
        self.scratch.mkdir(parents=True, exist_ok=True)
        return open_layers(job.checkpoint, self.scratch)
