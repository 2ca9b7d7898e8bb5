"""The table of commands, and what Python and recipes call them by.

A command is a typed function, loaded by name, so that no package imports one above it. Models that it takes may be
paths, GGUF files or names in the model hub.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast, get_args

import typer

from sportsllm.errors import ArtifactError, ResourceError, SportsLLMError, UsageError, did_you_mean
from sportsllm.files import ADAPTER, describe, require_directory
from sportsllm.options import BY_NAME, READS_TEXT, TRAINABLE
from sportsllm.options import path as given_path
from sportsllm.results import Result


class Entry(NamedTuple):
    """The module that has a command as a function of its last word, and a line for the list of commands."""

    module: str
    summary: str


COMMANDS = {
    "train": Entry("sportsllm.verbs.train", "Train a model from scratch, or fine-tune a checkpoint."),
    "distill": Entry("compress.distill", "Train a smaller student on a teacher's distribution."),
    "prune": Entry("compress.prune", "Cut width, depth, experts, cache or vocabulary."),
    "quantize": Entry("compress.quantize", "Quantize weights to INT8 or INT4."),
    "export": Entry("export.export", "Write ONNX or GGUF, checked against the PyTorch model."),
    "generate": Entry("sportsllm.verbs.generate", "Generate text, answer a message, or hold a conversation."),
    "serve": Entry("sportsllm.verbs.serve", "Serve exports through OpenAI's API."),
    "eval": Entry("sportsllm.verbs.eval", "Score perplexity, bits per byte and accuracy."),
    "bench": Entry("benchmarks.bench", "Measure latency, memory and size; judge a budget."),
    "fit": Entry("benchmarks.fit", "Search for the best model within a device's budget."),
    "plan": Entry("benchmarks.plan", "Predict size, memory, speed and training time."),
    "inspect": Entry("benchmarks.inspect", "Draw a model's parts, tensors and attention."),
    "report": Entry("benchmarks.report", "Write an HTML page of results that works offline."),
    "devices list": Entry("benchmarks.device_commands", "List the device budgets."),
    "devices show": Entry("benchmarks.device_commands", "Explain one device and the source of every figure."),
    "devices calibrate": Entry("benchmarks.device_commands", "Measure this machine and write a device file."),
    "data simulate": Entry("sportsllm.verbs.data", "Write a corpus of simulated matches, and questions."),
    "data sample": Entry("compress.sample", "Let a model write a corpus."),
    "data tokens": Entry("sportsllm.verbs.data", "Count the tokens of a text, and compare tokenizers."),
    "run": Entry("sportsllm.verbs.run", "Run the stages of a recipe; finished stages are kept."),
    "verify": Entry("sportsllm.verbs.verify", "Check a finished directory against its manifest."),
}
GROUPS = {
    "data": "Make training text, or count its tokens.",
    "devices": "List device budgets, explain one, or measure this machine.",
}
"""Commands that have commands of their own."""

Command = Callable[..., object]


def load_command(name: str) -> Command:
    """The function behind a command; it takes strings for paths too.

    Raises:
        ResourceError: its package is missing, or another package of that name hides it.
    """
    return _converting(load_function(COMMANDS[name].module, name.rpartition(" ")[2]))


def python_command(name: str) -> Command:
    """`load_command` for callers in Python: plain types in its signature, the options' help in its documentation, and
    parameters instead of flags there and in its errors."""
    command = load_command(name)
    signature = inspect.signature(command, eval_str=True)

    def named(text: str) -> str:
        flags = {"--" + key.replace("_", "-"): f"`{key}`" for key in signature.parameters} | {"--set": "`settings`"}
        return re.sub(r"(?<!\w)--[a-z][a-z-]*", lambda found: flags.get(found[0], found[0]), text)

    @functools.wraps(command)
    def function(*args: object, **given: object) -> object:
        try:
            bound = signature.bind(*args, **given)
        except TypeError as error:
            unknown = [did_you_mean(key, signature.parameters) for key in given if key not in signature.parameters]
            raise TypeError("; ".join(filter(None, [f"{name}() {error}", *unknown]))) from None
        for key, value in bound.arguments.items():
            try:
                bound.arguments[key] = as_given(signature.parameters[key].annotation, value)
            except UsageError as error:
                raise UsageError(f"{key}: {error}") from None
        try:
            result = command(*bound.args, **bound.kwargs)
        except SportsLLMError as error:
            error.args = (named(str(error)),)
            raise
        assert isinstance(result, Result)
        return result if result.complaint is None else dataclasses.replace(result, complaint=named(result.complaint))

    plain_ones, lines = [], [inspect.getdoc(function) or "", "", "Args:"]
    for parameter in signature.parameters.values():
        kind, option, *_ = get_args(parameter.annotation)
        default = f" By default: {option.show_default}." if isinstance(option.show_default, str) else ""
        lines.append(f"    {parameter.name}: {option.help}{default}")
        plain_ones.append(parameter.replace(annotation=kind))
    function.__doc__ = named("\n".join(lines))
    function.__signature__ = signature.replace(parameters=plain_ones)  # type: ignore[attr-defined]
    return function


def as_given(annotation: object, value: object) -> object:
    """A value from Python or a recipe in its type, within its bounds.

    A list may be given as its only item, `settings` as a mapping.
    """
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

    kinds = types_in(annotation)
    if isinstance(value, Path) and Path not in kinds:
        value = str(value)
    if {list, str} <= kinds and isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    if list in kinds and isinstance(value, str | Path | int):
        value = [value]
    kind: Any = annotation
    for mark in getattr(annotation, "__metadata__", ()):
        if getattr(mark, "parser", None) and isinstance(value, int | float):
            value = str(value)
        for name, bound in (("ge", getattr(mark, "min", None)), ("le", getattr(mark, "max", None))):
            kind = kind if bound is None else Annotated[kind, Field(**{name: bound})]
    adapter = TypeAdapter[object](kind, config=ConfigDict(coerce_numbers_to_str=True))
    try:
        return adapter.validate_python(parsed(annotation, value))
    except ValidationError as error:
        raise UsageError(describe(error)) from None


def load_function(module: str, name: str) -> Command:
    """A function by its module and name, from a package that the caller's may not import."""
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    here = Path(__file__).resolve().parents[1]
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent.parent != here:
        raise ResourceError(
            f"package {package!r} does not lie beside 'sportsllm' in {here}; another package may hide it: "
            "install sportsllm-compress into an environment of its own"
        )
    return cast(Command, getattr(importlib.import_module(module), name))


