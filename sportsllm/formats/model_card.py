"""The model card (README.md): how a model was made, measured quality and speed, how to load it, its limits.

All of it comes from manifests, config.json and results of `eval` and `bench`; the text is `model_card.md.jinja`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from sportsllm.errors import ArtifactError
from sportsllm.files import atomic_write_text
from sportsllm.formats.huggingface import OWN_MODEL_TYPE, load_config
from sportsllm.formats.json_files import JsonObject, read_json, validate
from sportsllm.formats.manifest import Ancestor, FileEntry, Manifest, ancestors, origin, read_manifest
from sportsllm.models.config import ModelConfig
from sportsllm.models.presets import described_shape
from sportsllm.text.chat import find_template

CARD = "README.md"
CardFields = dict[str, str | list[str]]
_CARRIED = ("license", "license_name", "license_link", "base_model", "language")
_RELATIONS = {"quantize": "quantized", "train": "finetune", "distill": "finetune", "prune": "finetune"}
_TAGS = {"distill": "distillation", "prune": "pruning", "quantize": "quantization"}
_OURS = "sportsllm-compress"
_LIBRARIES = {"*.gguf": "gguf", "*.onnx": "onnx", "onnx/*.onnx": "transformers.js", "*.safetensors": "transformers"}
"""The hub's name of the library that loads a directory, by the first kind of file that is in it."""
_FORMS = {
    "*.gguf": "A GGUF file",
    "*.onnx": "An ONNX graph with key/value cache",
    "onnx/*.onnx": "ONNX graphs for the browser",
    "*.safetensors": "A checkpoint (safetensors)",
}


@dataclass(frozen=True)
class QuestionScore:
    """Accuracy on a file of questions."""

    accuracy: float
    questions: int


@dataclass(frozen=True)
class Machine:
    """Where a measurement was taken."""

    processor: str | None = None
    measured_at: str | None = None


@dataclass(frozen=True)
class LimitOutcome:
    """One limit of a budget; `verdict` is pass, fail or uncertain."""

    name: str
    verdict: str | None = None


@dataclass(frozen=True)
class BudgetOutcome:
    """How a model does in a budget."""

    limits: tuple[LimitOutcome, ...] = ()
    target: str = ""
    verdict: str = ""
    decided_by: str | None = None

    @property
    def outcome(self) -> str:
        """In words."""
        missed = [limit.name for limit in self.limits if limit.verdict == "fail"]
        by = ", by prediction" if self.decided_by == "prediction" else ""
        return f"{self.verdict}{by}{'; it misses ' if missed else ''}{', '.join(missed)}"


@dataclass(frozen=True)
class Measured:
    """What a card shows of a result of `bench` or `eval`."""

    directory: str = ""
    text: tuple[str, ...] | str | None = None
    bits_per_byte: float | None = None
    teacher: str | None = None
    teacher_bits_per_byte: float | None = None
    question_files: dict[str, QuestionScore] = field(default_factory=dict)
    ttft_ms: dict[str, float | None] = field(default_factory=dict)
    tpot_ms: dict[str, dict[str, float | None]] = field(default_factory=dict)
    peak_rss_bytes: float | None = None
    threads: int | None = None
    clean: bool = True
    machine: Machine = Machine()
    budget: BudgetOutcome | None = None

    @property
    def times(self) -> list[float | None]:
        """Milliseconds to the first token of 128 and 512, and per token after 32 and 512."""
        steps = [self.tpot_ms.get(depth, {}).get("p50") for depth in ("32", "512")]
        return [*(self.ttft_ms.get(prompt) for prompt in ("128", "512")), *steps]

    @property
    def circumstances(self) -> str:
        """Threads and date."""
        return ", ".join(filter(None, [f"{self.threads or 'all'} threads", self.machine.measured_at]))


def write_card(
    directory: Path,
    results: Sequence[Path] = (),
    *,
    license: str | None = None,
    base_model: str | None = None,
    language: Sequence[str] = (),
) -> CardFields:
    """Write the model card of a finished directory again, and its digest into the manifest.

    Args:
        directory: finished.
        results: files of `bench` and `eval`; those on other models than this one and its ancestors are ignored.
        license, base_model, language: fields of the front matter, instead of those carried over.

    Returns:
        The front matter.

    Raises:
        ArtifactError: the directory is not finished, holds no model, or a result is damaged.
    """
    manifest = read_manifest(directory)
    measured = [validate(Measured, read_json(path), path) for path in results]
    stated: CardFields = {"license": license or "", "base_model": base_model or "", "language": list(language)}
    text = render_card(directory, manifest, directory, measured, {key: each for key, each in stated.items() if each})
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
    return read_front_matter(directory / CARD)


def read_front_matter(card: Path) -> CardFields:
    """The text fields of a card's YAML block, and its lists of text; none if there is no card or no block."""
    from huggingface_hub.repocard import metadata_load

    try:
        found = metadata_load(card) if card.is_file() else None
    except Exception:  # of the YAML library, which has no place in a card that somebody else wrote
        return {}

    def is_text(value: object) -> bool:
        return isinstance(value, str) and bool(value)

    return {
        key: value
        for key, value in (found or {}).items()
        if is_text(value) or (isinstance(value, list) and value and all(map(is_text, value)))
    }


