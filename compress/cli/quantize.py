"""The command `quantize`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli import flags
from sportsllm.cli import flags as options
from sportsllm.cli.flag_groups import check_not_given, expand_flag_groups
from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from compress.distillation.recovery import Recovery

_QAD_RATE = 1e-4
PADDING_TOLD = 10.0
"""Percent of padding from which on it is worth a line."""


@expand_flag_groups
def quantize(
    *,
    checkpoint: Annotated[
        Path, typer.Argument(help="An unquantized checkpoint, or one of bitsandbytes.", show_default=False)
    ],
    out: options.Out,
    bits: Annotated[int, typer.Option(help="Bits of the blocks' matrices: 8 or 4.")] = 4,
    method: Annotated[
        str | None,
        typer.Option(
            help="rtn (round to nearest), mse (best grid first), nf4 (bitsandbytes' 4-bit codes; slow to run), or with "
            "calibration text awq, smooth, gptq, awq+gptq or smooth+gptq. "
            "[default: gptq with --calibration or --qad (smooth+gptq per row), else mse]"
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Numbers that share a scale: 16, 32, 64, 128 or 256.")] = 32,
    per_row: Annotated[
        bool,
        typer.Option(
            "--per-row", help="INT8 with a scale a row, multiplied in whole numbers: faster, a little less exact."
        ),
    ] = False,
    head_bits: Annotated[int, typer.Option(help="Bits of embedding and head: 4, 8, or 32 for none.")] = 8,
    symmetric: Annotated[
        bool,
        typer.Option("--symmetric/--asymmetric", help="Zero in the middle of the range, or a zero point a block."),
    ] = True,
    bits_per_weight: Annotated[
        float | None, typer.Option(help="Mix 4 and 8 bits, by measurement, to so many on average in the layers.")
    ] = None,
    size_mb: Annotated[
        float | None, typer.Option(help="Mix 4 and 8 bits, by measurement, to weights of so many MB (10^6) in all.")
    ] = None,
    calibration: options.CalibrationText = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Pieces of calibration text; up to 64 if not given.")
    ] = None,
    qad: Annotated[
        int | None, typer.Option("--qad", min=1, help="Train on so many tokens as rounded, towards the full model.")
    ] = None,
    text: options.TextFlags,
    teacher: flags.TeacherFlags,
    training: options.TrainingFlags,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Pack the matrices as INT8 or INT4 blocks, exactly as the runtime reads them."""
    from compress.quantization.packed_checkpoint import Precision
    from compress.quantization.run import NF4
    from compress.quantization.run import quantize as run_quantize
    from sportsllm.console import output
    from sportsllm.models.hf_config import load_config
    from sportsllm.models.size import block_numbers
    from sportsllm.storage.packed_weights import BITS, ROW_BITS
    from sportsllm.training.setup import set_threads

    set_threads(threads)
    if per_row and bits != 8:
        raise UsageError(f"--per-row is a form of INT8, not of --bits {bits}; add --bits 8")
    if bits not in BITS:
        raise UsageError(f"--bits is {bits}; choose one of {', '.join(map(str, BITS))}")
    if qad is None:
        check_not_given("--qad TOKENS", text, teacher, training)
    result = run_quantize(
        checkpoint=checkpoint,
        out=out,
        precision=Precision(ROW_BITS if per_row else bits, block_size, head_bits, symmetric),
        method=method,
        calibration=calibration or [],
        samples=samples,
        bits_per_weight=bits_per_weight,
        size_mb=size_mb,
        recovery=None if qad is None else _recovery(checkpoint, qad, seed, text, teacher, training),
        resume=training.resume,
    )
    output().print(
        f"{out}: {result['parameters']:,} parameters in {result['size_bytes'] / 1e6:.2f} MB, "
        f"{'NF4' if method == NF4 else f'INT{bits}'} {'rows' if per_row else f'blocks of {block_size}'} "
        f"by {result['method']}, "
        f"{result['bits_per_weight']:.2f} bits a weight with scales, embedding and head {head_bits} bits"
    )
    if not per_row and method != NF4:
        config = load_config(out)
        result["padding_percent"] = 100 * (block_numbers(config, block_size) / block_numbers(config) - 1)
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
        raised = [", ".join(group["modules"]) for group in result["sensitivity"] if group["bits"] > bits]
        output().print(f"at 8 bits: {'; '.join(raised) or 'no matrix fits the budget'}")
    if result.get("valid_bits_per_byte"):
        output().print(
            f"bits per byte {result['bits_per_byte_before_recovery']:.4f} rounded, "
            f"{result['valid_bits_per_byte']:.4f} after training as rounded on {result['tokens']:,} tokens"
        )
    return result


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
    from sportsllm.training.loop import TrainConfig

    # Full-precision twins are near their place and decay would only pull them away from it.
    base = TrainConfig(seed=seed, learning_rate=_QAD_RATE, weight_decay=0.0)
    return Recovery(
        config=training.config(base, tokens),
        corpus=tuple(text.corpus or teacher_corpus(checkpoint, "corpus")),
        valid=tuple(text.valid or ([] if text.corpus else teacher_corpus(checkpoint, "valid"))),
        objective=teacher.config(fresh=False),
    )
