"""Speed and memory of a model on a device that is not at hand: a roofline from the device file's figures.

    time per token    = weights + cache + overhead; with a growing cache its copies too
      weights         = sum over forms of bytes / (bandwidth * share) + 2 numbers / (peak * share)
      cache           = bytes / (bandwidth * share) or 4 layers width depth / (fp32 peak * share)
      overhead        = a pass's own + layers * (a layer's own + what it touches * (1 / bandwidth - 1 / the best))
                      + products * what rounding activations takes for each
    time to a token   = sum over pieces of the prompt of products, or weights once + attention
                        + what lies between products + overhead; and the head for the last token
    peak memory       = runtime + copies * weights + cache + activations of one piece of the prompt

`a or b` is the longer one where they differ much, and 1.41 times either where they are equal: the two overlap in
part. Weights for one row do not: each number is used once, so that reading, unpacking and multiplying follow each
other in the same registers. A CPU's cores share attention by whole heads, so `width` counts the busiest one's for all.
The peaks and bandwidths are the device file's, the shares `benchmarks.predict.coefficients`'s or the file's own. The
bandwidth is that of a working set as large as what one token reads, where the file knows it. The form is the roofline
of Williams, Waterman and Patterson (CACM 52(4), 2009). `benchmarks.studies.prediction_error` fits shares and
measures errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.devices.schema import Device
from benchmarks.predict.coefficients import (
    EFFICIENCIES,
    CacheShares,
    Efficiency,
    FormCopies,
    FormOverheads,
    FormShares,
    alike,
    bandwidth_at,
    longer,
    whole_heads,
)
from benchmarks.predict.model_size import (
    OUTPUT_NUMBERS,
    SCORE_NUMBERS,
    Part,
    Stored,
    cache_bytes,
    file_bytes,
    sizes,
    slower_reading,
)
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

__all__ = [
    "EFFICIENCIES",
    "LONG_PIECE_TOKENS",
    "PREFILL_CHUNK_TOKENS",
    "Prediction",
    "Stored",
    "depths_that_fit",
    "efficiency_of",
    "file_bytes",
    "peak_memory_bytes",
    "predict",
    "predict_figures",
    "reliability",
    "tpot_ms",
    "ttft_ms",
]

PROMPT_TOKENS = 512
DEPTHS = (32, 512, 1024)
DEEPEST_LEAVES = 148  # the deepest measurement leaves room for its own new tokens
PREFILL_CHUNK_TOKENS = 128  # pieces in which `export.runtime.decoder` reads a prompt
P95_OVER_P50 = 1.25
"""Slow steps beside usual ones: an estimate. The shipped limits allow 1.3 to 1.7."""
GROWING_MOVES = 5
"""Times that a growing cache's bytes move in a step before attention reads them: copied into the graph's input (2),
joined with what is new (2), half of it transposed (1). See `export.runtime.kv_cache.GrowingCache` and
`export.graph.standard_layer`."""
PRODUCTS_A_LAYER = 4  # queries, keys and values in one, outputs, gate and up in one, down
STANDARD_OPERATORS = 6
"""Operators of a layer of `export.graph.standard_layer`, 59 at work, beside the 10 of `export.graph.ort_layer`."""
LONG_PIECE_TOKENS = (
    32  # `export.graph.int8_cache_prefill.LONG_PIECE`: from here on an INT8 cache is read back for attention
)
READ_BACK_BYTES = 9
"""Moved for each of a layer's keys and values then: a byte read, four written, four read by attention."""
GROWING_COPIES = 3
"""Buffers of a growing cache: the kept one, past and present."""


@dataclass(frozen=True)
class Prediction:
    """Figures of one precision at one depth. `ttft_ms` is for a prompt of `prompt_tokens`."""

    precision: str
    depth: int
    prompt_tokens: int
    ttft_ms: float
    tpot_ms: float
    peak_rss_bytes: int


def depths_that_fit(config: ModelConfig) -> list[int]:
    """Depths to predict at: 32, 512, 1,024 and the context less 148, those that the context has room for."""
    deepest = config.max_position_embeddings - DEEPEST_LEAVES
    return sorted({depth for depth in (*DEPTHS, deepest) if 1 <= depth <= config.max_position_embeddings})