def render_card(
    directory: Path,
    manifest: Manifest,
    place: Path,
    results: Sequence[Measured] = (),
    stated: CardFields | None = None,
) -> str | None:
    """The card's text; None if the directory holds no model.

    Args:
        directory: where the files are.
        manifest: of the directory; `files` may still be missing.
        place: where the directory will be, which gives the name.
        results: those on other models than this one and its ancestors are ignored.
        stated: fields of the front matter, instead of those carried over.
    """
    older = ancestors(manifest, place)
    model = _described(directory, older)
    if model is None:
        return None
    from jinja2 import Environment

    chain = [*reversed(older), Ancestor(place, manifest)]
    fields = _joined(stated or {}, _carried(directory, manifest, older))
    known = {one.directory.resolve() for one in chain}
    shown = [each for each in results if each.directory and Path(each.directory).resolve() in known]
    config, kind, parity = model.config, model.kind, manifest.results.get("parity")
    # optimum takes the width over the heads for a head's size in Llama models, and cannot pass an INT8 cache.
    plain_heads = config.head_dim * config.num_attention_heads == config.hidden_size
    plain_cache = (manifest.text("kv_cache") or "fp32") == "fp32"
    stored = f"INT{model.bits}" if model.bits else manifest.results.get("precision") or manifest.text("dtype")
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["cell"] = _cell
    template = Path(__file__).with_name("model_card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        card_data=_front_matter(model, chain, fields),
        name=place.name,
        model_type=model.model_type,
        shape=described_shape(config),
        form=f"{_FORMS[kind]}{f', {stored}' if stored else ''}.",
        steps=[_step(one) for one in chain],
        scores=list(dict.fromkeys([*_scores_of_training(chain, shown), *_scores(shown)])),
        answers=[
            (Path(each.directory).name, score, _texts([path]))
            for each in shown
            for path, score in each.question_files.items()
        ],
        parity=parity if isinstance(parity, dict) else None,
        benches=[each for each in shown if each.tpot_ms and Path(each.directory).resolve() == place.resolve()],
        kind=kind,
        library=model.library,
        file=next((path.name for path in directory.glob("*.gguf")), None),
        modelfile=(directory / "Modelfile").is_file(),
        optimum=kind == "*.onnx" and plain_heads and plain_cache and model.model_type == "llama",
        genai=kind == "*.onnx" and (directory / "genai_config.json").is_file(),
        begin=config.bos_token_id,
        limits=list(_limits(model, chain)),
        command=manifest.command,
        created=manifest.created,
    )


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


@dataclass(frozen=True)
class _Model:
    """What a directory holds: `kind` is a pattern of `_LIBRARIES`, `data` its config.json."""

    kind: str
    config: ModelConfig
    data: JsonObject
    chats: bool

    @property
    def model_type(self) -> str:
        return str(self.data.get("model_type", "llama"))

    @property
    def bits(self) -> int | None:
        """Bits of packed matrices; None if they are dense or of several sizes."""
        packed = self.data.get("quantization_config")
        bits = packed.get("bits") if isinstance(packed, dict) else None
        return bits if isinstance(bits, int) else None

    @property
    def library(self) -> str:
        only_here = "quantization_config" in self.data or self.model_type == OWN_MODEL_TYPE
        return _OURS if self.kind == "*.safetensors" and only_here else _LIBRARIES[self.kind]


def _described(directory: Path, older: Sequence[Ancestor]) -> _Model | None:
    """None if the directory holds no model, or none that is known: the command that loads it says what is wrong."""
    kind = next((kind for kind in _LIBRARIES if any(directory.glob(kind))), None)
    places = [directory, *(one.directory for one in older if kind == "*.gguf")]
    place = next((place for place in places if (place / "config.json").is_file()), None)
    if kind is None or place is None:
        return None
    try:
        config, data = load_config(place), read_json(place / "config.json")
        return _Model(kind, config, data, find_template(directory)[0] is not None)
    except ArtifactError:
        return None


def _front_matter(model: _Model, chain: Sequence[Ancestor], fields: CardFields) -> str:
    from huggingface_hub import ModelCardData

    commands = [one.manifest.command for one in chain]
    relation = next((_RELATIONS[command] for command in ("quantize", *_RELATIONS) if command in commands), None)
    formats = {"*.gguf": "gguf", "*.safetensors": "safetensors"}
    tags = [_OURS, model.model_type, formats.get(model.kind, "onnx")]
    tags += [*([f"{model.bits}-bit"] if model.bits else []), *(["conversational"] if model.chats else [])]
    data = ModelCardData(
        **{key: fields[key] for key in _CARRIED if key in fields},
        base_model_relation=relation if "base_model" in fields else None,
        pipeline_tag="text-generation",
        library_name=model.library,
        tags=[*tags, *(tag for command, tag in _TAGS.items() if command in commands)],
    )
    return str(data.to_yaml())


