"""What to call the method of a finished training, from its manifest's command and settings alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sportsllm.training.settings import TrainConfig

_WORDS = {"train": "fine-tuned", "distill": "distilled", "prune": "pruned"}
# Settings that say how long, on what or how large: no part of the method.
_LOOP_SETTINGS = {field.name for field in dataclasses.fields(TrainConfig)}
_PLACE_OR_SIZE = {
    "model", "corpus", "valid", "tokenizer", "teacher", "student", "init", "checkpoint", "calibration", "scores",
    "start", "signal_tokens", "hidden", "intermediate", "heads", "kv_heads", "layers",
}  # fmt: skip


def loop_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the training loop: a command's own, or those of its recovery."""
    loop: Mapping[str, Any] = settings.get("recover") or settings
    return loop


def method_name(command: str, settings: Mapping[str, Any], parent: str | None) -> str:
    """The method in words: `from scratch`, `pruned + recovered`, `pruned + fine-tuned with LoRA`.

    `parent` is the method of the run it starts from; None where it starts from the teacher or from random weights.
    """
    if command == "train" and not settings.get("init"):
        return "from scratch"
    words = _WORDS.get(command, command)
    if command == "distill" and settings.get("init") and parent is None:
        words = "distilled from weights"
    if settings.get("recover"):
        words += " + recovered"
    if settings.get("lora") or loop_settings(settings).get("lora"):
        words += " with LoRA"
    return words if parent is None else f"{parent} + {words}"


def variants(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """For each method and its settings, the method and the settings in which the runs of that method differ."""
    names = []
    flat = [_method_settings(settings) for _, settings in runs]
    for (method, _), own in zip(runs, flat, strict=True):
        peers = [other for (name, _), other in zip(runs, flat, strict=True) if name == method]
        keys = sorted({key for peer in peers for key in peer})
        differing = [key for key in keys if len({json.dumps(peer.get(key), default=str) for peer in peers}) > 1]
        names.append(", ".join([method, *filter(None, (_words(key, own.get(key)) for key in differing))]))
    return names


def recipe(settings: Mapping[str, Any], parent: str | None) -> str:
    """Equal for two runs whose settings differ in the seed alone, or in the path of `parent`, compared on its own."""
    kept = {key: value for key, value in settings.items() if key != "seed" and (parent is None or value != parent)}
    if isinstance(kept.get("recover"), dict):
        kept["recover"] = {key: value for key, value in kept["recover"].items() if key != "seed"}
    return json.dumps(kept, sort_keys=True, default=str)


def _method_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that describe the method; those inside another setting are named `setting key`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner = value if isinstance(value, dict) else {}
        prefix = "" if key == "recover" else f"{key} "
        found |= {prefix + name: part for name, part in inner.items() if name not in _LOOP_SETTINGS}
        if not inner and key not in _LOOP_SETTINGS | _PLACE_OR_SIZE | {"recover"}:
            found[key] = value
    return found


def _words(key: str, value: Any) -> str:
    name = key.replace("_", " ")
    if value is None or value == [] or (value == 0 and key == "hidden_weight"):
        return ""
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, str) and "/" in value:  # a path: that there is one says enough
        return name
    return f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
