"""Pruning as a stage: calibrate, choose what stays, write the smaller checkpoint, and recover it if asked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.distillation.recovery import Recovery, prepare_recovery, recover
from compress.distillation.settings import DistillationConfig
from compress.pruning.kept_units import LayerRun, choose_units, kept_layers
from compress.pruning.kv_heads import merge_kv_heads
from compress.pruning.output_selection import output_scores
from compress.pruning.refit import refit_layers
from compress.pruning.scores import (
    IMPORTANCES,
    MEASURED,
    Scores,
    importance_scores,
    load_scores,
    magnitude_scores,
    random_scores,
    save_scores,
)
from compress.pruning.shapes import Shape
from compress.pruning.slicing import slice_model
from sportsllm.console import say
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.artifact import Stage, run_stage
from sportsllm.storage.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.storage.safetensors_files import quantization_config
from sportsllm.text.calibration import calibration_samples
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.setup import manifest_setting

_SAMPLE_LENGTH = 512


@dataclass(frozen=True)
class PruneConfig:
    """How units are chosen and what is done for those that stay.

    Attributes:
        importance: `output` (`compress.pruning.output_selection`), Minitron's `activation`, or the baselines
            `magnitude` and `random`.
        refit: fit the kept matrices to the full model's values (`compress.pruning.refit`).
        samples: pieces of calibration text; None takes up to 256, a number must be there.
        seed: of `random`.
    """

    importance: str = "output"
    refit: bool = True
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.importance not in IMPORTANCES:
            raise UsageError(f"--importance {self.importance!r} is not known; use one of {', '.join(IMPORTANCES)}")

    def settings(self) -> dict[str, Any]:
        """For the manifest, under the names of the flags."""
        return {
            "importance": self.importance,
            "repair": self.refit,
            "kv_merge": "pca",  # the only way there is
            "samples": self.samples,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class PruneJob:
    """A checkpoint to prune, whatever its new shape.

    Attributes:
        checkpoint: unquantized.
        calibration: text that importance is measured on and the refit reads.
        config: how units are chosen.
        scores: importance saved by an earlier run on the same checkpoint, instead of measuring it.
        recovery: how to train afterwards, or None.
    """

    checkpoint: Path
    calibration: Sequence[Path]
    config: PruneConfig = field(default_factory=PruneConfig)
    scores: Path | None = None
    recovery: Recovery | None = None

    def settings(self, shape: Shape) -> dict[str, Any]:
        """What decides the outcome, for the manifest."""
        # What a checkpoint that is not recovered passes on to those who recover it later.
        inherited = {"recover": None, **{key: manifest_setting(self.checkpoint, key) for key in ("corpus", "valid")}}
        return {
            "checkpoint": str(self.checkpoint),
            **dataclasses.asdict(shape),
            **self.config.settings(),
            "scores": None if self.scores is None else str(self.scores),
            "calibration": [str(path) for path in self.calibration],
            **(inherited if self.recovery is None else self.recovery.settings(self.checkpoint)),
        }

    def inputs(self) -> list[Path]:
        """Everything that it reads."""
        scores = [] if self.scores is None else [self.scores]
        recovery = [] if self.recovery is None else self.recovery.inputs()
        return [self.checkpoint, *self.calibration, *scores, *recovery]

    def samples(self, tokenizer: Any, config: ModelConfig) -> list[Tensor]:
        """Calibration token ids, each (1, T)."""
        length = _SAMPLE_LENGTH if self.recovery is None else self.recovery.config.sequence
        return calibration_samples(self.calibration, tokenizer, config, self.config.samples, length)

    def measure_scores(self, model: SportsLLM, samples: Sequence[Tensor]) -> Scores:
        """Scores from the file, or by the way that `config` names."""
        if self.scores is not None:
            return load_scores(self.scores, model.config)
        return measure_scores(model, self.config, samples)


def measure_scores(model: SportsLLM, config: PruneConfig, samples: Sequence[Tensor]) -> Scores:
    """Scores of a model's units by the way that `config` names."""
    if config.importance == "magnitude":
        return magnitude_scores(model)
    if config.importance == "random":
        return random_scores(model.config, config.seed)
    return output_scores(model, samples) if config.importance == "output" else importance_scores(model, samples)


@dataclass(frozen=True)
class PrunedModel:
    """A smaller model, and the layers that were kept and tried."""

    model: SportsLLM
    layers: list[int]
    tried: list[LayerRun]