def _converting(function: Command) -> Command:
    """The function, its paths made of strings, models given by name downloaded, and text with its field checked."""
    signature = inspect.signature(function, eval_str=True)

    @functools.wraps(function)
    def command(*args: object, **given: object) -> object:
        bound = signature.bind(*args, **given)
        settings, texts = cast(Any, bound.arguments.get("settings") or ()), list[Path]()
        pairs = [*settings.items()] if isinstance(settings, Mapping) else [str(each).split("=", 1) for each in settings]
        rare = {name.strip(): "".join(map(str, value)).strip() for name, *value in pairs}
        for name in rare.keys() & signature.parameters.keys():
            raise UsageError(f"--set {name}: use the option --{name.replace('_', '-')} instead")
        for name, value in bound.arguments.items():
            if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; give a finite number")
            annotation = signature.parameters[name].annotation
            bound.arguments[name] = _converted(annotation, value)
            for path in cast(list[Path], bound.arguments[name] or []) if _marked(annotation, READS_TEXT) else []:
                if not path.exists():
                    raise ArtifactError(f"{path}: not found; give an existing file or folder of text")
                texts.append(path)
        if "text_field" in rare and texts:
            from sportsllm.text.documents import check_field

            check_field(texts, rare["text_field"])
        return function(*bound.args, **bound.kwargs)

    return command


