"""What is quantized and how: bits and grid of every matrix, their size on disk, rounding method, calibration text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sportsllm.console import log
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed import BITS, bitsandbytes_kind, quantization_config
from sportsllm.inference.calibration import CalibrationText
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, HEAD, matrix_shapes
from sportsllm.models.kinds import least_bits
from sportsllm.models.memory import BLOCK_SIZES, MIXED_GROWTH, matrix_parameters, quantized_bytes
from sportsllm.text.documents import held_out_setting, left_out, manifest_setting, tokens_per_parameter

if TYPE_CHECKING:
    from torch import Tensor

HEAD_BITS = (4, 8, 32)
UNPACKED = 32
"""Bits of a matrix that stays float32."""
HIGH_BITS = 8
"""Those of the most sensitive matrices if precisions are mixed."""
METHODS = {"rtn": 0, "mse": 0, "balance": 16, "gptq": 64}
"""Rounding methods, with the default number of calibration samples; 0 for those that read no text."""
SENSITIVITY_SAMPLES = 4
"""Samples that choose the matrices with 8 bits."""
LEAST_TOKENS = 4_096  # of calibration text: with 400 GPTQ is worse than no text at all, more than this gain little


class GridSpec(NamedTuple):
    """The grid of one matrix: bits of an integer, 4 or 8, group size, and whether it is symmetric."""

    bits: int
    block_size: int
    symmetric: bool


@dataclass(frozen=True)
class QuantizationConfig:
    """Bits and grid of every matrix.

    Attributes:
        bits: of the layers' matrices, 4 or 8.
        block_size: group size: weights that share a scale.
        head_bits: of embedding and head; 32 keeps float32.
        symmetric: symmetric, or asymmetric with a zero point per 4-bit block. 8-bit blocks are always symmetric.
        modules: bits of single matrices of the layers, by name, that differ from `bits`.
    """

    bits: int = 4
    block_size: int = 32
    head_bits: int = 8
    symmetric: bool = True
    modules: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for flag, value, known in (
            ("--bits", self.bits, BITS),
            ("--group-size", self.block_size, BLOCK_SIZES),
            ("--set head_bits", self.head_bits, HEAD_BITS),
        ):
            if value not in known:
                raise UsageError(f"{flag} is {value}; choose one of {', '.join(map(str, known))}")
        if self.bits == 8 and not self.symmetric:
            raise UsageError("symmetric=false is for 4 bits; with --bits 8 leave it out")

    def bits_for(self, module: str) -> int:
        """Bits of a matrix, for example of `model.layers.0.mlp.up_proj`."""
        if module in (EMBEDDING, HEAD):
            return self.head_bits
        return max(self.modules.get(module, self.bits), least_bits(module.partition(".mlp.")[2]))

    def grid_for(self, module: str) -> GridSpec:
        """The grid of a matrix that is packed."""
        bits = self.bits_for(module)
        return GridSpec(bits, self.block_size, self.symmetric or bits == 8)

    def bytes_for(self, module: str, rows: int, columns: int) -> int:
        """Size of a matrix on disk, with scales and zero points."""
        if self.bits_for(module) == UNPACKED:
            return 4 * rows * columns
        grid = self.grid_for(module)
        return quantized_bytes(rows, columns, grid.bits, grid.block_size, not grid.symmetric)

    def record(self) -> dict[str, Any]:
        """For manifests, config.json and results."""
        return {
            "bits": self.bits,
            "block_size": self.block_size,
            "head_bits": self.head_bits,
            "symmetric": self.symmetric,
        }


def matrix_bytes(model: ModelConfig, config: QuantizationConfig, layers_only: bool = False) -> int:
    """Size of all matrices of a model on disk, with scales and zero points."""
    shapes = matrix_shapes(model, layers_only)
    return sum(config.bytes_for(name, *shape) for name, shape in shapes.items())


def bits_per_weight(model: ModelConfig, config: QuantizationConfig) -> float:
    """Average bits per weight of the layers' matrices, with scales and zero points."""
    return 8 * matrix_bytes(model, config, layers_only=True) / matrix_parameters(model)


def padding_percent(model: ModelConfig, config: QuantizationConfig) -> float:
    """Percent of values that fill the last group of each row."""
    return 100 * (matrix_parameters(model, config.block_size) / matrix_parameters(model) - 1)


@dataclass(frozen=True)
class SizeBudget:
    """A size to mix 4 and 8 bits for; at most one field is given, none for MIXED_GROWTH.

    Attributes:
        bits_per_weight: average over the layers' matrices, with scales and zero points.
        size_mb: size of all weights in 10^6 bytes; norms and biases count 4 bytes per value.
    """

    bits_per_weight: float | None = None
    size_mb: float | None = None

    def spare_bytes(self, model: ModelConfig, config: QuantizationConfig) -> int:
        """Bytes beyond the low precision of `config`.

        Raises:
            UsageError: both or neither given, not 4 bits, or less than the low precision takes.
        """
        if self.bits_per_weight is not None and self.size_mb is not None:
            raise UsageError("give one of --set bits_per_weight and --size-mb, not both")
        if config.bits >= HIGH_BITS:
            raise UsageError("--set bits_per_weight and --size-mb mix 4 and 8 bits; leave --bits 8 out")
        if self == SizeBudget():
            return int(MIXED_GROWTH * matrix_bytes(model, config))
        if self.bits_per_weight is not None:
            least, smallest = matrix_bytes(model, config, layers_only=True), f"{bits_per_weight(model, config):.3f}"
            budget = int(self.bits_per_weight * matrix_parameters(model) / 8)
            flag = f"--set bits_per_weight={self.bits_per_weight:g}"
        else:
            assert self.size_mb is not None, "one of both is given"
            vectors = model.parameters - sum(map(math.prod, matrix_shapes(model).values()))
            least = matrix_bytes(model, config) + 4 * vectors
            smallest, budget = f"{least / 1e6:.3f}", int(self.size_mb * 1e6)
            flag = f"--size-mb {self.size_mb:g}"
        if budget < least:
            raise UsageError(
                f"{flag} is less than INT{config.bits} takes with groups of {config.block_size}, {smallest}; "
                "allow more, or use a larger --group-size"
            )
        return budget - least


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
        if untrained and not (text.files or text.samples):
            log("untrained weights: rounding without calibration (mse)")
            name = "mse"
    if name not in METHODS:
        raise UsageError(f"--method {name!r} is not known; choose one of {', '.join(METHODS)}")
    if not METHODS[name] and budget is None and (text.files or text.samples):
        raise UsageError(f"--method {name} uses no calibration text; leave it out, or choose gptq")
    return name