def predict(
    config: ModelConfig, device: Device, stored: Stored, depths: Sequence[int] | None = None
) -> list[Prediction]:
    """Time to first token, time per token and peak memory of one stored form of a model.

    Args:
        config: the model.
        device: whose figures are used.
        stored: precision and layout of the weights.
        depths: tokens already in the cache; `depths_that_fit` where not given.

    Raises:
        UsageError: an unknown precision, block size, cache, or a depth beyond the context.
    """
    prompt = min(PROMPT_TOKENS, config.max_position_embeddings)
    first = ttft_ms(config, device, stored, prompt)
    rows = []
    for depth in depths_that_fit(config) if depths is None else depths:
        if not 0 <= depth <= config.max_position_embeddings:
            raise UsageError(f"depth {depth} is not in the context of {config.max_position_embeddings} tokens")
        step = tpot_ms(config, device, stored, depth)
        memory = peak_memory_bytes(config, device, stored, depth)
        rows.append(Prediction(stored.precision, depth, prompt, first, step, memory))
    return rows


def predict_figures(config: ModelConfig, device: Device, stored: Stored) -> dict[str, float]:
    """The limits of a budget that can be predicted, by the limit's name (quality cannot).

    Where the context is too short for a limit's tokens, what it has room for counts, as in a measurement.
    """
    context = config.max_position_embeddings
    deepest = max(1, context - DEEPEST_LEAVES)
    step = tpot_ms(config, device, stored, min(device.limits.tpot_depth_tokens, deepest))
    peak = peak_memory_bytes(config, device, stored, min(device.limits.memory_context_tokens, context))
    return {
        "file_mb": file_bytes(config, stored) / 1e6,
        "peak_memory_mb": peak / 1e6,
        "ttft_ms": ttft_ms(config, device, stored, min(device.limits.ttft_prompt_tokens, context)),
        "tpot_p50_ms": step,
        "tpot_p95_ms": step * P95_OVER_P50,
    }


def efficiency_of(device: Device) -> Efficiency:
    """The device file's own set, or the one for its processor with what the file replaces of it."""
    if device.efficiency is not None:
        return device.efficiency
    default, hardware = EFFICIENCIES[device.processor], device.hardware
    changes: dict[str, object] = {}
    if hardware.bandwidth_share is not None:
        share = hardware.bandwidth_share.value
        changes["bandwidth_share"], scale = alike(share), share / default.bandwidth_share.fp32
        cache = {name: min(1.0, value * scale) for name, value in default.cache_share if value is not None}
        changes["cache_share"] = CacheShares(**cache)
    if hardware.layer_overhead is not None:
        changes["layer_overhead_us"] = hardware.layer_overhead.value
    return default.model_copy(update=changes)


def reliability(device: Device) -> dict[str, Any]:
    """What predictions for a device are made with, and how far such predictions were off where that was measured.

    Returns:
        `source`, `date` and `kind` of the efficiency set, `own`, whether it is the device's, and `error`, a
        `PredictionError` as a dict or None.
    """
    efficiency = efficiency_of(device)
    fields = efficiency.model_dump(mode="json", include={"source", "date", "kind", "error"})
    return {**fields, "own": device.efficiency is not None}


def tpot_ms(config: ModelConfig, device: Device, stored: Stored, depth: int, read_between: float = 0.0) -> float:
    """Time of one further token after `depth` others, in ms; `read_between` bytes were read since the one before."""
    efficiency, parts = efficiency_of(device), sizes(config, stored)
    cache = _cache(device, efficiency, stored)
    cached = depth * cache_bytes(config, cache)
    working_set = sum(_resident(device, part) for part in parts.decoding) + cached + read_between
    weights = sum(_step_s(device, efficiency, stored, part, working_set) for part in parts.decoding)
    rate = _bandwidth(device, working_set) * _of(efficiency.cache_share, device, cache)
    copied = _copying_s(device, efficiency, cached, working_set) if stored.standard else 0.0
    operations = 4 * config.num_hidden_layers * _heads(config, device) * config.head_dim * depth
    scores = operations / (_peak(device, "fp32") * _of(efficiency.attention_step_share, device, cache))
    attention = longer(cached / rate, scores)
    overhead = _overhead_ms(config, device, stored, [part.form for part in parts.decoding], working_set)
    return 1000 * (weights + copied + attention) + overhead


