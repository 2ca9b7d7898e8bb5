"""Try candidates: cut the teacher and recover briefly, round, export, score and time, within a time limit.

The commands make everything in directories that are kept, so that a repeated search resumes where it stopped.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.devices.schema import Device
from benchmarks.measure.bench import short_bench
from benchmarks.measure.machine import choose_cpus, default_threads
from benchmarks.measure.process import QUIET_CORES, wait_for_quiet
from benchmarks.model_size import ModelFormat
from benchmarks.predict.calibrate import export_untrained
from benchmarks.search.candidates import Candidate, Size
from benchmarks.search.recipe import (
    Source,
    export_settings,
    prune_settings,
    qad_tokens,
    quantize_settings,
    vocabulary_stages,
)
from benchmarks.spread import quality_loss
from compress.pruning.shapes import Shape
from sportsllm.commands import load_command
from sportsllm.console import log, logged
from sportsllm.files import atomic_write_text, has_state, read_json
from sportsllm.formats.artifact import partial_directory
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import digest, directory_bytes, manifest_of
from sportsllm.models.config import ModelConfig
from sportsllm.text.conversations import Document

LOG = "log.txt"
_SCORED_TOKENS = 16_384
BENCH_S = 30.0  # of a finished model that is small; of a larger one it is little beside its recovery
_MARGIN = 1.2  # of an expected time: recoveries of one length differ
_ATTEMPTS = 3  # measurements of an export


class Clock:
    """The time limit `--minutes`: a step starts only if earlier steps of its kind suggest that it ends in time.

    Attributes:
        token_s: predicted seconds of a token of recovery, used until a recovery was measured.
    """

    token_s = 0.0

    def __init__(self, minutes: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._start = now, now()
        self._limit = math.inf if minutes is None else 60 * minutes
        self._seen: dict[str, list[tuple[float, float]]] = {}
        self._refused: set[str] = set()  # each is logged once

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._now() - self._start

    def left(self) -> float:
        """Seconds; infinite without a limit."""
        return self._limit - self.seconds

    @contextmanager
    def step(self, kind: str, work: float = 1.0) -> Iterator[None]:
        """Measure a step of some work, such as tokens."""
        started = self._now()
        yield
        self._seen.setdefault(kind, []).append((work, self._now() - started))

    def expected(self, kind: str, work: float = 1.0) -> float:
        """Expected seconds of a step: on the line through the shortest and the longest of its kind.

        If none was measured, a trial is predicted from a rounding and the recovery's tokens; the rest counts as 0.
        """
        seen = sorted(self._seen.get(kind, []))
        if not seen:
            return self.expected("rounding") + self.token_s * work if kind == "trial" else 0.0
        (least, least_s), (most, most_s) = seen[0], seen[-1]
        if most > least:
            return max(0.0, most_s + max(0.0, most_s - least_s) / (most - least) * (work - most))
        return max(seconds for _, seconds in seen) * max(1.0, work / most)

    def allows(self, what: str, kind: str, work: float = 1.0, keep: float = 0.0) -> bool:
        """Whether a step is expected to end in time, with `keep` seconds left for the finish; else logs that."""
        needed = _MARGIN * (self.expected(kind, work) + keep)
        if self.left() > max(0.0, needed):
            return True
        if what not in self._refused:
            self._refused.add(what)
            minutes, left = needed / 60, max(0.0, self.left()) / 60
            log(f"no time for {what}: it needs about {minutes:.1f} minutes with the finish, and {left:.1f} are left")
        return False

    def affordable(self, kind: str, work: int, least: int, keep: float = 0.0) -> int:
        """The most work, between `least` and `work`, whose step is expected to end with `keep` seconds left."""

        def needed(work: int) -> float:
            return _MARGIN * (self.expected(kind, work) + keep)

        return max(least, least + bisect_right(range(least, work + 1), self.left(), key=needed) - 1)


class Losses(NamedTuple):
    """Rise of bits per byte over the teacher, in percent: of the recovered model, and of the same as exported.

    `interval` is the 95% interval of the second over documents; None if the text has too few. `file_mb` is the size of
    the export's files; None if the trial made no export.
    """

    recovered: float
    rounded: float
    interval: tuple[float, float] | None = None
    file_mb: float | None = None


class Timed(NamedTuple):
    """Measured figures by the limits' names; `busy` if other programs still ran after the wait for them."""

    figures: dict[str, float | None]
    busy: bool


