"""Which layers of its teacher a pruned student has: the states that are matched by hidden-state matching."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from compress.distillation.settings import DistillationConfig
from sportsllm.formats.manifest import MANIFEST, Ancestor, ancestors, read_manifest


def map_kept_layers(objective: DistillationConfig, kept: Sequence[int], layers: int) -> DistillationConfig:
    """The objective with a layer map that matches each kept layer's input to its input in the full model.

    So the layer before a dropped one learns to stand in for it, as in the refit. A given map stays.
    """
    if not objective.hidden_weight or objective.layer_map is not None:
        return objective
    pairs = ",".join(f"{student}:{teacher}" for student, teacher in enumerate([*kept, layers]))
    return dataclasses.replace(objective, layer_map=pairs)


def is_untrained_cut(checkpoint: Path) -> bool:
    """Whether a checkpoint was pruned and not trained since."""
    if not (checkpoint / MANIFEST).is_file():
        return False
    manifest = read_manifest(checkpoint)
    pruned = manifest.command == "prune" and "kept_layers" in manifest.results
    return pruned and manifest.settings.get("recover") is None


def layers_of_teacher(student: Path, teacher: Path) -> list[int] | None:
    """The teacher's layers that a checkpoint has; None where it was not pruned out of that very teacher.

    The manifests tell, of all stages between the two.
    """
    if not (student / MANIFEST).is_file():
        return None
    manifest = read_manifest(student)
    kept: list[int] | None = None
    for stage in (Ancestor(student, manifest), *ancestors(manifest, student)):
        if stage.directory.resolve() == teacher.resolve():
            return kept
        if stage.manifest.command == "distill" and stage.manifest.text("start") != "weights":
            return None  # layers of random weights, or of a cut that is not recorded
        cut: list[int] | None = stage.manifest.results.get("kept_layers")
        if cut is not None:
            kept = cut if kept is None else [cut[layer] for layer in kept]
    return None
