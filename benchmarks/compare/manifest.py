"""The manifest of a finished training, and where the models it was made from lie now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.methods import loop_settings
from sportsllm.errors import ArtifactError
from sportsllm.formats.artifact import digest, read_manifest

_CALIBRATION_LENGTH = 512  # tokens of a calibration sample where no recovery says its sequence


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

    @property
    def parent(self) -> str | None:
        """The weights that the run starts from, as its settings name them."""
        return self.settings.get("init") or self.settings.get("checkpoint")

    @property
    def teacher(self) -> str | None:
        """The model that the run learns from, as its settings name it; None where all its loss is cross-entropy."""
        if self.settings.get("kl_weight") == 0.0 and not self.settings.get("hidden_weight"):
            return None
        return self.settings.get("teacher") or self.settings.get("checkpoint")


def read_manifest_facts(directory: Path) -> ManifestFacts:
    """Read a finished directory's manifest.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    manifest = read_manifest(directory)
    parents = {parent["path"]: parent["sha256"] for parent in manifest.get("parents", [])}
    settings, results = manifest.get("settings", {}), manifest.get("results", {})
    return ManifestFacts(directory, str(manifest.get("command", "")), settings, results, parents)


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
