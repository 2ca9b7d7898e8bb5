"""Speed and memory of a model on a device: a roofline with six coefficients.

    time per token = weight bytes / bandwidth + MACs / (row share * arithmetic)
                     + cache bytes / (cache share * bandwidth) + attention MACs / (attention share * fp32)
                     + a pass's time + layers * a layer's time
    first token    = sum over chunks of 128 tokens of (MACs / (prompt share * arithmetic)
                     + attention MACs / (prompt attention share * fp32)
                     + activation bytes / (elementwise share * bandwidth) + a pass's time + layers * a layer's time)
                     + the head, and matrices that go token by token, as in the time per token
    peak memory    = the runtime's + weight bytes * copies + cache + activations of one chunk

The coefficients (`benchmarks.devices.schema.Coefficients`) are a device's own, measured by `devices calibrate`, or its
hardware's figures. Arithmetic is `int8` for packed weights and `fp32` for others. The shares are constants of a kind of
processor. The form is the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009), its parts added instead of
overlapped. Each formula is a sum of terms: amounts by the name of the coefficient that prices them, so that `calibrate`
fits the same formulas by least squares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.devices.schema import Band, Coefficients, Device
from benchmarks.devices.verdict import Predicted, depths_that_fit, limit_lengths
from benchmarks.measure.machine import this_machine
from benchmarks.model_size import (
    ModelFormat,
    WeightGroup,
    active_share,
    file_bytes,
    layer_activations,
    mixed_bytes,
    mixing_macs,
    sizes,
    stepwise_share,
    stored_format,
)
from sportsllm.models.config import ModelConfig
from sportsllm.models.memory import kv_cache_bytes_per_token, state_bytes

PROMPT_TOKENS, DEPTHS = 512, (32, 512, 1_024)
PREFILL_CHUNK_TOKENS = 128  # of a prompt, as `export.runtime.decoder` reads it
STANDARD_LAYER = 5.0  # what standard ONNX operators add to a layer, in multiples of its time
P95_OVER_P50 = 1.25  # slow steps beside median ones: an estimate. The shipped limits allow 1.3 to 1.7
GROWING_COPIES = 3  # buffers of a growing cache (standard operators): the kept one, past and present
KNOWN_BYTES = "bytes"  # a term of memory that needs no coefficient
_STUDY = "`benchmarks.studies.prediction_error`"
CALIBRATED_BAND = Band(tpot=1.5, ttft=1.5, memory=1.2, source=_STUDY, measured=True)

Terms = Mapping[str, float]


@dataclass(frozen=True)
class Shares:
    """Shares of a processor's bandwidth and arithmetic that a runtime reaches, by format of the weights or the cache.

    `row` and `prompt` are shares of the arithmetic with one row and with many, `copies` the memory that weights take as
    a multiple of their bytes in the file. In multiples of a layer's time, `whole_pass` is what a pass takes beside its
    layers, and `kernel_layer` a layer in this program's kernels. `first` are the coefficients that hardware figures
    lack.
    """

    row: Mapping[str, float]
    prompt: Mapping[str, float]
    cache: Mapping[str, float]
    attention: float
    prompt_attention: float
    elementwise: float
    copies: Mapping[str, float]
    whole_pass: float
    kernel_layer: float
    first: Mapping[str, Any]


# Between two machines, ONNX Runtime 1.31.1, 2 threads, 2026-11. A quiet Zen 5 with AVX512-VNNI; peaks 2,060 GOP/s and
# 510 GFLOP/s, bandwidth 50 to 81 GB/s. `small` decoded 52 MB (int4, block 128) in 1.7 ms, 100 MB (int8) in 3.05 ms and
# 389 MB (fp32) in 10.6 ms; from depth 32 to 512 it took 0.92 ms more with a float32 cache (35 MB) and 0.49 ms more
# with an int8 one. Memory is that of `export.runtime.decoder`: 69 MB before the weights, with prepacked copies.
# A noisy Zen 4 (peaks 947 and 237): shares fitted to whole models differ from these by up to a half for one row.
# Blocks are of this program's kernels. Against ONNX Runtime's operators they read int4 1.2 (Zen 4) and 1.4 times as
# fast (Zen 3 with AVX2; bandwidth 20 GB/s, peaks 267 and 133), int8 1.1 and 1.4 times, prompts at int4 1.1 and 1.5
# times, and hold 0.86 of the weights' memory. The Zen 3 decodes 1.3 to 1.5 times as fast as these shares say: kernels
# there are bound by bandwidth, and its int8 peak is that of saturating products.
CPU = Shares(
    row={"fp32": 0.3, "int8": 0.25, "int4": 0.4},
    prompt={"fp32": 0.8, "int8": 0.35, "int4": 0.42},
    cache={"fp32": 0.7, "int8": 0.45, "fp16": 0.7},
    attention=0.25,
    prompt_attention=0.4,
    elementwise=0.25,
    copies={"fp32": 1.15, "int8": 1.28, "int4": 1.3},
    whole_pass=0.55,
    kernel_layer=0.7,
    first={
        "source": "ONNX Runtime 1.31.1 on a Zen 5 and a Zen 4 server, scaled by peak rates",
        "date": date(2026, 11, 23),
        "reading": 1.0,
        "layer_us": 18.0,
        "runtime_mb": 69.0,
        "band": Band(tpot=2.0, ttft=2.0, memory=1.2, source=_STUDY, measured=True),
    },
)
# An 8B model at Q4 (4.9 GB, 32 layers) decodes 42, 74 and 87 tokens/s on RTX 3060, 3080 and 3090, a 3B one
# (2.0 GB, 28 layers) 123 on RTX 3060: 0.7 of the bandwidth and 50 us a layer meet all four within 22%. The others are
# guesses: weights of 4 and 8 bits are widened and multiplied in fp16, at half the int8 peak.
_GPU_PRODUCTS = {"fp32": 0.5, "fp16": 0.2, "int8": 0.2, "int4": 0.2}
GPU = Shares(
    row=_GPU_PRODUCTS,
    prompt=_GPU_PRODUCTS,
    cache={"fp32": 1.0, "int8": 1.0, "fp16": 1.0},
    attention=0.5,
    prompt_attention=0.2,
    elementwise=0.36,
    copies=dict.fromkeys(_GPU_PRODUCTS, 1.0),
    whole_pass=0.0,
    kernel_layer=1.0,
    first={
        "source": "Published decoding rates of RTX 3060, 3080 and 3090; first token and memory are guesses",
        "date": date(2026, 11, 21),
        "reading": 0.7,
        "layer_us": 50.0,
        "runtime_mb": 400.0,
        "band": Band(tpot=1.5, ttft=3.0, memory=1.5, source="guesses; published rates are within them", measured=False),
    },
)
SHARES = {"cpu": CPU, "gpu": GPU}


def resolve(device: Device) -> Coefficients:
    """The device file's own coefficients, else its hardware's figures and the shares of its kind.

    A device without hardware figures, which stands for any machine, gets those of this one, measured once.
    """
    if device.coefficients is not None:
        return device.coefficients
    hardware, fields = device.hardware or this_machine(), dict(SHARES[device.processor].first)
    reading = fields.pop("reading")
    if hardware.bandwidth_share is not None:
        reading = hardware.bandwidth_share.value
    if hardware.layer_overhead is not None:
        fields["layer_us"] = hardware.layer_overhead.value
    fields |= {
        "kind": "estimated",
        "bandwidth_gb_per_s": reading * hardware.memory_bandwidth.value,
        "int8_gop_per_s": hardware.int8_matmul_rate.value,
        "fp32_gop_per_s": hardware.fp32_matmul_rate.value,
        "weight_copies": 1.0,
    }
    return Coefficients.model_validate(fields)


def costs(coefficients: Coefficients) -> dict[str, float]:
    """What one unit of a term costs, by its coefficient: ms for a byte, a MAC (two operations) or a layer, bytes of
    memory for the process and for a byte of weights."""
    return {
        "bandwidth_gb_per_s": 1e-6 / coefficients.bandwidth_gb_per_s,
        "int8_gop_per_s": 2e-6 / coefficients.int8_gop_per_s,
        "fp32_gop_per_s": 2e-6 / coefficients.fp32_gop_per_s,
        "layer_us": 1e-3 * coefficients.layer_us,
        "runtime_mb": 1e6 * coefficients.runtime_mb,
        "weight_copies": coefficients.weight_copies,
    }


def reliability(device: Device) -> dict[str, Any]:
    """`source`, `date`, `kind` and `band` of the coefficients, and `own`, whether they are the device file's."""
    fields = resolve(device).model_dump(mode="json", include={"source", "date", "kind", "band"})
    return {**fields, "own": device.coefficients is not None}


