"""The inputs of a search, the settings of the commands that make a candidate, and the winner's recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.model_size import ModelFormat
from compress.pruning.shapes import Shape
from sportsllm.console import log
from sportsllm.files import atomic_write_text
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import manifest_of
from sportsllm.settings import STEPS, TRAINING
from sportsllm.text.conversations import Document
from sportsllm.text.documents import USUAL, Reading

if TYPE_CHECKING:
    from benchmarks.search.candidates import Candidate
    from sportsllm.models.config import ModelConfig

_SEQUENCE = 512
_CUT_SAMPLES = 64  # a brief recovery makes up for what more would gain
_SHARE_OF_TEACHER = 0.06
_UNKNOWN_TOKENS = 1_200_000
_QAD_SHARE = 0.2  # of the tokens of a recovery


@dataclass(frozen=True)
class Source:
    """The inputs of a search.

    Attributes:
        teacher: an unquantized checkpoint.
        corpus: training text; part of it is held out and decides between finalists.
        calibration: calibration text.
        valid: held-out text, half of it for choices and half for the result; without it a part of the corpus.
        threads: CPU threads of every command; all cores if None.
        seed: of everything random.
        settings: further flags of every training, such as `batch_size`.
        reading: of all text.
        samples: calibration samples of every cut; `prune` chooses if None.
    """

    teacher: Path
    corpus: tuple[Path, ...]
    calibration: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    threads: int | None = None
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    reading: Reading = USUAL
    samples: int | None = None

    def held_out(self) -> dict[str, Any]:
        """The option that names held-out text, if there is any."""
        return {"valid": list(self.valid)} if self.valid else {}

    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        return min(int(self.settings.get("sequence") or _SEQUENCE), load_config(self.teacher).max_position_embeddings)


def with_samples(source: Source) -> Source:
    """The source with a number of calibration samples, at most `_CUT_SAMPLES`, the same for trials and the result."""
    from sportsllm.inference.calibration import calibration_samples
    from sportsllm.text.tokenizer import load_tokenizer

    config = load_config(source.teacher)
    tokenizer = load_tokenizer(source.teacher, config, source.reading)
    text = source.calibration, source.valid, tokenizer, config
    samples = calibration_samples(*text, None, source.sequence, checkpoints=[source.teacher])
    return replace(source, samples=min(_CUT_SAMPLES, len(samples)))


class HeldOut(NamedTuple):
    """Files of held-out text, one for choices and one for the reported quality, and their numbers of documents."""

    selection_split: Path
    report_split: Path
    selection_documents: int
    report_documents: int


def held_out_text(source: Source, directory: Path) -> HeldOut:
    """Write both halves of `source.valid`, or of the documents that trainings on the corpus hold out by hash.

    Raises:
        ArtifactError: the corpus is empty or a single document.
    """
    from sportsllm.text.split import load_corpus

    parts = load_corpus(source.corpus, source.valid, source.reading.text_field, [source.teacher]).parts()
    paths = directory / "selection.jsonl", directory / "report.jsonl"
    for path, documents in zip(paths, parts, strict=True):
        atomic_write_text(path, "".join(json.dumps(_record(document)) + "\n" for document in documents))
    return HeldOut(*paths, *map(len, parts))


def _record(document: Document) -> dict[str, Any]:
    """What is read as the document again."""
    if isinstance(document, str):
        return {"text": document}
    messages: list[dict[str, Any]] = [*document.records()]
    replies = [message for message in messages if message["role"] == "assistant"]
    for number in document.unlearned:
        replies[number]["weight"] = 0
    return {"messages": messages}


@dataclass(frozen=True)
class Effort:
    """The work that a search may do.

    Attributes:
        tokens: of the winner's recovery if it is cut.
        search_tokens: of a candidate's brief recovery.
        finalists: candidates that are recovered for longer.
        minutes: for the whole search; None for no limit.
    """

    tokens: int
    search_tokens: int
    finalists: int = 3
    minutes: float | None = None

    @property
    def longer_tokens(self) -> int:
        """Tokens of the recovery between the brief one and the winner's."""
        return min(self.tokens, 3 * self.search_tokens)


@dataclass(frozen=True)
class Target:
    """The target device: a name or a file, limits that replace its own, and whether this machine is the device.

    Candidates are timed on `provider`, which runs on `processor`.
    """

    device: str
    on_device: bool = False
    provider: str = "cpu"
    processor: str = "cpu"
    limits: Mapping[str, float] = field(default_factory=dict)


def vocabulary_stages(
    source: Source, cut: Path, tuned: Path, vocab_size: int, tokens: int
) -> list[tuple[str, dict[str, Any]]]:
    """The commands that make the teacher with fewer tokens, with their settings."""
    prune = {
        "checkpoint": source.teacher,
        "out": cut,
        "calibration": list(source.calibration),
        "vocab_size": vocab_size,
        **source.held_out(),  # tokens are not counted in it
        **_rare(source.reading.record()),
    }
    train = {"checkpoint": cut, "out": tuned, "tokens": tokens, **_training(source, {}, TRAINING)}
    return [("prune", prune), ("train", train)]


