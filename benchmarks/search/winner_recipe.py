"""The recipe that makes the winner from the teacher, run by the same code as every recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.search.candidates import Candidate
from benchmarks.search.stages import (
    Effort,
    Source,
    Target,
    export_settings,
    prune_settings,
    qad_tokens,
    quantize_settings,
    vocabulary_stages,
)
from compress.pruning.shapes import Shape
from sportsllm.files import atomic_write_text
from sportsllm.formats.huggingface import load_config


def write_recipe(path: Path, candidate: Candidate, source: Source, effort: Effort, target: Target, text: Path) -> None:
    """Write the recipe that makes `candidate` from the teacher; its outputs go beside it.

    Args:
        path: of the recipe.
        candidate, source, effort, target: see their classes.
        text: held-out text that the finished model is compared with the teacher on.
    """
    stages = list(_stages(path.parent, candidate, source, effort, target, text))
    recipe = {
        "name": f"fit-{candidate.name}",
        "out": str(path.parent),
        "stage": [{"name": name, "command": command, **_plain(settings)} for name, command, settings in stages],
    }
    head = "# Written by `fit`: makes the chosen model again with `sportsllm-compress run`.\n"
    atomic_write_text(path, head + tomli_w.dumps(recipe))


def _stages(
    out: Path, candidate: Candidate, source: Source, effort: Effort, target: Target, text: Path
) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, command and settings of every stage."""
    stages: list[tuple[str, str, dict[str, Any]]] = []
    made, teacher, format = source.teacher, load_config(source.teacher), candidate.format
    if candidate.vocab_size != teacher.vocab_size:
        cut, tuned = out / "vocabulary", out / "teacher"
        commands = vocabulary_stages(source, cut, tuned, candidate.vocab_size, effort.search_tokens)
        stages += [(path.name, *command) for path, command in zip((cut, tuned), commands, strict=True)]
        made = tuned
    if candidate.shape != Shape.of(teacher):
        settings = prune_settings(source, candidate.shape, made, out / "student", effort.tokens)
        stages.append(("student", "prune", settings))
        made = out / "student"
    if format.precision != "fp32":
        qad = qad_tokens(format, effort.tokens)
        settings = quantize_settings(source, format, made, out / "packed", qad=qad)
        stages.append(("packed", "quantize", settings))
        made = out / "packed"
    stages.append(("export", "export", export_settings(source, format, made, out / "export", target.processor)))
    bench = {
        "directory": out / "export",
        "target": target.device,
        "on_device": target.on_device,
        **({"provider": target.provider} if target.provider != "cpu" else {}),
        "threads": source.threads,
        "text": [text],
        "teacher": source.teacher,
    }
    return [*stages, ("bench", "bench", bench)]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as TOML has them: paths are strings, and what is not set is left out."""

    def plain(value: Any) -> Any:
        return (
            [plain(one) for one in value]
            if isinstance(value, list)
            else str(value)
            if isinstance(value, Path)
            else value
        )

    return {"set" if key == "settings" else key: plain(value) for key, value in settings.items() if value is not None}
