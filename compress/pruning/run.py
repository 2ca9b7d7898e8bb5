"""Pruning as a stage: calibrate, choose what stays, write the smaller checkpoint, and recover it if asked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.distillation.layer_matching import map_kept_layers
from compress.distillation.recovery import Recovery, prepare_recovery, recover
from compress.pruning.experts import reduce_experts
from compress.pruning.heads import heads_change, reduce_heads
from compress.pruning.kept_units import LayerRun, choose_units, kept_layers, loss_per_token
from compress.pruning.latent import latent_config, to_latent
from compress.pruning.output_selection import output_scores
from compress.pruning.refit import refit_layers
from compress.pruning.rotation import principal_directions, rotate
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
from compress.pruning.shapes import Shape, fewer_experts
from compress.pruning.slicing import slice_model
from sportsllm.console import log
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import STATE_DIRECTORY, Stage, partial_directory, run_stage
from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.safetensors import quantization_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.size import kv_cache_bytes_per_token
from sportsllm.text.calibration import JUDGED_SAMPLES, calibration_samples, check_familiar
from sportsllm.text.provenance import HELD_OUT, held_out_files, manifest_setting
from sportsllm.text.tokenizer import load_tokenizer

SAMPLE_LENGTH = 512
_EXPERTS = ("experts", "experts_per_token", "experts_by")


@dataclass(frozen=True)
class PruneConfig:
    """How units are chosen, and whether the kept ones are refitted.

    `importance` is one of `IMPORTANCES`, `seed` that of `random`. `samples` are pieces of calibration text: None takes
    up to 256, fewer of a large model, a number must be there.
    """

    importance: str = "output"
    refit: bool = True
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.importance not in IMPORTANCES:
            raise UsageError(f"--importance {self.importance!r} is not known; use one of {', '.join(IMPORTANCES)}")


@dataclass(frozen=True)
class PruneJob:
    """A checkpoint to prune, whatever its new shape.

    Scores and refit read the calibration text. `scores` are those of an earlier run on the same checkpoint, `recovery`
    is the training afterwards. `experts` and `experts_per_token` are cut first, the way `experts_by` names, see
    `compress.pruning.experts`; then attention is made latent of a rank, see `compress.pruning.latent`.
    """

    checkpoint: Path
    calibration: Sequence[Path]
    config: PruneConfig = field(default_factory=PruneConfig)
    scores: Path | None = None
    recovery: Recovery | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    experts_by: str = "use"
    latent: int | None = None

    @property
    def cuts_experts(self) -> bool:
        """Whether there will be fewer experts, or fewer a token."""
        return self.experts is not None or self.experts_per_token is not None

    @property
    def changes_kinds(self) -> bool:
        """Whether something is cut that is no dimension of a `Shape`."""
        return self.cuts_experts or self.latent is not None

    def model_config(self) -> ModelConfig:
        """The shape that is pruned: the checkpoint's, with fewer experts and latent attention if asked for."""
        config = load_config(self.checkpoint)
        if self.cuts_experts:
            config = fewer_experts(config, self.experts, self.experts_per_token, self.experts_by)
        return config if self.latent is None else latent_config(config, self.latent)

    def settings(self, shape: Shape) -> dict[str, Any]:
        """For the manifest, under the names of the flags."""
        # A later recovery of a checkpoint that is not recovered finds its text here.
        inherited = {"recover": None} | {key: manifest_setting(self.checkpoint, key) for key in ("corpus", "valid")}
        if (held_out := manifest_setting(self.checkpoint, HELD_OUT)) is not None:
            inherited[HELD_OUT] = held_out
        return {
            "checkpoint": self.checkpoint,
            **dataclasses.asdict(shape),
            "importance": self.config.importance,
            "repair": self.config.refit,
            "kv_merge": "pca",  # the only way there is
            "samples": self.config.samples,
            "seed": self.config.seed,
            "scores": self.scores,
            "calibration": self.calibration,
            **({name: getattr(self, name) for name in _EXPERTS} if self.cuts_experts else {}),
            **({} if self.latent is None else {"latent": self.latent}),
            **(inherited if self.recovery is None else self.recovery.settings(self.checkpoint)),
        }

    def inputs(self) -> list[Path]:
        """Everything that it reads."""
        scores = [self.scores] if self.scores else []
        return [self.checkpoint, *self.calibration, *scores, *(self.recovery.inputs() if self.recovery else [])]

    def stage(self, shape: Shape) -> Stage:
        """The run that prunes to a shape."""
        seed = None if self.recovery is None else self.recovery.config.seed
        return Stage("prune", self.settings(shape), self.inputs(), seed)

    def calibrate(self) -> tuple[SportsLLM, list[Tensor]]:
        """The full model, of the kinds that `model_config` has, and calibration token ids, (1, T) each."""
        model = load_checkpoint(self.checkpoint)
        length = SAMPLE_LENGTH if self.recovery is None else self.recovery.config.sequence
        words = load_tokenizer(self.checkpoint, model.config)
        recovery = self.recovery
        valid = held_out_files(self.checkpoint) if recovery is None else recovery.training(self.checkpoint).left_out
        samples = calibration_samples(self.calibration, valid, words, model.config, self.config.samples, length)
        log(f"calibration on {len(samples)} pieces of text, {sum(one.numel() for one in samples):,} tokens")
        with torch.no_grad():
            check_familiar(samples, loss_per_token(model, samples[:JUDGED_SAMPLES]))
        if self.cuts_experts:
            fewer = fewer_experts(model.config, self.experts, self.experts_per_token, self.experts_by)
            model = reduce_experts(model, fewer, samples, self.experts_by, self.config.refit)
        if self.latent is not None:
            model = to_latent(model, self.model_config(), samples, self.config.refit)
        return model, samples


