"""Finished trainings as a comparison needs them: what was trained how, at what cost, and how good it is.

A run's tokens, FLOPs and seconds are those of the whole way from the teacher to it: a run that starts from another
compressed model carries that model's cost. The teacher's own training is not counted: it is there already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compare.cost import TrainingCost, training_cost
from benchmarks.compare.manifest import Lineage, ManifestFacts, parent_of, read_manifest_facts
from benchmarks.compare.methods import method_name, recipe
from benchmarks.report.inputs import read_metrics
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.storage.artifact import MANIFEST


@dataclass(frozen=True)
class Cost:
    """What a run took: FLOPs, tokens of this run alone and of the runs it starts from; epochs and seconds of both."""

    flops: TrainingCost
    trained: int
    before: int
    epochs: float
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens trained on since the teacher, or since random weights."""
        return self.before + self.trained

    @property
    def total_flops(self) -> int:
        """FLOPs spent since the teacher, or since random weights."""
        return self.flops.at(self.trained)


@dataclass(frozen=True)
class Quality:
    """How good a model is, in bits per byte of held-out text.

    Attributes:
        finished: of the finished model; nan where it was not scored.
        untrained: before any training of this run, where measured.
        curve: (tokens of this run alone, bits per byte) logged while training, the last one of the finished model.
        digests: say which text it was scored on.
        text: the names of that text.
    """

    finished: float
    untrained: float | None
    curve: tuple[tuple[int, float], ...]
    digests: tuple[str, ...]
    text: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One finished training.

    Attributes:
        name: the directory's, or its path where two have the same name.
        method: in words, for example `pruned + recovered`.
        recipe: equal for runs that differ in their seeds alone, all the way from the teacher.
        facts: its manifest.
        config: the model's shape.
        cost: tokens, FLOPs and time.
        quality: bits per byte.
        notes: caveats for a reader of the figures.
    """

    name: str
    method: str
    recipe: str
    facts: ManifestFacts
    config: ModelConfig
    cost: Cost
    quality: Quality
    notes: tuple[str, ...]

    @property
    def shape(self) -> ModelConfig:
        """The config less what changes no parameter."""
        return self.config.with_changes(
            max_position_embeddings=2, dropout=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=None
        )


def read_run(directory: Path, lineage: Lineage) -> Run:
    """One run and, to know its cost, those it starts from.

    Raises:
        ArtifactError: an input is gone or was changed, so that its cost cannot be counted.
    """
    facts, config = read_manifest_facts(directory), load_config(directory)
    flops, notes = training_cost(facts, config, lineage)
    epochs, seconds = float(facts.results.get("epochs", 0.0)), float(facts.results.get("seconds", 0.0))
    run = Run(
        name=directory.resolve().name,
        method=method_name(facts.command, facts.settings, None),
        recipe=recipe(facts.settings, None),
        facts=facts,
        config=config,
        cost=Cost(flops, trained=facts.tokens, before=0, epochs=epochs, seconds=seconds),
        quality=_read_quality(facts),
        notes=notes,
    )
    return _with_parent(run, lineage)


def _with_parent(run: Run, lineage: Lineage) -> Run:
    """The run with the cost of the run it starts from added; unchanged if that is the teacher or nothing."""
    facts, path = run.facts, parent_of(run.facts.settings)
    if path is None or facts.parents.get(path) == lineage.teacher:
        return run
    directory = lineage.find(path, facts)
    if not (directory / MANIFEST).exists():
        note = f"{facts.directory.name} starts from {directory.name}, whose cost is not recorded and not counted"
        return replace(run, notes=(note, *run.notes))
    parent = read_run(directory, lineage)
    note = f"{facts.directory.name} starts from {parent.name}, whose tokens, FLOPs and seconds are included in its own"
    return replace(
        run,
        method=method_name(facts.command, facts.settings, parent.method),
        recipe=recipe(facts.settings, path) + parent.recipe,
        cost=replace(
            run.cost,
            flops=replace(run.cost.flops, start=parent.cost.total_flops),
            before=parent.cost.tokens,
            epochs=run.cost.epochs + parent.cost.epochs,
            seconds=run.cost.seconds + parent.cost.seconds,
        ),
        notes=(*parent.notes, note, *run.notes),
    )


def _read_quality(facts: ManifestFacts) -> Quality:
    results = facts.results
    curve = tuple(
        (int(record["tokens"]), float(record["valid_bits_per_byte"]))
        for record in read_metrics(facts.directory / "metrics.jsonl")
        if is_positive(record.get("tokens")) and is_positive(record.get("valid_bits_per_byte"))
    )
    # Held-out text is in separate files, or a part of the corpus chosen by hash.
    own = [path for path in facts.settings.get("valid") or [] if path in facts.parents]
    paths = own or [path for path in facts.settings.get("corpus") or [] if path in facts.parents]
    part = () if own else ("by hash out of the corpus",)
    return Quality(
        finished=float(results.get("valid_bits_per_byte") or math.nan),
        untrained=results.get("bits_per_byte_before_recovery", results.get("bits_per_byte_before")),
        curve=curve,
        digests=(*part, *(facts.parents[path] for path in paths)),
        text=(*part, *("/".join(Path(path).parts[-2:]) for path in paths)),
    )


def is_positive(value: Any) -> bool:
    """Whether a record holds a usable number."""
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
