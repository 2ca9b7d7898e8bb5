"""Speed and memory of a model on a device: a roofline with plain coefficients.

    time per token = sum over formats of weight bytes / weights rate
                     + cache bytes / cache rate + attention MACs / attention rate
                     + a pass's time + layers * a layer's time, which is another one in the kernels
    first token    = sum over pieces of 128 tokens of (MACs / prefill rate + attention MACs / prefill attention rate
                     + activation bytes / elementwise rate + a pass's time + layers * a layer's time)
                     + head bytes / weights rate
                     + tokens * bytes of matrices that go token by token / weights rate
    peak memory    = the runtime's + sum over formats of weight bytes * copies + cache + activations of one piece

Each formula is a sum of terms: amounts by the name of the coefficient that prices them, so that `calibrate` fits the
same formulas by least squares. The coefficients are `benchmarks.devices.schema.Coefficients`. The form is the roofline
of Williams, Waterman and Patterson (CACM 52(4), 2009), its parts added instead of overlapped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import Predicted, depths_that_fit, limit_lengths
from benchmarks.predict.coefficients import costs, reliability, resolve
from benchmarks.predict.model_size import (
    ModelFormat,
    active_share,
    file_bytes,
    layer_activations,
    mixing_macs,
    sizes,
    stepwise_share,
    stored_format,
)
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.size import kv_cache_bytes_per_token, state_bytes

PROMPT_TOKENS, DEPTHS = 512, (32, 512, 1_024)
PREFILL_CHUNK_TOKENS = 128  # pieces in which `export.runtime.decoder` reads a prompt
P95_OVER_P50 = 1.25  # slow steps beside median ones: an estimate. The shipped limits allow 1.3 to 1.7
GROWING_COPIES = 3  # buffers of a growing cache (standard operators): the kept one, past and present
KNOWN_BYTES = "bytes"  # a term of memory that needs no coefficient

Terms = Mapping[str, float]


def tpot_terms(config: ModelConfig, stored: ModelFormat, depth: int) -> Terms:
    """Of the time per token after `depth` others, in ms."""
    parts, cached = sizes(config, stored), _cached_bytes(config, stored, depth)
    terms = _pass_terms(config, stored, cached, stored.in_kernels)
    for group, share in ((parts.layers, active_share(config)), (parts.head, 1.0)):
        terms[f"weights_gb_per_s.{group.weight_format}"] += share * group.bytes
    terms[f"cache_gb_per_s.{stored.cache}"] += cached
    terms["attention_gmac_per_s"] += mixing_macs(config, depth)
    return terms


def ttft_terms(config: ModelConfig, stored: ModelFormat, prompt: int) -> Terms:
    """Of the time to read `prompt` tokens and make the first new one, in ms."""
    parts, terms = sizes(config, stored), defaultdict[str, float](float)
    group = parts.layers
    terms[f"weights_gb_per_s.{parts.head.weight_format}"] += parts.head.bytes
    alone = stepwise_share(config)
    for new, end in pieces(prompt):
        terms[f"prefill_gmac_per_s.{group.weight_format}"] += new * (active_share(config) - alone) * group.macs
        if alone:
            terms[f"weights_gb_per_s.{group.weight_format}"] += new * alone * group.bytes
        # Scores of each new token with all so far, masked ones too, and their product with the values.
        terms["prefill_attention_gmac_per_s"] += new * mixing_macs(config, end)
        terms["elementwise_gb_per_s"] += 4 * new * config.num_hidden_layers * layer_activations(config)
        _add(terms, _pass_terms(config, stored, _cached_bytes(config, stored, end), stored.in_kernels))
    return terms


def memory_terms(config: ModelConfig, stored: ModelFormat, depth: int) -> Terms:
    """Of the process's peak memory (on a GPU: the card's) with `depth` tokens in the cache, in bytes."""
    parts, cached = sizes(config, stored), _cached_bytes(config, stored, depth)
    terms = defaultdict[str, float](float, runtime_mb=1)
    for group in (parts.layers, parts.head):
        terms[f"weight_copies.{group.weight_format}"] += group.bytes
    activations = 4 * min(depth, PREFILL_CHUNK_TOKENS) * layer_activations(config) + 4 * config.vocab_size
    cached *= GROWING_COPIES if stored.standard else 1
    terms[KNOWN_BYTES] = parts.rest + parts.embedding + cached + activations
    return terms


def _cached_bytes(config: ModelConfig, stored: ModelFormat, depth: int) -> int:
    """What is read of `depth` tokens, and of states whatever the depth."""
    return depth * kv_cache_bytes_per_token(config)[stored.cache] + state_bytes(config)[stored.cache]


def _pass_terms(config: ModelConfig, stored: ModelFormat, cached: float, in_kernels: bool) -> defaultdict[str, float]:
    """Of any pass through the model; standard operators have more of them, and copy their growing cache."""
    layer = "kernel_layer_us" if in_kernels else "layer_us"
    terms = defaultdict[str, float](float, {"pass_us": 1, layer: config.num_hidden_layers})
    if stored.standard:
        terms |= {"standard_layer_us": config.num_hidden_layers, "elementwise_gb_per_s": cached}
    return terms


def _add(terms: defaultdict[str, float], more: Terms) -> None:
    for name, amount in more.items():
        terms[name] += amount


def pieces(tokens: int) -> Iterator[tuple[int, int]]:
    """New tokens of each piece of a prompt, and all tokens up to its end."""
    for start in range(0, tokens, PREFILL_CHUNK_TOKENS):
        end = min(start + PREFILL_CHUNK_TOKENS, tokens)
        yield end - start, end


def total(terms: Terms, cost: Mapping[str, float]) -> float:
    """The sum of a formula, ms or bytes, with what `benchmarks.predict.coefficients.costs` gives.

    Raises:
        UsageError: the device has no coefficient for a format.
    """
    try:
        return sum(amount if name == KNOWN_BYTES else amount * cost[name] for name, amount in terms.items())
    except KeyError as error:
        raise UsageError(f"the device has no coefficient {error.args[0]}; add it to the device file") from None


def predict(config: ModelConfig, device: Device, stored: ModelFormat) -> list[dict[str, Any]]:
    """Predictions at every depth that the context has room for.

    Returns:
        A row a depth: `precision`, `depth`, `prompt_tokens`, and with the ends of their bands (`_low`, `_high`)
        `ttft_ms`, `tpot_ms` and `peak_rss_bytes`.
    """
    coefficients, prompt = resolve(device), min(PROMPT_TOKENS, config.max_position_embeddings)
    cost, band, rows = costs(coefficients), coefficients.band, []
    for depth in depths_that_fit(config.max_position_embeddings, DEPTHS):
        row: dict[str, Any] = {"precision": stored.precision, "depth": depth, "prompt_tokens": prompt}
        for name, terms, factor in (
            ("ttft_ms", ttft_terms(config, stored, prompt), band.ttft),
            ("tpot_ms", tpot_terms(config, stored, depth), band.tpot),
            ("peak_rss_bytes", memory_terms(config, stored, depth), band.memory),
        ):
            value = total(terms, cost)
            ends = {name: value, f"{name}_low": value / factor, f"{name}_high": value * factor}
            row |= {key: round(end) for key, end in ends.items()} if name == "peak_rss_bytes" else ends
        rows.append(row)
    return rows


def predict_figures(config: ModelConfig, device: Device, stored: ModelFormat) -> Predicted:
    """The limits of a budget that can be predicted; None where the context is too short for one.

    Quality cannot be predicted and is left out.
    """
    lengths, cost = limit_lengths(device.limits, config.max_position_embeddings), costs(resolve(device))
    step = None if lengths.tpot_depth is None else total(tpot_terms(config, stored, lengths.tpot_depth), cost)
    first = None if lengths.ttft_prompt is None else total(ttft_terms(config, stored, lengths.ttft_prompt), cost)
    figures = {
        "file_mb": file_bytes(config, stored) / 1e6,
        "peak_memory_mb": total(memory_terms(config, stored, lengths.memory_context), cost) / 1e6,
        "ttft_ms": first,
        "tpot_p50_ms": step,
        "tpot_p95_ms": None if step is None else P95_OVER_P50 * step,
    }
    return Predicted(figures, limit_band(device))


def limit_band(device: Device) -> dict[str, float]:
    """Factors, either way, that hold 90% of predictions, by the limits' names; file sizes are computed."""
    band = resolve(device).band
    return {"peak_memory_mb": band.memory, "ttft_ms": band.ttft, "tpot_p50_ms": band.tpot, "tpot_p95_ms": band.tpot}


def predict_directory(device: Device, config: ModelConfig, directory: Path) -> Predicted:
    """Predictions for a model as a directory stores it, with what they were made with."""
    return replace(predict_figures(config, device, stored_format(directory)), made_with=reliability(device))
