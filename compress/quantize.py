"""The verb `quantize`: pack a checkpoint's matrices as INT8 or INT4, exactly as the runtime reads them.

Resolve the method, find calibration text, choose bits by sensitivity if a size is given, round, and train on the grid
with `--qad`. Heavy imports are inside the functions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError
from sportsllm.results import TrainingResult
from sportsllm.settings import DISTILLATION, QUANTIZATION, SIGNALS, STEPS, TEXT, TRAINING, parse_settings

if TYPE_CHECKING:
    from torch import Tensor

    from compress.distillation.student import StudentTraining
    from compress.quantization.config import QuantizationConfig, QuantizationPlan, SizeBudget
    from compress.quantization.mixed_precision import SensitivityGroup
    from compress.quantization.packed_checkpoint import PackedCheckpoint
    from sportsllm.inference.calibration import CalibrationText

PADDING_NOTED = 10.0
"""Percent of padding from which a line is printed."""


@dataclass(frozen=True, kw_only=True)
class QuantizeResult(TrainingResult):
    """A quantized checkpoint. Fields of TrainingResult are those of `--qad`.

    Attributes:
        bits, group_size, symmetric: grid of the layers' matrices.
        head_bits: bits of embedding and head.
        method: rounding method.
        bits_per_weight: average of the layers' matrices, with scales and zero points.
        calibration_tokens: number of calibration tokens.
        sensitivity: groups of matrices with their KL and bits, if precisions are mixed.
        padding_percent: values added to fill the last group of each row.
        regridded_from, regrid_relative_error: bitsandbytes format of the input, and the error of the new rounding.
        bits_per_byte_before_recovery: quality before `--qad`, estimated from a part of the report split.
    """

    bits: int = 0
    group_size: int = 0
    symmetric: bool = True
    head_bits: int = 0
    method: str = ""
    bits_per_weight: float = 0.0
    calibration_tokens: int = 0
    sensitivity: list[dict[str, Any]] = field(default_factory=list)
    padding_percent: float | None = None
    regridded_from: str | None = None
    regrid_relative_error: float | None = None
    bits_per_byte_before_recovery: float | None = None


def quantize(
    checkpoint: options.Checkpoint,
    *,
    out: options.Out,
    bits: Annotated[int, typer.Option(help="Bits of the layers' matrices: 8 or 4.")] = 4,
    method: Annotated[
        str | None,
        typer.Option(
            help="rtn (round to nearest) or mse (grid of least squared error); with calibration text balance (scale "
            "channels, then one pass of error-compensated rounding) or gptq (fitted and refined too).",
            show_default="gptq for 4 bits, balance for 8; mse for untrained weights",
        ),
    ] = None,
    group_size: Annotated[
        int,
        typer.Option(help="Weights that share a scale: 16, 32, 64, 128 or 256. Small groups are more exact."),
    ] = 32,
    size_mb: Annotated[
        float | None,
        typer.Option(
            help="Mix 4 and 8 bits by sensitivity until all packed weights have this size, in MB (10^6 bytes).",
            show_default="5% more than INT4",
            rich_help_panel="Size",
        ),
    ] = None,
    calibration: options.Calibration = None,
    qad: Annotated[
        int | None,
        typer.Option(
            parser=options.count,
            metavar="N",
            help="Quantization-aware distillation: after rounding, train on this many tokens to match the "
            "full-precision model.",
            show_default="no training",
            rich_help_panel="Recovery",
        ),
    ] = None,
    corpus: options.Corpus = None,
    valid: options.Valid = None,
    settings: options.Settings = None,
    resume: options.Resume = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> QuantizeResult:
    """Quantize weights to INT8 or INT4."""
    from compress.distillation.starts import plan_training
    from compress.quantization.config import QuantizationConfig, SizeBudget
    from sportsllm.formats.huggingface import load_config
    from sportsllm.inference.calibration import CalibrationText
    from sportsllm.processors import use_processor
    from sportsllm.text.documents import take_reading
    from sportsllm.training.settings import Run, Start

    use_processor(threads, device)
    found = parse_settings(settings, QUANTIZATION, TRAINING, STEPS, DISTILLATION, SIGNALS, TEXT)
    reading = take_reading(found, checkpoint)
    taught = {name: value for name, value in found.items() if name not in QUANTIZATION}
    given = {"--corpus": corpus, **{f"--set {name}": True for name in taught}, "--resume": resume, "--seed": seed}
    if qad is None and (names := [name for name, value in given.items() if value]):
        raise UsageError(f"options of --qad: {', '.join(names)}; add --qad TOKENS or leave them out")
    config = QuantizationConfig(bits, group_size, found.get("head_bits", 8), found.get("symmetric", bits == 8))
    budget: SizeBudget | None = SizeBudget(found.get("bits_per_weight"), size_mb)
    uniform = found.get("uniform", False)
    if uniform and budget != SizeBudget():
        raise UsageError("--set uniform=true is one precision for all; leave bits_per_weight and --size-mb out")
    if budget == SizeBudget() and (uniform or bits != 4):
        budget = None
    recovery = None
    if qad is not None:  # the full-precision checkpoint is the teacher
        run = Run(Start.QUANTIZED, load_config(checkpoint))
        recovery = partial(plan_training, run, checkpoint, qad, taught, corpus, valid, seed, reading)
    result = quantize_checkpoint(
        checkpoint,
        out,
        config,
        method,
        text=CalibrationText(tuple(calibration or ()), found.get("samples"), tuple(valid or ()), reading),
        budget=budget,
        recovery=recovery,
        resume=resume,
    )
    _print(result)
    return result


def quantize_checkpoint(
    checkpoint: Path,
    out: Path,
    config: QuantizationConfig | None = None,
    method: str | None = None,
    *,
    text: CalibrationText | None = None,
    budget: SizeBudget | None = None,
    recovery: Callable[[], StudentTraining] | None = None,
    resume: bool = False,
) -> QuantizeResult:
    """Quantize a checkpoint directory into a new one.

    Args:
        checkpoint: an unquantized checkpoint, or a bitsandbytes one, which is rounded a second time.
        method: see `compress.quantization.config.resolve_method`.
        budget: mix 4 and 8 bits to this size; its default counts only for methods that read text.
        recovery: plans quantization-aware training (`compress.quantization.qad`), after all else is checked.

    Raises:
        UsageError: an unknown method, or text for a method that reads none.
        ArtifactError: the checkpoint is damaged or quantized already, or the text is missing or too short.
    """
    from compress.distillation.student import RunDirectory, StudentText, recover
    from compress.quantization.config import (
        METHODS,
        QuantizationConfig,
        bits_per_weight,
        padding_percent,
        plan_quantization,
    )
    from compress.quantization.qad import make_trainable, pack_trained
    from sportsllm.formats.artifact import Stage, run_stage
    from sportsllm.formats.checkpoint import load_checkpoint, write_config
    from sportsllm.formats.packed import bitsandbytes_kind
    from sportsllm.formats.safetensors import TensorFiles
    from sportsllm.inference.calibration import CalibrationText

    config, text = config or QuantizationConfig(), text or CalibrationText()
    plan = plan_quantization(checkpoint, config, method, text, budget)
    if plan.text is None and text.valid and recovery is None:
        raise UsageError(f"--valid: --method {plan.method} reads no text; leave it out, or add --qad TOKENS")
    settings, parents, cache, seed = plan.settings() | text.reading.record(), [checkpoint], None, None
    parents += [*plan.text.files, *plan.text.valid] if plan.text else []
    training = None if recovery is None else recovery()
    if training is not None:
        cache, seed = training.prepare(plan.model), training.config.seed
        settings |= training.recovery_settings()
        parents += training.inputs()
    stage = Stage("quantize", settings, parents, seed=seed)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        read = None if training is None else StudentText.read(training, directory)  # refused before the rounding
        samples = plan.read_samples()
        packed, groups = round_weights(plan, samples, directory, keep_originals=training is not None)
        write_config(directory, plan.model, checkpoint, packed.record())
        results: dict[str, Any] = {}
        if (packed_before := bitsandbytes_kind(checkpoint)) is not None:
            error = None if METHODS[plan.method] else packed.relative_change(TensorFiles(checkpoint))
            results |= {"regridded_from": packed_before, "regrid_relative_error": error}
        if training is not None and read is not None:
            model = load_checkpoint(directory)
            make_trainable(model, packed.originals)
            results |= recover(model, training, cache, RunDirectory(directory, stage.identity(), resume), read)
            pack_trained(model, packed)
            record = packed.record() | {"method": f"{packed.method}+qad"}
            write_config(directory, plan.model, checkpoint, record)
        return {
            **results,
            "parameters": plan.model.parameters,
            **config.record(),
            "group_size": config.block_size,
            "method": plan.method,
            "bits_per_weight": bits_per_weight(plan.model, packed.config),
            "padding_percent": padding_percent(plan.model, config),
            "calibration_tokens": sum(tokens.numel() for tokens in samples),
            "sensitivity": [group.to_json(packed.config) for group in groups],
            "seconds": time.perf_counter() - started,
        }

    return QuantizeResult.of(run_stage(out, stage, make, resume))


def round_weights(
    plan: QuantizationPlan, samples: Sequence[Tensor], directory: Path, keep_originals: bool
) -> tuple[PackedCheckpoint, list[SensitivityGroup]]:
    """Write quantized tensors; also the sensitivity of each group of matrices if precisions are mixed."""
    from compress.quantization.config import SENSITIVITY_SAMPLES
    from compress.quantization.layer_by_layer import round_checkpoint
    from compress.quantization.mixed_precision import choose_bits, measure_groups
    from compress.quantization.packed_checkpoint import PackedCheckpoint
    from sportsllm.formats.safetensors import WEIGHTS
    from sportsllm.processors import training_device

    config, groups, device = plan.config, [], training_device(quiet=True)
    if plan.budget is not None:
        few = samples[:: max(1, len(samples) // SENSITIVITY_SAMPLES)][:SENSITIVITY_SAMPLES]
        groups = measure_groups(plan.checkpoint, plan.model, config, few, directory, device=device)
        config = choose_bits(config, groups, plan.budget.spare_bytes(plan.model, config))
    packed = PackedCheckpoint(plan.model, config, plan.method, directory / WEIGHTS, keep_originals)
    round_checkpoint(plan.checkpoint, packed, samples, device)
    return packed, groups


def _print(result: QuantizeResult) -> None:
    """The lines that the command ends with."""
    from sportsllm.console import output

    bits = result.bits
    lines = [
        f"{result.out}: {result.parameters:,} parameters in {result.size_bytes / 1e6:.2f} MB, INT{bits} groups of "
        f"{result.group_size} by {result.method}, {result.bits_per_weight:.2f} bits per weight of the layers "
        f"with scales; embedding and head: {result.head_bits} bits"
    ]
    if (result.padding_percent or 0.0) >= PADDING_NOTED:
        lines.append(
            f"groups of {result.group_size} do not divide the rows: padding adds {result.padding_percent:.0f}%; a "
            "smaller --group-size packs tighter"
        )
    if result.regridded_from is not None:
        error = result.regrid_relative_error
        source = result.regridded_from
        loss = "moved by scaling first" if error is None else f"relative error {error:.4f}, on top of that of {source}"
        lines.append(f"matrices rounded again from {source}: {loss}")
    if result.sensitivity:
        raised = Counter(_kind(group["modules"]) for group in result.sensitivity if group["bits"] > bits)
        kinds = "; ".join(f"{count} x {kind}" for kind, count in raised.items()) or "no matrix fits the budget"
        if raised.total() == len(result.sensitivity):
            kinds = "the size leaves room for more; --bits 8 needs no size"
        lines.append(f"8 bits for {raised.total()} of {len(result.sensitivity)} groups of matrices: {kinds}")
    if result.valid_bits_per_byte is not None:
        lines.append(
            f"bits per byte {result.bits_per_byte_before_recovery:.4f} rounded, {result.valid_bits_per_byte:.4f} after "
            f"quantization-aware distillation on {result.tokens:,} tokens{result.warning}"
        )
    for line in lines:
        output().print(line)


def _kind(modules: Sequence[str]) -> str:
    """The matrices of a group by name, without the numbers of layer and expert."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in modules))
