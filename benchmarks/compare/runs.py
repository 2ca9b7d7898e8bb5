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
from benchmarks.compare.manifest import Lineage, ManifestFacts, read_manifest_facts
from benchmarks.compare.methods import method_name, recipe
from benchmarks.report.inputs import read_metrics
from sportsllm.formats.artifact import MANIFEST
from sportsllm.formats.huggingface.config import load_config
from sportsllm.models.config import ModelConfig


@dataclass(frozen=True)
class Run:
    """One finished training.

    Attributes:
        name: the directory's, or its path where two have the same name.
        method: in words, for example `pruned + recovered`.
        recipe: equal for runs that differ in their seeds alone, all the way from the teacher.
        flops: of this run and, as `start`, of those it starts from.
        before: tokens of the runs it starts from; epochs and seconds are of these and its own.
        bits_per_byte: of the finished model on held-out text; nan where it was not scored.
        untrained: bits per byte before any training of this run, where measured.
        curve: (tokens of this run alone, bits per byte) logged while training, the last one of the finished model.
        text_digests, text_names: of the text it was scored on.
        notes: caveats for a reader of the figures.
    """

    name: str
    method: str
    recipe: str
    facts: ManifestFacts
    config: ModelConfig
    flops: TrainingCost
    before: int
    epochs: float
    seconds: float
    bits_per_byte: float
    untrained: float | None
    curve: list[tuple[int, float]]
    text_digests: list[str]
    text_names: list[str]
    notes: list[str]

    @property
    def tokens(self) -> int:
        """Tokens trained on since the teacher, or since random weights."""
        return self.before + self.facts.tokens

    @property
    def total_flops(self) -> int:
        """FLOPs spent since the teacher, or since random weights."""
        return self.flops.at(self.facts.tokens)

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
    settings, results = facts.settings, facts.results
    flops, notes = training_cost(facts, config, lineage)
    # Held-out text is in separate files, or a part of the corpus chosen by hash.
    own = [path for path in settings.get("valid") or [] if path in facts.parents]
    paths = own or [path for path in settings.get("corpus") or [] if path in facts.parents]
    part = [] if own else ["by hash out of the corpus"]
    run = Run(
        name=directory.resolve().name,
        method=method_name(facts.command, settings, None),
        recipe=recipe(settings, None),
        facts=facts,
        config=config,
        flops=flops,
        before=0,
        epochs=float(results.get("epochs", 0.0)),
        seconds=float(results.get("seconds", 0.0)),
        bits_per_byte=float(results.get("valid_bits_per_byte") or math.nan),
        untrained=results.get("bits_per_byte_before_recovery", results.get("bits_per_byte_before")),
        curve=[
            (int(record["tokens"]), float(record["valid_bits_per_byte"]))
            for record in read_metrics(directory / "metrics.jsonl")
            if is_positive(record.get("tokens")) and is_positive(record.get("valid_bits_per_byte"))
        ],
        text_digests=part + [facts.parents[path] for path in paths],
        text_names=part + ["/".join(Path(path).parts[-2:]) for path in paths],
        notes=notes,
    )
    return _with_parent(run, lineage)


def _with_parent(run: Run, lineage: Lineage) -> Run:
    """The run with the cost of the run it starts from added; unchanged if that is the teacher or nothing."""
    facts, path = run.facts, run.facts.parent
    if path is None or facts.parents.get(path) == lineage.teacher:
        return run
    directory = lineage.find(path, facts)
    if not (directory / MANIFEST).exists():
        note = f"{facts.directory.name} starts from {directory.name}, whose cost is not recorded and not counted"
        return replace(run, notes=[note, *run.notes])
    parent = read_run(directory, lineage)
    note = f"{facts.directory.name} starts from {parent.name}, whose tokens, FLOPs and seconds are included in its own"
    return replace(
        run,
        method=method_name(facts.command, facts.settings, parent.method),
        recipe=recipe(facts.settings, path) + parent.recipe,
        flops=replace(run.flops, start=parent.total_flops),
        before=parent.tokens,
        epochs=run.epochs + parent.epochs,
        seconds=run.seconds + parent.seconds,
        notes=[*parent.notes, note, *run.notes],
    )


def is_positive(value: Any) -> bool:
    """Whether a record holds a usable number."""
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
