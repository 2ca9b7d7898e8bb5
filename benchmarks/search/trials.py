"""Trying candidates out: latency of random weights here, loss right after the cut, quality after a brief recovery.

Everything is made by the commands themselves, in directories of its own, and kept: a search that is run again goes on
where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.devices.schema import Device
from benchmarks.files import write_whole
from benchmarks.measure.quick import quick_figures
from benchmarks.search.candidates import Candidate, Form, shape_name
from compress.pruning.shapes import Shape
from sportsllm.cli.flags import load_command
from sportsllm.console import silenced
from sportsllm.models.hf_config import load_config, read_json
from sportsllm.storage.artifact import Stage, digest, run_stage

_SCORING_SAMPLES = 8
_CUT_SAMPLES = 32
_BRIEF_SAMPLES = 96
_SEQUENCE = 512


@dataclass(frozen=True)
class Source:
    """What a search starts from.

    Attributes:
        teacher: an unquantized checkpoint.
        corpus: training text; what decides between finalists is held out of it.
        calibration: text that statistics are taken from.
        threads: of everything; all cores if None.
        seed: of everything random.
        settings: further flags of every training, such as `batch_size`.
    """

    teacher: Path
    corpus: tuple[Path, ...]
    calibration: tuple[Path, ...]
    threads: int | None = None
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def training(self) -> dict[str, Any]:
        """Flags of the commands that train."""
        return {"corpus": list(self.corpus), "seed": self.seed, "threads": self.threads, **self.settings}

    @property
    def sequence(self) -> int:
        """Tokens of one piece of text."""
        return min(int(self.settings.get("sequence") or _SEQUENCE), load_config(self.teacher).max_position_embeddings)


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
            for command, settings in vocabulary_stages(
                self.source, teacher, cut, tuned, vocab_size, self.search_tokens
            ):
                load_command(command)(**settings)
        return tuned

    def probe(self, candidate: Candidate) -> dict[str, float | None]:
        """Figures by the limits' names, measured here on an export of the candidate's shape with random weights."""
        directory = self.directory / "probes" / candidate.name
        export = self._export(self._random(candidate), candidate.form, directory, method="rtn")
        kept = directory / "figures.json"
        key = hashlib.sha256(json.dumps([digest(export), self.source.threads]).encode()).hexdigest()
        old = read_json(kept) if kept.exists() else {}
        if old.get("fingerprint") == key:
            return dict(old["figures"])
        figures = quick_figures(export, self.device, self.source.threads)
        write_whole(kept, json.dumps({"fingerprint": key, "figures": figures}))
        return figures

    def loss_after_cut(self, shape: Shape, vocab_size: int) -> float:
        """Nats a token on calibration text, right after cut and repair: which shapes are worth recovering."""
        name = shape_name(shape, vocab_size)
        if name not in self._losses:
            self._losses[name] = self._loss_after_cut(shape, vocab_size)
        return self._losses[name]

    def _loss_after_cut(self, shape: Shape, vocab_size: int) -> float:
        from compress.pruning.run import Cut, cut_to_shape
        from compress.pruning.search import loss_per_token

        model, scores, samples = self._measured_teacher(vocab_size)
        if shape == Shape.of(model.config):
            return loss_per_token(model, samples[:_SCORING_SAMPLES])
        pruned, _ = cut_to_shape(model, scores, shape, Cut(), samples)
        return loss_per_token(pruned, samples[:_SCORING_SAMPLES])

    @functools.lru_cache(maxsize=2)  # noqa: B019 - one search, and it ends with the process
    def _measured_teacher(self, vocab_size: int) -> tuple[Any, Any, Any]:
        from compress.pruning.run import Cut, make_scores
        from sportsllm.storage.checkpoint import load_checkpoint

        model = load_checkpoint(self.teacher_with(vocab_size))
        samples = self._pieces(vocab_size)[:_CUT_SAMPLES]
        return model, make_scores(model, Cut(), samples, None), samples

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as above
    def _pieces(self, vocab_size: int) -> list[Any]:
        from sportsllm.text.calibration import calibration_samples
        from sportsllm.text.tokenizer import load_tokenizer

        teacher = self.teacher_with(vocab_size)
        config = load_config(teacher)
        words = load_tokenizer(teacher, config)
        return calibration_samples(self.source.calibration, words, config, None, self.source.sequence)

    def quality(self, candidate: Candidate) -> float:
        """Bits per byte of the candidate, recovered briefly and packed, on text held out of the corpus."""
        student = self.recovered(candidate, self.directory / "recovered", self.search_tokens)
        with silenced():
            packed = self._packed(student, candidate.form, self.directory / "recovered")
        return self.score(packed)

    def recovered(self, candidate: Candidate, parent: Path, tokens: int) -> Path:
        """The cut teacher, recovered; the teacher itself where nothing is cut."""
        teacher = self.teacher_with(candidate.vocab_size)
        if candidate.shape == Shape.of(load_config(teacher)):
            return teacher
        out = parent / shape_name(candidate.shape, candidate.vocab_size)
        # A brief recovery hides what more samples of the cut would gain.
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

    def _packed(self, checkpoint: Path, form: Form, parent: Path, method: str | None = None) -> Path:
        if form.precision == "fp32":
            return checkpoint
        out = parent / f"{checkpoint.name}-{Form(form.precision, form.block_size, 0.0, form.per_row).name}"
        load_command("quantize")(**quantize_settings(self.source, form, checkpoint, out, method))
        return out

    def _export(self, checkpoint: Path, form: Form, parent: Path, method: str | None = None) -> Path:
        with silenced():
            packed = self._packed(checkpoint, form, parent, method)
            load_command("export")(**export_settings(self.source, form, packed, parent / "export"))
        return parent / "export"


def vocabulary_stages(
    source: Source, teacher: Path, cut: Path, tuned: Path, vocab_size: int, tokens: int
) -> list[tuple[str, dict[str, Any]]]:
    """The commands that make a teacher with fewer tokens, with their settings."""
    calibration = list(source.calibration)
    return [
        ("prune", {"checkpoint": teacher, "out": cut, "calibration": calibration, "vocab_size": vocab_size}),
        ("train", {"init": cut, "out": tuned, "tokens": tokens, **source.training()}),
    ]


def prune_settings(
    source: Source, candidate: Candidate, teacher: Path, out: Path, tokens: int, samples: int | None = None
) -> dict[str, Any]:
    """Flags of `prune` that make a candidate's shape.

    A teacher whose vocabulary was cut was fine-tuned since, at a low rate: recovery goes by the original's.
    """
    from compress.cli.prune import recovery_rate

    shape, training = candidate.shape, source.training()
    if teacher != source.teacher and training.get("learning_rate") is None:
        training["learning_rate"] = recovery_rate(source.teacher)[0]
    return {
        "checkpoint": teacher,
        "out": out,
        "calibration": list(source.calibration),
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "layers": shape.layers,
        "samples": samples,
        "recover": tokens,
        **training,
    }


def quantize_settings(
    source: Source, form: Form, checkpoint: Path, out: Path, method: str | None, qad: int | None = None
) -> dict[str, Any]:
    """Flags of `quantize` for a form."""
    settings: dict[str, Any] = {
        "checkpoint": checkpoint,
        "out": out,
        "bits": int(form.precision.removeprefix("int")),
        "threads": source.threads,
    }
    if form.per_row:
        settings["per_row"] = True
    else:
        settings["block_size"] = form.block_size
    if method is not None:
        settings["method"] = method
    else:
        settings["calibration"] = list(source.calibration)
    if qad:
        settings |= {"qad": qad, **source.training()}
        settings.pop("learning_rate", None)  # training as rounded has a rate of its own
    return settings


def export_settings(source: Source, form: Form, checkpoint: Path, out: Path) -> dict[str, Any]:
    """Flags of `export` for a form."""
    settings: dict[str, Any] = {"checkpoint": checkpoint, "out": out, "kv_cache": form.cache, "profile": form.profile}
    if form.cache == "int8":
        settings["calibration"] = list(source.calibration)
    return settings
