"""The verb `run`: execute a recipe, a TOML file of stages, and keep the finished ones.

Each stage is a command, and its keys are the command's parameters.

    name = "quickstart"
    out = "runs/quickstart"

    [[stage]]
    name = "teacher"                     # writes runs/quickstart/teacher
    command = "train"
    model = "tiny-1m"
    corpus = ["@corpus/train.jsonl"]     # @name is the output of an earlier stage, @out the folder of all
    set = { warmup = 20 }                # rare settings, as --set warmup=20

    [defaults.train]                     # for every stage of a command that has no value of its own
    seed = 1

    [each]                               # a stage with {shape} in its name is repeated for each value
    shape = ["deep", "wide"]

All mistakes in a recipe are reported at once, before anything runs.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm import __version__, options
from sportsllm.commands import COMMANDS, load_command
from sportsllm.errors import SportsLLMError, UsageError
from sportsllm.formats.json_files import read_toml
from sportsllm.results import Result

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_FOLDER = "out"  # the name of the recipe's own folder
_KEPT_AS = {"eval": ".json", "bench": ".json", "generate": ".txt"}  # commands whose result is a file
_STAGE_KEYS = {"name", "command", "optional"}


@dataclass(frozen=True)
class RecipeStage:
    """A command and its checked settings. An `optional` gate that is missed does not fail the recipe."""

    name: str
    command: str
    settings: dict[str, Any]
    optional: bool = False


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    name: str
    out: Path
    stages: tuple[RecipeStage, ...]


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage of a run. `cpu_seconds` is processor time over all cores."""

    name: str
    command: str
    out: str | None
    cached: bool
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class RunResult(Result):
    """A finished recipe. `bench` is the JSON form of its last benchmark."""

    recipe: str
    stages: list[StageRow]
    bench: dict[str, Any] | None
    seconds: float


def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe, TOML.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Directory of the stages' outputs.", show_default="the recipe's `out`")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Run only this stage.", show_default="all stages")] = None,
    threads: options.Threads = None,
) -> RunResult:
    """Run every stage of a recipe. Finished stages with the same inputs are kept."""
    from sportsllm.console import log, output, silenced

    checked = load_recipe(recipe, out)
    chosen = [stage for stage in checked.stages if only is None or stage.name == only]
    if not chosen:
        raise UsageError(f"--only {only}: no such stage; it has {', '.join(stage.name for stage in checked.stages)}")
    rows: list[StageRow] = []
    missed: list[tuple[str, int]] = []
    bench, began = None, time.perf_counter()
    for number, stage in enumerate(chosen, start=1):
        log(f"[{number}/{len(chosen)}] {stage.name}: {stage.command}")
        started, worked = time.perf_counter(), _processor_seconds()
        try:
            with silenced(stage.command == "bench"), _shared_tokens(checked):  # the report's table has its figures
                result = _run_stage(checked, stage, threads)
        except SportsLLMError as error:
            error.args = (f"stage {stage.name!r}: {error}",)
            raise
        if result.get("complaint"):
            log(str(result["complaint"]))
        if result.get("exit_code") and not stage.optional:
            missed.append((stage.name, int(result["exit_code"])))
        if stage.command == "bench":
            bench = result
        row = StageRow(
            name=stage.name,
            command=stage.command,
            out=None if result.get("out") is None else str(result["out"]),
            cached=bool(result.get("cached", False)),
            seconds=round(time.perf_counter() - started, 2),
            cpu_seconds=round(_processor_seconds() - worked, 2),
        )
        rows.append(row)
    seconds = time.perf_counter() - began
    output().print(f"{checked.name}: {len(rows)} stages in {seconds:.0f} s")
    names = ", ".join(name for name, _ in missed)
    return RunResult(
        recipe=checked.name,
        stages=rows,
        bench=bench,
        seconds=round(seconds, 2),
        exit_code=missed[0][1] if missed else 0,
        complaint=f"gates missed by: {names}" if missed else None,
    )


