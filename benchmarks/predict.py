"""Speed and memory of a model on a device that is not at hand: a roofline from the device file's figures.

    time per token    = max(2 P / rate_1, (weights + cache) / bandwidth) + layers * overhead
    time to a token   = max(2 P T / rate, weights / bandwidth) + attention + layers * overhead
    peak memory       = runtime + copies * weights + cache + activations of one piece of the prompt

P numbers in the matrices, T tokens of the prompt; `bandwidth` and the rates are the device's peaks times the
shares below. The form is the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.device import Device
from sportsllm.config import ModelConfig
from sportsllm.errors import UsageError
from sportsllm.plan import (
    CACHE_BYTES,
    PRECISIONS,
    active_weight_bytes,
    block_matrices,
    kv_cache_bytes_per_token,
    weight_bytes,
)

PROMPT_TOKENS = 512
DEPTHS = (32, 512, 1024)
DEEPEST_LEAVES = 148  # the deepest measurement leaves room for its own new tokens
PREFILL_CHUNK_TOKENS = 128  # pieces in which `export.runtime` reads a prompt
P95_OVER_P50 = 1.25
"""Slow steps beside usual ones: an estimate. The shipped limits allow 1.3 to 1.7."""
GRAPH_BYTES = 100_000
"""The graph without its weights: names and nodes; the rotary table is counted apart."""


@dataclass(frozen=True)
class Efficiency:
    """What a runtime gets out of a processor, as shares of the device's peak figures.

    Attributes:
        bandwidth_share: of the memory bandwidth, while decoding.
        layer_overhead_us: time a layer adds to every pass beside its arithmetic and its traffic, in us.
        prefill_share: of the device's peak rate for that precision, by precision, with many rows.
        decode_share: the same with one row.
        attention_share: of the fp32 peak, in attention over a prompt.
        weight_copies: memory for weights at the peak, as a multiple of their size in memory.
        runtime_bytes: the process without weights, libraries loaded.
        cache: precision of the key/value cache.
    """

    bandwidth_share: float
    layer_overhead_us: float
    prefill_share: Mapping[str, float]
    decode_share: Mapping[str, float]
    attention_share: float
    weight_copies: Mapping[str, float]
    runtime_bytes: int
    cache: str


# ONNX Runtime 1.31.1, 2 threads, x86-64 with AVX512-VNNI, quiet, 2026-11; peaks 2,060 GOP/s and 510 GFLOP/s,
# bandwidth 50 to 81 GB/s. `small` decoded 52 MB (int4, block 128) in 1.7 ms, 100 MB (int8) in 3.05 ms and
# 389 MB (fp32) in 10.6 ms: a line of 37 GB/s (0.57 of 65) and 0.32 ms over 12 layers. Two other devices agree
# on 0.57: Raspberry Pi 5 with 9.6 of 17.1 GB/s, OnePlus 12 with 41 to 47 of 76.8 GB/s (see their files).
# Rates are those of one 768 x 4,096 product: MatMulNBits at 512 rows 489 to 735 (int4) and 558 to 723 (int8)
# GOP/s, at one row 25 and 48 us with block 32; MatMul in fp32 478 GFLOP/s, less what lies between products.
# Attention over 512 tokens: 4.8 GFLOP in 38 ms. Memory is that of `export.runtime` on 2026-11-21: 70 MB before the
# weights, and after loading `small` 505 MB (fp32), 568 (fp16), 227 (int8, block 32), 184 and 137 (int4, blocks of
# 32 and 128), where the files have 390, 195, 110, 68 and 52 MB: prepacked copies stand beside the weights.
CPU = Efficiency(
    bandwidth_share=0.57,
    layer_overhead_us=27.0,
    prefill_share=MappingProxyType({"fp32": 0.75, "fp16": 0.75, "int8": 0.32, "int4": 0.28}),
    decode_share=MappingProxyType({"fp32": 0.75, "fp16": 0.75, "int8": 0.065, "int4": 0.12}),
    attention_share=0.25,
    weight_copies=MappingProxyType({"fp32": 1.15, "fp16": 1.15, "int8": 1.45, "int4": 1.5}),
    runtime_bytes=69_000_000,
    cache="fp32",
)
# An 8B model at Q4 (4.9 GB, 32 layers) decodes 42, 74 and 87 tokens/s on RTX 3060, 3080 and 3090, a 3B one
# (2.0 GB, 28 layers) 123 on RTX 3060: 0.7 of the bandwidth and 50 us a layer meet all four within 22%.
# Weights of 4 and 8 bits are widened and multiplied in fp16, at half the int8 peak. Shares of the matmul rates
# and the memory of a CUDA context are estimates.
GPU = Efficiency(
    bandwidth_share=0.70,
    layer_overhead_us=50.0,
    prefill_share=MappingProxyType({"fp32": 0.5, "fp16": 0.2, "int8": 0.2, "int4": 0.2}),
    decode_share=MappingProxyType({"fp32": 0.5, "fp16": 0.2, "int8": 0.2, "int4": 0.2}),
    attention_share=0.25,
    weight_copies=MappingProxyType({"fp32": 1.0, "fp16": 1.0, "int8": 1.0, "int4": 1.0}),
    runtime_bytes=400_000_000,
    cache="fp16",
)
EFFICIENCIES = {"cpu": CPU, "gpu": GPU}


@dataclass(frozen=True)
class Prediction:
    """Figures of one precision at one depth. `ttft_ms` is for a prompt of `prompt_tokens`."""

    precision: str
    depth: int
    prompt_tokens: int
    ttft_ms: float
    tpot_ms: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class Stored:
    """How a model is kept: what `sportsllm.plan.weight_bytes` needs to know.

    `cache` is the precision of the key/value cache, None for the device's usual one. `file_bytes`, where a
    file exists, replaces the computed size; `prompt_bytes` of it are a second graph's, which decoding does not read.
    """

    precision: str
    block_size: int = 32
    head_bits: int = 8
    zero_points: bool = False
    cache: str | None = None
    file_bytes: int | None = None
    prompt_bytes: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision {self.precision!r} is not known; use one of {', '.join(PRECISIONS)}")
        if self.cache is not None and self.cache not in CACHE_BYTES:
            raise UsageError(f"cache {self.cache!r} is not known; use one of {', '.join(CACHE_BYTES)}")


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
    """The limits of a budget that can be predicted, by the limit's name (quality cannot)."""
    context = config.max_position_embeddings
    step = tpot_ms(config, device, stored, min(device.limits.tpot_depth_tokens, context))
    peak = peak_memory_bytes(config, device, stored, min(device.limits.memory_context_tokens, context))
    return {
        "file_mb": file_bytes(config, stored) / 1e6,
        "peak_memory_mb": peak / 1e6,
        "ttft_ms": ttft_ms(config, device, stored, min(device.limits.ttft_prompt_tokens, context)),
        "tpot_p50_ms": step,
        "tpot_p95_ms": step * P95_OVER_P50,
    }


