"""The model card (README.md): how a model was made, measured quality and speed, how to load it, its limits.

All of it comes from manifests, config.json and results of `eval` and `bench`; the text is `model_card.md.jinja`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, atomic_write_text, read_json, validate
from sportsllm.formats.huggingface import OWN_MODEL_TYPE, load_config
from sportsllm.formats.manifest import CARD, Ancestor, FileEntry, Manifest, ancestors, origin, plain_name, read_manifest
from sportsllm.models.description import described_shape
from sportsllm.text.chat import find_template

if TYPE_CHECKING:
    from jinja2 import Template

CardFields = dict[str, str | list[str]]
_CARRIED = ("license", "license_name", "license_link", "base_model", "language")
_RELATIONS = {"quantize": "quantized", "train": "finetune", "distill": "finetune", "prune": "finetune"}
_TAGS = {"distill": "distillation", "prune": "pruning", "quantize": "quantization"}
_OURS = "sportsllm-compress"
_FORMS = {
    "*.gguf": ("A GGUF file", "gguf", "gguf"),
    "*.onnx": ("An ONNX graph with a cache", "onnx", "onnx"),
    "onnx/*.onnx": ("ONNX graphs for the browser", "onnx", "transformers.js"),
    "*.safetensors": ("A checkpoint (safetensors)", "safetensors", "transformers"),
}
"""By pattern, the first that a directory has: its files in words, their tag, the library that loads them on the hub."""


@dataclass(frozen=True)
class BudgetOutcome:
    """How a model does in a budget; each limit has a name and a verdict."""

    limits: tuple[JsonObject, ...] = ()
    target: str = ""
    verdict: str = ""
    decided_by: str | None = None


@dataclass(frozen=True)
class Measured:
    """What a card shows of a result of `bench` or `eval`."""

    directory: str = ""
    text: tuple[str, ...] | str | None = None
    bits_per_byte: float | None = None
    teacher: str | None = None
    teacher_bits_per_byte: float | None = None
    tasks: dict[str, JsonObject] = field(default_factory=dict)
    teacher_tasks: dict[str, JsonObject] = field(default_factory=dict)
    ttft_ms: dict[str, float | None] = field(default_factory=dict)
    tpot_ms: dict[str, dict[str, float | None]] = field(default_factory=dict)
    peak_rss_bytes: float | None = None
    threads: int | None = None
    clean: bool = True
    machine: JsonObject = field(default_factory=dict)
    budget: BudgetOutcome | None = None

    def is_of(self, directory: Path) -> bool:
        """Whether a directory was measured."""
        return self.directory != "" and Path(self.directory).resolve() == directory.resolve()


def write_card(directory: Path, results: Sequence[Path] = ()) -> None:
    """Write the model card of a finished directory again, and its digest into the manifest.

    `results` are files of `bench`, `eval` and `fit`; those on other models than this one and its ancestors are ignored.

    Raises:
        ArtifactError: the directory is not finished, holds no model, or a result is damaged.
    """
    manifest = read_manifest(directory)
    measured = [validate(Measured, (read := read_json(path)).get("bench", read), path) for path in results]
    text = render_card(directory, manifest, directory, measured)
    if text is None:
        raise ArtifactError(
            f"{directory}: holds no model that a card could describe; for a GGUF file, put the checkpoint that it was "
            "exported from beside the directory"
        )
    old, data = manifest.files.get(CARD), text.encode("utf-8")
    first = None if old is None else old.first_sha256 or old.sha256
    entry = FileEntry(hashlib.sha256(data).hexdigest(), len(data), first)
    atomic_write_text(directory / CARD, text)
    replace(manifest, files=manifest.files | {CARD: entry}).write(directory)


def render_card(directory: Path, manifest: Manifest, place: Path, results: Sequence[Measured] = ()) -> str | None:
    """The card's text; None if the directory holds no model, or none that can be read.

    Args:
        directory: where the files are.
        manifest: of the directory; `files` may still be missing.
        place: where the directory will be, which gives the name.
        results: those on other models than this one and its ancestors are ignored.
    """
    older = ancestors(manifest, place)
    kind = next((kind for kind in _FORMS if any(directory.glob(kind))), None)
    places = [directory, *(one.directory for one in older if kind == "*.gguf")]
    source = next((each for each in places if (each / "config.json").is_file()), None)
    if kind is None or source is None:
        return None
    try:
        config, data = load_config(source), read_json(source / "config.json")
        chats = find_template(source)[0] is not None
    except ArtifactError:  # the command that loads it says what is wrong
        return None
    from huggingface_hub import ModelCardData

    chain = [*reversed(older), Ancestor(place, manifest)]
    commands = [one.manifest.command for one in chain]
    model_type, (form, tag, library) = str(data.get("model_type", "llama")), _FORMS[kind]
    packed = data.get("quantization_config")
    bits = packed["bits"] if isinstance(packed, dict) and isinstance(packed.get("bits"), int) else None
    if kind == "*.safetensors" and ("quantization_config" in data or model_type == OWN_MODEL_TYPE):
        library = _OURS
    fields = _carried(directory, manifest, older)
    relation = next((_RELATIONS[command] for command in ("quantize", *_RELATIONS) if command in commands), None)
    tags = [_OURS, model_type, tag, *([f"{bits}-bit"] if bits else []), *(["conversational"] if chats else [])]
    card_data = ModelCardData(
        **{key: fields[key] for key in _CARRIED if key in fields},
        base_model_relation=relation if "base_model" in fields else None,
        pipeline_tag="text-generation",
        library_name=library,
        tags=[*tags, *(tag for command, tag in _TAGS.items() if command in commands)],
    )
    shown = [each for each in results if any(each.is_of(one.directory) for one in chain)]
    return _template().render(
        card_data=card_data.to_yaml(),
        name=plain_name(place),
        model_type=model_type,
        shape=described_shape(config),
        form=form,
        stored=f"INT{bits}" if bits else manifest.results.get("precision") or manifest.text("dtype"),
        chain=[(_name(one), one.manifest) for one in chain],
        scores=list(dict.fromkeys([*_scores_of_training(chain, shown), *_scores(shown)])),
        tasks=list(dict.fromkeys(_tasks(shown))),
        parity=manifest.results.get("parity"),
        benches=[each for each in shown if each.tpot_ms and each.is_of(place)],
        kind=kind,
        library=library,
        files=sorted(path.name for path in directory.iterdir()),
        config=config,
        chats=chats,
        manifest=manifest,
    )


@cache
def _template() -> Template:
    """Cached: compiling it takes longer than rendering a card."""
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters.update(texts=_texts, file=lambda path: PurePath(str(path)).name)
    environment.filters["digits"] = lambda value: f"{Decimal(f'{value:.3g}'):,f}"  # three, without an exponent
    environment.filters["cell"] = lambda text: " ".join(str(text).split()).replace("|", "\\|")
    return environment.from_string(Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8"))


def _texts(paths: Sequence[str] | str) -> str:
    """Files and folders of text by the last two parts of their names: `wiki/train.jsonl`."""
    paths = [paths] if isinstance(paths, str) else paths
    return ", ".join(f"`{'/'.join(PurePath(path).parts[-2:])}`" for path in dict.fromkeys(paths))


def _name(one: Ancestor) -> str:
    downloaded = origin(one.directory)
    return plain_name(one.directory) if downloaded is None else f"{downloaded['model']}@{downloaded['revision']}"


def _front_matter(card: Path) -> CardFields:
    """The text fields of a card's YAML block, and its lists of text; none if there is no card or no block."""
    from huggingface_hub.repocard import metadata_load

    try:
        found = (metadata_load(card) if card.is_file() else None) or {}
    except Exception:  # of the YAML library, which has no place in a card that somebody else wrote
        return {}
    lists = {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    return {key: found[key] for key, each in lists.items() if each and all(isinstance(v, str) and v for v in each)}


def _carried(directory: Path, manifest: Manifest, older: Sequence[Ancestor]) -> CardFields:
    """Licence, base model and language: of the card that is there, else of the nearest model that says them."""
    found: CardFields = {}
    for place, facts in [Ancestor(directory, manifest), *older]:
        card = {key: value for key, value in _front_matter(place / CARD).items() if key in _CARRIED}
        if facts.results.get("source_license") and "license" not in card:
            card["license"] = str(facts.results["source_license"]).lower()
        if not facts.command and (base := _hub_name(place)):
            card["base_model"] = base
        found = _joined(found, card)
    return found


def _joined(nearer: CardFields, farther: CardFields) -> CardFields:
    """Fields of two cards, the nearer one's first; the three of a licence belong together."""
    if "license" in nearer:
        farther = {key: value for key, value in farther.items() if not key.startswith("license")}
    return farther | nearer


def _hub_name(directory: Path) -> str | None:
    """The name in the hub of a downloaded checkpoint, or that its config.json keeps, `owner/name`; None for a path."""
    if (downloaded := origin(directory)) is not None:
        return downloaded["model"]
    config = directory / "config.json"
    name = read_json(config).get("_name_or_path") if config.is_file() else None
    return name if isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/", "~")) else None


def _scores(results: Sequence[Measured]) -> Iterator[tuple[str, float, str]]:
    """Bits per byte of a model, and of its teacher, on text that has a name."""
    for each in results:
        for model, value in ((each.teacher, each.teacher_bits_per_byte), (each.directory, each.bits_per_byte)):
            if each.text and model and value is not None:
                yield plain_name(Path(model)), value, _texts(each.text)


def _tasks(results: Sequence[Measured]) -> Iterator[tuple[object, ...]]:
    """Model, task, metric, its value and standard error."""
    for one in results:
        for model, scores in ((one.teacher, one.teacher_tasks), (one.directory, one.tasks)):
            for name, score in scores.items():
                yield plain_name(Path(model or "")), name, *(score.get(key) for key in ("metric", "value", "error"))


def _scores_of_training(chain: Sequence[Ancestor], results: Sequence[Measured]) -> list[tuple[str, float, str]]:
    """The models of the chain scored on the text that the last one was scored on, if nothing measured them since."""
    measured, found = {model for model, *_ in _scores(results)}, []
    for directory, made in chain:
        value, valid, corpus = made.figure("valid_bits_per_byte"), made.paths("valid"), made.paths("corpus")
        if value is not None and (valid or corpus):
            text = f"a part of {_texts(valid)}" if valid else f"a part of {_texts(corpus)}, held out"
            found.append((plain_name(directory), value, text))
    return [each for each in found if each[2] == found[-1][2] and each[0] not in measured]
