"""The command `quantize`. Heavy imports are inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli import flags
from sportsllm.cli import flags as options
from sportsllm.cli.flag_groups import FlagGroup, check_not_given, expand_flag_groups

if TYPE_CHECKING:
    from compress.distillation.recovery import Recovery
    from compress.quantization.config import QuantizationConfig
    from compress.quantization.mixed_precision import SizeBudget

PADDING_TOLD = 10.0
"""Percent of padding from which on a line is printed."""


@dataclass(frozen=True)
class GridFlags(FlagGroup):
    """Bits and grid of the matrices."""

    bits: Annotated[int, typer.Option(help="Bits of the layers' matrices: 8 or 4.")] = 4
    block_size: Annotated[int, typer.Option(help="Numbers that share a scale: 16, 32, 64, 128 or 256.")] = 32
    per_row: Annotated[
        bool,
        typer.Option(
            "--per-row", help="INT8 with one scale for each row: faster integer products, slightly less exact."
        ),
    ] = False
    head_bits: Annotated[int, typer.Option(help="Bits of embedding and head: 4, 8, or 32 to keep float32.")] = 8
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Zero in the middle of the range, or a zero point for each 4-bit block.",
            show_default="asymmetric at 4 bits",
        ),
    ] = None

    def config(self) -> QuantizationConfig:
        """The flags as a configuration."""
        from compress.quantization.config import Granularity, QuantizationConfig

        granularity = Granularity.PER_CHANNEL if self.per_row else Granularity.BLOCK
        symmetric = self.bits == 8 if self.symmetric is None else self.symmetric
        return QuantizationConfig(self.bits, self.block_size, self.head_bits, symmetric, granularity=granularity)


@dataclass(frozen=True)
class BudgetFlags(FlagGroup):
    """A size that 4 and 8 bits are mixed for."""

    bits_per_weight: Annotated[
        float | None,
        typer.Option(
            help="Mix 4 and 8 bits by measured sensitivity: average bits per weight of the layers.",
            show_default="one precision",
        ),
    ] = None
    size_mb: Annotated[
        float | None,
        typer.Option(
            help="Mix 4 and 8 bits by measured sensitivity: size of all packed weights in MB (10^6 bytes).",
            show_default="one precision",
        ),
    ] = None

    def budget(self) -> SizeBudget | None:
        """The budget; None for one precision."""
        from compress.quantization.mixed_precision import SizeBudget

        return SizeBudget(self.bits_per_weight, self.size_mb) if self.given() else None


@expand_flag_groups
def quantize(
    *,
    checkpoint: Annotated[
        Path,
        typer.Argument(help="An unquantized checkpoint, or one of bitsandbytes.", show_default=False),
        options.BY_NAME,
    ],
    out: options.Out,
    method: Annotated[
        str | None,
        typer.Option(
            help="rtn (round to nearest) or mse (grid of least squared error); with calibration text balance, awq, "
            "gptq, smooth or smooth+gptq.",
            show_default="gptq for 4 bits, balance for 8, smooth+gptq with --per-row; mse for untrained weights",
        ),
    ] = None,
    grid: GridFlags,
    mixed: BudgetFlags,
    calibration: options.CalibrationText = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Pieces of calibration text.", show_default="up to 64")
    ] = None,
    qad: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="After rounding, train the quantized model on this many tokens to match the full-precision model.",
            show_default="no training",
        ),
    ] = None,
    text: options.TextFlags,
    teacher: flags.TeacherFlags,
    training: options.TrainingFlags,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Pack the matrices as INT8 or INT4 blocks, exactly as the runtime reads them."""
    from compress.quantization.run import quantize as run_quantize
    from sportsllm.processors import set_threads
    from sportsllm.training.calibration_text import CalibrationText

    set_threads(threads)
    if qad is None:
        check_not_given("--qad TOKENS", replace(text, valid=None), teacher, training)
    result = run_quantize(
        checkpoint,
        out,
        grid.config(),
        method,
        text=CalibrationText(tuple(calibration or ()), samples, tuple(text.valid or ())),
        budget=mixed.budget(),
        recovery=None if qad is None else _recovery(checkpoint, qad, seed, text, teacher, training),
        resume=training.resume,
    )
    _print(out, result)
    return result


def _print(out: Path, result: dict[str, Any]) -> None:
    """The lines that the command ends with; adds `padding_percent` to the result."""
    from sportsllm.console import output
    from sportsllm.formats.huggingface.config import load_config
    from sportsllm.models.size import matrix_parameters

    bits, block_size = result["bits"], result["block_size"]
    grid = "rows" if result["per_row"] else f"blocks of {block_size}"
    output().print(
        f"{out}: {result['parameters']:,} parameters in {result['size_bytes'] / 1e6:.2f} MB, "
        f"INT{bits} {grid} by {result['method']}, {result['bits_per_weight']:.2f} bits a weight with scales, "
        f"embedding and head {result['head_bits']} bits"
    )
    if not result["per_row"]:
        model = load_config(out)
        result["padding_percent"] = 100 * (matrix_parameters(model, block_size) / matrix_parameters(model) - 1)
        if result["padding_percent"] >= PADDING_TOLD:
            output().print(
                f"blocks of {block_size} do not divide the rows: {result['padding_percent']:.0f}% more numbers are "
                "stored than there are; a smaller --block-size packs tighter"
            )
    if "regridded_from" in result:
        error, source = result["regrid_relative_error"], result["regridded_from"]
        loss = (
            f"relative error {error:.4f}, on top of that of {source}" if error is not None else "moved by scaling first"
        )
        output().print(f"matrices rounded again from {source}: {loss}")
    if result["sensitivity"]:
        raised = Counter(_kind(group["modules"]) for group in result["sensitivity"] if group["bits"] > bits)
        kinds = "; ".join(f"{count} x {kind}" for kind, count in raised.items()) or "no matrix fits the budget"
        output().print(f"8 bits for {raised.total()} of {len(result['sensitivity'])} groups of matrices: {kinds}")
    if result.get("valid_bits_per_byte"):
        output().print(
            f"bits per byte {result['bits_per_byte_before_recovery']:.4f} rounded, "
            f"{result['valid_bits_per_byte']:.4f} after quantization-aware training on {result['tokens']:,} tokens"
        )


def _kind(modules: Sequence[str]) -> str:
    """Matrices of a group by name, without the numbers of layer and expert."""
    return ", ".join(name.rpartition(".")[2] for name in modules)


def _recovery(
    checkpoint: Path,
    tokens: int,
    seed: int,
    text: options.TextFlags,
    teacher: flags.TeacherFlags,
    training: options.TrainingFlags,
) -> Recovery:
    from compress.distillation.recovery import Recovery
    from compress.distillation.run import teacher_corpus
    from sportsllm.formats.huggingface.config import load_config
    from sportsllm.training.settings import Run, Start

    run = Run(Start.QUANTIZED, load_config(checkpoint))
    return Recovery(
        config=training.config(run, tokens, seed=seed),
        corpus=tuple(text.corpus or teacher_corpus(checkpoint, "corpus")),
        valid=tuple(text.valid or ([] if text.corpus else teacher_corpus(checkpoint, "valid"))),
        objective=teacher.config(Start.QUANTIZED, checkpoint),  # it is to say what it said before rounding
    )
