"""A checkpoint to quantize: its method, its calibration text and its record for the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from compress.quantization.config import QuantizationConfig
from compress.quantization.mixed_precision import SizeBudget
from sportsllm.console import log
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed import bitsandbytes_kind, quantization_config
from sportsllm.inference.calibration import CalibrationText
from sportsllm.models.config import ModelConfig
from sportsllm.text.documents import held_out_setting, left_out, manifest_setting, tokens_per_parameter

METHODS = {"rtn": 0, "mse": 0, "balance": 16, "gptq": 64}
"""Rounding methods, with the default number of calibration samples; 0 for those that read no text."""
SENSITIVITY_SAMPLES = 4
"""Samples that choose the matrices with 8 bits."""
LEAST_TOKENS = 4_096  # of calibration text: with 400 GPTQ is worse than no text at all, more than this gain little


@dataclass(frozen=True)
class QuantizationPlan:
    """A checked request. `text` is None if none is read, `budget` None for one precision."""

    checkpoint: Path
    model: ModelConfig
    config: QuantizationConfig
    method: str
    text: CalibrationText | None
    budget: SizeBudget | None

    def settings(self) -> JsonObject:
        """For the manifest."""
        recorded = {name: manifest_setting(self.checkpoint, name) for name in ("corpus", "valid")}
        settings = {"checkpoint": str(self.checkpoint), **self.config.record(), "method": self.method, **recorded}
        held_out = left_out(() if self.text is None else self.text.valid, self.checkpoint)
        settings |= held_out_setting([Path(name) for name in recorded["valid"] or []], held_out)
        if self.text is not None:
            settings |= {"calibration": [str(path) for path in self.text.files], "samples": self.text.samples}
        if self.budget is not None:
            settings |= {"bits_per_weight": self.budget.bits_per_weight, "size_mb": self.budget.size_mb}
        return settings

    def read_samples(self) -> list[Tensor]:
        """Calibration token ids, (1, T) each."""
        if self.text is None:
            return []
        samples, least = METHODS[self.method], LEAST_TOKENS
        if not samples:  # the text is for the sensitivities alone
            samples, least = SENSITIVITY_SAMPLES, 0
        return self.text.read(self.checkpoint, self.model, samples, least)


def plan_quantization(
    checkpoint: Path, config: QuantizationConfig, method: str | None, text: CalibrationText, budget: SizeBudget | None
) -> QuantizationPlan:
    """Check a request against the checkpoint, and find the calibration text.

    A budget without a size counts only for methods that read text.

    Raises:
        UsageError: an unknown method, options that do not go with it, or too small a budget.
        ArtifactError: the checkpoint is damaged or quantized already.
    """
    sized = None if budget == SizeBudget() else budget
    untrained = tokens_per_parameter(checkpoint) == 0
    name = resolve_method(method, config, text, sized, untrained)
    budget = budget if METHODS[name] else sized
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized already; give the unquantized checkpoint")
    if (kind := bitsandbytes_kind(checkpoint)) is not None:
        log(
            f"{checkpoint}: bitsandbytes stored its matrices as {kind}; they are rounded again; start from the "
            "full-precision checkpoint if there is one"
        )
    model = load_config(checkpoint)
    if budget is not None:
        budget.spare_bytes(model, config)
    read = text.found(checkpoint) if METHODS[name] or budget is not None else None
    return QuantizationPlan(checkpoint, model, config, name, read, budget)


def resolve_method(
    name: str | None, config: QuantizationConfig, text: CalibrationText, budget: SizeBudget | None, untrained: bool
) -> str:
    """The method's name; by default gptq at 4 bits, balance at 8 bits, mse if untrained.

    Raises:
        UsageError: an unknown method, or options that do not go with it.
    """
    if name is None:
        name = "balance" if config.bits == 8 else "gptq"
        if untrained and not text.files:
            log("untrained weights: rounding without calibration (mse)")
            name = "mse"
    if name not in METHODS:
        raise UsageError(f"--method {name!r} is not known; choose one of {', '.join(METHODS)}")
    if not METHODS[name] and budget is None and (text.files or text.samples):
        raise UsageError(f"--method {name} uses no calibration text; leave it out, or choose gptq")
    return name
