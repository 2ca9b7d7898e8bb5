"""The model card of a directory: what it is, how it was made, how good and fast it is, how to load it, its limits.

Everything in it is read from manifests, from the config and from results of `eval` and `bench`. What those do not say
is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sportsllm.errors import ArtifactError
from sportsllm.formats.card_figures import quality, speed
from sportsllm.formats.card_usage import LIBRARY, Loadable, usage
from sportsllm.formats.front_matter import Fields, front_matter, read_front_matter
from sportsllm.formats.hub import origin
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.json_files import read_json
from sportsllm.formats.lineage import Ancestor, ancestors
from sportsllm.formats.words import markdown_table, of_text, plain, short_path
from sportsllm.models.config import ModelConfig
from sportsllm.models.shape import described_shape

CARD = "README.md"
_CARRIED = ("license", "license_name", "license_link", "base_model", "language")
_RELATIONS = {"quantize": "quantized", "train": "finetune", "distill": "finetune", "prune": "finetune"}


def model_card(
    directory: Path,
    place: Path,
    manifest: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]] = (),
    stated: Mapping[str, str | list[str]] | None = None,
) -> str:
    """A card in Markdown, with front matter where the directory holds a model.

    Args:
        directory: where the files are.
        place: where they will be, which gives the name.
        manifest: of the directory; `files` may still be missing.
        results: of `eval` and `bench`, on this model or on those it was made from.
        stated: fields of the front matter that stand above those carried over.
    """
    older = ancestors(manifest, place)
    loadable = _loadable(directory, place.name, manifest, older)
    details = _details(manifest)
    if loadable is None:
        made = f"Made by `sportsllm-compress {manifest['command']}` on {manifest['created']}."
        return _joined([f"# {place.name}", made, *details])
    given = dict(stated or {})
    carried = _joined_fields(given, _carried(directory, manifest, older))
    chain = [*reversed(older), Ancestor(place, manifest)]
    return front_matter(_fields(loadable, carried, chain)) + _joined(
        [
            f"\n# {place.name}",
            f"A language model, {loadable.data.get('model_type', 'llama')}: {described_shape(loadable.config)}. "
            f"{loadable.form}",
            "## How it was made",
            *_steps(chain),
            *quality(chain, results),
            *speed(place, results),
            "## Use",
            *usage(loadable),
            "## Limits",
            "\n".join(f"- {line}" for line in _limits(loadable, chain)),
            *details,
        ]
    )


def _joined(blocks: Sequence[str]) -> str:
    return "\n\n".join(blocks) + "\n"


def _loadable(directory: Path, name: str, manifest: Mapping[str, Any], older: Sequence[Ancestor]) -> Loadable | None:
    """What the directory holds for a runtime to load; None where it holds no model."""
    places = [directory, *(one.directory for one in older)] if any(directory.glob("*.gguf")) else [directory]
    place = next((place for place in places if (place / "config.json").is_file()), None)
    if place is None or not any(path for kind in LIBRARY for path in directory.glob(kind)):
        return None
    try:
        config, data = load_config(place), read_json(place / "config.json")
    except ArtifactError:  # a card is no place to fail: the command that loads it says what is wrong
        return None
    return Loadable(directory, name, config, data, manifest.get("settings", {}), manifest.get("results", {}))


def _carried(directory: Path, manifest: Mapping[str, Any], older: Sequence[Ancestor]) -> Fields:
    """Licence, base model and language: of the card that is there, else of the nearest model that says them."""
    found: Fields = {}
    for place, facts in [(directory, manifest), *((one.directory, one.manifest) for one in older)]:
        card = {key: value for key, value in read_front_matter(place / CARD).items() if key in _CARRIED}
        license_ = facts.get("results", {}).get("license") if facts.get("command") == "import" else None
        if license_ and "license" not in card:
            card["license"] = str(license_).lower()
        if not facts and place != directory and (base := _hub_name(place)):
            card["base_model"] = base
        found = _joined_fields(found, card)
    return found


def _joined_fields(nearer: Fields, farther: Fields) -> Fields:
    """Fields of two cards, the nearer one's first; the three of a licence belong together."""
    if "license" in nearer:
        farther = {key: value for key, value in farther.items() if not key.startswith("license")}
    return farther | nearer


def _hub_name(directory: Path) -> str | None:
    """The name on the hub of a downloaded checkpoint, or that its config.json keeps, `owner/name`; None for a path."""
    if (downloaded := origin(directory)) is not None:
        return downloaded["model"]
    config = directory / "config.json"
    name = read_json(config).get("_name_or_path") if config.is_file() else None
    return name if isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/", "~")) else None


def _fields(loadable: Loadable, carried: Fields, chain: Sequence[Ancestor]) -> Fields:
    commands = [str(one.manifest["command"]) for one in chain if one.manifest]
    relation = next((_RELATIONS[command] for command in ("quantize", *_RELATIONS) if command in commands), "")
    base = carried.get("base_model", "")
    made = {"distill": "distillation", "prune": "pruning", "quantize": "quantization"}
    tags = ["sportsllm-compress", *loadable.tags, *(tag for command, tag in made.items() if command in commands)]
    return {
        **{key: carried.get(key, "") for key in ("license", "license_name", "license_link")},
        "base_model": base,
        "base_model_relation": relation if base else "",
        "language": carried.get("language", ""),
        "pipeline_tag": "text-generation",
        "library_name": loadable.library,
        "tags": tags,
    }


