"""`bench --against`: other runtimes on the same weights, in turns with ours: A B C A B C, each turn a fresh process.

A runtime that is not installed or that fails gets a line with the reason instead of figures.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure.process import DEFAULT_TIMEOUT_S, ChildFailure, Turn, take_turns
from benchmarks.measure.summary import nested
from benchmarks.runtimes import worker
from benchmarks.runtimes.worker import OTHER, OURS
from benchmarks.spread import agree, spread
from sportsllm.errors import UsageError, did_you_mean
from sportsllm.formats.manifest import plain_name
from sportsllm.models.config import ModelConfig

DEPTHS = (32, 512)
MEMORY = "peak_rss_bytes"
TOO_SHORT = f"ttft_ms.{DEPTHS[0]}"  # a single disturbance shows in it, so it never asks for further rounds
METRICS = {"generated_tokens_per_s": max, "ttft_ms": min, MEMORY: min}  # which of two values is better
INSTALL = {
    "genai": "pip install onnxruntime-genai",
    "openvino": "pip install openvino-genai",
    "llama.cpp": "pip install xllamacpp",
    "ik_llama.cpp": "pip install ik-llama-cpp-python",
    "optimum": "pip install 'sportsllm-compress[optimum]' torch",
    OTHER: "pip install sportsllm-compress",
}
_GGUF = "export CHECKPOINT --format gguf --dtype q4_0"
CONVERT = {  # commands that make a model for runtimes that cannot read our export
    "openvino": "optimum-cli export openvino --model CHECKPOINT --weight-format int4 DIR",
    "llama.cpp": _GGUF,
    "ik_llama.cpp": _GGUF,
    OTHER: "export",
}
WITH_OPTIONS = ("openvino", "llama.cpp", "ik_llama.cpp")
"""Runtimes that take settings when they open a model; the others keep theirs in its directory."""


@dataclass(frozen=True)
class Runtime:
    """A runtime to measure; with a label, `openvino+128`, if it takes part several times. See `parse_runtimes`."""

    name: str
    python: str
    directory: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name without a label."""
        return self.name.partition("+")[0]


def portable_too(directory: Path) -> Runtime:
    """This program's runtime with ONNX Runtime's operators, to compare with its own kernels."""
    return Runtime(f"{OURS}+portable", sys.executable, directory, {"kernels": "portable"})


def parse_runtimes(texts: Sequence[str] | None, export: Path) -> list[Runtime]:
    """The runtimes that --against names; `export` is read by those that need no model of their own.

    Each text is `NAME[+LABEL][=DIR][,python=PATH][,bench=PATH][,KEY=VALUE ...]`: the model converted for the runtime,
    the interpreter that has it or its llama-bench, and settings by the runtime's own names (JSON if valid, else text).

    Raises:
        UsageError: no such runtime, a name given twice, options that a runtime does not take, or a missing path.
    """
    found: dict[str, Runtime] = {}
    for text in texts or ():
        first, *others = (part.strip() for part in text.split(","))
        name, _, place = first.partition("=")
        kind = name.partition("+")[0]
        if kind not in INSTALL:
            advice = did_you_mean(kind, INSTALL) or f"choose from {', '.join(INSTALL)}"
            raise UsageError(f"--against {text}: no such runtime; {advice}")
        if not place and kind in CONVERT:
            advice = f"make one with {CONVERT[kind]}, then --against {name}=DIR"
            raise UsageError(f"--against {text}: needs a model of its own; {advice}")
        if name in found:
            raise UsageError(f"--against {text}: {name} is named twice; give one a label: {name}+LABEL")
        directory = Path(place) if place else export
        if not directory.exists():
            raise UsageError(f"--against {text}: {directory} not found; check the path")
        options = dict(_option(text, kind, other) for other in others)
        asked = str(options.pop("python", sys.executable))
        if kind == "llama.cpp" and options and "bench" not in options:
            raise UsageError(f"--against {text}: options are flags of a llama-bench; name it with bench=PATH")
        for program in (asked, str(options.get("bench", asked))):
            if shutil.which(program) is None:
                raise UsageError(f"--against {text}: no program {program}; check the path")
        found[name] = Runtime(name, str(shutil.which(asked)), directory, options)
    return list(found.values())


