"""Finished trainings as a comparison needs them: what was trained how, on how many tokens, at what cost.

A run's tokens, FLOPs and seconds are those of the whole way from the teacher to it: a run that starts from another
compressed model carries what that one cost. The teacher's own training is nobody's cost: it is there already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.flops import (
    TrainingCost,
    clone_flops_per_batch,
    cut_flops,
    forward_flops_per_token,
    training_flops_per_token,
)
from benchmarks.compare.methods import loop_settings, method_name, recipe
from benchmarks.report.report import read_metrics
from compress.pruning.scores import MEASURED
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.storage.artifact import MANIFEST, digest, read_manifest

_CALIBRATION_LENGTH = 512  # tokens of a calibration sample where no recovery says its sequence
_ORIGINS = ("init", "checkpoint")  # settings that name the weights a run starts from
_MATCHING = ("hidden_weight", "attention_weight", "on_policy", "clone_weight")  # these read the teacher too
_GUIDES = ("teacher", "checkpoint")  # settings that name the model it learns from, unless `teachers` lists several

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Run:
    """One finished training.

    Attributes:
        name: the directory's, or its path where two are called alike.
        command: that made it.
        method: in words, for example `pruned + recovered`.
        settings: of the manifest; `seed` is the training's.
        recipe: equal for runs that differ in their seeds alone, all the way from the teacher.
        config: the model's shape.
        held_out: digests that say which text it was scored on, and `text` the names of that text.
        cost: FLOPs by what they are for.
        trained: tokens of this run alone; `before` those of the runs it starts from.
        epochs, seconds: with the runs it starts from.
        bits_per_byte: of the finished model on held-out text; nan where it was not scored.
        unrecovered: bits per byte before any training of this run, where measured.
        points: (tokens of this run alone, bits per byte) logged while training, the last one of the finished model.
        remarks: what a reader of the figures must know.
    """

    name: str
    directory: Path
    command: str
    method: str
    settings: dict[str, Any]
    seed: int | None
    recipe: str
    config: ModelConfig
    held_out: tuple[str, ...]
    text: tuple[str, ...]
    cost: TrainingCost
    trained: int
    before: int
    epochs: float
    seconds: float
    bits_per_byte: float
    unrecovered: float | None
    points: Points
    remarks: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens trained on since the teacher, or since random weights."""
        return self.before + self.trained

    @property
    def flops(self) -> int:
        """FLOPs spent since the teacher, or since random weights."""
        return self.cost.at(self.trained)

    @property
    def from_scratch(self) -> bool:
        """Whether it began with random weights and learnt from text alone."""
        return self.command == "train" and not self.settings.get("init")

    @property
    def shape(self) -> ModelConfig:
        """The config less what changes no parameter."""
        return self.config.with_changes(
            max_position_embeddings=2, dropout=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=None
        )