def prune_to_shape(
    model: SportsLLM, scores: Scores, shape: Shape, config: PruneConfig, samples: Sequence[Tensor]
) -> PrunedModel:
    """Merge key/value heads if the shape asks for it, choose layers and units, slice, refit."""
    if shape.merges_kv_heads(model.config):
        model = merge_kv_heads(model, shape.kv_heads, samples)
    layers, tried = kept_layers(model, scores, shape.layers, samples)
    kept = choose_units(model.config, scores, shape, layers)
    pruned = slice_model(model, kept)
    if config.refit:
        refit_layers(pruned, model, kept, samples)
    return PrunedModel(pruned, layers, tried)


@dataclass(frozen=True)
class PruneResult:
    """What a pruning did.

    Attributes:
        parameters: of the result.
        share_of_block_parameters: of the full model's non-embedding parameters.
        shape: of the result.
        calibration_tokens: read.
        kept_layers: of the full model.
        layers_tried: runs of layers whose loss was compared.
        search: rows of the shapes that a search recovered.
        training: results of the recovery.
        seconds: it took.
    """

    parameters: int
    share_of_block_parameters: float
    shape: Shape
    calibration_tokens: int
    kept_layers: list[int]
    layers_tried: list[LayerRun]
    search: list[dict[str, Any]]
    training: dict[str, Any]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As `prune --json` prints it; `search` only after one."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        search, training, seconds = (values.pop(name) for name in ("search", "training", "seconds"))
        values["shape"] = dataclasses.asdict(self.shape)
        values["layers_tried"] = [run._asdict() for run in self.layers_tried]
        return {**values, **({"search": search} if search else {}), **training, "seconds": seconds}


def prune_checkpoint(
    job: PruneJob, shape: Shape, out: Path, *, resume: bool = False, search: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Prune a checkpoint directory into a new one.

    Args:
        job: what is pruned and how.
        shape: of the result.
        out: directory to make.
        resume: go on with an interrupted recovery.
        search: rows of the search that found the shape, for the results.

    Returns:
        `PruneResult.to_json()` and what `run_stage` adds.
    """
    if quantization_config(job.checkpoint) is not None:
        raise ArtifactError(f"{job.checkpoint}: is quantized; prune the unquantized checkpoint")
    config, recovery = load_config(job.checkpoint), job.recovery
    smaller = shape.applied_to(config)
    if smaller.hidden_size != smaller.query_size:
        say(f"note: hidden size {smaller.hidden_size} is not heads x head_dim {smaller.query_size}; optimum needs that")
    signals = None if recovery is None else prepare_recovery(recovery, job.checkpoint, smaller)
    stage = Stage("prune", job.settings(shape), job.inputs(), seed=None if recovery is None else recovery.config.seed)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        model = load_checkpoint(job.checkpoint)
        samples = job.samples(load_tokenizer(job.checkpoint, config), config)
        scores = job.measure_scores(model, samples)
        pruned = prune_to_shape(model, scores, shape, job.config, samples)
        network = pruned.model
        training: dict[str, Any] = {}
        if recovery is not None:
            objective = map_kept_layers(recovery, pruned.layers, config.num_hidden_layers)
            network, training = recover(
                network,
                dataclasses.replace(recovery, objective=objective),
                job.checkpoint,
                directory=directory,
                identity=stage.fingerprint(),
                resume=resume,
                signals=signals,
            )
        seconds = time.perf_counter() - started
        save_checkpoint(directory, network, job.checkpoint)
        if job.config.importance in MEASURED and job.scores is None:
            save_scores(directory, scores, config)
        return PruneResult(
            parameters=smaller.parameters,
            share_of_block_parameters=smaller.block_parameters / config.block_parameters,
            shape=shape,
            calibration_tokens=sum(sample.numel() for sample in samples),
            kept_layers=pruned.layers,
            layers_tried=pruned.tried,
            search=list(search),
            training=training,
            seconds=seconds,
        ).to_json()

    return run_stage(out, stage, make, resume)


def map_kept_layers(recovery: Recovery, kept: Sequence[int], layers: int) -> DistillationConfig:
    """The recovery's objective, with a layer map that matches each kept layer's input to its input in the full model.

    So the layer before a dropped one learns to stand in for it, as in the refit. A given map stays, and so does the
    evenly spread one of a teacher other than the unpruned model, which has layers of its own.
    """
    objective = recovery.objective
    if not objective.hidden_weight or objective.layer_map is not None or recovery.teacher is not None:
        return objective
    pairs = ",".join(f"{student}:{teacher}" for student, teacher in enumerate([*kept, layers]))
    return dataclasses.replace(objective, layer_map=pairs)
