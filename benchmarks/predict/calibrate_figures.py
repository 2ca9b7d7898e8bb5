"""From the times of `calibrate`'s probes to rates and an efficiency set. Plain arithmetic, nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

from benchmarks.predict.coefficients import (
    CPU_CACHES,
    CPU_FORMS,
    MOST_OF_A_RATE,
    SHARPNESS,
    CacheShares,
    Curve,
    Efficiency,
    FormCopies,
    FormOverheads,
    FormShares,
    bandwidth_at,
    whole_heads,
)
from benchmarks.predict.latency import PRODUCTS_A_LAYER, STANDARD_OPERATORS
from benchmarks.predict.model_size import OUTPUT_NUMBERS, SCALE_NUMBERS, SCORE_NUMBERS

BLOCK = 128  # numbers that share a scale
PROMPT_ROWS = (128, 512)
PRODUCT = (4_096, 768)  # rows and columns of the matrix that prompts are multiplied by
STEP_WIDTH, STEP_COUNTS = 768, (2, 8)
EMPTY_COUNTS = (2, 32)
EMPTY_WIDTH: Mapping[str, int] = {"fp32": 32, "int8": BLOCK, "int4": BLOCK, "int8_rows": BLOCK}  # next to no work
READS = (
    (384, 2), (384, 4), (768, 2), (768, 3), (768, 4), (768, 5), (768, 6), (768, 7), (768, 8), (768, 9), (768, 10),
    (768, 12), (768, 14), (768, 17), (768, 21), (768, 28), (768, 41), (768, 57), (768, 113),
)  # fmt: skip
"""Widths and numbers of float32 matrices that are read one after the other: 1.2 to 267 MB, close together where
third-level caches end."""
FAR_BYTES = 100e6  # of matrices of each packed form: beyond most caches
FAR_FORMS = tuple(form for form in CPU_FORMS if form != "fp32")
LEAST_SLOWER = 1.2  # reading so much, for the two to tell what reading costs and what multiplying
HEADS, KV_HEADS, HEAD_DIM = 12, (12, 2), 64
PROMPT_NEW, PROMPT_END, DEEP = 128, 512, 1_900
GATED = (128, 2_048, 8)  # rows, width, times
BYTES: Mapping[str, float] = {"fp32": 4.0, "int8": 1.03, "int4": 0.53, "int8_rows": 1.0}  # a number, with its scale
LEAST_OF_A_STEP = 0.1  # for multiplying, whatever noise leaves of it
LAYERS = ((384, 4), (768, 41))
"""Widths and numbers of layers with one float32 product each, those of `READS`: in the caches, and beyond most."""
LAYER_HEAD_DIM, LAYER_KV_HEADS, LAYER_DEPTH = 64, 2, 8  # next to nothing to read and no scores

Seconds = Mapping[str, float]


def operator_seconds(seconds: Seconds, form: str = "fp32") -> tuple[float, float]:
    """What a product with next to no work takes, and what a run takes besides: slope and start of a line.

    That of float32 stands for any operator; those of packed matrices round what they multiply first.
    """
    few, many = EMPTY_COUNTS
    slope = (seconds[f"empty.{form}.{many}"] - seconds[f"empty.{form}.{few}"]) / (many - few)
    slope = max(slope, 0.0)
    return slope, max(seconds[f"empty.{form}.{few}"] - few * slope, 0.0)


def rates(seconds: Seconds) -> dict[str, dict[int, float]]:
    """Operations a second of products by form and by rows: 1, 128 and 512.

    That of one row is the slope between a short and a longer chain, without what any operator takes.
    """
    few, many = STEP_COUNTS
    found: dict[str, dict[int, float]] = {}
    for form in CPU_FORMS:
        empty, _ = operator_seconds(seconds, form)
        whole = (seconds[f"step.{form}.{many}"] - seconds[f"step.{form}.{few}"]) / (many - few)
        # A product takes at least a tenth of the time that was seen: what is left after noise is no rate.
        step = max(whole - empty, LEAST_OF_A_STEP * seconds[f"step.{form}.{many}"] / many)
        found[form] = {1: 2 * STEP_WIDTH**2 / step}
        for rows in PROMPT_ROWS:
            found[form][rows] = 2 * rows * PRODUCT[0] * PRODUCT[1] / seconds[f"product.{form}.{rows}"]
    return found


def read_bytes(form: str, width: int, count: int) -> float:
    """Of so many square matrices."""
    return BYTES[form] * count * width**2


def far_count(form: str) -> int:
    """Matrices of `STEP_WIDTH` that take `FAR_BYTES`."""
    return round(FAR_BYTES / read_bytes(form, STEP_WIDTH, 1))


def read_curve(seconds: Seconds) -> dict[float, float]:
    """Bytes a second at which float32 products of one row read their matrices, by bytes of the working set.

    Of all forms they do the least with a byte. The caches end where they end for products, whose pages are small and
    which go through many matrices: numpy's sums of one array fade later and more slowly.

    Args:
        seconds: of one run of each timed graph; of `read.*` those that memory had room for.
    """
    found = {}
    for width, count in READS:
        if f"read.{width}.{count}" in seconds:
            size = read_bytes("fp32", width, count)
            found[size] = size / _chain_seconds(seconds, "fp32", f"read.{width}.{count}", count)
    return found


def _chain_seconds(seconds: Seconds, form: str, name: str, count: int) -> float:
    """Of a chain's products, without what operators and a run take; at least a tenth, whatever noise leaves."""
    operator, run = operator_seconds(seconds, form)
    return max(seconds[name] - count * operator - run, LEAST_OF_A_STEP * seconds[name])


