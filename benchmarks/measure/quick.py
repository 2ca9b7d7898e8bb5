"""A budget's figures measured quickly: two fresh processes instead of `bench`'s dozen, no interval, for choosing."""

from __future__ import annotations

from pathlib import Path

from benchmarks.devices.schema import Device
from benchmarks.measure.bench import default_threads
from benchmarks.measure.process import child_command, run_child
from benchmarks.predict.latency import DEEPEST_LEAVES
from benchmarks.spread import percentile
from sportsllm.models.hf_config import load_config
from sportsllm.storage.artifact import directory_bytes

STEPS, WARM_UP_STEPS = 48, 8


def quick_figures(directory: Path, device: Device, threads: int | None = None) -> dict[str, float | None]:
    """Figures by the limits' names; None where the context is too short for what a limit asks; of the
    time per token only where it is too short for any.

    Args:
        directory: an export.
        device: whose limits say at which lengths.
        threads: CPU threads; all physical cores where not given.

    Raises:
        ChildFailure: a measuring process crashed, hung or was killed.
    """
    context, limits = load_config(directory).max_position_embeddings, device.limits
    prompt = limits.ttft_prompt_tokens
    depth = min(limits.tpot_depth_tokens, context - DEEPEST_LEAVES)  # as deep as `bench` goes
    threads = threads or default_threads()
    common = {
        "directory": str(directory.resolve()),
        "threads": threads,
        "seed": 0,
        "prompts": [prompt] if prompt <= context else [],
        "depths": [depth] if depth >= 1 else [],
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "repeats": 5,
        "seconds_per_figure": 0.1,
        "context_tokens": min(limits.memory_context_tokens, context),
        "memory_steps": 8,
    }
    speed, memory = (
        run_child(
            child_command({**common, "mode": mode}),
            f"{directory.parent.name} ({mode})",
            environment={"OMP_NUM_THREADS": str(threads)},
        ).payload
        for mode in ("speed", "memory")
    )
    firsts = speed["ttft_ms"].get(str(prompt), [])
    steps = [step for sweep in speed["step_ms"].get(str(depth), []) for step in sweep]
    return {
        "file_mb": directory_bytes(directory) / 1e6,
        "peak_memory_mb": memory["peak_rss_bytes"] / 1e6,
        "ttft_ms": percentile(firsts, 50) if firsts else None,
        "tpot_p50_ms": percentile(steps, 50) if steps else None,
        "tpot_p95_ms": percentile(steps, 95) if steps else None,
        "quality_loss_percent": None,
    }
