"""`bench --against`: other runtimes on the same weights, in turns with ours: A B C A B C, each turn a fresh process.

A runtime reads our export (onnxruntime-genai, optimum) or a model that its own tool wrote from the same checkpoint. One
that is not installed gets a line that says how to install it, one that fails its reason; neither gets a number.
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
from benchmarks.measure.rounds import Payloads, Turn, take_turns
from benchmarks.runtimes import worker
from benchmarks.runtimes.options import CONVERT, INSTALL, Runtime
from benchmarks.runtimes.worker import OTHER, OURS
from benchmarks.spread import spread
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

DEPTHS = (32, 512)
TOO_SHORT = f"ttft_ms.{DEPTHS[0]}"
"""So few milliseconds that one disturbance counts: reported, but never the reason for another round."""
PROBE_TIMEOUT_S = 120.0
METRICS = {"decode_tokens_per_s": max, "ttft_ms": min, "peak_rss_bytes": min}
"""The figures that are compared, and which of two values is the better one."""


def turn_depths(context: int) -> list[int]:
    """Depths of a turn that fit a context of `context` tokens.

    Raises:
        UsageError: none fits.
    """
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
    """Measure ours and the others in turns.

    Args:
        directory: our model.
        config: its shape, which the others' must match.
        runtimes: the others.
        settings: `threads` and `cpus`, the same for all.
        check_after_rounds: see `benchmarks.measure.rounds.stop_checks`.
        timeout_s: after which one turn counts as hung.

    Returns:
        `against`: by runtime, `ours` too, `status` ("measured", "not installed" or "failed: reason"). A measured one
        has `decode_tokens_per_s` and `ttft_ms` by depth, `peak_rss_bytes`, `version`, `directory`, `python`, `rounds`,
        `noise`, `noisy`, `options` and `steady` (enough rounds agree); one that is not installed has `install`.
        `against_ratios`: see `best_ratios`, to runtimes at their defaults; empty where ours or all others failed.
        `against_tuned_ratios`: to those with options too; empty where none has options.
        `against_raw`: every round of those that were measured.

    Raises:
        UsageError: the context is too short.
    """
    depths = turn_depths(config.max_position_embeddings)
    entries = {OURS: Runtime(OURS, sys.executable, directory)} | {runtime.name: runtime for runtime in runtimes}
    against = {name: _missing(runtime) for name, runtime in entries.items()}
    asked = {key: settings[key] for key in ("threads", "cpus")} | {"depths": depths, "vocab_size": config.vocab_size}
    turns = [_turn(runtime, asked) for name, runtime in entries.items() if not against[name]]

    def failed(name: str, failure: ChildFailure) -> None:
        against[name] = _failure(failure.advising("--timeout"))

    title = f"bench {directory.name} against others"
    raw = take_turns(title, turns, check_after_rounds, _converged, timeout_s, failed)
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


def _compared(runtimes: Sequence[Runtime]) -> list[str]:
    """Which of them ours is compared with: a second export of ours counts only if there is no other runtime."""
    return [one.name for one in runtimes if one.kind != OTHER] or [one.name for one in runtimes]


def _missing(runtime: Runtime) -> dict[str, Any]:
    """Why a runtime cannot take part, empty where it can: found out before the rounds, not in the middle of them."""
    if runtime.name == OURS:
        return {}
    turn = _turn(runtime, {"probe": True})
    try:
        found = run_child(turn.command, turn.what, PROBE_TIMEOUT_S, turn.environment).payload["found"]
    except ChildFailure as failure:
        return _failure(failure)
    if not found:
        own = f"in an environment of its own, then --peer-python {runtime.name}=ENVIRONMENT/bin/python"
        return {"status": "not installed", "install": f"{INSTALL[runtime.kind]}, {own}"}
    if runtime.directory is None:
        reason = f"cannot read an export; make its own with {CONVERT[runtime.kind]}"
        return {"status": f"failed: {reason}, then --peer-directory {runtime.name}=DIR"}
    return {}


def _failure(failure: ChildFailure) -> dict[str, Any]:
    kinds = {"memory": "out of memory", "hang": "hung", "crash": "crashed", "refused": "gave up"}
    return {"status": f"failed: {kinds[failure.kind]} ({failure})"}


def _turn(runtime: Runtime, settings: Mapping[str, Any]) -> Turn:
    asked = {"kind": runtime.kind, "options": dict(runtime.options), **settings}
    if runtime.directory is not None:
        asked["directory"] = str(runtime.directory.resolve())
    command = [runtime.python, str(Path(worker.__file__).resolve()), json.dumps(asked)]
    # Its interpreter must find its own packages, never those of this environment.
    environment: dict[str, str | None] = {"PYTHONPATH": None, "PYTHONHOME": None, "VIRTUAL_ENV": None}
    if "threads" in settings:
        environment["OMP_NUM_THREADS"] = str(settings["threads"])
    return Turn(runtime.name, command, f"bench against {runtime.name}", environment)


def _metrics(one: Mapping[str, Any]) -> dict[str, float]:
    """One turn's figures by dotted name."""
    named = {f"{key}.{depth}": value for key in ("decode_tokens_per_s", "ttft_ms") for depth, value in one[key].items()}
    return named | {"peak_rss_bytes": float(one["peak_rss_bytes"])}


