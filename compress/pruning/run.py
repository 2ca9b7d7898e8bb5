"""`prune` as a stage: calibrate, choose what stays, write the smaller checkpoint, and recover it if asked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.distillation.recovery import Recovery, prepare_recovery, recover
from compress.distillation.settings import DistillationConfig
from compress.pruning.kv_heads import KV_MERGES, convert_kv_heads
from compress.pruning.output_selection import output_scores
from compress.pruning.refit import reconstruct
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
from compress.pruning.shapes import Shape, shape_for_share, share_for_megabytes
from compress.pruning.slicing import choose, cut, kept_layers
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
class Cut:
    """How units are chosen and what is done for those that stay.

    Attributes:
        importance: `output` (`compress.pruning.output_selection`), Minitron's `activation`, or the baselines
        `magnitude` and `random`.
        repair: refit the kept matrices to the full model's values (`compress.pruning.refit`).
        kv_merge: how key/value heads are merged where the shape asks for it.
        samples: pieces of calibration text; None takes up to 256, a number must be there.
        seed: of `random`.
    """

    importance: str = "output"
    repair: bool = True
    kv_merge: str = "pca"
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.importance not in IMPORTANCES:
            raise UsageError(f"--importance {self.importance!r} is not known; use one of {', '.join(IMPORTANCES)}")
        if self.kv_merge not in KV_MERGES:
            raise UsageError(f"--kv-merge {self.kv_merge!r} is not known; use one of {', '.join(KV_MERGES)}")


def target_shape(
    config: ModelConfig, share: float | None, megabytes: float | None, given: dict[str, int | None]
) -> Shape:
    """The shape that flags describe: a share of the parameters, a file size, or dimensions with the rest kept."""
    chosen = {key: value for key, value in given.items() if value is not None}
    ways = [
        *(["--params"] if share is not None else []),
        *(["--size-mb"] if megabytes is not None else []),
        *([", ".join("--" + key.replace("_", "-") for key in chosen)] if chosen else []),
    ]
    if len(ways) > 1:
        raise UsageError(f"give one of {' and '.join(ways)}, not both")
    if megabytes is not None:
        share = share_for_megabytes(config, megabytes)
    if share is not None:
        return shape_for_share(config, share)
    if not chosen:
        raise UsageError(
            "say how small: --params SHARE, --size-mb MB, or --hidden, --intermediate, --heads, --kv-heads, --layers"
        )
    return dataclasses.replace(Shape.of(config), **chosen)


def make_scores(model: SportsLLM, how: Cut, samples: Sequence[Tensor], saved: Path | None) -> Scores:
    """Scores from a file, or by the cut's own way."""
    if saved is not None:
        return load_scores(saved, model.config)
    if how.importance == "magnitude":
        return magnitude_scores(model)
    if how.importance == "random":
        return random_scores(model.config, how.seed)
    return output_scores(model, samples) if how.importance == "output" else importance_scores(model, samples)


def cut_to_shape(
    model: SportsLLM, scores: Scores, shape: Shape, how: Cut, samples: Sequence[Tensor]
) -> tuple[SportsLLM, dict[str, Any]]:
    """Merge key/value heads if the shape asks for it, choose layers and units, cut, repair.

    Returns:
        The smaller model, and what was kept and tried.
    """
    if shape.merges_kv_heads(model.config):
        model = convert_kv_heads(model, shape.kv_heads, samples, how.kv_merge)
    layers, tried = kept_layers(model, scores, shape.layers, samples)
    kept = choose(model.config, scores, shape, layers)
    pruned = cut(model, kept)
    if how.repair:
        reconstruct(pruned, model, kept, samples)
    return pruned, {"kept_layers": layers, "layers_tried": tried}


def prune_stage(
    *,
    checkpoint: Path,
    out: Path,
    shape: Shape,
    how: Cut,
    calibration: Sequence[Path],
    scores: Path | None = None,
    recovery: Recovery | None = None,
    resume: bool = False,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Prune a checkpoint directory into a new one.

    Args:
        checkpoint: unquantized.
        out: directory to make.
        shape: what is left.
        how: how units are chosen.
        calibration: text that importance is measured on and the repair is fitted to.
        scores: importance saved by an earlier run on the same checkpoint, instead of measuring it.
        recovery: how to train afterwards, or None.
        resume: go on with an interrupted recovery.
        extra: more to write into the results: what a search tried.
    """
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized; prune the unquantized checkpoint")
    config = load_config(checkpoint)
    smaller = shape.applied_to(config)
    if smaller.hidden_size != smaller.query_size:
        say(f"note: hidden size {smaller.hidden_size} is not heads x head_dim {smaller.query_size}; optimum needs that")
    signals = None if recovery is None else prepare_recovery(recovery, checkpoint, smaller)
    settings = {
        "checkpoint": str(checkpoint),
        **dataclasses.asdict(shape),
        **dataclasses.asdict(how),
        "scores": None if scores is None else str(scores),
        "calibration": [str(path) for path in calibration],
        **(_inherited(checkpoint) if recovery is None else recovery.settings(checkpoint)),
    }
    inputs = [checkpoint, *calibration, *([scores] if scores else []), *(recovery.inputs() if recovery else [])]
    stage = Stage("prune", settings, inputs, seed=None if recovery is None else recovery.config.seed)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        model = load_checkpoint(checkpoint)
        words = load_tokenizer(checkpoint, config)
        length = recovery.config.sequence if recovery else _SAMPLE_LENGTH
        samples = calibration_samples(calibration, words, config, how.samples, length)
        measured = make_scores(model, how, samples, scores)
        pruned, choice = cut_to_shape(model, measured, shape, how, samples)
        results: dict[str, Any] = {
            "parameters": smaller.parameters,
            "share_of_block_parameters": smaller.block_parameters / config.block_parameters,
            "shape": dataclasses.asdict(shape),
            "calibration_tokens": sum(sample.numel() for sample in samples),
            **choice,
            **(extra or {}),
        }
        if recovery is not None:
            objective = _mapped(recovery, choice["kept_layers"], config.num_hidden_layers)
            pruned, trained = recover(
                pruned,
                dataclasses.replace(recovery, objective=objective),
                checkpoint,
                directory=directory,
                identity=stage.fingerprint(),
                resume=resume,
                signals=signals,
            )
            results |= trained
        results["seconds"] = time.perf_counter() - started
        save_checkpoint(directory, pruned, checkpoint)
        if how.importance in MEASURED and scores is None:
            save_scores(directory, measured)
        return results

    return run_stage(out, stage, make, resume)


def _mapped(recovery: Recovery, kept: Sequence[int], layers: int) -> DistillationConfig:
    """The objective with a layer map, unless it has one: what each kept layer reads is what it read in the full model.

    The layer before a dropped one so learns to stand in for it, as in the repair. A teacher other than the unpruned
    model has layers of its own, and gets the evenly spread map.
    """
    objective = recovery.objective
    if not objective.hidden_weight or objective.layer_map is not None or recovery.teacher is not None:
        return objective
    pairs = ",".join(f"{student}:{teacher}" for student, teacher in enumerate([*kept, layers]))
    return dataclasses.replace(objective, layer_map=pairs)


def _inherited(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint that is not recovered passes on to those who recover it later."""
    return {"recover": None, **{key: manifest_setting(checkpoint, key) for key in ("corpus", "valid")}}
