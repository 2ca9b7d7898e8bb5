"""Recipes: a TOML file of stages. Each stage is a command, and its settings are the command's flags.

    name = "quickstart"
    out = "runs/quickstart"

    [[stage]]
    name = "teacher"              # writes runs/quickstart/teacher
    command = "train"
    model = "tiny-1m"
    corpus = ["@corpus/train.jsonl"]     # @name is another stage's output, @out the folder of all of them

    [defaults.train]                     # settings of every stage of a command, unless it has its own
    seed = 1

All errors of a recipe are reported at once, before anything runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model

from sportsllm import __version__
from sportsllm.cli.flags import COMMANDS, load_command
from sportsllm.cli.recipe_each import each_problems, repeated
from sportsllm.console import log, output, silenced
from sportsllm.errors import SportsLLMError, UsageError
from sportsllm.formats.artifact import STATE_DIRECTORY, digest, partial_directory
from sportsllm.formats.huggingface.config import read_json

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_FOLDER = "out"  # the name of the recipe's own folder
_KEPT_AS = {"eval": ".json", "bench": ".json", "generate": ".txt"}  # commands whose result is a file
_STAGE_KEYS = {"name", "command", "optional"}


@dataclass(frozen=True)
class RecipeStage:
    """One step: a command and its checked settings. An `optional` gate that is missed does not fail the recipe.

    `needs` names the stages whose outputs it reads.
    """

    name: str
    command: str
    settings: dict[str, Any]
    optional: bool = False
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    name: str
    out: Path
    stages: tuple[RecipeStage, ...]


def load_recipe(path: Path, out: Path | None = None) -> Recipe:
    """Read and check a recipe.

    Args:
        path: the TOML file.
        out: where outputs go, instead of the recipe's own `out`.

    Raises:
        UsageError: all its mistakes, in one line.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: not found; give a recipe, for example recipes/quickstart.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML ({error})") from None
    problems = [f"unknown key {key!r}" for key in sorted(set(data) - {"name", "out", "stage", "defaults", "each"})]
    problems += each_problems(each := data.get("each", {}))
    defaults = data.get("defaults", {})
    problems += [f"defaults.{key}: unknown command {key!r}" for key in sorted(set(defaults) - set(COMMANDS))]
    base = out or Path(str(data.get("out") or Path("runs") / path.stem))
    stages: list[RecipeStage] = []
    known: dict[str, Path] = {_FOLDER: base}
    entries = data.get("stage", [])
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path}: has no [[stage]]; add at least one")
    for number, entry in enumerate(entries if problems else repeated(entries, each), start=1):
        if not isinstance(entry, dict):
            problems.append(f"stage {number}: is not a table; write [[stage]]")
            continue
        name, command = str(entry.get("name", "")), str(entry.get("command", ""))
        where = f"stage {number} ({name or 'without a name'})"
        if not _NAME.fullmatch(name):
            problems.append(f"{where}: name must be of a-z, 0-9, '.', '_' and '-'")
        if name in known:
            problems.append(f"{where}: the name is {'not free' if name == _FOLDER else 'used twice'}")
        if command not in COMMANDS or command == "run":
            problems.append(f"{where}: unknown command {command!r}")
            continue
        settings = defaults.get(command, {}) | {key: value for key, value in entry.items() if key not in _STAGE_KEYS}
        resolved, errors, needs = _resolve(settings, known)
        problems += [f"{where}: {error}" for error in errors]
        function = load_command(command)
        known[name] = base / (name + _KEPT_AS.get(command, ".html" if command == "report" else ""))
        if "out" in inspect.signature(function).parameters and command not in _KEPT_AS:
            resolved.setdefault("out", str(known[name]))
        checked, errors = _check_settings(function, resolved)
        problems += [f"{where}: {error}" for error in errors]
        stages.append(RecipeStage(name, command, checked, bool(entry.get("optional", False)), frozenset(needs)))
    if problems:
        raise UsageError(f"{path}: " + "; ".join(problems))
    return Recipe(str(data.get("name", path.stem)), base, tuple(stages))


def _resolve(value: Any, known: dict[str, Path]) -> tuple[Any, list[str], set[str]]:
    """Replace @stage and @stage/file by paths; later stages are not known yet."""
    errors: list[str] = []
    needs: set[str] = set()

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
            if stage != _FOLDER:
                needs.add(stage)
            return str(known[stage]) + slash + rest
        return item

    return replace(value), errors, needs


