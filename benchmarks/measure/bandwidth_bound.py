"""The time per token that the memory's bandwidth allows. Apart from the probe, which a measured process imports: the
imports here would add 10 MB to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.labels import BUDGET_DEPTH
from sportsllm.formats.json_files import read_json
from sportsllm.formats.manifest import directory_bytes, manifest_of
from sportsllm.models.config import ModelConfig
from sportsllm.models.size import kv_cache_bytes_per_token, quantized_bytes, state_bytes


def bytes_read_per_token(directory: Path, config: ModelConfig) -> dict[str, int]:
    """Bytes that decoding one token has to read: `weight_bytes`, and `kv_bytes_per_token` for each token before it.

    Weights are the files' bytes without embeddings of which one row is looked up: an untied one, whose share of the
    bytes is taken to be its share of the parameters, and the copy by rows that standard operators need of a packed tied
    matrix. Of experts those count that a token is sent to, by their share of the parameters. kv is what all layers
    cache of a token, in numbers, times the bytes of one; states that do not grow count as weights.
    """
    settings = manifest_of(directory).settings
    packed = read_json(directory / "config.json").get("quantization_config") or {}
    weights = directory_bytes(directory)
    if not config.tie_word_embeddings:
        embedding = config.parameters_by_component()["embedding"]
        weights = int(weights * (1 - embedding / config.parameters))
    elif settings.get("format") == "standard" and "bits" in packed:
        bits, block_size = int(packed.get("head_bits", packed["bits"])), int(packed.get("block_size", 32))
        if bits != 32:
            zeros = bits == 4 and not packed.get("symmetric", True)
            weights -= quantized_bytes(config.vocab_size, config.hidden_size, bits, block_size, zeros)
    weights = int(weights * config.active_parameters / config.parameters)
    weights += state_bytes(config)["fp32"]
    cached = kv_cache_bytes_per_token(config)
    kv_bytes = cached.get(str(settings.get("kv_cache")), cached["fp32"])
    return {"weight_bytes": weights, "kv_bytes_per_token": kv_bytes}


def budget_depth(depths: Iterable[int]) -> int:
    """The depth whose time per token a budget judges: 512 tokens, else the deepest measured, 0 without any."""
    depths = list(depths)
    return BUDGET_DEPTH if BUDGET_DEPTH in depths else max(depths, default=0)


def bandwidth_bound(
    read: Mapping[str, int], probes: Sequence[Mapping[str, Any]], depths: Sequence[int]
) -> dict[str, Any]:
    """The least that a step can take: bytes read per token / bandwidth, in ms by depth.

    `read` comes from `bytes_read_per_token`, `probes` from the worker's bandwidth mode: the highest bandwidth counts,
    since a lower one was disturbed.
    """
    bandwidth = max(float(probe["bandwidth_bytes_per_s"]) for probe in probes)

    def milliseconds(depth: int) -> float:
        return 1000 * (read["weight_bytes"] + read["kv_bytes_per_token"] * depth) / bandwidth

    return {
        "memory_floor_tpot_ms": milliseconds(budget_depth(depths)),
        "memory_floor": {
            **read,
            "by_depth_ms": {str(depth): milliseconds(depth) for depth in depths},
            "bandwidth_bytes_per_s": bandwidth,
            "working_set_bytes": probes[0]["working_set_bytes"],
        },
    }