def _marked(annotation: object, mark: object) -> bool:
    return mark in getattr(annotation, "__metadata__", ())


def _converted(annotation: object, value: object) -> object:
    kinds = types_in(annotation)
    if _marked(annotation, BY_NAME) and isinstance(value, str | Path):
        found = find_model(value)
        value = found if Path in kinds else str(found)
        if Path in kinds:  # refused before a command's imports
            from sportsllm.inference.decoder import is_onnx_directory

            trainable = _marked(annotation, TRAINABLE)
            require_directory(found, "a checkpoint" if trainable else "a checkpoint or an export")
            if trainable and is_onnx_directory(found) and not any(found.glob("*.safetensors")):
                raise ArtifactError(f"{found}: is an export; give the checkpoint that it was made from")
    return parsed(annotation, value)


def parsed(annotation: object, value: object) -> object:
    """A text in the form that an option of this type has on the command line, such as 100k, as its value."""
    found = (getattr(mark, "parser", None) for mark in getattr(annotation, "__metadata__", ()))
    parser = next(filter(None, found), given_path if Path in types_in(annotation) else None)
    try:
        if parser is not None and isinstance(value, list | tuple):
            return [parser(item) if isinstance(item, str) else item for item in value]
        return value if parser is None or not isinstance(value, str) else parser(value)
    except typer.BadParameter as error:
        raise UsageError(str(error)) from None


def find_model(text: str | Path) -> Path:
    """The directory of a model. A GGUF file, or a directory with one, is converted to a checkpoint in `cache_folder`.

    An existing path wins over a name in the hub, see `sportsllm.formats.huggingface.download_model`.

    Raises:
        UsageError: an empty text.
        ArtifactError: the GGUF file is damaged; the hub has no such model, or it has no safetensors or is unsupported.
        ResourceError: the model asks for permission, or the hub cannot be reached.
    """
    if not str(text):
        raise UsageError("the model is empty; give a directory, a GGUF file or a name in the hub")
    path = Path(text)
    if (file := find_gguf(path)) is None:
        from sportsllm.formats.huggingface import download_model

        found = path if path.exists() else download_model(str(text))
        if (found / ADAPTER).exists() and (found / "config.json").exists():
            from sportsllm.console import log

            log(f"{found}: the LoRA adapter beside the weights is ignored; merge it into the weights to use it")
        return found
    from sportsllm.formats.gguf.convert import convert_gguf
    from sportsllm.formats.manifest import file_sha256

    if not file.is_file():
        raise ArtifactError(f"{file}: not found; give a .gguf file")
    out = cache_folder() / "gguf" / f"{file.stem}-{file_sha256(file)[:12]}"
    convert_gguf(file, out)
    return out


def find_gguf(path: Path) -> Path | None:
    """A GGUF file itself, or the one in a directory without config.json; None for anything else.

    Raises:
        ArtifactError: the directory has several.
    """
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if len(files) > 1:
        raise ArtifactError(f"{path}: holds {len(files)} GGUF files; give one of them, for example {files[0].name}")
    return files[0] if files else None


def cache_folder() -> Path:
    """SPORTSLLM_CACHE, or `sportsllm-compress` in the user's cache folder."""
    own, shared = map(os.environ.get, ("SPORTSLLM_CACHE", "XDG_CACHE_HOME"))
    return Path(own or Path(shared or Path.home() / ".cache") / "sportsllm-compress")


def types_in(annotation: object) -> set[object]:
    """All types in an annotation: of `list[Path] | None` list, Path and None."""
    parts = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return types_in(parts[0])
    origin = getattr(annotation, "__origin__", annotation)
    return {origin}.union(*(types_in(part) for part in parts if not isinstance(part, str)))