def _copying_s(device: Device, efficiency: Efficiency, cached: float, working_set: float) -> float:
    """Seconds that a step with a growing cache copies it: no buffer stays where the last step had it."""
    touched = working_set + (GROWING_COPIES - 1) * cached
    share = efficiency.between_share if efficiency.growing_share is None else efficiency.growing_share
    return GROWING_MOVES * cached / (_bandwidth(device, touched) * share)


def ttft_ms(config: ModelConfig, device: Device, stored: Stored, prompt: int) -> float:
    """Time to read `prompt` tokens and make the first new one, in ms, with logits for the last one only."""
    parts = sizes(config, stored)
    if parts.prompt is not None and prompt > 1:
        # All but the last token go through the second graph, of whose last layer only keys and values are made. Its
        # weights are in the caches then, in the place of those that read the last one.
        layers = config.num_hidden_layers - 1
        last = tpot_ms(config, device, stored, prompt - 1, read_between=_resident(device, parts.prompt))
        return _reading_ms(config, device, stored, parts.prompt, layers, prompt - 1) + last
    working_set = sum(_resident(device, part) for part in parts.decoding)
    head = _step_s(device, efficiency_of(device), stored, parts.head, working_set)
    return _reading_ms(config, device, stored, parts.body, config.num_hidden_layers, prompt) + 1000 * head


def _reading_ms(config: ModelConfig, device: Device, stored: Stored, body: Part, layers: int, tokens: int) -> float:
    """Time of reading a prompt through so many layers with the matrices of `body`, piece by piece, without a head."""
    efficiency, seconds = efficiency_of(device), 0.0
    rate = _peak(device, body.form) * _of(efficiency.prefill_share, device, body.form)
    weights = _resident(device, body)
    once = weights / (_bandwidth(device, weights) * _of(efficiency.bandwidth_share, device, body.form))
    between = 4 * layers * _numbers_between(config)
    peak, cache = _peak(device, "fp32"), _cache(device, efficiency, stored)
    numbers = body.numbers + OUTPUT_NUMBERS[body.form] * body.outputs
    widths = _heads(config, device) * (config.head_dim + SCORE_NUMBERS)
    for new, end in _pieces(tokens):
        seconds += longer(2 * numbers * new / rate, once)
        # Scores of each new token with all so far, masked ones too, and their product with the values: 2 T S each.
        read_back = cache == "int8" and device.processor == "cpu" and new >= LONG_PIECE_TOKENS
        share = _of(efficiency.attention_share, device, "fp32" if read_back else cache)
        seconds += 4 * layers * widths * new * end / (peak * share)
        if read_back:
            widened = READ_BACK_BYTES * 2 * config.key_value_size * end
            seconds += layers * widened / (_bandwidth(device, widened) * efficiency.between_share)
        a_layers = 4 * new * _numbers_between(config)
        seconds += between * new / (_bandwidth(device, a_layers) * efficiency.between_share)
        seconds += _overhead_ms(config, device, stored, [body.form], weights) / 1000
    return 1000 * seconds


def peak_memory_bytes(config: ModelConfig, device: Device, stored: Stored, depth: int) -> int:
    """Peak memory of the process (on a GPU: of the card) with `depth` tokens in the cache."""
    efficiency, parts = efficiency_of(device), sizes(config, stored)
    weights = sum(
        _resident(device, part) * _of(efficiency.weight_copies, device, part.form)
        for part in (*parts.decoding, parts.prompt)
        if part is not None
    )
    weights += parts.rest + (0 if parts.looked_up is None else _resident(device, parts.looked_up))
    cache = depth * cache_bytes(config, _cache(device, efficiency, stored))
    # A layer's residual stream, norms, q, k, v, gate, up and their product, held twice: inputs and outputs.
    width = 4 * config.hidden_size + config.query_size + 2 * config.key_value_size + 3 * config.intermediate_size
    new = min(depth, PREFILL_CHUNK_TOKENS)
    scores = 4 * config.num_attention_heads * new * depth
    activations = 2 * 4 * width * new + 4 * config.vocab_size
    if stored.standard:
        cache, scores = GROWING_COPIES * cache, 3 * scores  # before, with and after the mask
    elif _cache(device, efficiency, stored) == "int8" and device.processor == "cpu" and new >= LONG_PIECE_TOKENS:
        activations += 4 * 2 * config.key_value_size * depth  # a layer's, read back
    return round(1e6 * efficiency.runtime_mb + weights + cache + scores + activations)


