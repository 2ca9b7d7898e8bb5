"""A checkpoint to prune: its inputs, its record for the manifest, and the calibration that every cut shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from compress.layerwise import KnownStates, in_scratch_file
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
from sportsllm.formats.safetensors import StreamedTensors
from sportsllm.inference.calibration import JUDGED_SAMPLES, calibration_samples, check_familiar, usual_samples
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.process_memory import available_bytes, give_back
from sportsllm.processors import training_device
from sportsllm.text.documents import HELD_OUT, USUAL, Reading, manifest_setting
from sportsllm.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from compress.distillation.student import StudentText, StudentTraining


RANKING_SAMPLES = 8  # all shapes of a search read the same text, so little of it tells them apart
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

    `text` reads that of recoveries. With a directory for `scratch` files one layer of a large model is in memory at a
    time; before recoveries of a search it keeps what was refitted, so that the same shape is not cut again.
    """

    job: PruneJob
    scratch: Path | None = None
    text: Callable[[], StudentText] | None = None
    _layers: dict[int, tuple[list[int], list[LayerRun]]] = field(default_factory=dict)  # by their number
    _refitted: dict[Shape, tuple[ModelConfig, StreamedTensors]] = field(default_factory=dict)

    @cached_property
    def model(self) -> SportsLLM:
        """The full model, with the experts of `PruneJob.model_config`."""
        job, size = self.job, 4 * load_config(self.job.checkpoint).parameters
        if self.scratch is None or job.recovery is not None or size <= min(_IN_MEMORY, _SHARE * available_bytes()):
            model = load_checkpoint(job.checkpoint)
        else:
            log(f"{job.checkpoint}: {size / 1e9:.1f} GB of float32 weights are read and cut layer by layer")
            self.scratch.mkdir(parents=True, exist_ok=True)
            model = open_layers(job.checkpoint, self.scratch)
        model = model.to(training_device(quiet=True))
        loss = loss_per_token(model, self.samples[:JUDGED_SAMPLES])
        if not math.isfinite(loss):
            raise ArtifactError(f"{job.checkpoint}: its loss on the calibration text is {loss}; it is damaged")
        check_familiar(self.samples, loss)
        return model if job.experts is None else reduce_experts(model, job.model_config(), self.samples)

    @cached_property
    def samples(self) -> list[Tensor]:
        """Calibration token ids, (1, T) each."""
        job, recovery, config = self.job, self.job.recovery, load_config(self.job.checkpoint)
        length, most = SAMPLE_LENGTH, None
        if recovery is not None:
            length, most = recovery.config.sequence, usual_samples(config, recovery.config.sequence, recovery.tokens)
        tokenizer = load_tokenizer(job.checkpoint, config, job.reading)
        valid, models = ((), (job.checkpoint,)) if recovery is None else (recovery.valid, recovery.checkpoints)
        source = job.calibration, valid, tokenizer, config, job.samples, length, most
        drawn = calibration_samples(*source, checkpoints=models)
        log(f"calibration on {len(drawn)} samples of text, {sum(one.numel() for one in drawn):,} tokens")
        return [tokens.to(training_device(quiet=True)) for tokens in drawn]

    def split_samples(self) -> tuple[list[Tensor], list[Tensor]]:
        """Samples that rank the shapes of a search, and the others, to which it refits them."""
        ranking = max(1, min(RANKING_SAMPLES, len(self.samples) // 4))
        return self.samples[:ranking], self.samples[ranking:] or self.samples

    @cached_property
    def scores(self) -> Scores:
        """Importance of the model's units: measured, or of an earlier run."""
        if self.job.scores is not None:
            return load_scores(self.job.scores, self.model.config)
        return measure_scores(self.model, self.samples, self._known)

    def cut(self, smaller: ModelConfig, samples: Sequence[Tensor], refit: bool) -> PrunedModel:
        """`prune_model`; which layers stay is tried once for each depth, on the same text for all cuts."""
        count, shape = smaller.num_hidden_layers, Shape.of(smaller)
        if refit and shape in self._refitted:
            config, tensors = self._refitted[shape]
            same = SportsLLM(config)
            same.load_state_dict(dict(tensors), assign=True)
            return PrunedModel(same.to(training_device(quiet=True)).eval(), *self._layers[count])
        if count not in self._layers:
            self._layers[count] = kept_layers(self.model, self.scores, count, self.samples, self._known)
        pruned = prune_model(self.model, self.scores, smaller, samples, refit, self._layers[count], self._known)
        if refit and self.scratch is not None and self.job.search is not None and self.job.recovery is not None:
            self._refitted[shape] = pruned.model.config, in_scratch_file(self.scratch, pruned.model.state_dict())
        return pruned

    def forget(self, refitted: bool = False) -> None:
        """Free the model and its states, such as before a recovery; after a search also what was refitted."""
        if refitted:
            self._refitted.clear()
        for name in ("model", "_known"):
            vars(self).pop(name, None)
        give_back()

    @cached_property
    def _known(self) -> KnownStates:
        return KnownStates(self.model)
