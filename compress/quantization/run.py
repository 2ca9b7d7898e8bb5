"""Checkpoint in, quantized checkpoint out: the methods of `quantize`, from round to nearest upwards."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.distillation.recovery import Recovery, prepare_recovery, recover
from compress.distillation.student_training import RunState
from compress.quantization.aware_training import make_trainable, pack_trained
from compress.quantization.config import QuantizationConfig, bits_per_weight
from compress.quantization.layer_by_layer import quantize_calibrated, quantize_without_data
from compress.quantization.mixed_precision import SensitivityGroup, SizeBudget, choose_bits, measure_groups
from compress.quantization.packed_checkpoint import PackedCheckpoint
from compress.teacher_cache.read import TeacherCache
from sportsllm.console import log
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.checkpoint import load_checkpoint, write_checkpoint
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.safetensors import TensorFiles, bitsandbytes_kind, quantization_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import matrix_shapes
from sportsllm.text.provenance import held_out_setting, left_out, manifest_setting, tokens_per_parameter
from sportsllm.training.calibration_text import CalibrationText

LEAST_TOKENS = 4_096  # of calibration text: with 400 GPTQ is worse than no text at all, more than this gain little
_SENSITIVITY_SAMPLES = 4  # pieces that choose the matrices of 8 bits


@dataclass(frozen=True)
class Method:
    """How weights are rounded.

    Attributes:
        search: take the grid of least squared error instead of the one that holds every number.
        scaling: scale channels first, by a rule of `compress.quantization.channel_scaling`.
        gptq: fit to the inputs and round by GPTQ.
        samples: pieces of calibration text that are read unless a number is given.
    """

    search: bool = True
    scaling: str | None = None
    gptq: bool = False
    samples: int = 64

    @property
    def reads_text(self) -> bool:
        """Whether it needs calibration text."""
        return self.gptq or self.scaling is not None


METHODS = {
    "rtn": Method(search=False),
    "mse": Method(),
    "balance": Method(scaling="balance", samples=16),
    "awq": Method(scaling="awq"),
    "smooth": Method(scaling="smooth"),
    "gptq": Method(scaling="balance", gptq=True),
    "smooth+gptq": Method(scaling="smooth", gptq=True),
}


def resolve_method(
    name: str | None, config: QuantizationConfig, text: CalibrationText, budget: SizeBudget | None, untrained: bool
) -> str:
    """The name of the method that flags ask for.

    Args:
        name: None for gptq at 4 bits, balance at 8, smooth+gptq per channel; mse for untrained weights.
        config: grids of the matrices.
        text: for calibration, as it was given.
        budget: for a mixture of precisions.
        untrained: the weights are random, so that no text says anything about them.

    Raises:
        UsageError: an unknown method, or flags that do not go with it.
    """
    if name is None:
        name = "smooth+gptq" if config.per_channel else "balance" if config.bits == 8 else "gptq"
        if untrained and not text.files:
            log("untrained weights: they are rounded without calibration (mse)")
            name = "mse"
    if name not in METHODS:
        raise UsageError(f"--method {name!r} is not known; choose one of {', '.join(METHODS)}")
    method = METHODS[name]
    if config.per_channel and budget is not None:
        raise UsageError("--per-row is one precision for all; leave --bits-per-weight and --size-mb out")
    if method.scaling == "smooth" and not config.per_channel:
        raise UsageError(f"--method {name} prepares whole rows; add --per-row, or choose awq or gptq")
    if not method.reads_text and budget is None and (text.files or text.samples):
        raise UsageError(f"--method {name} reads no calibration text; leave it out, or choose gptq")
    return name


@dataclass(frozen=True)
class QuantizationPlan:
    """What `quantize` does, checked.

    `text` is None where none is read, `budget` None for one precision.
    """

    checkpoint: Path
    model: ModelConfig
    config: QuantizationConfig
    method: str
    text: CalibrationText | None
    budget: SizeBudget | None

    def settings(self) -> dict[str, Any]:
        """For the manifest."""
        settings: dict[str, Any] = {
            "checkpoint": str(self.checkpoint),
            **self.config.record(),
            "method": self.method,
            "corpus": manifest_setting(self.checkpoint, "corpus"),
            "valid": manifest_setting(self.checkpoint, "valid"),
        }
        held_out = left_out(() if self.text is None else self.text.valid, self.checkpoint)
        settings |= held_out_setting([Path(name) for name in settings["valid"] or []], held_out)
        if self.text is not None:
            settings |= {"calibration": [str(path) for path in self.text.files], "samples": self.text.samples}
        if self.budget is not None:
            settings |= {"bits_per_weight": self.budget.bits_per_weight, "size_mb": self.budget.size_mb}
        return settings

    @property
    def moves_scales(self) -> bool:
        """Whether matrices are scaled first, so that none of their numbers has a counterpart in the checkpoint."""
        return METHODS[self.method].scaling is not None


def check_request(
    checkpoint: Path, config: QuantizationConfig, method: str, text: CalibrationText, budget: SizeBudget | None
) -> QuantizationPlan:
    """Check a request against the checkpoint, and find the calibration text.

    Raises:
        UsageError: the budget is too small.
        ArtifactError: the checkpoint is damaged or quantized already.
    """
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized already; give the unquantized checkpoint")
    model = load_config(checkpoint)
    if budget is not None:
        budget.spare_bytes(model, config)
    if not METHODS[method].reads_text and budget is None:
        return QuantizationPlan(checkpoint, model, config, method, None, None)
    return QuantizationPlan(checkpoint, model, config, method, text.found(checkpoint), budget)


@dataclass(frozen=True)
class RoundedWeights:
    """The quantized model's tensors, and what each group of matrices costs where precisions are mixed.

    `originals` are the layers' matrices before rounding, scaled, by module; empty where they are not asked for.
    """

    packed: PackedCheckpoint
    groups: list[SensitivityGroup] = field(default_factory=list)
    calibration_tokens: int = 0
    originals: dict[str, Tensor] = field(default_factory=dict)


def round_weights(plan: QuantizationPlan, keep_originals: bool) -> RoundedWeights:
    """Quantize a checkpoint's tensors."""
    method, config, groups = METHODS[plan.method], plan.config, list[SensitivityGroup]()
    samples = [] if plan.text is None else plan.text.read(plan.checkpoint, plan.model, method.samples, LEAST_TOKENS)
    if plan.budget is not None:
        groups = measure_groups(load_checkpoint(plan.checkpoint), config, samples[:_SENSITIVITY_SAMPLES])
        config = choose_bits(config, groups, plan.budget.spare_bytes(plan.model, config))
    packed = PackedCheckpoint(plan.model, config)
    originals: dict[str, Tensor] | None = {} if keep_originals else None
    if method.reads_text:
        quantize_calibrated(
            plan.checkpoint,
            plan.model,
            packed,
            samples,
            scaling=method.scaling,
            gptq=method.gptq,
            originals=originals,
        )
    else:
        quantize_without_data(plan.checkpoint, plan.model, packed, method.search)
        if originals is not None:
            stored = load_checkpoint(plan.checkpoint).state_dict()
            originals |= {module: stored[f"{module}.weight"] for module in matrix_shapes(plan.model, layers_only=True)}
    packed.check_complete()
    return RoundedWeights(packed, groups, sum(piece.numel() for piece in samples), originals or {})


