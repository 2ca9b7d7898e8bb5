"""What a run cost in floating-point operations (FLOPs): the student's steps, the teacher's passes, the cut."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.compare.manifest import Lineage, ManifestFacts, read_manifest_facts
from benchmarks.flops import forward_flops_per_token, training_flops_per_token
from compress.pruning.scores import MEASURED
from sportsllm.formats.huggingface.config import load_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_matrices


def repair_flops_per_token(full: ModelConfig, cut: ModelConfig, sequence: int) -> int:
    """FLOPs of fitting a cut model's matrices to the full one's values (`prune` with repair), for a calibration token.

        forward(full) + forward(cut) + sum over the cut model's matrices of 2 I (I + O)

    An estimate: every block runs about once in either model, and each matrix of I inputs and O outputs adds its
    inputs' (I, I) and (I, O) products. Heads are not run.
    """
    regression = 2 * sum(
        layers * m.columns * (m.columns + m.rows) for part, layers in cut.runs() for m in block_matrices(part)
    )
    blocks = sum(
        forward_flops_per_token(config, sequence) - 2 * config.vocab_size * config.hidden_size for config in (full, cut)
    )
    return blocks + regression


def cut_flops(
    full: ModelConfig, cut: ModelConfig, sequence: int, *, tokens: int, scored: bool, candidates: int, repaired: bool
) -> int:
    """FLOPs of a cut on `tokens` of calibration text in samples of `sequence`.

    Merging key/value heads and solving the repair's equations are left out; scores saved by an earlier cut count again.

    Args:
        scored: whether the full model read the text once to score its units.
        candidates: runs of layers that were left out on trial, one pass each.
        repaired: see `repair_flops_per_token`.
    """
    shorter = full.with_changes(num_hidden_layers=cut.num_hidden_layers)
    per_token = candidates * forward_flops_per_token(shorter, sequence)
    per_token += forward_flops_per_token(full, sequence) if scored else 0
    per_token += repair_flops_per_token(full, cut, sequence) if repaired else 0
    return tokens * per_token


@dataclass(frozen=True)
class TrainingCost:
    """FLOPs of one run by what they are for.

    `start` was spent by the runs it starts from, `importance` on scoring units before a cut and repairing it, and
    `signals` on the teacher's one pass over tokens whose signals are stored; all three before the first step.
    `student_per_token` and `teacher_per_token` are spent on each token of training; the teacher's is 0 where it does
    not run along.
    """

    student_per_token: int
    teacher_per_token: int = 0
    start: int = 0
    importance: int = 0
    signals: int = 0

    def at(self, tokens: int) -> int:
        """FLOPs spent once the run has trained on `tokens` tokens."""
        return sum(self.parts(tokens).values())

    def parts(self, tokens: int) -> dict[str, int]:
        """The same by part."""
        return {
            "start": self.start,
            "importance": self.importance,
            "signals": self.signals,
            "student": self.student_per_token * tokens,
            "teacher": self.teacher_per_token * tokens,
        }


def training_cost(facts: ManifestFacts, config: ModelConfig, lineage: Lineage) -> tuple[TrainingCost, list[str]]:
    """The FLOPs of a run that made a model of shape `config`, without those of the run it starts from, and notes.

    Raises:
        ArtifactError: a model that it learnt from or cut is gone or was changed.
    """
    settings, results, notes = facts.settings, facts.results, []
    teacher = importance = signals = 0
    if settings.get("calibration") and settings.get("checkpoint"):
        importance = cut_flops(
            load_config(lineage.find(settings["checkpoint"], facts)),
            config,
            facts.sequence,
            tokens=int(results.get("calibration_tokens", 0)),
            scored=settings.get("importance") in MEASURED,
            candidates=len(results.get("layers_tried", [])),
            repaired=bool(settings.get("repair")),
        )
    if settings.get("signals"):
        stored = read_manifest_facts(lineage.find(settings["signals"], facts))
        signals = stored.tokens * _teacher_flops(stored, lineage)
        notes.append(
            f"{facts.directory.name} learnt from the signals in {stored.directory.name}: the teacher's pass over their "
            "tokens counts once, however often they are read, and in full in each run that reads them; its seconds are "
            "left out"
        )
    if facts.tokens and (not settings.get("signals") or settings.get("hidden_weight")):
        teacher = _teacher_flops(facts, lineage)
    student = training_flops_per_token(config, facts.sequence)
    return TrainingCost(student, teacher, importance=importance, signals=signals), notes


def _teacher_flops(facts: ManifestFacts, lineage: Lineage) -> int:
    """FLOPs per token of one forward pass of a run's teacher; 0 where it learns from text alone."""
    if facts.teacher is None:
        return 0
    return forward_flops_per_token(load_config(lineage.find(facts.teacher, facts)), facts.sequence)
