"""`bench --against`: other runtimes on the same weights, in turns with ours: A B C A B C, each turn a fresh process.

A peer reads our export (onnxruntime-genai, optimum) or what its own tool made from the same checkpoint. One that is
not installed gets a line that says how to install it, one that fails its reason; neither gets a number.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure.process import ChildFailure, run_child
from benchmarks.measure.rounds import Payloads, Turn, take_turns
from benchmarks.runtimes import worker as turn_file
from benchmarks.spread import spread
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

OURS = "ours"
LABEL = "+"
"""Parts a runtime's name from what tells two peers of that runtime apart."""
OTHER = "other"
"""A second export of this project, so that two forms of a model are compared in turns."""
DEPTHS = (32, 512)
TOO_SHORT = f"ttft_ms.{DEPTHS[0]}"
"""Milliseconds, in which one disturbance counts: told, but never the reason for another round."""
PROBE_TIMEOUT_S = 120.0
OWN_ENVIRONMENT = "in an environment of its own, then --peer-python {name}=ENVIRONMENT/bin/python"
INSTALL = {
    "genai": "pip install onnxruntime-genai",
    "openvino": "pip install openvino-genai",
    "llama.cpp": "pip install llama-cpp-python",
    "optimum": "pip install 'sportsllm-compress[optimum]' torch",
    OTHER: "pip install sportsllm-compress",
}
CONVERT = {
    "openvino": "optimum-cli export openvino --model CHECKPOINT --weight-format int4 DIR",
    "llama.cpp": "export/gguf/convert.py CONVERT_HF_TO_GGUF.PY CHECKPOINT --outfile FILE.gguf, then llama-quantize",
}
"""Runtimes that cannot read our export, and what makes the directory they read; the others can."""
FIGURES = {"decode_tokens_per_s": max, "ttft_ms": min, "peak_rss_bytes": min}
"""What is compared, and which of two values is the better one."""


@dataclass(frozen=True)
class Peer:
    """A runtime to measure: its name, its interpreter, what it reads (None where nothing was named) and its options.

    A name is that of a runtime, or one with a label, `openvino+128`, so that a runtime can take part several times.
    """

    name: str
    python: str
    directory: Path | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The runtime's name without a label."""
        return _kind(self.name)


def _kind(name: str) -> str:
    return name.partition(LABEL)[0]


def parse_peers(
    names: str | None,
    directories: Sequence[str] | None,
    pythons: Sequence[str] | None,
    export: Path,
    options: Sequence[str] | None = None,
) -> list[Peer]:
    """The peers that `--against`, `--peer-directory`, `--peer-python` and `--peer-option` ask for.

    What a runtime's plain name was given holds for its labelled ones that were given nothing; options do not.

    Raises:
        UsageError: no such runtime, a flag without its runtime, a runtime without options, or a path that is not there.
    """
    wanted = list(dict.fromkeys(name.strip() for name in (names or "").split(",") if name.strip()))
    for name in wanted:
        if _kind(name) not in INSTALL:
            raise UsageError(f"--against {name}: no such runtime; it knows {', '.join(INSTALL)}")
    known = {*wanted, *map(_kind, wanted)}
    places = dict(_pairs("--peer-directory", directories, known))
    interpreters = dict(_pairs("--peer-python", pythons, known))
    settings = _options(options, wanted)
    found = []
    for name in wanted:
        place = places.get(name, places.get(_kind(name)))
        if _kind(name) == OTHER and place is None:
            raise UsageError(f"--against {name}: name the second export with --peer-directory {name}=DIR")
        directory = Path(place) if place else None if _kind(name) in CONVERT else export
        if directory is not None and not directory.exists():
            raise UsageError(f"--peer-directory {name}={directory}: not found; check the path")
        asked = interpreters.get(name, interpreters.get(_kind(name), sys.executable))
        python = shutil.which(asked)
        if python is None:
            raise UsageError(f"--peer-python {name}={asked}: no such program; check the path")
        found.append(Peer(name, python, directory, settings.get(name, {})))
    return found


def _pairs(
    flag: str, texts: Sequence[str] | None, known: Collection[str], form: str = "NAME=PATH"
) -> Iterator[tuple[str, str]]:
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not value or name not in known:
            raise UsageError(f"{flag} {text}: give {form} with a NAME of --against")
        yield name, value