def _check_settings(function: Callable[..., Any], settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A stage's settings in the types that its command takes, and its mistakes."""
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        least = [
            item.min
            for item in getattr(parameter.annotation, "__metadata__", ())
            if getattr(item, "min", None) is not None
        ]
        bounded = Annotated[parameter.annotation, Field(ge=least[0])] if least else parameter.annotation
        fields[name] = (bounded, default)
    config = ConfigDict(extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True)
    try:
        checked = create_model("Settings", __config__=config, **fields)(**settings)
    except ValidationError as error:
        found = ((".".join(map(str, item["loc"])), item["msg"].lower()) for item in error.errors())
        return settings, [f"setting {field!r}: {message}" for field, message in found]
    return {name: getattr(checked, name) for name in settings}, []


def run_recipe(recipe: Recipe, threads: int | None = None, only: str | None = None) -> dict[str, Any]:
    """Run the stages in order. Those that are finished from the same inputs are kept.

    Args:
        recipe: checked.
        threads: for stages that do not set them.
        only: the one stage to run; the outputs that it reads must be there.

    Returns:
        See `summarize`.

    Raises:
        SportsLLMError: that of the stage that failed, with its name.
        UsageError: `only` is not the name of a stage.
    """
    chosen = [stage for stage in recipe.stages if only is None or stage.name == only]
    if not chosen:
        raise UsageError(f"--only {only}: no such stage; it has {', '.join(stage.name for stage in recipe.stages)}")
    results, began = [], time.perf_counter()
    for number, stage in enumerate(chosen, start=1):
        log(f"[{number}/{len(chosen)}] {stage.name}: {stage.command}")
        started, worked = time.perf_counter(), _processor_seconds()
        try:
            with silenced(stage.command == "bench"), _one_tokenizing(recipe):  # the report's table has its figures
                result = _run_stage(recipe, stage, threads)
        except SportsLLMError as error:
            error.args = (f"stage {stage.name!r}: {error}",)
            raise
        if result.get("complaint"):
            log(str(result["complaint"]))
        result["cpu_seconds"] = _processor_seconds() - worked
        results.append((stage, result, time.perf_counter() - started))
    return summarize(recipe, results, time.perf_counter() - began)


def summarize(
    recipe: Recipe, results: Sequence[tuple[RecipeStage, dict[str, Any], float]], seconds: float
) -> dict[str, Any]:
    """The summary of a run: from each stage's result and seconds, and the seconds of the whole.

    `cpu_seconds` is processor time over all cores: the cost of a stage on a shared machine.

    Returns:
        `stages` (name, command, out, cached, seconds, cpu_seconds), the last `bench`, `seconds`, and `exit_code`
        where a gate was missed.
    """
    rows = [
        {
            "name": stage.name,
            "command": stage.command,
            "out": result.get("out"),
            "cached": bool(result.get("cached", False)),
            "seconds": round(own, 2),
            "cpu_seconds": round(result.pop("cpu_seconds"), 2),
        }
        for stage, result, own in results
    ]
    missed = [(stage.name, result["exit_code"]) for stage, result, _ in results if _missed(stage, result)]
    benches = [result for stage, result, _ in results if stage.command == "bench"]
    output().print(f"{recipe.name}: {len(rows)} stages in {seconds:.0f} s")
    summary: dict[str, Any] = {
        "recipe": recipe.name,
        "stages": rows,
        "bench": benches[-1] if benches else None,
        "seconds": round(seconds, 2),
    }
    if missed:
        names = ", ".join(name for name, _ in missed)
        summary |= {"exit_code": int(missed[0][1]), "complaint": f"not passed: {names}"}
    return summary


@contextmanager
def _one_tokenizing(recipe: Recipe) -> Iterator[None]:
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


def _missed(stage: RecipeStage, result: dict[str, Any]) -> bool:
    return bool(result.get("exit_code")) and not stage.optional


def _run_stage(recipe: Recipe, stage: RecipeStage, threads: int | None) -> dict[str, Any]:
    function = load_command(stage.command)
    settings, parameters = dict(stage.settings), inspect.signature(function).parameters
    if threads is not None and "threads" in parameters:
        settings.setdefault("threads", threads)
    if (
        "resume" in parameters
        and settings.get("out")
        and (partial_directory(Path(settings["out"])) / STATE_DIRECTORY).exists()
    ):
        log(f"{stage.name}: continuing the interrupted run")
        settings["resume"] = True
    if stage.command not in _KEPT_AS:
        return function(**settings)
    path = recipe.out / f"{stage.name}.json"
    fingerprint = _fingerprint(stage.command, settings)
    if path.exists():
        kept = read_json(path)
        if kept.pop("fingerprint", None) == fingerprint:
            log(f"{path}: up to date")
            return {**kept, "cached": True, "out": str(path)}
    result = function(**settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    if stage.command == "generate":
        path.with_suffix(".txt").write_text(result["prompt"] + result["text"] + "\n", encoding="utf-8")
    fresh = path.with_suffix(".json.partial")
    fresh.write_text(json.dumps({"fingerprint": fingerprint, **result}, indent=1, default=str), encoding="utf-8")
    fresh.replace(path)
    return {**result, "out": str(path)}


def _fingerprint(command: str, settings: dict[str, Any]) -> str:
    """Digest of a stage's settings and of the content of every path among them, also of those written NAME=PATH."""
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