def _pieces(tokens: int) -> Iterator[tuple[int, int]]:
    """Tokens of each piece of a prompt, and of all up to its end."""
    for start in range(0, tokens, PREFILL_CHUNK_TOKENS):
        end = min(start + PREFILL_CHUNK_TOKENS, tokens)
        yield end - start, end


def _numbers_between(config: ModelConfig) -> int:
    """Numbers that a token makes one layer's operators between products read and write.

    Two norms with their sums read two and write two; of packed q, k, v a rotated copy; of gate and up, which are taken
    apart, silu and the product, 4 + 2 + 3 times the inner width.
    """
    attention = config.query_size + 2 * config.key_value_size
    return 8 * config.hidden_size + 2 * attention + 9 * config.intermediate_size


def _step_s(device: Device, efficiency: Efficiency, stored: Stored, part: Part, working_set: float) -> float:
    """Seconds of multiplying one row by a part's matrices: their bytes and their numbers."""
    slower = 1.0
    if device.processor == "cpu" and part.form in ("int8", "int4"):
        slower = slower_reading(part.form, stored.block_size)
    reading = _bandwidth(device, working_set) * _of(efficiency.bandwidth_share, device, part.form)
    rate = _peak(device, part.form) * _of(efficiency.decode_share, device, part.form)
    return slower * _resident(device, part) / reading + 2 * part.numbers / rate


def _heads(config: ModelConfig, device: Device) -> int:
    """Query heads, on a CPU those that its cores wait for counted too."""
    cores = round(device.hardware.cores.value) if device.processor == "cpu" else 1
    return whole_heads(config.num_attention_heads, cores)


def _resident(device: Device, part: Part) -> float:
    """Bytes in memory. On a CPU half-precision weights are widened to float32 when loaded."""
    return 2 * part.bytes if part.form == "fp16" and device.processor == "cpu" else part.bytes


def _cache(device: Device, efficiency: Efficiency, stored: Stored) -> str:
    return stored.cache or efficiency.cache


def _of(table: FormShares | FormCopies | FormOverheads | CacheShares, device: Device, name: str) -> float:
    """A form's share; on a CPU half precision is float32 by the time it is used."""
    found = getattr(table, "fp32" if name == "fp16" and device.processor == "cpu" else name)
    if found is None:
        raise UsageError(f"{device.name}: its efficiency has no figure for {name}; add one to the device file")
    return float(found)


def _bandwidth(device: Device, working_set: float) -> float:
    """Bytes a second at which so many bytes are read again and again."""
    hardware = device.hardware
    curve = {1e6 * figure.working_set_mb: 1e9 * figure.value for figure in hardware.bandwidth_by_working_set}
    if not curve:
        return 1e9 * hardware.memory_bandwidth.value
    return bandwidth_at(curve, working_set * efficiency_of(device).working_set_scale)


def _slower(device: Device, working_set: float) -> float:
    """Seconds a byte that a working set is read more slowly than one that fits the caches."""
    figures = device.hardware.bandwidth_by_working_set
    rate = _bandwidth(device, working_set)
    return 1 / rate - 1 / max([rate, *(1e9 * figure.value for figure in figures)])


def _overhead_ms(
    config: ModelConfig, device: Device, stored: Stored, forms: Sequence[str], working_set: float
) -> float:
    """Of a pass with layers of the first form and, where there is a second, a head of that."""
    efficiency = efficiency_of(device)
    a_layer = efficiency.layer_overhead_us
    touched_us = 1e9 * efficiency.layer_touched_kb * _slower(device, working_set)
    if stored.standard:
        more = efficiency.standard_overhead_us
        a_layer += (STANDARD_OPERATORS - 1) * a_layer if more is None else more
    counts = (PRODUCTS_A_LAYER * config.num_hidden_layers, 1)
    products = sum(
        count * _of(efficiency.product_overhead_us, device, form) for count, form in zip(counts, forms, strict=False)
    )
    return (efficiency.pass_overhead_us + config.num_hidden_layers * (a_layer + touched_us) + products) / 1000


def _peak(device: Device, form: str) -> float:
    """Peak rate that a form's products run against, in operations a second."""
    widened = form == "fp16" and device.processor == "cpu"
    rate = device.hardware.fp32_matmul_rate if form == "fp32" or widened else device.hardware.int8_matmul_rate
    return rate.value * 1e9