def measure_scores(
    model: SportsLLM, config: PruneConfig, samples: Sequence[Tensor], saved: Path | None = None
) -> Scores:
    """Scores of a model's units by the way that `config` names, or from the file of an earlier run."""
    if saved is not None:
        return load_scores(saved, model.config)
    if config.importance == "magnitude":
        return magnitude_scores(model, principal_directions(model, samples))
    if config.importance == "random":
        return random_scores(model.config, config.seed, principal_directions(model, samples))
    return {"output": output_scores, "activation": importance_scores}[config.importance](model, samples)


class PrunedModel(NamedTuple):
    """A smaller model, and the layers that were kept and tried."""

    model: SportsLLM
    layers: list[int]
    tried: list[LayerRun]


def prune_to_shape(
    model: SportsLLM, scores: Scores, shape: Shape, config: PruneConfig, samples: Sequence[Tensor]
) -> PrunedModel:
    """`cut_model` to a shape; UsageError if it is impossible."""
    return cut_model(model, scores, shape.applied_to(model.config), config, samples)


def cut_model(
    model: SportsLLM, scores: Scores, smaller: ModelConfig, config: PruneConfig, samples: Sequence[Tensor]
) -> PrunedModel:
    """Cut a model to a config that is possible: choose layers and units, make heads, rotate, slice, refit."""
    layers, tried = kept_layers(model, scores, smaller.num_hidden_layers, samples)
    reduced = model
    if heads_change(model.config, smaller):
        reduced = reduce_heads(model, smaller, scores, samples)
        every = [torch.ones(smaller.num_attention_heads)] * model.config.num_hidden_layers
        scores = dataclasses.replace(scores, units={**scores.units, "query_head": every})
    kept = choose_units(reduced.config, scores, smaller, layers)
    hidden, into, source = smaller.hidden_size, None, reduced
    if hidden < model.config.hidden_size:
        into, source = scores.directions.into(hidden), rotate(reduced, scores.directions, hidden)
    pruned = slice_model(source, kept)
    if config.refit:
        refit_layers(pruned, model, kept, samples, reduced, into)
    return PrunedModel(pruned, layers, tried)


def prune_checkpoint(
    job: PruneJob,
    shape: Shape,
    out: Path,
    *,
    resume: bool = False,
    search: Sequence[dict[str, Any]] = (),
    known: Scores | None = None,
) -> dict[str, Any]:
    """Prune a checkpoint directory to a shape.

    Args:
        job, shape, out: what is pruned to what, and the directory to make.
        resume: go on with an interrupted recovery, if there is one.
        search: rows of the search that found the shape, for the results.
        known: the scores that it measured.

    Returns:
        The results, as `prune --json` prints them.
    """
    if quantization_config(job.checkpoint) is not None:
        raise ArtifactError(f"{job.checkpoint}: is quantized; prune the unquantized checkpoint")
    full, config, recovery = load_config(job.checkpoint), job.model_config(), job.recovery
    smaller = shape.applied_to(config)
    if smaller.hidden_size != smaller.query_size and smaller.attention_kind == "grouped_query":
        log(f"note: hidden size {smaller.hidden_size} is not heads x head_dim {smaller.query_size}; optimum needs that")
    resume = resume and (partial_directory(out) / STATE_DIRECTORY).exists()
    signals = None if recovery is None else prepare_recovery(recovery, job.checkpoint, smaller)
    stage = job.stage(shape)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        model, samples = job.calibrate()
        scores = None
        pruned = PrunedModel(model, list(range(config.num_hidden_layers)), [])
        if not (job.changes_kinds and shape == Shape.of(config)):
            scores = known or measure_scores(model, job.config, samples, job.scores)
            pruned = prune_to_shape(model, scores, shape, job.config, samples)
        network, training = pruned.model, dict[str, Any]()
        if recovery is not None:
            objective, identity = recovery.objective, stage.fingerprint()
            if recovery.teacher is None:  # another one has layers of its own
                objective = map_kept_layers(objective, pruned.layers, config.num_hidden_layers)
            mapped = dataclasses.replace(recovery, objective=objective)
            network, training = recover(
                network, mapped, job.checkpoint, directory=directory, identity=identity, resume=resume, signals=signals
            )
        seconds = time.perf_counter() - started
        save_checkpoint(directory, network, job.checkpoint)
        if scores is not None and job.config.importance in MEASURED and job.scores is None:
            save_scores(directory, scores, config)
        return {
            "parameters": smaller.parameters,
            "share_of_block_parameters": smaller.block_parameters / full.block_parameters,
            "shape": dataclasses.asdict(shape),
            "kv_cache_bytes_per_token": kv_cache_bytes_per_token(smaller),
            "kv_cache_bytes_per_token_before": kv_cache_bytes_per_token(full),
            "calibration_tokens": sum(sample.numel() for sample in samples),
            "kept_layers": pruned.layers,
            "layers_tried": [run._asdict() for run in pruned.tried],
            **({"search": list(search)} if search else {}),
            **training,
            "seconds": seconds,
        }

    return run_stage(out, stage, make, resume)
