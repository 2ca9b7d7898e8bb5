"""What a runtime gets out of a processor: shares of a device's peak figures, and what models cost beside them.

A device file that `calibrate` or `benchmarks.studies.prediction_error` wrote has its own; for the others the sets below
stand in. Shares belong to the peaks they were found with: `calibrate` takes for a peak what the runtime's best
operator reached, the shipped device files what the processor could do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date
from itertools import pairwise
from typing import Annotated

from pydantic import Field, field_validator

from benchmarks.devices.figures import Kind, Strict, Text

FORMS = ("fp32", "fp16", "int8", "int4", "int8_rows")
"""How a matrix is stored: `int8` and `int4` in blocks (MatMulNBits), `int8_rows` for DynamicQuantizeMatMul."""
CPU_FORMS = tuple(form for form in FORMS if form != "fp16")
"""On a CPU half precision is widened when it is loaded."""
CPU_CACHES = ("fp32", "int8")

SHARPNESS = 2
"""Exponent p of `longer`, (a^p + b^p)^(1/p): without bound it is the larger one, which has a corner that no measured
time has, and beyond which a fit learns nothing of the smaller one."""

Curve = Mapping[float, float]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
MOST_OF_A_RATE = 4
RateShare = Annotated[float, Field(gt=0, le=MOST_OF_A_RATE)]
"""Of a peak rate that counts multiplications alone: scales and outputs, which count as further numbers, lift it. And of
a bandwidth: the runtime's products may read faster than what measured it."""
Copies = Annotated[float, Field(ge=0.1, le=10)]
Microseconds = Annotated[float, Field(ge=0, le=100_000)]
Kilobytes = Annotated[float, Field(ge=0, le=1_000_000)]
Percent = Annotated[float, Field(ge=0, le=100_000)]


class FormShares(Strict):
    """A share for each form of a matrix; fp16 only where a processor multiplies it."""

    fp32: RateShare
    int8: RateShare
    int4: RateShare
    int8_rows: RateShare
    fp16: RateShare | None = None


class FormCopies(Strict):
    """Memory for weights at the peak, as a multiple of their size, for each form of a matrix."""

    fp32: Copies
    int8: Copies
    int4: Copies
    int8_rows: Copies
    fp16: Copies | None = None


class FormOverheads(Strict):
    """Microseconds for each form of a matrix."""

    fp32: Microseconds = 0.0
    int8: Microseconds = 0.0
    int4: Microseconds = 0.0
    int8_rows: Microseconds = 0.0
    fp16: Microseconds = 0.0


class CacheShares(Strict):
    """A share for each precision of the key/value cache."""

    fp32: PositiveShare
    int8: PositiveShare
    fp16: PositiveShare | None = None


class PredictionError(Strict):
    """How far predictions were from measurements, in percent of the measurement, either way.

    Attributes:
        combinations: shapes x precisions x depths that were compared; none of them had been fitted.
        decode_median_percent, decode_largest_percent: of the time per token; likewise `ttft` and `memory`, None
            where nothing was compared.
        machine: what it was measured on.
    """

    combinations: int = Field(ge=1)
    decode_median_percent: Percent | None = None
    decode_largest_percent: Percent | None = None
    ttft_median_percent: Percent | None = None
    ttft_largest_percent: Percent | None = None
    memory_median_percent: Percent | None = None
    memory_largest_percent: Percent | None = None
    machine: Text
    source: Text
    date: date


