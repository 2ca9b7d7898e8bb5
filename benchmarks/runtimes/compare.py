"""`bench --against`: other runtimes on the same weights, in turns with ours: A B C A B C, each turn a fresh process.

A runtime that is not installed gets a line that says how to install it, one that fails its reason; neither a number.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measure.process import ChildFailure, run_child
from benchmarks.measure.rounds import Turn, take_turns
from benchmarks.measure.summary import nested
from benchmarks.runtimes import worker
from benchmarks.runtimes.options import CONVERT, INSTALL, Runtime
from benchmarks.runtimes.worker import OTHER, OURS
from benchmarks.spread import agree, spread
from export.loaders import caches_keys_and_values, not_opened_by
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

DEPTHS = (32, 512)
MEMORY = "peak_rss_bytes"
TOO_SHORT = f"ttft_ms.{DEPTHS[0]}"  # so short that one disturbance counts: never the reason for another round
PROBE_TIMEOUT_S = 120.0
FAILURES = {"memory": "out of memory", "hang": "hung", "crash": "crashed", "refused": "gave up"}
METRICS = {"generated_tokens_per_s": max, "ttft_ms": min, "peak_rss_bytes": min}  # which of two values is better


def turn_depths(context: int) -> list[int]:
    """Depths of a turn that fit a context of `context` tokens; an error where none does."""
    after = 1 + worker.WARM_UP + worker.STEPS
    depths = [depth for depth in DEPTHS if depth + after <= context]
    if not depths:
        raise UsageError(f"--against: a context of {context} tokens has no room for {DEPTHS[0]} and {after} more")
    return depths


def measure_against(
    directory: Path,
    config: ModelConfig,
    runtimes: Sequence[Runtime],
    settings: Mapping[str, Any],
    check_after_rounds: Sequence[int],
    timeout_s: float,
) -> dict[str, Any]:
    """Measure our model in turns with others of its shape; `settings` has the `threads` and `cpus` of all.

    Returns:
        `against`: by runtime, `ours` too, `status` ("measured", "not installed" or "failed: reason") and its figures.
        `against_ratios`: see `best_ratios`, to runtimes at their defaults; empty where ours or all others failed.
        `against_tuned_ratios`: to those with options too; empty where none has options.
        `against_raw`: every round of those that were measured.
    """
    depths = turn_depths(config.max_position_embeddings)
    ours = Runtime(OURS, sys.executable, directory, kernels=str(settings.get("kernels", "auto")))
    entries = {OURS: ours} | {runtime.name: runtime for runtime in runtimes}
    closed = not_opened_by(config)
    against = {
        name: {"status": f"failed: {closed}"} if closed and _reads(runtime, directory, config) else _missing(runtime)
        for name, runtime in entries.items()
    }
    asked = {key: settings[key] for key in ("threads", "cpus")} | {"depths": depths, "vocab_size": config.vocab_size}
    turns = [_turn(runtime, asked) for name, runtime in entries.items() if not against[name]]

    def failed(name: str, failure: ChildFailure) -> None:
        against[name] = _failure(failure.advising("--set timeout=SECONDS"))

    title = f"bench {directory.name} against others"
    raw = take_turns(title, turns, check_after_rounds, lambda raw: all(map(_steady, raw.values())), timeout_s, failed)
    for name, runtime in entries.items():
        if not against[name]:
            against[name] = _summary(runtime, raw[name], config)
    measured = [name for name in entries if against[name]["status"] == "measured"]
    kept = {name: raw[name] for name in measured}
    others = [entries[name] for name in measured if name != OURS] if OURS in measured else []
    plain = [runtime for runtime in others if not runtime.options]
    return {
        "against": against,
        "against_ratios": best_ratios(kept, _compared(plain)),
        "against_tuned_ratios": best_ratios(kept, _compared(others)) if len(plain) < len(others) else {},
        "against_raw": kept,
    }


def _reads(runtime: Runtime, export: Path, config: ModelConfig) -> bool:
    """Whether another runtime would have to open an export that `not_opened_by` has a line on."""
    known_to = {"optimum"} if caches_keys_and_values(config) else {"optimum", "genai"}
    return runtime.kind in known_to and runtime.directory == export


def _compared(runtimes: Sequence[Runtime]) -> list[str]:
    """Which of them ours is compared with: others of ours count only if there is no other runtime."""
    return [one.name for one in runtimes if one.kind not in (OTHER, OURS)] or [one.name for one in runtimes]


def _missing(runtime: Runtime) -> dict[str, Any]:
    """Why a runtime cannot take part, empty where it can: found out before the rounds, not in the middle of them."""
    if runtime.kind == OURS:
        return {}
    turn = _turn(runtime, {"probe": True})
    try:
        found = run_child(turn.command, turn.what, PROBE_TIMEOUT_S, turn.environment).payload["found"]
    except ChildFailure as failure:
        return _failure(failure)
    if not found:
        own = f"in an environment of its own, then --against {runtime.name},python=ENVIRONMENT/bin/python"
        return {"status": "not installed", "install": f"{INSTALL[runtime.kind]}, {own}"}
    if runtime.directory is None:
        advice = f"make its own with {CONVERT[runtime.kind]}, then --against {runtime.name}=DIR"
        return {"status": f"failed: cannot read an export; {advice}"}
    return {}


def _failure(failure: ChildFailure) -> dict[str, Any]:
    return {"status": f"failed: {FAILURES[failure.kind]} ({failure})"}


def _turn(runtime: Runtime, settings: Mapping[str, Any]) -> Turn:
    asked = {"kind": runtime.kind, "options": dict(runtime.options), "kernels": runtime.kernels, **settings}
    if runtime.directory is not None:
        asked["directory"] = str(runtime.directory.resolve())
    command = [runtime.python, str(Path(worker.__file__).resolve()), json.dumps(asked)]
    # Its interpreter must find its own packages, never those of this environment.
    environment: dict[str, str | None] = {"PYTHONPATH": None, "PYTHONHOME": None, "VIRTUAL_ENV": None}
    if "threads" in settings:
        environment["OMP_NUM_THREADS"] = str(settings["threads"])
    return Turn(runtime.name, command, f"bench against {runtime.name}", environment, cpus=settings.get("cpus"))


def _by_name(rounds: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Each figure's values by dotted name, one a round."""
    first, by_depth = rounds[0], ("generated_tokens_per_s", "ttft_ms")
    values = {f"{key}.{depth}": [one[key][depth] for one in rounds] for key in by_depth for depth in first[key]}
    return values | {"peak_rss_bytes": [float(one["peak_rss_bytes"]) for one in rounds]}


