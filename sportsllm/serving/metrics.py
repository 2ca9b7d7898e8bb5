"""What `/metrics` reports, in Prometheus' text format, by llama-server's names if it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sportsllm.serving.engine import Engine


def _counted(name: str, unit: float = 1, per: str = "") -> Callable[[Engine], float]:
    return lambda engine: engine.counts[name] * unit / (max(1, engine.counts[per]) if per else 1)


METRICS: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "llamacpp:prompt_tokens_total": ("Prompt tokens read.", _counted("prompt_tokens")),
    "llamacpp:prompt_tokens_cached_total": ("Prompt tokens from the cache.", _counted("cached_tokens")),
    "llamacpp:prompt_seconds_total": ("Time in which prompts were read.", _counted("prompt_us", 1e-6)),
    "llamacpp:prompt_tokens_seconds": ("Prompt tokens read per second.", _counted("prompt_tokens", 1e6, "prompt_us")),
    "llamacpp:tokens_predicted_total": ("Tokens generated.", _counted("generated_tokens")),
    "llamacpp:tokens_predicted_seconds_total": ("Time in which tokens were generated.", _counted("generated_us", 1e-6)),
    "llamacpp:predicted_tokens_seconds": ("Tokens per second.", _counted("generated_tokens", 1e6, "generated_us")),
    "llamacpp:n_decode_total": ("Runs of the model.", _counted("runs")),
    "llamacpp:n_busy_slots_per_decode": ("Sequences in a step.", _counted("rows", 1, "steps")),
    "llamacpp:n_tokens_max": ("Longest sequence.", _counted("longest")),
    "llamacpp:spec_decode_num_drafts_total": ("Passes that read proposed tokens.", _counted("drafts")),
    "llamacpp:spec_decode_num_draft_tokens_total": ("Tokens proposed.", _counted("draft_tokens")),
    "llamacpp:spec_decode_num_accepted_tokens_total": ("Proposed tokens kept.", _counted("lookup_tokens")),
    "llamacpp:requests_processing": ("Sequences that have a slot.", lambda engine: len(engine.running)),
    "llamacpp:requests_deferred": ("Sequences that wait for a slot.", lambda engine: len(engine.waiting)),
    "sportsllm_sequences_total": ("Sequences ended.", _counted("finished")),
    "sportsllm_refused_total": ("Sequences refused because too many waited.", _counted("refused")),
    "sportsllm_prefix_cache_bytes": ("Size of the prefix cache.", lambda engine: engine.prefixes.size_bytes),
}
"""An explanation of each metric, and its value."""


def describe_metrics(engines: Mapping[str, Engine]) -> str:
    """All metrics of the loaded models, by name, which is a label if there are several."""
    lines = list[str]()
    for name, (text, value) in METRICS.items():
        kind = "counter" if name.endswith(("_total", "_max")) else "gauge"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for model, engine in engines.items():
            escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            label = f'{{model="{escaped}"}}' if len(engines) > 1 else ""
            lines.append(f"{name}{label} {value(engine)}")
    return "\n".join(lines) + "\n"