def _carried(directory: Path, manifest: Manifest, older: Sequence[Ancestor]) -> CardFields:
    """Licence, base model and language: of the card that is there, else of the nearest model that says them."""
    found: CardFields = {}
    for place, facts in [(directory, manifest), *((one.directory, one.manifest) for one in older)]:
        card = {key: value for key, value in read_front_matter(place / CARD).items() if key in _CARRIED}
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


@dataclass(frozen=True)
class _Step:
    name: str
    how: str
    parameters: float | None
    size: float | None


def _step(one: Ancestor) -> _Step:
    downloaded = origin(one.directory)
    name = one.directory.name if downloaded is None else f"{downloaded['model']}@{downloaded['revision']}"
    return _Step(name, _how(one.manifest), one.manifest.figure("parameters"), one.manifest.figure("size_bytes"))


def _how(made: Manifest) -> str:
    """How a model was made, as far as its manifest says."""
    tokens = made.figure("tokens")
    corpus = f" on {_texts(made.paths('corpus'))}" if made.paths("corpus") else ""
    training = f", {tokens:,.0f} tokens{corpus}" if tokens else ""
    match made.command:
        case "":
            return "a checkpoint that was not made here"
        case "train" if not made.figure("steps"):
            return "written untrained"
        case "train":
            return f"{'fine-tuned' if made.text('init') else 'trained from random weights'}{training}"
        case "distill":
            start = ", from random weights" if made.text("start") == "fresh" else ""
            return f"distilled from `{PurePath(made.text('teacher') or 'a teacher').name}`{start}{training}"
        case "prune":
            shape = made.results.get("shape")
            kept = ", ".join(f"{name} {value}" for name, value in shape.items()) if isinstance(shape, dict) else ""
            recovered = f"; recovered by distillation{training}" if training else ""
            return f"pruned{f' to {kept}' if kept else ''}{recovered}"
        case "quantize":
            bits, block = made.figure("bits"), made.figure("group_size") or made.figure("block_size")
            mixed, method = made.figure("bits_per_weight"), made.results.get("method")
            packed = ["INT4 and INT8"] if made.results.get("sensitivity") else [f"INT{bits:.0f}"] if bits else []
            packed += [f"{mixed:.2f} bits per weight"] if mixed else []
            packed += [*([f"groups of {block:.0f}"] if block else []), *([f"method {method}"] if method else [])]
            return f"quantized: {', '.join(packed)}{training}" if packed else "quantized"
        case "export":
            return "exported, compared with the PyTorch model"
        case "gguf":
            return f"converted from the GGUF file `{PurePath(made.text('source') or 'unknown').name}`"
    return f"`sportsllm-compress {made.command}`"


def _texts(paths: Sequence[str]) -> str:
    """Files and folders of text by the last two parts of their names: `wiki/train.jsonl`."""
    return ", ".join(f"`{'/'.join(PurePath(path).parts[-2:])}`" for path in dict.fromkeys(paths))


def _scores(results: Sequence[Measured]) -> Iterator[tuple[str, float, str]]:
    """Bits per byte of a model, and of its teacher, on text that has a name."""
    for each in results:
        texts = [each.text] if isinstance(each.text, str) else list(each.text or ())
        for model, value in ((each.teacher, each.teacher_bits_per_byte), (each.directory, each.bits_per_byte)):
            if texts and model and value is not None:
                yield Path(model).name, value, _texts(texts)


def _scores_of_training(chain: Sequence[Ancestor], results: Sequence[Measured]) -> list[tuple[str, float, str]]:
    """The models of the chain scored on the text that the last one was scored on, if nothing measured them since."""
    measured = {model for model, *_ in _scores(results)}
    found = []
    for one in chain:
        value = one.manifest.figure("valid_bits_per_byte")
        valid, corpus = one.manifest.paths("valid"), one.manifest.paths("corpus")
        if value is not None and (valid or corpus):
            text = f"a part of {_texts(valid)}" if valid else f"a part of {_texts(corpus)}, held out"
            found.append((one.directory.name, value, text))
    return [each for each in found if each[2] == found[-1][2] and each[0] not in measured]


def _limits(model: _Model, chain: Sequence[Ancestor]) -> Iterator[str]:
    yield f"It reads at most {model.config.max_position_embeddings:,} tokens, prompt and answer together."
    if not model.chats:
        yield "It has no chat template: it continues text, and was not taught here to follow instructions."
    first = chain[0].manifest
    if first.command == "train" and not first.text("init"):
        read = [path for one in chain if one.manifest.figure("steps") for path in one.manifest.paths("corpus")]
        if not first.figure("steps"):
            yield f"`{chain[0].directory.name}` was written untrained: its weights are random."
        if read:
            yield f"All text that it was trained on is {_texts(read)}."
        if share := first.figure("tokens_per_parameter"):
            yield f"`{chain[0].directory.name}` read {share:,.3g} tokens a parameter."
    if any(one.manifest.command == "quantize" for one in chain):
        yield "Its weights are quantized: it does not answer exactly as the model it was made from."
    yield "Nothing here measured bias or harmful answers; do that before people rely on it."