class Efficiency(Strict):
    """What a runtime gets out of a processor.

    Attributes:
        bandwidth_share: of the bandwidth at the working set's size, reading weights while decoding, beside multiplying:
            the more is unpacked between two reads, the fewer reads are on their way at once. That of blocks is
            for 128 numbers in each. One number in a file stands for all forms.
        cache_share: the same, reading keys and values.
        working_set_scale: what a step takes up of the caches, as a multiple of what it reads: at which size on the
            device's curve a model of so many bytes stands.
        pass_overhead_us: time of any pass through the model beside all else, in us.
        layer_overhead_us: the same that each layer adds, everything in the caches.
        layer_touched_kb: what a layer waits for beside weights and cache (records of the runtime, code, activations,
            pages), as so many kB, read more slowly than at the best bandwidth: a large model has pushed all of it out
            of the caches by the next token. None in files from before it was told apart.
        product_overhead_us: what a product of a form takes beside its work more than a plain operator, which rounds no
            activations; none in files that were written before it was told apart.
        standard_overhead_us: what a layer of standard operators takes beside `layer_overhead_us`; by their number where
            the file does not say.
        prefill_share: of the device's peak rate for a form (fp32, or int8 for what is quantized), with many rows,
            a block's scale counted as `benchmarks.predict.model_size.SCALE_NUMBERS`, an output as `OUTPUT_NUMBERS`.
        decode_share: the same with one row, beside reading.
        attention_share: of the fp32 peak, in attention over a prompt, a score counted as `SCORE_NUMBERS`; an INT8
            cache is read back for pieces of 32 tokens and more, so that its own counts for shorter ones only.
        attention_step_share: the same for one new token.
        between_share: of the bandwidth at their size, in what lies between products while reading a prompt.
        growing_share: the same in copying a growing cache; `between_share` where the file does not say.
        weight_copies: memory for weights at the peak, as a multiple of their size in memory.
        runtime_mb: the process without weights, libraries loaded, in MB.
        cache: precision of the key/value cache where nobody says.
        error: of predictions with this set; None where it was never checked.
    """

    source: Text
    date: date
    kind: Kind
    bandwidth_share: FormShares
    working_set_scale: Copies = 1.0
    pass_overhead_us: Microseconds
    layer_overhead_us: Microseconds
    layer_touched_kb: Kilobytes = 0.0
    product_overhead_us: FormOverheads = FormOverheads()
    standard_overhead_us: Microseconds | None = None
    between_share: PositiveShare
    growing_share: RateShare | None = None
    runtime_mb: float = Field(ge=1, le=100_000)
    cache: Annotated[str, Field(pattern="^(fp32|fp16|int8)$")] = "fp32"
    cache_share: CacheShares
    attention_share: CacheShares
    attention_step_share: CacheShares
    prefill_share: FormShares
    decode_share: FormShares
    weight_copies: FormCopies
    error: PredictionError | None = None

    @field_validator("bandwidth_share", mode="before")
    @classmethod
    def _one_for_all_forms(cls, share: object) -> object:
        number = isinstance(share, int | float) and not isinstance(share, bool)
        return dict.fromkeys(FORMS, share) if number else share


def alike(share: float) -> FormShares:
    """One share for every form."""
    return FormShares(**dict.fromkeys(FORMS, share))


def longer(first: float, second: float) -> float:
    """The longer of two times that pass side by side, or a little more where they are alike."""
    return float((first**SHARPNESS + second**SHARPNESS) ** (1 / SHARPNESS))


