"""The manifest of a finished training, and where the models it was made from lie now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.methods import loop_settings
from sportsllm.errors import ArtifactError
from sportsllm.storage.artifact import digest, read_manifest

_CALIBRATION_LENGTH = 512  # tokens of a calibration sample where no recovery says its sequence
_STARTS = ("init", "checkpoint")  # settings that name the weights a run starts from
_TEACHERS = ("teacher", "checkpoint")  # settings that name the model it learns from, unless `teachers` lists several
_MATCHING = ("hidden_weight", "attention_weight", "on_policy", "clone_weight")  # these read the teacher too


@dataclass(frozen=True)
class ManifestFacts:
    """The content of a manifest. `parents` are the digests of the inputs, by the path that each had then."""

    directory: Path
    command: str
    settings: dict[str, Any]
    results: dict[str, Any]
    parents: dict[str, str]

    @property
    def tokens(self) -> int:
        """Tokens of this run alone."""
        return int(self.results.get("tokens", 0))

    @property
    def sequence(self) -> int:
        """Tokens of a sequence in training, or of a calibration sample."""
        return int(loop_settings(self.settings).get("sequence") or _CALIBRATION_LENGTH)

    @property
    def seed(self) -> int | None:
        """The training's."""
        return loop_settings(self.settings).get("seed")

    @property
    def from_scratch(self) -> bool:
        """Whether it began with random weights and learnt from text alone."""
        return self.command == "train" and not self.settings.get("init")


def read_manifest_facts(directory: Path) -> ManifestFacts:
    """Read a finished directory's manifest.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    manifest = read_manifest(directory)
    return ManifestFacts(
        directory,
        command=str(manifest.get("command", "")),
        settings=dict(manifest.get("settings", {})),
        results=dict(manifest.get("results", {})),
        parents={parent["path"]: parent["sha256"] for parent in manifest.get("parents", [])},
    )


def parent_of(settings: Mapping[str, Any]) -> str | None:
    """The weights that a run starts from, as its settings name them."""
    return next((str(settings[key]) for key in _STARTS if settings.get(key)), None)


def teachers_of(settings: Mapping[str, Any]) -> list[str]:
    """The models that a run learns from, as its settings name them; none where all of its loss is cross-entropy."""
    if settings.get("kl_weight") == 0.0 and not matches_teacher(settings):
        return []
    several = [str(path) for path, _share in settings.get("teachers") or []]
    return several or [str(settings[key]) for key in _TEACHERS if settings.get(key)][:1]


def matches_teacher(settings: Mapping[str, Any]) -> bool:
    """Whether the loss needs more of the teacher than its stored signals."""
    return any(settings.get(key) for key in _MATCHING)


@dataclass(frozen=True)
class Lineage:
    """Where runs come from: the digest of the teacher they all begin at, and directories by their digests."""

    teacher: str
    known: dict[str, Path]

    def find(self, path: str, facts: ManifestFacts) -> Path:
        """Where an input that `facts` call `path` lies now.

        Raises:
            ArtifactError: it is gone or was changed.
        """
        expected = facts.parents.get(path)
        if expected in self.known:
            return self.known[expected]
        if Path(path).is_dir() and digest(Path(path)) == expected:
            return Path(path)
        raise ArtifactError(
            f"{facts.directory}: was made from {path}, which is missing or has changed, so its cost cannot be counted; "
            "put it back or leave this run out"
        )