def _steady(rounds: Sequence[Mapping[str, Any]]) -> bool:
    return agree([spread(values) for name, values in _by_name(rounds).items() if name not in (TOO_SHORT, MEMORY)])


def _summary(runtime: Runtime, rounds: Sequence[Mapping[str, Any]], config: ModelConfig) -> dict[str, Any]:
    """The figures of a runtime's rounds; failed where its model is not ours."""
    for key, value in rounds[0]["shape"].items():
        if value != getattr(config, key):
            reason = f"{runtime.directory} holds another model: {key} {value}, ours has {getattr(config, key)}"
            return {"status": f"failed: {reason}; convert the same checkpoint"}
    by_name = _by_name(rounds)
    noise = {name: asdict(spread(values)) for name, values in by_name.items()}
    middle = nested({name: statistics.median(values) for name, values in by_name.items()})
    return {
        "status": "measured",
        "version": rounds[0]["version"],
        "directory": str(runtime.directory),
        "python": runtime.python,
        "options": dict(runtime.options),
        "cpus": rounds[0]["cpus"],
        "rounds": len(rounds),
        "peak_rss_bytes": int(max(by_name["peak_rss_bytes"])),
        "generated_tokens_per_s": middle["generated_tokens_per_s"],
        "ttft_ms": middle["ttft_ms"],
        "noise": noise,
        "noisy": [name for name, one in noise.items() if one["noisy"]],
        "steady": _steady(rounds),
    }


def best_ratios(raw: Mapping[str, Sequence[Mapping[str, Any]]], others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ours over the best of `others`, by figure; empty where there are none.

    Args:
        raw: the rounds of `ours` and of every measured runtime, equally many.
        others: the runtimes that count.

    Returns:
        Per dotted name `peer` (the best by its median), `ours`, `best`, `ratio` = the median over the rounds of ours /
        that runtime's of the same round with its interval, and `better` ("higher" or "lower").
    """
    figures = {who: _by_name(rounds) for who, rounds in raw.items()}
    ratios = {}
    for name in figures[OURS] if others else ():
        middle = {who: statistics.median(by_name[name]) for who, by_name in figures.items()}
        better = METRICS[name.partition(".")[0]]
        best = better(others, key=middle.__getitem__)
        each = [mine / theirs for mine, theirs in zip(figures[OURS][name], figures[best][name], strict=True)]
        interval = spread(each)
        ratios[name] = {
            "peer": best,
            "ours": middle[OURS],
            "best": middle[best],
            "ratio": statistics.median(each),
            "low": interval.low,
            "high": interval.high,
            "better": "higher" if better is max else "lower",
        }
    return ratios