def load_recipe(path: Path, out: Path | None = None) -> Recipe:
    """Read and check a recipe.

    Args:
        path: the TOML file.
        out: folder of the outputs, instead of the recipe's own `out`.

    Raises:
        UsageError: all its mistakes, in one line.
    """
    data = read_toml(path, error_type=UsageError)
    problems = [f"unknown key {key!r}" for key in sorted(set(data) - {"name", "out", "stage", "defaults", "each"})]
    each, defaults, entries = data.get("each", {}), data.get("defaults", {}), data.get("stage", [])
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path}: has no [[stage]]; add at least one")
    if not isinstance(each, dict) or not isinstance(defaults, dict):
        raise UsageError(f"{path}: each and defaults must be tables; write [each] and [defaults.COMMAND]")
    strange = sorted(set(defaults) - set(COMMANDS))
    problems += [_unknown(f"defaults.{key}: command", key, COMMANDS) for key in strange]
    problems += [f"defaults.{key}: is not a table" for key, item in defaults.items() if not isinstance(item, dict)]
    repeating = _each_problems(each)
    if repeating or any(not isinstance(item, dict) for item in defaults.values()):
        raise UsageError(f"{path}: " + "; ".join([*problems, *repeating]))
    base = out or Path(str(data.get("out") or Path("runs") / path.stem))
    known: dict[str, Path] = {_FOLDER: base}
    stages = []
    for number, entry in enumerate(_repeated(entries, each), start=1):
        stage, found = _stage(number, entry, defaults, base, known)
        problems += found
        if stage is not None:
            stages.append(stage)
    if problems:
        raise UsageError(f"{path}: " + "; ".join(problems))
    return Recipe(str(data.get("name", path.stem)), base, tuple(stages))


