"""The time per token that memory alone allows, from the bytes a token reads and the bandwidth seen beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.predict.model_size import prompt_graph_bytes, sizes, stored_form
from sportsllm.models.config import ModelConfig
from sportsllm.models.size import CACHE_BYTES
from sportsllm.storage.artifact import MANIFEST, directory_bytes, read_manifest

BUDGET_DEPTH = 512


def floor_bytes(directory: Path, config: ModelConfig) -> dict[str, int]:
    """Bytes that decoding one token has to read: `weight_bytes`, and `kv_bytes_per_token` for each token before it.

    Weights are the files' bytes, without the latency profile's second graph and without an untied embedding, of which
    one row is looked up (its share of the bytes is taken to be its share of the parameters). Keys and values are
    2 * layers * kv_heads * head_dim * bytes of one number.

    Raises:
        ArtifactError: the directory's manifest is damaged.
    """
    weights = directory_bytes(directory) - prompt_graph_bytes(directory)
    if not config.tie_word_embeddings:
        embedding = config.parameters_by_component()["embedding"]
        weights = int(weights * (1 - embedding / config.parameters))
    elif (by_rows := sizes(config, stored_form(directory)).looked_up) is not None:
        weights -= int(by_rows.bytes)  # standard operators: the tied matrix a second time
    cache = "fp32"
    if (directory / MANIFEST).exists():
        cache = str(read_manifest(directory).get("settings", {}).get("kv_cache", cache))
    numbers = 2 * config.num_hidden_layers * config.key_value_size
    return {"weight_bytes": weights, "kv_bytes_per_token": numbers * CACHE_BYTES.get(cache, CACHE_BYTES["fp32"])}


def budget_depth(depths: Iterable[int]) -> int:
    """The depth of those measured that a budget's time per token is for, and the one figure `memory_floor_tpot_ms`:
    512 tokens, or the deepest where the context has no room for so many; 0 where there is none."""
    depths = list(depths)
    return BUDGET_DEPTH if BUDGET_DEPTH in depths else max(depths, default=0)


def memory_floor(read: Mapping[str, int], probes: Sequence[Mapping[str, Any]], depths: Sequence[int]) -> dict[str, Any]:
    """Bytes read per token / bandwidth, in ms: about the least that a step takes which reads its weights from memory.

    Args:
        read: what `floor_bytes` returned.
        probes: results of `benchmarks.measure.worker`'s bandwidth mode. The highest bandwidth counts, since a lower one
            was disturbed.
        depths: tokens already in the cache.
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