def best_for_cost(finals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (cost, bits per byte) that no cheaper or equally dear one is as good as, cheapest first."""
    best: list[tuple[float, float]] = []
    for cost, bits in sorted(finals):
        if not best or bits < best[-1][1]:
            best.append((cost, bits))
    return best


def parents_of(directory: Path) -> dict[str, str]:
    """Digests of what a directory was made from, by the path each had then."""
    return {parent["path"]: parent["sha256"] for parent in read_manifest(directory).get("parents", [])}


@dataclass(frozen=True)
class Line:
    """Where runs come from: the digest of the teacher they all begin at, and directories by their digests."""

    teacher: str
    known: dict[str, Path]

    def read(self, directory: Path) -> Run:
        """One run and, to know its cost, those it starts from."""
        manifest, parents = read_manifest(directory), parents_of(directory)
        settings, results = dict(manifest.get("settings", {})), manifest.get("results", {})
        command, loop = str(manifest.get("command", "")), loop_settings(settings)
        config = load_config(directory)
        sequence = int(loop.get("sequence") or _CALIBRATION_LENGTH)
        tokens, epochs = int(results.get("tokens", 0)), float(results.get("epochs", 0.0))
        start, remarks = self._start(directory, settings, parents)
        importance = signals = per_token = 0
        if settings.get("calibration") and settings.get("checkpoint"):
            # Samples count as full ones where the manifest does not count their tokens.
            importance = cut_flops(
                load_config(self.find(settings["checkpoint"], directory, parents)),
                config,
                sequence,
                tokens=int(results.get("calibration_tokens", int(settings.get("samples") or 0) * sequence)),
                scored=settings.get("importance") in MEASURED,
                candidates=len(results.get("layers_tried", [])),
                repaired=bool(settings.get("repair")),
            )
        if settings.get("signals"):
            stored = self.find(settings["signals"], directory, parents)
            signals = self._signals_flops(stored)
            remarks.append(
                f"{directory.name} learnt from the signals in {stored.name}: the teacher's pass over their tokens "
                "counts once, however often they are read, and in full in each run that reads them; its seconds are "
                "left out"
            )
        if tokens and (not settings.get("signals") or _matches(settings)):
            per_token = self._pass_flops(directory, settings, parents, sequence)
        if settings.get("on_policy"):
            remarks.append(f"{directory.name} writes part of its text itself; the FLOPs of writing are not counted")
        held_out, text = _held_out(settings, parents)
        return Run(
            name=directory.resolve().name,
            directory=directory,
            command=command,
            method=method_name(command, settings, start.method if start else None),
            settings=settings,
            seed=loop.get("seed"),
            recipe=recipe(settings, origin_of(settings) if start else None) + (start.recipe if start else ""),
            config=config,
            held_out=held_out,
            text=text,
            cost=TrainingCost(
                student_per_token=training_flops_per_token(config, sequence) + self._clone_flops(directory, config),
                teacher_per_token=per_token,
                start=start.flops if start else 0,
                importance=importance,
                signals=signals,
            ),
            trained=tokens,
            before=start.tokens if start else 0,
            epochs=epochs + (start.epochs if start else 0.0),
            seconds=float(results.get("seconds", 0.0)) + (start.seconds if start else 0.0),
            bits_per_byte=float(results.get("valid_bits_per_byte") or math.nan),
            unrecovered=results.get("bits_per_byte_before_recovery", results.get("bits_per_byte_before")),
            points=_points(directory),
            remarks=tuple(remarks),
        )

    def find(self, path: str, directory: Path, parents: Mapping[str, str]) -> Path:
        """Where an input of `directory` lies now.

        Raises:
            ArtifactError: it is gone or was changed.
        """
        expected = parents.get(path)
        if expected in self.known:
            return self.known[expected]
        if Path(path).is_dir() and digest(Path(path)) == expected:
            return Path(path)
        raise ArtifactError(
            f"{directory}: was made from {path}, which is not there as it was, so what it cost cannot be counted; "
            "put it back or leave this run out"
        )

    def _start(
        self, directory: Path, settings: Mapping[str, Any], parents: Mapping[str, str]
    ) -> tuple[Run | None, list[str]]:
        origin = origin_of(settings)
        if origin is None or parents.get(origin) == self.teacher:
            return None, []
        path = self.find(origin, directory, parents)
        if not (path / MANIFEST).exists():
            return None, [f"{directory.name} starts from {path.name}, which says not what it cost: that is not counted"]
        start = self.read(path)
        said = f"{directory.name} starts from {start.name}: its tokens, FLOPs and seconds include that one's"
        return start, [*start.remarks, said]

    def _pass_flops(
        self, directory: Path, settings: Mapping[str, Any], parents: Mapping[str, str], sequence: int
    ) -> int:
        """FLOPs on a token of one forward pass of all that a run learns from; 0 where it learns from text alone."""
        guides = [load_config(self.find(path, directory, parents)) for path in guides_of(settings)]
        return sum(forward_flops_per_token(config, sequence) for config in guides)

    def _clone_flops(self, directory: Path, config: ModelConfig) -> int:
        """What making a clone's weights costs each token of a batch; 0 for any other run."""
        settings = read_manifest(directory).get("settings", {})
        if settings.get("start") != "clone":
            return 0
        teacher = load_config(self.find(settings["teacher"], directory, parents_of(directory)))
        return clone_flops_per_batch(teacher, config) // int(settings["batch_size"] * settings["sequence"])

    def _signals_flops(self, directory: Path) -> int:
        """FLOPs of making stored signals."""
        manifest = read_manifest(directory)
        settings = manifest.get("settings", {})
        per_token = self._pass_flops(directory, settings, parents_of(directory), int(settings["sequence"]))
        return int(manifest["results"]["tokens"]) * per_token


def origin_of(settings: Mapping[str, Any]) -> str | None:
    """The weights that a run starts from, as its settings name them."""
    return next((str(settings[key]) for key in _ORIGINS if settings.get(key)), None)


def guides_of(settings: Mapping[str, Any]) -> list[str]:
    """The models that a run learns from, as its settings name them; none where all of its loss is cross-entropy."""
    if settings.get("kl_weight") == 0.0 and not _matches(settings):
        return []
    several = [str(path) for path, _share in settings.get("teachers") or []]
    return several or [str(settings[key]) for key in _GUIDES if settings.get(key)][:1]


def _matches(settings: Mapping[str, Any]) -> bool:
    return any(settings.get(key) for key in _MATCHING)


def _held_out(settings: Mapping[str, Any], parents: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Digests and names of the held-out text: of files of its own, or of the corpus it is a hashed part of."""
    own = [path for path in settings.get("valid") or [] if path in parents]
    paths = own or [path for path in settings.get("corpus") or [] if path in parents]
    names = ["/".join(Path(path).parts[-2:]) for path in paths]
    part = () if own else ("by hash out of the corpus",)
    return (*part, *(parents[path] for path in paths)), (*part, *names)


def _points(directory: Path) -> Points:
    return tuple(
        (int(record["tokens"]), float(record["valid_bits_per_byte"]))
        for record in read_metrics(directory / "metrics.jsonl")
        if is_positive(record.get("tokens")) and is_positive(record.get("valid_bits_per_byte"))
    )


def is_positive(value: Any) -> bool:
    """Whether a record holds a usable number."""
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