def _option(text: str, kind: str, pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not key or not equals:
        raise UsageError(f"--against {text}: write KEY=VALUE after the comma")
    if key == "python":
        return key, value
    if kind not in WITH_OPTIONS:
        raise UsageError(f"--against {text}: only {', '.join(WITH_OPTIONS)} take options")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def turn_depths(context: int) -> list[int]:
    """Depths of a turn that fit a context of `context` tokens; an error if none does."""
    after = 1 + worker.WARM_UP + worker.STEPS
    depths = [depth for depth in DEPTHS if depth + after <= context]
    if not depths:
        raise UsageError(f"--against, --kernels both: need a context of {DEPTHS[0] + after} tokens, not {context}")
    return depths


def measure_against(
    directory: Path,
    config: ModelConfig,
    runtimes: Sequence[Runtime],
    settings: Mapping[str, Any],
    check_after_rounds: Sequence[int],
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """Measure our model in turns with others of its shape; `settings` has the `threads` and `cpus` of all.

    Returns:
        `against`: by runtime, `ours` too, `status` ("measured", "not installed" or "failed: reason") and its figures.
        `against_ratios`: see `best_ratios`; empty if ours or all others failed.
        `against_raw`: every round of those that were measured.
    """
    ours = Runtime(OURS, sys.executable, directory, {"kernels": settings.get("kernels", "auto")})
    entries = {runtime.name: runtime for runtime in (ours, *runtimes)}
    asked = {key: settings[key] for key in ("threads", "cpus")} | {"vocab_size": config.vocab_size}
    asked["depths"] = turn_depths(config.max_position_embeddings)
    failures: dict[str, ChildFailure] = {}
    title = f"bench {plain_name(directory)} against others"
    turns = [_turn(runtime, asked) for runtime in entries.values()]
    raw = take_turns(
        title, turns, check_after_rounds, lambda raw: all(map(_steady, raw.values())), timeout_s, failures.__setitem__
    )
    against = {
        name: _failure(runtime, failures[name]) if name in failures else _summary(runtime, raw[name], config)
        for name, runtime in entries.items()
    }
    kept = {name: raw[name] for name, one in against.items() if one["status"] == "measured"}
    others = [name for name in kept if entries[name].kind not in (OTHER, OURS)]
    others = others or [name for name in kept if name != OURS]  # others of ours only if there is no other runtime
    ratios = best_ratios(kept, others) if OURS in kept else {}
    return {"against": against, "against_ratios": ratios, "against_raw": kept}


def _failure(runtime: Runtime, failure: ChildFailure) -> dict[str, Any]:
    if failure.exit_code == worker.NOT_INSTALLED:
        own = f"in an environment of its own, then --against {runtime.name}={runtime.directory},python=PYTHON"
        return {"status": "not installed", "install": f"{INSTALL.get(runtime.kind, INSTALL[OTHER])}, {own}"}
    return {"status": f"failed: {failure}"}


def _turn(runtime: Runtime, settings: Mapping[str, Any]) -> Turn:
    asked = {"kind": runtime.kind, "options": dict(runtime.options), "directory": str(runtime.directory.resolve())}
    command = [runtime.python, str(Path(worker.__file__).resolve()), json.dumps({**asked, **settings})]
    # Its interpreter must find its own packages, never those of this environment.
    environment: dict[str, str | None] = {"PYTHONPATH": None, "PYTHONHOME": None, "VIRTUAL_ENV": None}
    environment["OMP_NUM_THREADS"] = str(settings["threads"])
    return Turn(runtime.name, command, f"bench against {runtime.name}", environment, settings["cpus"])


def _by_name(rounds: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Each figure's values by dotted name, one a round."""
    first, by_depth = rounds[0], ("generated_tokens_per_s", "ttft_ms")
    values = {f"{key}.{depth}": [one[key][depth] for one in rounds] for key in by_depth for depth in first[key]}
    return values | {MEMORY: [float(one[MEMORY]) for one in rounds]}


def _steady(rounds: Sequence[Mapping[str, Any]]) -> bool:
    return agree([spread(values) for name, values in _by_name(rounds).items() if name not in (TOO_SHORT, MEMORY)])


def _summary(runtime: Runtime, rounds: Sequence[Mapping[str, Any]], config: ModelConfig) -> dict[str, Any]:
    """The figures of a runtime's rounds; failed if its model is not ours."""
    for key, value in rounds[0]["shape"].items():
        if value != getattr(config, key):
            reason = f"{runtime.directory} holds another model: {key} {value}, ours has {getattr(config, key)}"
            return {"status": f"failed: {reason}; convert the same checkpoint"}
    by_name = _by_name(rounds)
    return {
        "status": "measured",
        "version": rounds[0]["version"],
        "directory": str(runtime.directory),
        "python": runtime.python,
        "options": dict(runtime.options),
        "cpus": rounds[0]["cpus"],
        "rounds": len(rounds),
        **nested({name: statistics.median(values) for name, values in by_name.items()}),
        MEMORY: int(max(by_name[MEMORY])),
        "noise": {name: asdict(spread(values)) for name, values in by_name.items()},
        "steady": _steady(rounds),
    }


def best_ratios(raw: Mapping[str, Sequence[Mapping[str, Any]]], others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ours over the best of `others`, by figure; empty if there are none.

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
            "low": None if interval.rounds == 1 else interval.low,
            "high": None if interval.rounds == 1 else interval.high,
            "better": "higher" if better is max else "lower",
        }
    return ratios
