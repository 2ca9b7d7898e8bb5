"""The winner's line: a recipe that makes it from the teacher, run by the same code as every recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.files import write_whole
from benchmarks.search.candidates import Candidate
from benchmarks.search.trials import (
    Source,
    export_settings,
    prune_settings,
    quantize_settings,
    vocabulary_stages,
)
from compress.pruning.shapes import Shape
from sportsllm.models.config import ModelConfig

_QAD_SHARE = 0.2  # of the recovery's tokens, for training as rounded at 4 bits


def write_line(
    path: Path,
    source: Source,
    candidate: Candidate,
    teacher: ModelConfig,
    *,
    tokens: int,
    search_tokens: int,
    device: str,
    on_device: bool,
    valid: list[Path],
) -> None:
    """Write the recipe that makes `candidate` from the teacher; outputs go beside it.

    Args:
        path: the recipe to write.
        source: teacher and text.
        candidate: what to make.
        teacher: the teacher's config.
        tokens: of the recovery.
        search_tokens: of the fine-tuning after a cut of the vocabulary.
        device: name or file of the budget.
        on_device: this machine is the device.
        valid: held-out text for the quality limit.
    """
    out = path.parent
    stages: list[tuple[str, str, dict[str, Any]]] = []
    made = source.teacher
    if candidate.vocab_size != teacher.vocab_size:
        cut, tuned = out / "vocabulary", out / "teacher"
        pair = vocabulary_stages(source, made, cut, tuned, candidate.vocab_size, search_tokens)
        stages += [
            (name, command, settings) for name, (command, settings) in zip(("vocabulary", "teacher"), pair, strict=True)
        ]
        made = tuned
    if candidate.shape != Shape.of(teacher):
        student = out / "student"
        stages.append(
            ("student", "prune", {**prune_settings(source, candidate, made, student, tokens), "valid": valid})
        )
        made = student
    if candidate.form.precision != "fp32":
        packed = out / "packed"
        # At 4 bits rounding costs enough to be trained away.
        qad = round(_QAD_SHARE * tokens) if candidate.form.precision == "int4" else None
        settings = quantize_settings(source, candidate.form, made, packed, None, qad)
        stages.append(("packed", "quantize", settings | ({"valid": valid} if qad else {})))
        made = packed
    export = out / "export"
    stages.append(("export", "export", export_settings(source, candidate.form, made, export)))
    measured = {"directory": export, "device": device, "on_device": on_device, "threads": source.threads}
    if valid:
        measured |= {"text": valid, "teacher": source.teacher}
    stages.append(("bench", "bench", measured))
    write_whole(path, _toml(f"fit-{candidate.name}", out, stages))


def _toml(name: str, out: Path, stages: list[tuple[str, str, dict[str, Any]]]) -> str:
    lines = [
        "# Written by `fit`: makes the chosen model again with `sportsllm-compress run`.",
        f"name = {_value(name)}",
        f"out = {_value(out)}",
    ]
    for stage, command, settings in stages:
        lines += ["", "[[stage]]", f"name = {_value(stage)}", f"command = {_value(command)}"]
        lines += [f"{key} = {_value(value)}" for key, value in _given(settings).items()]
    return "\n".join(lines) + "\n"


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _value(value: Any) -> str:
    """TOML of a string, path, number, flag or list of them, which JSON's spelling is too."""
    return json.dumps(value, default=str, ensure_ascii=False)