def peaks(by_form: Mapping[str, Mapping[int, float]]) -> tuple[float, float]:
    """The highest rate of products of 8-bit numbers, and of float32, in operations a second."""
    quantized = max(max(rates.values()) for form, rates in by_form.items() if form != "fp32")
    return quantized, max(by_form["fp32"].values())


def derive(
    seconds: Seconds,
    footprints: Mapping[str, tuple[int, int]],
    curve: Curve,
    source: str,
    day: date,
    cores: int,
) -> Efficiency:
    """An efficiency set from probes alone.

    Args:
        seconds: of one run of each timed graph, by the names of `benchmarks.predict.calibrate.probes`.
        footprints: peak memory and weight bytes by form, and `none`.
        curve: bytes a second by bytes of the working set, see `read_curve`.
        source: how the set came about.
        day: when.
        cores: that the probes ran on.

    Raises:
        pydantic.ValidationError: a figure that cannot be, such as weights that take no memory.
    """
    by_form = rates(seconds)
    integer, real = peaks(by_form)
    operator, run = operator_seconds(seconds)
    peak = {form: real if form == "fp32" else integer for form in CPU_FORMS}
    rows, width, times = GATED
    between = _share(5 * 4 * rows * width * times, seconds["between"], bandwidth_at(curve, 3 * 4 * rows * width))
    steps = {form: _step(seconds, form, by_form[form][1], curve) for form in CPU_FORMS}
    beside, touched = _layer(seconds, curve)
    layer = _digits(1e6 * (beside + (PRODUCTS_A_LAYER + 1) * operator))  # gate and up are taken apart too
    reading = {cache: _attention_step(seconds, cache, curve, real, operator, cores) for cache in CPU_CACHES}
    prompt = 4 * PROMPT_NEW * PROMPT_END * whole_heads(HEADS, cores) * (HEAD_DIM + SCORE_NUMBERS)
    nothing = footprints["none"][0]
    return Efficiency(
        source=source,
        date=day,
        kind="measured",
        bandwidth_share=FormShares(**{form: share for form, (share, _) in steps.items()}),
        pass_overhead_us=_digits(1e6 * run),
        layer_overhead_us=layer,
        layer_touched_kb=_digits(touched / 1e3),
        standard_overhead_us=_digits((STANDARD_OPERATORS - 1) * layer),
        product_overhead_us=FormOverheads(
            **{form: _digits(1e6 * max(0.0, operator_seconds(seconds, form)[0] - operator)) for form in CPU_FORMS}
        ),
        between_share=between,
        growing_share=between,
        runtime_mb=_digits(nothing / 1e6),
        cache_share=CacheShares(**{cache: shares[0] for cache, shares in reading.items()}),
        attention_step_share=CacheShares(**{cache: shares[1] for cache, shares in reading.items()}),
        attention_share=CacheShares(
            **{cache: _share(prompt, seconds[f"prompt.{cache}"] - operator, real) for cache in CPU_CACHES}
        ),
        # Prompts are read in pieces of 128 tokens.
        prefill_share=FormShares(
            **{
                form: _rate_share(form, by_form[form][128], peak, OUTPUT_NUMBERS[form] / PRODUCT[1])
                for form in CPU_FORMS
            }
        ),
        decode_share=FormShares(**{form: _rate_share(form, rate, peak) for form, (_, rate) in steps.items()}),
        weight_copies=FormCopies(
            **{form: _digits((footprints[form][0] - nothing) / footprints[form][1]) for form in CPU_FORMS}
        ),
    )