def _spreads(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    metrics = [_metrics(one) for one in rounds]
    return {name: asdict(spread([one[name] for one in metrics])) for name in metrics[0]}


def _steady(noise: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(one["noisy"] is False for name, one in noise.items() if name != TOO_SHORT)


def _converged(raw: Payloads) -> bool:
    return all(_steady(_spreads(rounds)) for rounds in raw.values())


def _summary(runtime: Runtime, rounds: Sequence[Mapping[str, Any]], config: ModelConfig) -> dict[str, Any]:
    """The figures of a runtime's rounds; failed where its model is not ours."""
    for key, value in rounds[0]["shape"].items():
        if value != getattr(config, key):
            reason = f"{runtime.directory} holds another model: {key} {value}, ours has {getattr(config, key)}"
            return {"status": f"failed: {reason}; convert the same checkpoint"}
    noise = _spreads(rounds)
    middle = {name: statistics.median(_metrics(one)[name] for one in rounds) for name in noise}
    by_depth = {
        key: {depth: middle[f"{key}.{depth}"] for depth in rounds[0][key]} for key in ("decode_tokens_per_s", "ttft_ms")
    }
    return {
        "status": "measured",
        "version": rounds[0]["version"],
        "directory": str(runtime.directory),
        "python": runtime.python,
        "options": dict(runtime.options),
        "cpus": rounds[0]["cpus"],
        "rounds": len(rounds),
        "peak_rss_bytes": int(max(one["peak_rss_bytes"] for one in rounds)),
        **by_depth,
        "noise": noise,
        "noisy": [name for name, one in noise.items() if one["noisy"]],
        "steady": _steady(noise),
    }


def best_ratios(raw: Mapping[str, Sequence[Mapping[str, Any]]], others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ours over the best other runtime, by figure.

    Args:
        raw: the rounds of `ours` and of every measured runtime, equally many.
        others: the runtimes that count.

    Returns:
        Per dotted name `peer` (the best by its median), `ours`, `best`, `ratio` = the median over the rounds of ours /
        that runtime's of the same round, `low`, `high` and `confidence` of its interval (see
        `benchmarks.spread.spread`), and `better` ("higher" or "lower"). Empty where no runtime counts.
    """
    metrics = {name: [_metrics(one) for one in rounds] for name, rounds in raw.items()}
    ratios = {}
    for name in metrics[OURS][0] if others else ():
        middle = {who: statistics.median(one[name] for one in rounds) for who, rounds in metrics.items()}
        better = METRICS[name.partition(".")[0]]
        best = better(others, key=middle.__getitem__)
        each = [mine[name] / theirs[name] for mine, theirs in zip(metrics[OURS], metrics[best], strict=True)]
        interval = spread(each)
        ratios[name] = {
            "peer": best,
            "ours": middle[OURS],
            "best": middle[best],
            "ratio": statistics.median(each),
            "low": interval.low,
            "high": interval.high,
            "confidence": interval.confidence,
            "better": "higher" if better is max else "lower",
        }
    return ratios