@dataclass(eq=False)
class Trials:
    """Trials of candidates, kept under `directory`.

    Attributes:
        source: teacher and text.
        device: whose budget counts.
        directory: of everything that trials make, and of log.txt, the output of the commands.
        text: held-out documents that everything is scored on.
        tuning_tokens: of the training that a cut vocabulary needs.
        provider, processor: what exports are timed on.
        patience_s: how long a measurement waits for other programs; 0 after the first wait in vain.
    """

    source: Source
    device: Device
    directory: Path
    text: Path
    tuning_tokens: int
    provider: str = "cpu"
    processor: str = "cpu"
    patience_s: float = 60.0
    _scores: dict[tuple[Path, int], Path] = field(default_factory=dict)  # by teacher and experts, of their first cut

    def best_right_after_the_cut(self, shapes: Sequence[Shape], count: int, seconds: float) -> list[Shape]:
        """The best of some shapes by the loss after cut and refit, without training, found in about `seconds`;
        kept for a search that is run again."""
        from compress.pruning.cut import SAMPLE_LENGTH
        from compress.pruning.job import Calibration, PruneJob
        from compress.pruning.search import Finalist, find_finalists

        kept, asked = self.directory / "mixed.json", [shape.sizes() for shape in shapes]
        old = read_json(kept) if kept.exists() else {}
        if old.get("asked") == asked:
            return [Shape(**sizes) for sizes in old["found"]]
        # Without a recovery samples are longer than a recovery's short sequences, and the text gives fewer of them.
        samples = self.source.samples if self.source.sequence >= SAMPLE_LENGTH else None
        job = PruneJob(self.source.teacher, self.source.calibration, samples, reading=self.source.reading)
        ranked, experts = list[Finalist](), dict.fromkeys(shape.experts for shape in shapes)
        for number in experts:  # a mixture loses experts before anything else is cut
            work = Calibration(replace(job, experts=None if number == Shape.of(self._config).experts else number))
            alike = [shape for shape in shapes if shape.experts == number]
            with logged(self.directory / LOG):
                ranked += find_finalists(work, alike, (), count, seconds / len(experts))
        found = [one.shape for one in sorted(ranked, key=lambda one: one.loss)[:count]]
        atomic_write_text(kept, json.dumps({"asked": asked, "found": [shape.sizes() for shape in found]}) + "\n")
        return found

    def losses(self, candidate: Candidate, tokens: int, trained: bool) -> Losses:
        """Losses of a candidate after `tokens` of recovery, rounded with calibration text and exported.

        `trained` says whether what is not cut is trained as rounded, as the winner would be.
        """
        student = self._student(candidate.size, tokens)
        made = self._packed(student, candidate.format, qad_tokens(candidate, self._config, tokens) if trained else None)
        file_mb = None
        if candidate.format.quantized and self.processor == "cpu":
            packed, made = made, self.directory / "exported" / f"{made.name}-{candidate.format.cache}"
            self._run("export", export_settings(self.source, candidate.format, packed, made, self.processor))
            file_mb = directory_bytes(made) / 1e6
        interval = quality_loss(self._scores_of(made)["nats"], self._scores_of(self.source.teacher)["nats"])[1]
        return Losses(self._loss(student), self._loss(made), interval, file_mb)

    def timed(self, candidate: Candidate) -> Timed:
        """Figures by the limits' names, measured here on an export of the candidate's shape with random weights.

        A measurement while other programs run is repeated once they end, else it counts as busy.
        """
        directory = self.directory / "timed" / candidate.name
        if not (directory / "export" / "config.json").exists():  # the last file
            shutil.rmtree(directory, ignore_errors=True)
            config = candidate.size.applied_to(self._config)
            with logged(self.directory / LOG):
                in_half = self.processor == "gpu"  # as `export_settings` has it
                export_untrained(config, candidate.format, directory / "export", in_half=in_half)
        kept = directory / "figures.json"
        made = [digest(directory / "export"), self.source.threads, self.provider]
        old = read_json(kept) if kept.exists() else {}
        if old.get("made") == made:
            return Timed(dict(old["figures"]), busy=False)
        for _ in range(_ATTEMPTS):
            figures, cores = short_bench(directory / "export", self.device, self.source.threads, self.provider)
            if cores <= QUIET_CORES:
                atomic_write_text(kept, json.dumps({"made": made, "figures": figures}))
                return Timed(figures, busy=False)
            log(f"{candidate.name}: other programs used {cores:.1f} cores while it was timed")
            if not wait_for_quiet(self.patience_s, choose_cpus(self.source.threads or default_threads())):
                self.patience_s = 0.0  # the next candidates are timed once: waiting would take time from trials
                break
        log(f"{candidate.name}: the machine stays busy; predicted times are used instead of the measured ones")
        return Timed(figures, busy=True)

    def bits_per_byte(self, directory: Path) -> float:
        """On the first 16,384 or so of the teacher's tokens of the text."""
        scores = self._scores_of(directory)
        return float(sum(scores["nats"]) / scores["bits"])

    def documents(self) -> int:
        """How many documents of the text are scored."""
        return len(self._documents)

    @functools.cached_property
    def _documents(self) -> list[Document]:
        """The same for every candidate: a smaller vocabulary makes more tokens of each."""
        from sportsllm.inference.scoring import document_windows
        from sportsllm.text.documents import read_documents
        from sportsllm.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.source.teacher, self._config, self.source.reading)
        documents, context = list(read_documents([self.text])), self._config.max_position_embeddings
        return documents[: len(document_windows(tokenizer, documents, context, _SCORED_TOKENS).tokens)]

    def _scores_of(self, directory: Path) -> dict[str, Any]:
        """Nats of each document for a checkpoint or an export, and bits of all; kept for a search that is run again."""
        from sportsllm.inference.decoder import open_decoder, require_finite
        from sportsllm.inference.scoring import score_documents
        from sportsllm.text.tokenizer import load_tokenizer

        kept = self.directory / "scores.json"
        key = f"{digest(directory)} on {self.documents()} documents of {digest(self.text)}"
        scores: dict[str, Any] = read_json(kept) if kept.exists() else {}
        if key not in scores:
            decoder = open_decoder(directory, self.source.threads)
            tokenizer = load_tokenizer(directory, decoder.config, self.source.reading)
            with logged(self.directory / LOG):
                score = score_documents(decoder, tokenizer, self._documents)
            require_finite(score.nats, str(directory))
            scores[key] = {"nats": score.documents, "bits": math.log(2) * score.bytes}
            atomic_write_text(kept, json.dumps(scores) + "\n")
        return dict(scores[key])

    def _loss(self, directory: Path) -> float:
        return 100 * (self.bits_per_byte(directory) / self.bits_per_byte(self.source.teacher) - 1)

    def _student(self, size: Size, tokens: int) -> Path:
        """The cut teacher, recovered, after a cut of its vocabulary; the teacher itself if no dimension is cut."""
        shape, whole, teacher, vocabulary = size.shape, Shape.of(self._config), self.source.teacher, size.vocab_size
        if vocabulary != self._config.vocab_size:
            cut, teacher = self.directory / f"vocabulary-{vocabulary}", self.directory / f"teacher-{vocabulary}"
            for command, settings in vocabulary_stages(self.source, cut, teacher, vocabulary, self.tuning_tokens):
                self._run(command, settings)
        if shape == whole:
            return teacher
        out = self.directory / "recovered" / f"{size.name}-{tokens}"
        first = self._scores.get((teacher, shape.experts), out)  # its scores are read by later cuts
        if out.exists():  # by an earlier run of the search, in which another cut may have been the first
            first = Path(manifest_of(out).text("scores") or out)
        if shape == replace(whole, experts=shape.experts):
            first = out  # only experts are cut, which needs no scores
        else:
            self._scores.setdefault((teacher, shape.experts), first)
        known = {} if first == out else {"scores": first}
        self._run("prune", prune_settings(self.source, shape, teacher, out, tokens, **known))
        return out

    def _packed(self, checkpoint: Path, format: ModelFormat, qad: int | None) -> Path:
        if not format.quantized:
            return checkpoint
        out = self.directory / "packed" / (f"{checkpoint.name}-{format.weights_name}" + "-trained" * bool(qad))
        self._run("quantize", quantize_settings(self.source, format, checkpoint, out, qad=qad))
        return out

    def _run(self, command: str, settings: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if has_state(partial_directory(settings["out"])):
            settings["resume"] = True
        with logged(self.directory / LOG):
            load_command(command)(**settings)

    @functools.cached_property
    def _config(self) -> ModelConfig:
        return load_config(self.source.teacher)