def _layer(seconds: Seconds, curve: Curve) -> tuple[float, float]:
    """What a layer takes beside its products: seconds in the caches, and bytes that it waits for beyond them.

    Of two graphs with equal layers one leaves everything in the caches, and the other's matrices push all of it out.
    Where memory has room for the first one only, nothing is known of the bytes.
    """
    found = []
    for width, count in LAYERS:
        name = f"{width}.{count}"
        if f"layers.{name}" in seconds and f"read.{name}" in seconds:
            beside = max(seconds[f"layers.{name}"] - seconds[f"read.{name}"], 0.0) / count
            found.append((beside, 1 / bandwidth_at(curve, read_bytes("fp32", width, count))))
    (near, near_pace), (far, far_pace) = found[0], found[-1]
    if far_pace < LEAST_SLOWER * near_pace:
        return near, 0.0
    return near, max(far - near, 0.0) / (far_pace - near_pace)


def _step(seconds: Seconds, form: str, rate: float, curve: Curve) -> tuple[float, float]:
    """One row by a form's matrices: the share of the bandwidth that they are read at, and the rate beside it.

    Matrices in a cache and ones beyond it are multiplied alike, so what the latter take longer is reading. Where both
    are read as fast, or none was read beyond, reading is taken to reach the bandwidth, which is float32's.

    Args:
        seconds: of one run of each timed graph.
        form: the matrices'.
        rate: operations a second that hold reading and multiplying, of the chain in a cache.
        curve: `read_curve`.
    """
    size, operations, share = read_bytes(form, STEP_WIDTH, 1), 2 * STEP_WIDTH**2, 1.0
    near, count = operations / rate, far_count(form)
    near_read, far_read = (size / bandwidth_at(curve, each * size) for each in (STEP_COUNTS[1], count))
    if f"far.{form}" in seconds and far_read > LEAST_SLOWER * near_read:
        far = _chain_seconds(seconds, form, f"far.{form}", count) / count
        most = near / near_read  # all of the time in the cache is reading
        share = 1 / min(most, max((far - near) / (far_read - near_read), 1 / MOST_OF_A_RATE))
    share = min(_digits(share), float(MOST_OF_A_RATE))
    return share, operations / max(near - near_read / share, LEAST_OF_A_STEP * near)


def _attention_step(
    seconds: Seconds, cache: str, curve: Curve, real: float, operator: float, cores: int
) -> tuple[float, float]:
    """Shares of bandwidth and of the fp32 peak, from two graphs with equal scores and unequal keys and values.

    Each takes `longer(read, scores)`; what one reads takes a known part of the other's reading.
    """
    size = {"fp32": 4, "int8": 1}[cache]
    most, least = (2 * DEEP * heads * HEAD_DIM * size for heads in KV_HEADS)
    more, fewer = (max(seconds[f"attention.{cache}.{heads}"] - operator, 0.0) ** SHARPNESS for heads in KV_HEADS)
    part = least * bandwidth_at(curve, most) / (most * bandwidth_at(curve, least))
    read = max(more - fewer, 0.0) / (1 - part**SHARPNESS)
    read_share = _share(most, read ** (1 / SHARPNESS), bandwidth_at(curve, most))
    scores = max(more - read, 0.0) ** (1 / SHARPNESS)
    return read_share, _share(4 * DEEP * whole_heads(HEADS, cores) * HEAD_DIM, scores, real)


def _rate_share(form: str, rate: float, peak: Mapping[str, float], outputs: float = 0.0) -> float:
    """Of a peak, scales counted as further numbers, and so many more for each of them."""
    scales = SCALE_NUMBERS / BLOCK if form in ("int8", "int4") else 0.0
    return min(float(MOST_OF_A_RATE), _digits(rate * (1 + scales + outputs) / peak[form]))


def _share(amount: float, seconds: float, peak: float) -> float:
    """amount / seconds as a share of a peak; all of it where the time is too short to be seen."""
    return 1.0 if seconds <= amount / peak else _digits(amount / seconds / peak)


def _digits(value: float) -> float:
    """Four digits: measurements have no more."""
    return float(f"{value:.4g}")