@dataclass(frozen=True)
class Formulas:
    """The terms of a model's figures, with the shares of a kind of processor."""

    config: ModelConfig
    stored: ModelFormat
    shares: Shares = CPU

    def tpot(self, depth: int) -> Terms:
        """Terms of the time per token after `depth` others, in ms."""
        (layers, head), cached = self._groups(), self._cached_bytes(depth)
        terms = self._pass(cached)
        self._multiply_a_row(terms, layers, active_share(self.config))
        self._multiply_a_row(terms, head)
        terms["bandwidth_gb_per_s"] += cached / self.shares.cache[self.stored.cache]
        terms["fp32_gop_per_s"] += mixing_macs(self.config, depth) / self.shares.attention
        return terms

    def ttft(self, prompt: int) -> Terms:
        """Terms of the time to read `prompt` tokens and make the first new one, in ms."""
        config, shares, alone = self.config, self.shares, stepwise_share(self.config)
        terms, (layers, head) = defaultdict[str, float](float), self._groups()
        self._multiply_a_row(terms, head)
        self._multiply_a_row(terms, layers, prompt * alone)
        for start in range(0, prompt, PREFILL_CHUNK_TOKENS):
            end = min(start + PREFILL_CHUNK_TOKENS, prompt)
            new = end - start
            together = new * (active_share(config) - alone) * layers.macs
            terms[_arithmetic(layers)] += together / shares.prompt[layers.weight_format]
            # Scores of each new token with all so far, masked ones too, and their product with the values.
            terms["fp32_gop_per_s"] += new * mixing_macs(config, end) / shares.prompt_attention
            activations = 4 * new * config.num_hidden_layers * layer_activations(config)
            terms["bandwidth_gb_per_s"] += activations / shares.elementwise
            for name, amount in self._pass(self._cached_bytes(end)).items():
                terms[name] += amount
        return terms

    def memory(self, depth: int) -> Terms:
        """Terms of the process's peak memory (on a GPU: the card's) with `depth` tokens in the cache, in bytes."""
        config, parts, cached = self.config, sizes(self.config, self.stored), self._cached_bytes(depth)
        copies = sum(self.shares.copies[group.weight_format] * group.bytes for group in self._groups())
        activations = 4 * min(depth, PREFILL_CHUNK_TOKENS) * layer_activations(config) + 4 * config.vocab_size
        cached *= GROWING_COPIES if self.stored.standard else 1
        known = parts.rest + parts.embedding + cached + activations
        return {"runtime_mb": 1, "weight_copies": copies, KNOWN_BYTES: known}

    def _groups(self) -> tuple[WeightGroup, WeightGroup]:
        """Layers and head, as they are in memory: a CPU widens float16 to float32 when it loads it."""
        parts = sizes(self.config, self.stored)
        layers, head = parts.layers, parts.head
        if self.stored.precision == "fp16" and "fp16" not in self.shares.row:
            layers, head = (replace(each, weight_format="fp32", bytes=2 * each.bytes) for each in (layers, head))
        return layers, head

    def _multiply_a_row(self, terms: defaultdict[str, float], group: WeightGroup, share: float = 1.0) -> None:
        """The weights are read, then multiplied."""
        terms["bandwidth_gb_per_s"] += share * group.bytes
        terms[_arithmetic(group)] += share * group.macs / self.shares.row[group.weight_format]

    def _cached_bytes(self, depth: int) -> int:
        """Bytes read for `depth` tokens, and for states at any depth."""
        cache = self.stored.cache
        return depth * kv_cache_bytes_per_token(self.config)[cache] + state_bytes(self.config)[cache]

    def _pass(self, cached: float) -> defaultdict[str, float]:
        """Terms of any pass through the model; standard operators take longer for a layer and copy their cache."""
        shares, layers = self.shares, self.config.num_hidden_layers
        a_layer = shares.kernel_layer if self.stored.in_kernels else 1.0
        a_layer += STANDARD_LAYER * self.stored.standard
        terms = defaultdict[str, float](float, layer_us=shares.whole_pass + a_layer * layers)
        if self.stored.standard:
            terms["bandwidth_gb_per_s"] += cached / shares.elementwise
        return terms


