"""Quality of a model on held-out text and in tasks, compared with its teacher's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.spread import accuracy_loss, quality_loss
from sportsllm.formats.manifest import digest, plain_name
from sportsllm.inference.decoder import Decoder, open_decoder, require_finite
from sportsllm.inference.divergence import compare_documents
from sportsllm.inference.scoring import TextScore, score_documents
from sportsllm.results import as_json
from sportsllm.text.documents import Reading, read_documents
from sportsllm.text.split import warn_if_trained_on
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer


class Model(NamedTuple):
    """A model, how its text is read, and how it is run."""

    directory: Path
    reading: Reading
    threads: int | None
    kernels: str = "auto"
    provider: str = "cpu"

    def open(self) -> tuple[Decoder, TextTokenizer]:
        """The model and its tokenizer."""
        decoder = open_decoder(self.directory, self.threads, self.kernels, self.provider)
        return decoder, load_tokenizer(self.directory, decoder.config, self.reading)


def text_quality(model: Model, teacher: Model | None, text: Sequence[Path], distance: bool) -> dict[str, Any]:
    """Bits per byte of the text, and the loss against the teacher with its interval; None without text or teacher.

    With `distance` also the KL divergence from the teacher and the changed top tokens.
    """
    own = score_text(model, text) if text else None
    reference = score_text(teacher, text) if teacher and text else None
    loss, interval = quality_loss(own.documents, reference.documents) if own and reference else (None, None)
    far = compare_text(model, teacher, text) if teacher and text and distance else {}
    return far | {
        "bits_per_byte": own and own.bits_per_byte,
        "teacher_bits_per_byte": reference and reference.bits_per_byte,
        "text": [str(path) for path in text],
        "text_digests": [digest(path) for path in text],
        "teacher": teacher and str(teacher.directory),
        "quality_loss_percent": loss,
        "quality_interval_percent": interval and list(interval),
        "quality_documents": len(own.documents) if own and reference else None,
    }


def score_text(model: Model, text: Sequence[Path]) -> TextScore:
    """A model's score on the documents of some files, as `eval` computes it.

    Raises:
        ArtifactError: the score is not finite.
    """
    decoder, tokenizer = model.open()
    documents = list(read_documents(text, model.reading.text_field))
    warn_if_trained_on(model.directory, documents)
    score = score_documents(decoder, tokenizer, documents, description=f"score {plain_name(model.directory)}")
    require_finite(score.nats, str(model.directory))
    return score


def compare_text(model: Model, teacher: Model, text: Sequence[Path]) -> dict[str, Any]:
    """KL divergence from the teacher and the share of changed top-1 tokens, as `eval --against` computes them."""
    (own, tokenizer), (base, base_tokenizer) = model.open(), teacher.open()
    documents = list(read_documents(text, model.reading.text_field))
    _, found = compare_documents(own, base, tokenizer, base_tokenizer, documents)
    alike = found.top1_interval
    return {
        "kl_nats": found.kl,
        "kl_interval_nats": found.kl_interval and list(found.kl_interval),
        "top1_changed_percent": 100 * (1 - found.top1_agreement),
        "top1_changed_interval_percent": alike and [100 * (1 - alike[1]), 100 * (1 - alike[0])],
    }


def task_quality(model: Model, teacher: Model | None, tasks: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """The tasks' metrics of both models, and the loss of accuracy over all documents with its interval."""
    from sportsllm.inference.harness import run_tasks

    found = [run_tasks(*each.open(), tasks, settings) for each in (model, teacher) if each is not None]
    values = [[value for _, each in one.values() for value in each] for one in found]
    loss, interval = accuracy_loss(values[0], values[1]) if teacher and values[0] else (None, None)
    scores = [{name: as_json(score) for name, (score, _) in one.items()} for one in found]
    return {
        "tasks": scores[0],
        "teacher_tasks": scores[1] if teacher else {},
        "accuracy_loss_points": loss,
        "accuracy_interval_points": interval and list(interval),
    }
