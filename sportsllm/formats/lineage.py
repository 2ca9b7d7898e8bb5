"""Which models a directory was made from, by the paths and digests in the manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sportsllm.errors import ArtifactError
from sportsllm.formats.digests import digest
from sportsllm.formats.manifest import MANIFEST, read_manifest

_STARTS = ("init", "checkpoint", "teacher")  # settings that name the model a stage starts from, the nearest first
_MOST_STEPS = 64


@dataclass(frozen=True)
class Ancestor:
    """A model that another was made from; `manifest` is empty for one that no stage made."""

    directory: Path
    manifest: Mapping[str, Any]


def parents_by_nearness(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Path and digest of everything a stage read, the model that it started from first."""
    settings = manifest.get("settings", {})
    starts = [str(settings[key]) for key in _STARTS if settings.get(key)]
    parents = [(str(parent["path"]), str(parent["sha256"])) for parent in manifest.get("parents", [])]
    return sorted(parents, key=lambda parent: starts.index(parent[0]) if parent[0] in starts else len(starts))


def is_stage(directory: Path, value: str) -> bool:
    """Whether a finished stage with this digest lies there; a damaged one is another."""
    try:
        return (directory / MANIFEST).is_file() and digest(directory) == value
    except ArtifactError:
        return False


def ancestors(manifest: Mapping[str, Any], directory: Path) -> list[Ancestor]:
    """The models that `directory`, whose manifest this is, was made from, the nearest first.

    They are looked for where the manifests say, and beside the stage made from them; the list ends where one is gone
    or was changed.
    """
    found: list[Ancestor] = []
    while len(found) < _MOST_STEPS:
        settings = manifest.get("settings", {})
        keys = (*_STARTS, "student") if settings.get("start") == "weights" else _STARTS
        starts = {str(settings[key]) for key in keys if settings.get(key)}
        parents = parents_by_nearness(manifest)
        named = [parent for parent in parents if parent[0] in starts]
        if not parents:
            return found
        path, value = (named or parents)[0]  # a stage that names no start reads its model first
        places = [Path(path), directory.parent / Path(path).name]
        stage = next((place for place in places if is_stage(place, value)), None)
        if stage is None:
            outside = [
                place for place in places if (place / "config.json").is_file() and not (place / MANIFEST).exists()
            ]
            return [*found, *(Ancestor(place, {}) for place in outside[:1])]
        directory, manifest = stage, read_manifest(stage)
        found.append(Ancestor(directory, manifest))
    return found