def prune_settings(source: Source, shape: Shape, teacher: Path, out: Path, tokens: int, **rare: Any) -> dict[str, Any]:
    """Arguments of `prune` that make a shape; `rare` are settings. Experts are named only if there are to be fewer."""
    whole, sizes = Shape.of(load_config(source.teacher)), shape.sizes()
    if source.samples is not None:
        rare |= {"samples": source.samples}
    if shape.experts == whole.experts:
        sizes.pop("experts", None)
    return {
        "checkpoint": teacher,
        "out": out,
        "calibration": list(source.calibration),
        **sizes,
        "recover": tokens,
        **_training(source, rare, (*STEPS, *TRAINING)),
    }


def quantize_settings(
    source: Source, format: ModelFormat, checkpoint: Path, out: Path, qad: int | None = None
) -> dict[str, Any]:
    """Flags of `quantize` for a format: calibrated, and trained on `qad` tokens if that is given."""
    settings: dict[str, Any] = {
        "checkpoint": checkpoint,
        "out": out,
        "bits": int(format.precision.removeprefix("int")),
        "threads": source.threads,
        "group_size": format.block_size,
        "calibration": list(source.calibration),
        **source.held_out(),
    }
    rare = {"head_bits": format.head_bits, "symmetric": not format.zero_points}
    if not qad:
        return settings | _rare(rare | source.reading.record())
    training = _training(source, rare, (*STEPS, *TRAINING))
    training["settings"].pop("learning_rate", None)  # it has a rate of its own
    return settings | {"qad": qad, **training}


def _training(source: Source, rare: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Arguments of a training: options by name, and `settings`, the rare ones and those in `names`."""
    training = {"corpus": list(source.corpus), **source.held_out(), "seed": source.seed, "threads": source.threads}
    training |= source.settings
    rare |= {name: training.pop(name) for name in names if name in training}
    return training | _rare(rare | source.reading.record())


def _rare(settings: dict[str, Any]) -> dict[str, Any]:
    return {"settings": settings} if settings else {}


def qad_tokens(candidate: Candidate, teacher: ModelConfig, tokens: int) -> int | None:
    """Tokens to train a rounded model on: 4 bits of all layers. What is cut gains more by as much more recovery."""
    whole = candidate.size.shape == Shape.of(teacher)
    return max(1, round(_QAD_SHARE * tokens)) if whole and candidate.format.precision == "int4" else None


def export_settings(
    source: Source, format: ModelFormat, checkpoint: Path, out: Path, processor: str = "cpu"
) -> dict[str, Any]:
    """Flags of `export` for a format; a GPU computes in float16."""
    return {
        **({"dtype": "fp16"} if processor == "gpu" else {}),
        "checkpoint": checkpoint,
        "out": out,
        "kv_cache": format.cache,
        "threads": source.threads,
        **({"calibration": list(source.calibration)} if format.cache == "int8" else {}),
        **_rare(source.reading.record()),
    }


def recovery_tokens(teacher: Path) -> int:
    """6% of the tokens that the teacher was trained on, as its manifest says; else 1.2 million."""
    trained = manifest_of(teacher).figure("tokens")
    tokens = round(_SHARE_OF_TEACHER * trained) if trained else _UNKNOWN_TOKENS
    why = "6% of the teacher's" if trained else "the teacher's own are not known"
    log(f"no --tokens given: the winner is recovered on {tokens:,} tokens ({why})")
    return max(1, tokens)


def write_recipe(path: Path, candidate: Candidate, source: Source, effort: Effort, target: Target, text: Path) -> None:
    """Write the recipe that makes `candidate` from the teacher; its outputs go beside it.

    `text` is the held-out text that the finished model is compared with the teacher on.
    """
    import tomli_w

    stages: list[tuple[str, str, dict[str, Any]]] = []
    out, made, teacher, format = path.parent, source.teacher, load_config(source.teacher), candidate.format
    if candidate.size.vocab_size != teacher.vocab_size:
        cut, tuned = out / "vocabulary", out / "teacher"
        commands = vocabulary_stages(source, cut, tuned, candidate.size.vocab_size, effort.search_tokens)
        stages += [(path.name, *command) for path, command in zip((cut, tuned), commands, strict=True)]
        made = tuned
    if candidate.size.shape != Shape.of(teacher):
        settings = prune_settings(source, candidate.size.shape, made, out / "student", effort.tokens)
        stages.append(("student", "prune", settings))
        made = out / "student"
    if format.quantized:
        qad = qad_tokens(candidate, teacher, effort.tokens)
        stages.append(("packed", "quantize", quantize_settings(source, format, made, out / "packed", qad)))
        made = out / "packed"
    stages.append(("export", "export", export_settings(source, format, made, out / "export", target.processor)))
    bench = {
        "directory": out / "export",
        "target": target.device,
        "limit": [f"{name}={value!r}" for name, value in target.limits.items()] or None,
        "on_device": target.on_device,
        **({"provider": target.provider} if target.provider != "cpu" else {}),
        "threads": source.threads,
        "text": [text],
        "teacher": source.teacher,
    }
    stages.append(("bench", "bench", bench))
    recipe = {
        "name": f"fit-{candidate.name}",
        "out": str(out),
        "stage": [{"name": name, "command": command, **_plain(settings)} for name, command, settings in stages],
    }
    head = "# Written by `fit`: makes the chosen model again with `sportsllm-compress run`.\n"
    atomic_write_text(path, head + tomli_w.dumps(recipe))


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for TOML: paths as strings, without those that are None."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(one) for one in value]
        return str(value) if isinstance(value, Path) else value

    return {"set" if key == "settings" else key: plain(value) for key, value in settings.items() if value is not None}