def file_bytes(config: ModelConfig, stored: Stored) -> int:
    """Size of the exported files: weights, rotary table and graph."""
    if stored.file_bytes is not None:
        return stored.file_bytes
    rotary = 4 * config.max_position_embeddings * config.head_dim
    return _weights(config, stored) + rotary + GRAPH_BYTES


def tpot_ms(config: ModelConfig, device: Device, stored: Stored, depth: int) -> float:
    """Time of one further token after `depth` others, in ms."""
    efficiency = EFFICIENCIES[device.processor]
    cache = depth * _cache_bytes(config, efficiency, stored)
    memory = (_active(config, device, stored) + cache) / _bandwidth(device)
    numbers = _block_numbers(config) + config.vocab_size * config.hidden_size
    share = efficiency.decode_share[stored.precision]
    compute = 2 * numbers / (_peak(device, stored.precision) * share)
    return 1000 * max(memory, compute) + _overhead_ms(config, device)


def ttft_ms(config: ModelConfig, device: Device, stored: Stored, prompt: int) -> float:
    """Time to read `prompt` tokens and make the first new one, in ms, with logits for the last one only."""
    efficiency = EFFICIENCIES[device.processor]
    head = config.vocab_size * config.hidden_size
    rate = _peak(device, stored.precision) * efficiency.prefill_share[stored.precision]
    compute = 2 * (_block_numbers(config) * prompt + head) / rate
    memory = _active(config, device, stored) / _bandwidth(device)
    # Scores and their product with the values, each 2 T^2 * (width of all heads), half of it masked away.
    operations = 2 * config.num_hidden_layers * config.query_size * prompt * prompt
    fp32_peak = device.hardware.fp32_matmul_rate.value * 1e9
    attention = operations / (fp32_peak * efficiency.attention_share)
    passes = -(-prompt // PREFILL_CHUNK_TOKENS)
    return 1000 * (max(compute, memory) + attention) + passes * _overhead_ms(config, device)


def peak_memory_bytes(config: ModelConfig, device: Device, stored: Stored, depth: int) -> int:
    """Peak memory of the process (on a GPU: of the card) with `depth` tokens in the cache."""
    efficiency = EFFICIENCIES[device.processor]
    weights = efficiency.weight_copies[stored.precision] * _resident(config, device, stored)
    cache = depth * _cache_bytes(config, efficiency, stored)
    # A layer's residual stream, norms, q, k, v, gate, up and their product, held twice: inputs and outputs.
    width = 4 * config.hidden_size + config.query_size + 2 * config.key_value_size + 3 * config.intermediate_size
    activations = 2 * 4 * width * min(depth, PREFILL_CHUNK_TOKENS) + 4 * config.vocab_size
    return round(efficiency.runtime_bytes + weights + cache + activations)


def _weights(config: ModelConfig, stored: Stored) -> int:
    return weight_bytes(config, stored.precision, stored.block_size, stored.head_bits, stored.zero_points)


def _resident(config: ModelConfig, device: Device, stored: Stored) -> float:
    """Bytes of weights in memory. On a CPU half-precision weights are widened to float32 when loaded."""
    if stored.precision == "fp16" and device.processor == "cpu":
        return 2 * file_bytes(config, stored)
    return file_bytes(config, stored)


def _active(config: ModelConfig, device: Device, stored: Stored) -> float:
    """Bytes of weights read for one token: the share of the resident ones that are no untied embedding."""
    used = active_weight_bytes(config, stored.precision, stored.block_size, stored.head_bits, stored.zero_points)
    return (_resident(config, device, stored) - stored.prompt_bytes) * used / _weights(config, stored)


def _block_numbers(config: ModelConfig) -> int:
    return sum(matrix.layers * matrix.rows * matrix.columns for matrix in block_matrices(config))


def _cache_bytes(config: ModelConfig, efficiency: Efficiency, stored: Stored) -> int:
    return kv_cache_bytes_per_token(config)[stored.cache or efficiency.cache]


def _bandwidth(device: Device) -> float:
    share = device.hardware.bandwidth_share
    default = EFFICIENCIES[device.processor].bandwidth_share
    return device.hardware.memory_bandwidth.value * 1e9 * (share.value if share else default)


def _overhead_ms(config: ModelConfig, device: Device) -> float:
    overhead = device.hardware.layer_overhead
    default = EFFICIENCIES[device.processor].layer_overhead_us
    return config.num_hidden_layers * (overhead.value if overhead else default) / 1000


def _peak(device: Device, precision: str) -> float:
    """Peak rate that a precision's products run against, in operations a second."""
    widened = precision == "fp16" and device.processor == "cpu"
    rate = device.hardware.fp32_matmul_rate if precision == "fp32" or widened else device.hardware.int8_matmul_rate
    return rate.value * 1e9