def _arithmetic(group: WeightGroup) -> str:
    """What prices products with weights: on a GPU those in float16 run on the cores that multiply int8."""
    return "fp32_gop_per_s" if group.weight_format == "fp32" else "int8_gop_per_s"


def total(terms: Terms, cost: Mapping[str, float]) -> float:
    """The sum of a formula, ms or bytes, with what `costs` gives."""
    return sum(amount if name == KNOWN_BYTES else amount * cost[name] for name, amount in terms.items())


def predict(config: ModelConfig, device: Device, stored: ModelFormat) -> list[dict[str, Any]]:
    """Predictions at every depth that the context has room for.

    Returns:
        A row a depth: `precision`, `depth`, `prompt_tokens`, and with the ends of their bands (`_low`, `_high`)
        `ttft_ms`, `tpot_ms` and `peak_rss_bytes`.
    """
    coefficients, rows = resolve(device), []
    prices, band = costs(coefficients), coefficients.band
    formulas = Formulas(config, stored, SHARES[device.processor])
    prompt = min(PROMPT_TOKENS, config.max_position_embeddings)
    for depth in depths_that_fit(config.max_position_embeddings, DEPTHS):
        row: dict[str, Any] = {"precision": stored.precision, "depth": depth, "prompt_tokens": prompt}
        for name, terms, factor in (
            ("ttft_ms", formulas.ttft(prompt), band.ttft),
            ("tpot_ms", formulas.tpot(depth), band.tpot),
            ("peak_rss_bytes", formulas.memory(depth), band.memory),
        ):
            value = total(terms, prices)
            ends = {name: value, f"{name}_low": value / factor, f"{name}_high": value * factor}
            row |= {key: round(end) for key, end in ends.items()} if name == "peak_rss_bytes" else ends
        rows.append(row)
    return rows


