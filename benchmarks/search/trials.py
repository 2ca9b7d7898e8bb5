"""Trying candidates out: latency of random weights here, loss right after the cut, quality after a brief recovery.

The commands themselves make everything, each thing in a directory that is kept, so that a search that is run again
resumes where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.devices.schema import Device
from benchmarks.measure.bench import short_bench
from benchmarks.predict.model_size import ModelFormat
from benchmarks.search.candidates import Candidate, shape_name
from benchmarks.search.stages import Source, export_settings, prune_settings, quantize_settings, vocabulary_stages
from compress.pruning.shapes import Shape
from sportsllm.cli.flags import load_command
from sportsllm.console import silenced
from sportsllm.files import atomic_write_text
from sportsllm.models.hf_config import load_config, read_json
from sportsllm.storage.artifact import Stage, digest, run_stage

_SCORING_SAMPLES = 8
_CUT_SAMPLES = 32
_BRIEF_SAMPLES = 96


@dataclass(eq=False)
class Trials:
    """Tries candidates out under `directory`.

    Attributes:
        source: teacher and text.
        device: whose budget counts.
        directory: of everything made on the way.
        search_tokens: of a brief recovery.
    """

    source: Source
    device: Device
    directory: Path
    search_tokens: int
    _losses: dict[str, float] = field(default_factory=dict)

    def teacher_with(self, vocab_size: int) -> Path:
        """The teacher, its vocabulary cut to `vocab_size` and fine-tuned on as many tokens as a brief recovery has."""
        teacher = self.source.teacher
        if vocab_size == load_config(teacher).vocab_size:
            return teacher
        cut, tuned = self.directory / f"vocabulary-{vocab_size}", self.directory / f"teacher-{vocab_size}"
        with silenced():
            for command, settings in vocabulary_stages(self.source, cut, tuned, vocab_size, self.search_tokens):
                load_command(command)(**settings)
        return tuned

    def probe(self, candidate: Candidate) -> dict[str, float | None]:
        """Figures by the limits' names, measured here on an export of the candidate's shape with random weights."""
        directory = self.directory / "probes" / candidate.name
        export = self._export(self._random(candidate), candidate.format, directory, method="rtn")
        kept = directory / "figures.json"
        key = hashlib.sha256(json.dumps([digest(export), self.source.threads]).encode()).hexdigest()
        old = read_json(kept) if kept.exists() else {}
        if old.get("fingerprint") == key:
            return dict(old["figures"])
        figures = short_bench(export, self.device, self.source.threads)
        atomic_write_text(kept, json.dumps({"fingerprint": key, "figures": figures}))
        return figures

    def loss_after_cut(self, shape: Shape, vocab_size: int) -> float:
        """Nats a token on calibration text, right after cut and refit: which shapes are worth recovering."""
        name = shape_name(shape, vocab_size)
        if name not in self._losses:
            self._losses[name] = self._loss_after_cut(shape, vocab_size)
        return self._losses[name]

    def _loss_after_cut(self, shape: Shape, vocab_size: int) -> float:
        from compress.pruning.kept_units import loss_per_token
        from compress.pruning.run import PruneConfig, prune_to_shape

        model, scores, samples = self._measured_teacher(vocab_size)
        if shape == Shape.of(model.config):
            return loss_per_token(model, samples[:_SCORING_SAMPLES])
        pruned = prune_to_shape(model, scores, shape, PruneConfig(), samples)
        return loss_per_token(pruned.model, samples[:_SCORING_SAMPLES])

    @functools.lru_cache(maxsize=2)  # noqa: B019 - one search, and it ends with the process
    def _measured_teacher(self, vocab_size: int) -> tuple[Any, Any, Any]:
        from compress.pruning.run import PruneConfig, measure_scores
        from sportsllm.storage.checkpoint import load_checkpoint

        model = load_checkpoint(self.teacher_with(vocab_size))
        samples = self._pieces(vocab_size)[:_CUT_SAMPLES]
        return model, measure_scores(model, PruneConfig(), samples), samples

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as above
    def _pieces(self, vocab_size: int) -> list[Any]:
        from sportsllm.text.calibration import calibration_samples
        from sportsllm.text.tokenizer import load_tokenizer
        from sportsllm.training.setup import held_out_files

        teacher = self.teacher_with(vocab_size)
        config = load_config(teacher)
        words = load_tokenizer(teacher, config)
        valid = held_out_files(self.source.teacher)
        return calibration_samples(self.source.calibration, valid, words, config, None, self.source.sequence)

    def quality(self, candidate: Candidate) -> float:
        """Bits per byte of the candidate, recovered briefly and packed, on text held out of the corpus."""
        student = self.recovered(candidate, self.directory / "recovered", self.search_tokens)
        with silenced():
            packed = self._packed(student, candidate.format, self.directory / "recovered")
        return self.score(packed)

    def recovered(self, candidate: Candidate, parent: Path, tokens: int) -> Path:
        """The cut teacher, recovered; the teacher itself where nothing is cut."""
        teacher = self.teacher_with(candidate.vocab_size)
        if candidate.shape == Shape.of(load_config(teacher)):
            return teacher
        out = parent / shape_name(candidate.shape, candidate.vocab_size)
        # More samples of the cut gain nothing that is left after a brief recovery.
        samples = _BRIEF_SAMPLES if len(self._pieces(candidate.vocab_size)) >= _BRIEF_SAMPLES else None
        with silenced():
            load_command("prune")(**prune_settings(self.source, candidate, teacher, out, tokens, samples))
        return out

    def score(self, directory: Path) -> float:
        """Bits per byte on the documents that the training corpus holds out by hash."""
        from sportsllm.storage.checkpoint import load_checkpoint
        from sportsllm.text.split import load_corpus
        from sportsllm.text.tokenizer import load_tokenizer
        from sportsllm.training.setup import validator

        model = load_checkpoint(directory)
        return validator(load_corpus(self.source.corpus, ()), load_tokenizer(directory, model.config))(model)

    def _random(self, candidate: Candidate) -> Path:
        from sportsllm.models.language_model import SportsLLM
        from sportsllm.storage.checkpoint import save_checkpoint

        teacher = self.teacher_with(candidate.vocab_size)
        config = candidate.shape.applied_to(load_config(teacher))

        def make(directory: Path) -> dict[str, Any]:
            model = SportsLLM(config)
            model.initialize(self.source.seed)
            save_checkpoint(directory, model, teacher)
            return {"parameters": config.parameters}

        name = shape_name(candidate.shape, candidate.vocab_size)
        shape = {"shape": name, "seed": self.source.seed}
        return Path(run_stage(self.directory / "random" / name, Stage("random", shape, [teacher]), make)["out"])

    def _packed(self, checkpoint: Path, format: ModelFormat, parent: Path, method: str | None = None) -> Path:
        if format.precision == "fp32":
            return checkpoint
        out = parent / f"{checkpoint.name}-{format.weights_name}"
        load_command("quantize")(**quantize_settings(self.source, format, checkpoint, out, method))
        return out

    def _export(self, checkpoint: Path, format: ModelFormat, parent: Path, method: str | None = None) -> Path:
        with silenced():
            packed = self._packed(checkpoint, format, parent, method)
            load_command("export")(**export_settings(self.source, format, packed, parent / "export"))
        return parent / "export"