def train_rounded(
    plan: QuantizationPlan, rounded: RoundedWeights, recovery: Recovery, cache: TeacherCache | None, state: RunState
) -> dict[str, Any]:
    """Train the quantized checkpoint on its grid and write it again; returns the results of training."""
    model, packed = load_checkpoint(state.directory), rounded.packed
    make_trainable(model, rounded.originals)
    model, results = recover(
        model,
        recovery,
        plan.checkpoint,
        directory=state.directory,
        identity=state.identity,
        resume=state.resume,
        signals=cache,
    )
    pack_trained(model, packed)
    record = packed.record(f"{plan.method}+qad")
    write_checkpoint(state.directory, plan.model, packed.tensors, plan.checkpoint, record)
    return results


def quantize(
    checkpoint: Path,
    out: Path,
    config: QuantizationConfig | None = None,
    method: str | None = None,
    *,
    text: CalibrationText | None = None,
    budget: SizeBudget | None = None,
    recovery: Recovery | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Quantize a checkpoint directory into a new one.

    Args:
        checkpoint: an unquantized checkpoint, or one that bitsandbytes quantized, which is rounded a second time.
        out: directory to make.
        config: bits and grid of every matrix.
        method: one of METHODS; see `resolve_method` for None.
        text: for calibration.
        budget: mix 4 and 8 bits to this size.
        recovery: quantization-aware training, see `compress.quantization.aware_training`.
        resume: go on with an interrupted training.

    Returns:
        The results, as `quantize --json` prints them; for matrices that were packed before also `regridded_from` and
        `regrid_relative_error`.

    Raises:
        UsageError: a method that is not known, or calibration text for one that reads none.
        ArtifactError: the checkpoint is damaged or quantized already, or the text is missing or too short.
    """
    config, text = config or QuantizationConfig(), text or CalibrationText()
    name = resolve_method(method, config, text, budget, tokens_per_parameter(checkpoint) == 0)
    plan = check_request(checkpoint, config, name, text, budget)
    settings, parents, cache, seed = plan.settings(), [checkpoint], None, None
    parents += [*plan.text.files, *plan.text.valid] if plan.text else []
    if recovery is not None:
        cache, seed = prepare_recovery(recovery, checkpoint, plan.model), recovery.config.seed
        settings |= recovery.settings(checkpoint)
        parents += recovery.inputs()
    stage = Stage("quantize", settings, parents, seed=seed)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        packed_before = bitsandbytes_kind(checkpoint)
        if packed_before is not None:
            log(
                f"{checkpoint}: bitsandbytes stored its matrices as {packed_before}; they are rounded again; "
                "start from the full-precision checkpoint where there is one"
            )
        rounded = round_weights(plan, keep_originals=recovery is not None)
        packed = rounded.packed
        write_checkpoint(directory, plan.model, packed.tensors, checkpoint, packed.record(name))
        results: dict[str, Any] = {}
        if recovery is not None:
            state = RunState(directory, stage.fingerprint(), resume)
            results = train_rounded(plan, rounded, recovery, cache, state)
        if packed_before is not None:
            error = None if plan.moves_scales else regrid_error(checkpoint, packed)
            results |= {"regridded_from": packed_before, "regrid_relative_error": error}
        return {
            **results,
            "parameters": plan.model.parameters,
            **config.record(),
            "method": name,
            "bits_per_weight": bits_per_weight(plan.model, packed.config),
            "calibration_tokens": rounded.calibration_tokens,
            "sensitivity": [group.to_json(packed.config) for group in rounded.groups],
            "seconds": time.perf_counter() - started,
        }

    return run_stage(out, stage, make, resume)


def regrid_error(checkpoint: Path, packed: PackedCheckpoint) -> float:
    """Root mean square of what rounding changed in the layers' matrices, over that of the numbers stored before."""
    changed, before = 0.0, 0.0
    tensors = TensorFiles(checkpoint)
    for module in packed.layer_modules():
        stored = tensors[f"{module}.weight"].float()
        before += float(stored.square().sum(dtype=torch.float64))
        changed += float((packed.matrix(module) - stored).square().sum(dtype=torch.float64))
    return math.sqrt(changed / before) if before else 0.0