def predict_figures(config: ModelConfig, device: Device, stored: ModelFormat) -> Predicted:
    """The limits of a budget that can be predicted; None if the context is too short for one.

    Quality cannot be predicted and is left out.
    """
    prompt, depth, context = limit_lengths(device.limits, config.max_position_embeddings)
    formulas, prices = Formulas(config, stored, SHARES[device.processor]), costs(resolve(device))
    step = None if depth is None else total(formulas.tpot(depth), prices)
    growth = math.sqrt(1 + mixed_bytes(config, stored) / file_bytes(config, stored))
    figures = {
        "file_mb": growth * file_bytes(config, stored) / 1e6,
        "peak_memory_mb": total(formulas.memory(context), prices) / 1e6,
        "ttft_ms": None if prompt is None else total(formulas.ttft(prompt), prices),
        "tpot_p50_ms": step,
        "tpot_p95_ms": None if step is None else P95_OVER_P50 * step,
    }
    return Predicted(figures, limit_band(device) | {"file_mb": growth})


def limit_band(device: Device) -> dict[str, float]:
    """Factors, either way, that hold 90% of predictions, by the limits' names; files are computed."""
    band = resolve(device).band
    return {"peak_memory_mb": band.memory, "ttft_ms": band.ttft, "tpot_p50_ms": band.tpot, "tpot_p95_ms": band.tpot}


def predict_directory(device: Device, config: ModelConfig, directory: Path) -> Predicted:
    """Predictions for a model as a directory stores it, with what they were made with."""
    return replace(predict_figures(config, device, stored_format(directory)), made_with=reliability(device))