def _unknown(what: str, name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"{what} {name!r} is unknown" + (f"; did you mean {near[0]!r}?" if near else "")


def _stage(
    number: int, entry: Any, defaults: Mapping[str, Any], base: Path, known: dict[str, Path]
) -> tuple[RecipeStage | None, list[str]]:
    """One stage and its mistakes; `known`, the outputs of the stages before it, gains its own."""
    if not isinstance(entry, dict):
        return None, [f"stage {number}: is not a table; write [[stage]]"]
    name, command = str(entry.get("name", "")), str(entry.get("command", ""))
    where, problems = f"stage {number} ({name[:40] or 'without a name'})", []
    if not _NAME.fullmatch(name):
        problems.append(f"{where}: name must be of a-z, 0-9, '.', '_' and '-'")
    if name in known:
        problems.append(f"{where}: the name is {'not free' if name == _FOLDER else 'used twice'}")
    if command not in COMMANDS or command == "run":
        return None, [*problems, f"{where}: {_unknown('command', command, COMMANDS)}"]
    usual, own = defaults.get(command, {}), {key: value for key, value in entry.items() if key not in _STAGE_KEYS}
    settings = usual | own
    if isinstance(usual.get("set"), dict) and isinstance(own.get("set"), dict):
        settings["set"] = usual["set"] | own["set"]
    resolved, errors = _resolve(settings, known)
    function = load_command(command)
    parameters = inspect.signature(function).parameters
    if "set" in resolved and "settings" in parameters:
        resolved["settings"] = resolved.pop("set")
    known[name] = base / (name + _KEPT_AS.get(command, ".html" if command == "report" else ""))
    if "out" in parameters and command not in _KEPT_AS:
        resolved.setdefault("out", str(known[name]))
    checked, more = _check_settings(function, resolved)
    problems += [f"{where}: {error}" for error in [*errors, *more]]
    return RecipeStage(name, command, checked, bool(entry.get("optional", False))), problems


def _resolve(value: Any, known: Mapping[str, Path]) -> tuple[Any, list[str]]:
    """Replace @stage and @stage/file by paths; later stages are not known yet."""
    errors: list[str] = []

    def replace(item: Any) -> Any:
        if isinstance(item, list):
            return [replace(part) for part in item]
        if isinstance(item, dict):
            return {key: replace(part) for key, part in item.items()}
        if isinstance(item, str) and item.startswith("@"):
            stage, slash, rest = item[1:].partition("/")
            if stage not in known:
                errors.append(f"{item!r} names no earlier stage")
                return item
            return str(known[stage]) + slash + rest
        return item

    return replace(value), errors


def _check_settings(function: Callable[..., Any], settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A stage's settings in the types of its command's parameters, and its mistakes."""
    from pydantic import ConfigDict, Field, ValidationError, create_model

    fields: dict[str, Any] = {}
    parameters = inspect.signature(function, eval_str=True).parameters
    errors = [_unknown("setting", key, parameters) for key in settings if key not in parameters]
    for name, parameter in parameters.items():
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        marks = getattr(parameter.annotation, "__metadata__", ())
        least = [item.min for item in marks if getattr(item, "min", None) is not None]
        annotation = parameter.annotation
        if name == "settings":
            annotation = list[str] | dict[str, Any] | None
        fields[name] = (Annotated[annotation, Field(ge=least[0])] if least else annotation, default)
    config = ConfigDict(protected_namespaces=(), coerce_numbers_to_str=True)
    known = {key: value for key, value in settings.items() if key in parameters}
    try:
        checked = create_model("Settings", __config__=config, **fields)(**known)
    except ValidationError as error:
        found = ((".".join(map(str, item["loc"])), item["msg"].lower()) for item in error.errors())
        return settings, [*errors, *(f"setting {field!r}: {message}" for field, message in found)]
    return {name: getattr(checked, name) for name in known}, errors


def _repeated(entries: Sequence[Any], each: Mapping[str, Sequence[str]]) -> list[Any]:
    """The stages, those with `{name}` in their own name once for every value of `each`, in order."""
    for name, values in each.items():
        marked = f"{{{name}}}"
        entries = [
            copy
            for entry in entries
            for copy in (
                [_filled(entry, marked, value) for value in values]
                if isinstance(entry, dict) and marked in str(entry.get("name", ""))
                else [entry]
            )
        ]
    return list(entries)


def _each_problems(each: Mapping[str, Any]) -> list[str]:
    return [
        f"each.{name}: must be a list of texts"
        for name, values in each.items()
        if not (isinstance(values, list) and values and all(isinstance(value, str) for value in values))
    ]


def _filled(item: Any, marked: str, value: str) -> Any:
    if isinstance(item, dict):
        return {key: _filled(part, marked, value) for key, part in item.items()}
    if isinstance(item, list):
        return [_filled(part, marked, value) for part in item]
    return item.replace(marked, value) if isinstance(item, str) else item


def _run_stage(recipe: Recipe, stage: RecipeStage, threads: int | None) -> dict[str, Any]:
    """Run a stage, or take its kept result: its JSON form with `exit_code` and `complaint`."""
    from sportsllm.console import log
    from sportsllm.formats.artifact import STATE_DIRECTORY, partial_directory
    from sportsllm.formats.json_files import read_json

    function = load_command(stage.command)
    settings, parameters = dict(stage.settings), inspect.signature(function).parameters
    if threads is not None and "threads" in parameters:
        settings.setdefault("threads", threads)
    partial = partial_directory(Path(settings.get("out", "none")))
    if "resume" in parameters and (partial / STATE_DIRECTORY).exists():
        log(f"{stage.name}: continuing the interrupted run")
        settings["resume"] = True
    if stage.command not in _KEPT_AS:
        return _plain(function(**settings))
    path = recipe.out / f"{stage.name}.json"
    fingerprint = _fingerprint(stage.command, settings)
    if path.exists():
        kept = read_json(path)
        if kept.pop("fingerprint", None) == fingerprint:
            log(f"{path}: up to date")
            return {**kept, "cached": True, "out": str(path)}
    result = _plain(function(**settings))
    path.parent.mkdir(parents=True, exist_ok=True)
    if stage.command == "generate":
        path.with_suffix(".txt").write_text(result["prompt"] + result["text"] + "\n", encoding="utf-8")
    fresh = path.with_suffix(".json.partial")
    fresh.write_text(json.dumps({"fingerprint": fingerprint, **result}, indent=1, default=str), encoding="utf-8")
    fresh.replace(path)
    return {**result, "out": str(path)}


def _plain(result: Any) -> dict[str, Any]:
    if not isinstance(result, Result):
        return dict(result)
    return result.to_json() | {"exit_code": result.exit_code, "complaint": result.complaint}


def _fingerprint(command: str, settings: dict[str, Any]) -> str:
    """Digest of a stage's settings and of the content of every path among them, also of those written NAME=PATH."""
    from sportsllm.formats.manifest import digest

    if command != "bench":  # other results do not depend on the threads
        settings = {key: value for key, value in settings.items() if key != "threads"}
    parts: list[Any] = [command, __version__, settings]
    for value in settings.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, (str, Path)):
                # os.path, not pathlib: a prompt may be longer than a file's name
                places = (str(item), str(item).partition("=")[2])
                parts += [digest(Path(place)) for place in places if os.path.exists(place)]  # noqa: PTH110
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def _shared_tokens(recipe: Recipe) -> Iterator[None]:
    """Stages that train on one corpus tokenize it once."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    from sportsllm.text.packing import kept_tokens

    with kept_tokens(recipe.out / "tokens"):
        yield


def _processor_seconds() -> float:
    """Processor time of this process and of its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