def _options(texts: Sequence[str] | None, wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by peer; a value is JSON where it reads as such (`true`, `128`), else text."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in _pairs("--peer-option", texts, wanted, "NAME=KEY=VALUE"):
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--peer-option {name}={text}: give NAME=KEY=VALUE")
        if _kind(name) not in turn_file.WITH_OPTIONS:
            takers = " and ".join(turn_file.WITH_OPTIONS)
            raise UsageError(f"--peer-option {name}={text}: only {takers} take options")
        try:
            found.setdefault(name, {})[key] = json.loads(value)
        except ValueError:
            found.setdefault(name, {})[key] = value
    return found


def turn_depths(context: int) -> list[int]:
    """Depths of a turn that a context of so many tokens has room for.

    Raises:
        UsageError: for none of them.
    """
    after = 1 + turn_file.WARM_UP + turn_file.STEPS
    depths = [depth for depth in DEPTHS if depth + after <= context]
    if not depths:
        raise UsageError(f"--against: a context of {context} tokens has no room for {DEPTHS[0]} and {after} more")
    return depths


def measure_against(
    directory: Path,
    config: ModelConfig,
    peers: Sequence[Peer],
    specification: Mapping[str, Any],
    look_after: Sequence[int],
    timeout_s: float,
) -> dict[str, Any]:
    """Measure ours and the peers in turns.

    Args:
        directory: our model.
        config: its shape, which a peer's must match.
        peers: what `parse_peers` returned.
        specification: `threads` and `cpus`, the same for all.
        look_after: see `benchmarks.measure.rounds.looks`.
        timeout_s: after which one turn counts as hung.

    Returns:
        `against`: by runtime, `ours` too, `status` ("measured", "not installed" or "failed: reason"). A measured one
        has `decode_tokens_per_s` and `ttft_ms` by depth, `peak_rss_bytes`, `version`, `directory`, `python`, `rounds`,
        `noise`, `noisy`, `options` and `steady` (enough rounds agree); one that is not installed `install`.
        `against_ratios`: see `best_ratios`, to peers at their defaults; empty where ours or every peer failed.
        `against_tuned_ratios`: the same with those that were given options too; empty where none was.
        `against_raw`: every round of those that were measured.

    Raises:
        UsageError: the context is too short.
    """
    depths = turn_depths(config.max_position_embeddings)
    entries = {OURS: Peer(OURS, sys.executable, directory)} | {peer.name: peer for peer in peers}
    against = {name: _missing(peer) for name, peer in entries.items()}
    asked = {key: specification[key] for key in ("threads", "cpus")}
    asked |= {"depths": depths, "vocab_size": config.vocab_size}
    turns = [_turn(peer, asked) for name, peer in entries.items() if not against[name]]

    def failed(name: str, failure: ChildFailure) -> None:
        against[name] = _failure(failure)

    raw = take_turns(f"bench {directory.name} against others", turns, look_after, _agree, timeout_s, failed)
    for name, peer in entries.items():
        if not against[name]:
            against[name] = _summary(peer, raw[name], config)
    measured = [name for name in entries if against[name]["status"] == "measured"]
    kept = {name: raw[name] for name in measured}
    peers_measured = [entries[name] for name in measured if name != OURS] if OURS in measured else []
    return {
        "against": against,
        "against_ratios": best_ratios(kept, _compared([peer for peer in peers_measured if not peer.options])),
        "against_tuned_ratios": best_ratios(kept, _compared(peers_measured))
        if any(peer.options for peer in peers_measured)
        else {},
        "against_raw": kept,
    }


def _compared(peers: Sequence[Peer]) -> list[str]:
    """Who ours is compared with: a second export of ours counts only where there is no other runtime."""
    return [peer.name for peer in peers if peer.kind != OTHER] or [peer.name for peer in peers]


def _missing(peer: Peer) -> dict[str, Any]:
    """Why a runtime cannot take part, empty where it can: found out before the rounds, not in the middle of them."""
    if peer.name == OURS:
        return {}
    try:
        found = run_child(*_command(peer, {"probe": True}), PROBE_TIMEOUT_S, _environment(None)).payload["found"]
    except ChildFailure as failure:
        return _failure(failure)
    if not found:
        advice = f"{INSTALL[peer.kind]}, {OWN_ENVIRONMENT.format(name=peer.name)}"
        return {"status": "not installed", "install": advice}
    if peer.directory is None:
        reason = f"cannot read an export; make its own with {CONVERT[peer.kind]}"
        return {"status": f"failed: {reason}, then --peer-directory {peer.name}=DIR"}
    return {}


def _failure(failure: ChildFailure) -> dict[str, Any]:
    kinds = {"memory": "out of memory", "hang": "hung", "crash": "crashed", "refused": "gave up"}
    return {"status": f"failed: {kinds[failure.kind]} ({failure})"}


def _command(peer: Peer, specification: Mapping[str, Any]) -> tuple[list[str], str]:
    """The command of a turn, and what messages call it."""
    asked = {"kind": peer.kind, "options": dict(peer.options), **specification}
    if peer.directory is not None:
        asked["directory"] = str(peer.directory.resolve())
    return [peer.python, str(Path(turn_file.__file__).resolve()), json.dumps(asked)], f"bench against {peer.name}"


def _environment(threads: int | None) -> dict[str, str | None]:
    """A peer's interpreter must find its own packages, never those of this environment."""
    own: dict[str, str | None] = {"PYTHONPATH": None, "PYTHONHOME": None, "VIRTUAL_ENV": None}
    return own | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def _turn(peer: Peer, specification: Mapping[str, Any]) -> Turn:
    command, what = _command(peer, specification)
    return Turn(peer.name, command, what, _environment(specification["threads"]))


def _figures(one: Mapping[str, Any]) -> dict[str, float]:
    """One turn's figures by dotted name."""
    named = {f"{key}.{depth}": value for key in ("decode_tokens_per_s", "ttft_ms") for depth, value in one[key].items()}
    return named | {"peak_rss_bytes": float(one["peak_rss_bytes"])}


def _spreads(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    figures = [_figures(one) for one in rounds]
    return {name: asdict(spread([one[name] for one in figures])) for name in figures[0]}


def _steady(noise: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(one["noisy"] is False for name, one in noise.items() if name != TOO_SHORT)


def _agree(raw: Payloads) -> bool:
    return all(_steady(_spreads(rounds)) for rounds in raw.values() if rounds)


def _summary(peer: Peer, rounds: Sequence[Mapping[str, Any]], config: ModelConfig) -> dict[str, Any]:
    """What a runtime's rounds come to; failed where its model is not ours."""
    shape = rounds[0]["shape"]
    wrong = {key: value for key, value in shape.items() if value != getattr(config, key)}
    if wrong:
        key, value = next(iter(wrong.items()))
        reason = f"{peer.directory} holds another model: {key} {value}, ours has {getattr(config, key)}"
        return {"status": f"failed: {reason}; convert the same checkpoint"}
    noise = _spreads(rounds)
    middle = {name: statistics.median(_figures(one)[name] for one in rounds) for name in noise}
    result: dict[str, Any] = {
        "status": "measured",
        "version": rounds[0]["version"],
        "directory": str(peer.directory),
        "python": peer.python,
        "options": dict(peer.options),
        "cpus": rounds[0]["cpus"],
        "rounds": len(rounds),
        "peak_rss_bytes": int(max(one["peak_rss_bytes"] for one in rounds)),
    }
    for key in ("decode_tokens_per_s", "ttft_ms"):
        result[key] = {depth: middle[f"{key}.{depth}"] for depth in rounds[0][key]}
    noisy = [name for name, one in noise.items() if one["noisy"]]
    return result | {"noise": noise, "noisy": noisy, "steady": _steady(noise)}


def best_ratios(raw: Mapping[str, Sequence[Mapping[str, Any]]], others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ours over the best peer, by figure.

    Args:
        raw: the rounds of `ours` and of every measured peer, equally many.
        others: the peers that count.

    Returns:
        Per dotted name `peer` (the best by its median), `ours`, `best`, `ratio` = the median over the rounds of ours /
        that peer's of the same round, `low`, `high` and `confidence` of its interval (see `benchmarks.spread.spread`),
        and `better` ("higher" or "lower"). Empty where no peer counts.
    """
    figures = {name: [_figures(one) for one in rounds] for name, rounds in raw.items()}
    ratios = {}
    for name in figures[OURS][0] if others else ():
        middle = {who: statistics.median(one[name] for one in rounds) for who, rounds in figures.items()}
        better = FIGURES[name.partition(".")[0]]
        best = better(others, key=middle.__getitem__)
        pairs = zip(figures[OURS], figures[best], strict=True)
        each = [mine[name] / theirs[name] for mine, theirs in pairs]
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