def whole_heads(heads: int, cores: int) -> int:
    """Heads, and those in whose place a core waits: of three heads on two cores one core computes two."""
    return -(-heads // cores) * cores


def bandwidth_at(curve: Curve, working_set_bytes: float) -> float:
    """Bytes a second at a working set: between two measured sizes a power law, beyond them the nearest.

    Args:
        curve: bytes a second by bytes of the working set; not empty.
        working_set_bytes: what is read again and again.
    """
    sizes = sorted(curve)
    if working_set_bytes <= sizes[0]:
        return curve[sizes[0]]
    for small, large in pairwise(sizes):
        if working_set_bytes < large:
            place = math.log(working_set_bytes / small) / math.log(large / small)
            return float(curve[small] ** (1 - place) * curve[large] ** place)
    return curve[sizes[-1]]


# Between two machines, ONNX Runtime 1.31.1, 2 threads, 2026-11. A quiet Zen 5 with AVX512-VNNI; peaks 2,060 GOP/s and
# 510 GFLOP/s, bandwidth 50 to 81 GB/s. `small` decoded 52 MB (int4, block 128) in 1.7 ms, 100 MB (int8) in 3.05 ms and
# 389 MB (fp32) in 10.6 ms: a line of 37 GB/s and 0.32 ms over 12 layers. Reading at 65 GB/s leaves 0.58, 1.19 and
# 4.3 ms for multiplying: 377, 184 and 45 GOP/s, where products of one row by themselves reached 371 and 196 (int4 and
# int8; none was measured in fp32). From depth 32 to 512 it took 0.92 ms more with a float32 cache and 0.49 ms more
# with an int8 one: 0.57 and 0.28 of 65 GB/s.
# Rates are those of one 768 x 4,096 product: MatMulNBits at 512 rows 489 to 735 (int4) and 558 to 723 (int8)
# GOP/s, at one row 25 and 48 us with block 32 (scales counted as numbers, see `benchmarks.predict.model_size`);
# DynamicQuantizeMatMul 1,310 to 1,547 GOP/s and 57 us; MatMul in fp32 478 GFLOP/s, less what lies between products;
# for prompts outputs and scores are counted too.
# Attention over 512 tokens in pieces of 128: 6.0 GFLOP in 38 ms, and in 138 ms with an int8 cache. Of what lies
# between products half the bandwidth is an estimate.
# A Zen 4 with AVX512-VNNI, noisy: `benchmarks.studies.prediction_error` fitted, of peaks of 947 GOP/s and 237
# GFLOP/s (128 and
# 32 a cycle and core at 3.7 GHz), 0.88, 0.49, 0.45 and 0.75 for products of many rows (fp32, int8, int4, int8 rows),
# 1.06, 0.29, 0.21 and 0.10 of one row, 0.77 for scores of prompts, 0.12 and 0.10 for those of one row; 19 us a pass
# and 13 a layer; other runs there differ by up to a fifth. The set lies between both machines, chosen by hand; one row
# by the geometric means of 371 and 200, 190 and 273, 110 and 90 GOP/s as shares; the bandwidth is taken whole.
# Memory is that of `export.runtime.decoder` on 2026-11-21: 70 MB before the weights, and after loading `small` 505
# MB (fp32),
# 568 (fp16), 227 (int8, block 32), 184 and 137 (int4, blocks of 32 and 128), where the files have 390, 195, 110, 68
# and 52 MB: prepacked copies stand beside the weights. INT8 rows are taken to need as many as blocks.
CPU = Efficiency(
    source="ONNX Runtime 1.31.1 on a Zen 5 server, gathered by hand, and on a Zen 4 one, fitted: their middle",
    date=date(2026, 11, 22),
    kind="estimated",
    bandwidth_share=alike(1.0),
    pass_overhead_us=10.0,
    layer_overhead_us=18.0,
    between_share=0.5,
    runtime_mb=69.0,
    cache_share=CacheShares(fp32=0.75, int8=0.45),
    attention_share=CacheShares(fp32=0.62, int8=0.16),
    attention_step_share=CacheShares(fp32=0.2, int8=0.2),
    prefill_share=FormShares(fp32=0.87, int8=0.47, int4=0.42, int8_rows=0.73),
    decode_share=FormShares(fp32=0.3, int8=0.16, int4=0.195, int8_rows=0.072),
    weight_copies=FormCopies(fp32=1.15, int8=1.45, int4=1.5, int8_rows=1.45),
    error=PredictionError(
        combinations=60,
        decode_median_percent=26.7,
        decode_largest_percent=84.5,
        ttft_median_percent=15.7,
        ttft_largest_percent=39.0,
        memory_median_percent=3.0,
        memory_largest_percent=12.2,
        machine="AMD EPYC (Zen 4) with AVX512-VNNI, 2 threads, its peaks by its clock, bandwidths calibrated",
        source="`benchmarks.studies.prediction_error`, 12 rounds; half of the set comes from this very machine",
        date=date(2026, 11, 22),
    ),
)
# An 8B model at Q4 (4.9 GB, 32 layers) decodes 42, 74 and 87 tokens/s on RTX 3060, 3080 and 3090, a 3B one
# (2.0 GB, 28 layers) 123 on RTX 3060: 0.7 of the bandwidth and 50 us a layer meet all four within 22%.
# Weights of 4 and 8 bits are widened and multiplied in fp16, at half the int8 peak. Shares of the matmul rates
# and the memory of a CUDA context are estimates.
_HALF_OF_INT8 = FormShares(fp32=0.5, fp16=0.2, int8=0.2, int4=0.2, int8_rows=0.2)
GPU = Efficiency(
    source="Published decoding rates of RTX 3060, 3080 and 3090; matmul shares and memory are guesses",
    date=date(2026, 11, 21),
    kind="estimated",
    bandwidth_share=alike(0.70),
    pass_overhead_us=0.0,
    layer_overhead_us=50.0,
    between_share=0.5,
    runtime_mb=400.0,
    cache="fp16",
    cache_share=CacheShares(fp32=0.70, fp16=0.70, int8=0.70),
    attention_share=CacheShares(fp32=0.31, fp16=0.31, int8=0.31),
    attention_step_share=CacheShares(fp32=0.5, fp16=0.5, int8=0.5),
    prefill_share=_HALF_OF_INT8,
    decode_share=_HALF_OF_INT8,
    weight_copies=FormCopies(fp32=1.0, fp16=1.0, int8=1.0, int4=1.0, int8_rows=1.0),
)
EFFICIENCIES = {"cpu": CPU, "gpu": GPU}