def _steps(chain: Sequence[Ancestor]) -> Iterator[str]:
    rows = []
    for one in chain:
        results = one.manifest.get("results", {})
        size = results.get("size_bytes")
        rows.append(
            (
                f"`{_named(one.directory)}`",
                _what(one.manifest),
                f"{results['parameters']:,}" if results.get("parameters") else "",
                f"{size / 1e6:,.3g} MB" if size else "",
            )
        )
    yield markdown_table(("model", "how", "parameters", "size"), rows, (0, 1))


def _named(directory: Path) -> str:
    """A model's directory by its name, a downloaded one by that in the hub and its commit."""
    return directory.name if origin(directory) is None else short_path(str(directory))


def _what(manifest: Mapping[str, Any]) -> str:
    """A step in a sentence, as far as its manifest says it."""
    if not manifest:
        return "a checkpoint that was not made here"
    command, settings, results = manifest["command"], manifest.get("settings", {}), manifest.get("results", {})
    text = f" on {of_text(settings.get('corpus'))}" if settings.get("corpus") else ""
    tokens = f", {results['tokens']:,} tokens" if results.get("tokens") else ""
    training = f"{tokens}{text}" if tokens else ""
    if command == "train" and not _steps_of(manifest):
        return "written untrained"
    if command == "train":
        return f"{'fine-tuned' if settings.get('init') else 'trained from random weights'}{training}"
    if command == "distill":
        start = {"cut": ", cut out of it", "fresh": ", from random weights"}.get(str(settings.get("start")), "")
        return f"distilled from `{Path(str(settings['teacher'])).name}`{start}{training}"
    if command == "prune" and "vocab_size_before" in results:
        return f"vocabulary cut from {results['vocab_size_before']:,} to {results['vocab_size']:,} tokens"
    if command == "prune":
        recovered = f"; recovered by distillation{training}" if training else ""
        return f"pruned to {plain(results.get('shape', {}))}{recovered}"
    if command == "quantize":
        mixed = any(group["bits"] > results["bits"] for group in results.get("sensitivity", []))
        also = f" and INT8, {results['bits_per_weight']:.2f} bits a weight" if mixed else ""
        packed = [f"INT{results['bits']}{also}"] if isinstance(results.get("bits"), int) else []
        packed += [f"blocks of {results['block_size']}"] if results.get("block_size") else []
        packed += [f"method {results['method']}"] if results.get("method") else []
        return f"quantized: {', '.join(packed)}{training}" if packed else "quantized"
    if command == "export":
        return f"exported as {'GGUF' if settings.get('gguf') else 'ONNX'}, compared with the PyTorch model"
    if command == "import":
        formats = ", ".join(results.get("formats", []))
        return f"imported from the GGUF file `{Path(str(settings['source'])).name}`{f' ({formats})' if formats else ''}"
    return f"`sportsllm-compress {command}`"


def _steps_of(manifest: Mapping[str, Any]) -> int:
    """Steps of a training; 0 for other stages, and for a model that was written untrained."""
    return int(manifest.get("results", {}).get("steps") or 0)


def _limits(loadable: Loadable, chain: Sequence[Ancestor]) -> Iterator[str]:
    config: ModelConfig = loadable.config
    yield f"It reads at most {config.max_position_embeddings:,} tokens, prompt and answer together."
    if not loadable.chats:
        yield "It has no chat template: it continues text, and was not taught here to follow instructions."
    first = chain[0].manifest
    if first.get("command") == "train" and not first["settings"].get("init"):
        if not _steps_of(first):
            yield f"`{chain[0].directory.name}` was written untrained: its weights are random."
        read = [
            path for one in chain if _steps_of(one.manifest) for path in one.manifest["settings"].get("corpus") or []
        ]
        if read:
            yield f"All text that it was trained on is {of_text(dict.fromkeys(read))}."
        if share := first.get("results", {}).get("tokens_per_parameter"):
            yield f"`{chain[0].directory.name}` read {share:,.3g} tokens a parameter."
    if any(one.manifest.get("command") == "quantize" for one in chain):
        yield "Its weights are rounded: it does not answer exactly as the model it was made from."
    yield "Nothing here measured bias or harmful answers; do that before people rely on it."


def _details(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Settings, results and versions, folded away."""
    tables = []
    for kind in ("setting", "result"):
        rows = [(name, value) for name, value in _rows(manifest[f"{kind}s"]) if value != "None"]
        tables += [markdown_table((kind, "value"), rows, (0, 1))] if rows else []
    versions = ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())
    made = f"`sportsllm-compress {manifest['command']}`, {manifest['created']}; {versions}".rstrip("; ")
    yield "<details><summary>Settings and results of this step</summary>"
    yield f"{made}."
    yield from tables
    yield "</details>"


def _rows(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values for a table: what is inside others by `outer inner`, long lists by their length."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _rows(value, f"{name} ")
        elif isinstance(value, list | tuple):
            simple = all(isinstance(item, str | int | float) for item in value)
            listed = ", ".join(short_path(item) if isinstance(item, str) else str(item) for item in value)
            yield name, (listed or "none") if simple else f"{len(value)} entries in manifest.json"
        elif isinstance(value, str):
            yield name, short_path(value)
        else:
            yield name, f"{value:.6g}" if isinstance(value, float) else str(value)
