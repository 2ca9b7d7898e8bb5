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

All mistakes in a recipe are reported at once, before anything runs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sportsllm import __version__, options
from sportsllm.commands import COMMANDS, as_given, load_command
from sportsllm.errors import InterruptedRun, SportsLLMError, UsageError, did_you_mean
from sportsllm.files import JsonObject, atomic_write_text, has_state, read_json, read_toml, require_new
from sportsllm.results import Result

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_FOLDER = "out"  # the name of the recipe's own folder
_KEPT = ("eval", "bench", "generate", "devices calibrate")  # commands whose result is kept as JSON
_SUFFIXES = {"eval": ".json", "bench": ".json", "generate": ".txt", "report": ".html", "inspect": ".html"}
_SUFFIXES["devices calibrate"] = ".toml"


@dataclass(frozen=True)
class RecipeStage:
    """A command and its checked settings.

    `needs` are the earlier stages whose outputs it reads. An `optional` gate that is missed does not fail the recipe.
    """

    name: str
    command: str
    settings: JsonObject
    needs: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    name: str
    out: Path
    stages: tuple[RecipeStage, ...]


@dataclass(frozen=True)
class StageRow:
    """One stage of a run."""

    name: str
    command: str
    out: str | None
    cached: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunResult(Result):
    """A finished recipe.

    Attributes:
        recipe: name of the recipe.
        stages: the stages with their results.
        bench: JSON result of the last `bench` stage.
        seconds: total time.
    """

    recipe: str
    stages: list[StageRow]
    bench: JsonObject | None
    seconds: float


def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe, TOML.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Directory of the stages' outputs.", show_default="the recipe's `out`")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Run only this stage.", show_default="all stages")] = None,
    slurm: Annotated[
        Path | None,
        typer.Option(
            help="Run nothing; write a script that submits the stages to SLURM.",
            show_default="run here",
            metavar="FILE",
        ),
    ] = None,
    threads: options.Threads = None,
) -> RunResult:
    """Run every stage of a recipe. Finished stages with the same inputs are kept."""
    from sportsllm.console import log, output, silenced

    checked = load_recipe(recipe, out)
    chosen = [stage for stage in checked.stages if only is None or stage.name == only]
    if not chosen:
        raise UsageError(f"--only {only}: no such stage; it has {', '.join(stage.name for stage in checked.stages)}")
    if slurm is not None:
        return _write_jobs(slurm, recipe, checked, chosen, threads)
    rows, missed, bench, began = list[StageRow](), dict[str, int](), None, time.perf_counter()
    for number, stage in enumerate(chosen, start=1):
        log(f"[{number}/{len(chosen)}] {stage.name}: {stage.command}")
        started = time.perf_counter()
        try:
            with silenced(stage.command == "bench"):  # the report's table has its figures
                result = _run_stage(checked, stage, threads)
        except (KeyboardInterrupt, InterruptedRun):
            message = f"stage {stage.name!r}: interrupted; run the same command again to continue"
            raise InterruptedRun(message) from None
        except SportsLLMError as error:
            error.args = (f"stage {stage.name!r}: {_advised(str(error), checked, stage)}",)
            raise
        if result["complaint"]:
            log(str(result["complaint"]))
        if result["exit_code"] and not stage.optional:
            missed[stage.name] = result["exit_code"]
        bench = result if stage.command == "bench" else bench
        seconds, cached = round(time.perf_counter() - started, 2), result.get("cached", False)
        rows.append(StageRow(stage.name, stage.command, result.get("out"), cached, seconds))
    seconds = time.perf_counter() - began
    output().print(f"{checked.name}: {len(rows)} stage{'s' * (len(rows) != 1)} in {seconds:.0f} s")
    return RunResult(
        recipe=checked.name,
        stages=rows,
        bench=bench,
        seconds=round(seconds, 2),
        exit_code=next(iter(missed.values()), 0),
        complaint=f"gates missed by: {', '.join(missed)}" if missed else None,
    )


def _advised(message: str, recipe: Recipe, changed: RecipeStage) -> str:
    """An error whose advice, if it is about a changed stage, names what was made from that stage's output too."""
    from sportsllm.formats.artifact import AGAIN

    stale = {changed.name}
    for stage in recipe.stages:
        if not stale.isdisjoint(stage.needs):
            stale.add(stage.name)
    outs = [Path(stage.settings["out"]) for stage in recipe.stages if stage.name in stale and "out" in stage.settings]
    places = shlex.join(str(out) for out in outs if out.is_dir())
    again = f"to make it again, with all that was made from it, type: rm -r {places}; to keep it, choose another --out"
    return message.replace(AGAIN, again)


def _write_jobs(
    path: Path, recipe: Path, checked: Recipe, chosen: Sequence[RecipeStage], threads: int | None
) -> RunResult:
    """Write the script of `--slurm`."""
    from sportsllm.console import output
    from sportsllm.slurm import levels, submit_script

    require_new(path, "--slurm FILE")
    names = [stage.name for stage in chosen]
    stages = levels({stage.name: [name for name in stage.needs if name in names] for stage in chosen})
    command = [sys.executable, "-m", "sportsllm.cli", "run", str(recipe.resolve()), "--out", str(checked.out.resolve())]
    command += [] if threads is None else ["--threads", str(threads)]
    logs = str(checked.out.resolve() / "logs")
    atomic_write_text(path, submit_script(stages, command, checked.name, str(Path.cwd()), logs))
    output().print(f"{path}: {len(names)} jobs in {len(stages)} arrays; submit them with `bash {path} SBATCH-OPTIONS`")
    return RunResult(recipe=checked.name, stages=[], bench=None, seconds=0.0)


def load_recipe(path: Path, out: Path | None = None) -> Recipe:
    """Read and check a recipe; `out` replaces its own folder of outputs.

    Raises:
        UsageError: all its mistakes, in one line.
    """
    data = read_toml(path, error_type=UsageError)
    defaults, entries = data.get("defaults", {}), data.get("stage", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path}: has no [[stage]] tables; add at least one")
    if not isinstance(defaults, dict) or not all(isinstance(item, dict) for item in defaults.values()):
        raise UsageError(f"{path}: defaults must be tables; write [defaults.COMMAND]")
    problems = [f"unknown key {key!r}" for key in sorted(data.keys() - {"name", "out", "stage", "defaults"})]
    problems += [_unknown(f"defaults.{key}: command", key, COMMANDS) for key in sorted(defaults.keys() - COMMANDS)]
    base = out or Path(str(data.get("out") or Path("runs") / path.stem))
    known, stages = {_FOLDER: base}, list[RecipeStage]()
    for number, entry in enumerate(entries, start=1):
        name, command = str(entry.pop("name", "")), str(entry.pop("command", ""))
        optional, errors, checked, needs = entry.pop("optional", False), list[str](), JsonObject(), set[str]()
        if not isinstance(optional, bool):
            errors.append("optional must be true or false")
        if not _NAME.fullmatch(name):
            errors.append("name must be of a-z, 0-9, '.', '_' and '-'")
        if name in known:
            errors.append(f"the name is {'not free' if name == _FOLDER else 'used twice'}")
        if command not in COMMANDS or command == "run":
            errors.append(_unknown("command", command, COMMANDS))
        else:
            usual, place = defaults.get(command, {}), base / (name + _SUFFIXES.get(command, ""))
            checked, wrong, needs = _settings(command, usual, entry, known, place)
            errors, known[name] = [*errors, *wrong], place if command == "bench" else Path(checked.get("out", place))
        problems += [f"stage {number} ({name[:40] or 'without a name'}): {error}" for error in errors]
        stages.append(RecipeStage(name, command, checked, tuple(each for each in known if each in needs), optional))
    if problems:
        raise UsageError(f"{path}: " + "; ".join(problems))
    return Recipe(str(data.get("name", path.stem)), base, tuple(stages))


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    near = did_you_mean(name, known)
    return f"{what} {name!r} is unknown" + (f"; {near}" if near else "")


def _settings(
    command: str, usual: JsonObject, own: JsonObject, known: Mapping[str, Path], place: Path
) -> tuple[JsonObject, list[str], set[str]]:
    """A stage's settings in the types of its command's parameters, with paths for @stage and @stage/file; mistakes; and
    the stages that it needs, all earlier ones if it reads their folder.
    """
    errors, checked, needs = list[str](), JsonObject(), set[str]()
    parameters = inspect.signature(load_command(command), eval_str=True).parameters

    def resolved(item: object) -> object:
        if isinstance(item, list):
            return [resolved(part) for part in item]
        if isinstance(item, dict):
            return {key: resolved(part) for key, part in item.items()}
        if not isinstance(item, str):
            return item
        if not item.startswith("@"):
            path = Path(item)
            needs.update(each for each, made in known.items() if path == known[_FOLDER] or path.is_relative_to(made))
            return item
        stage, slash, rest = item[1:].partition("/")
        if stage not in known:
            errors.append(f"{item!r} names no earlier stage")
        needs.update(known if stage == _FOLDER else [stage])
        return str(known.get(stage, item)) + slash + rest

    given = usual | own
    if isinstance(usual.get("set"), dict) and isinstance(own.get("set"), dict):
        given["set"] = usual["set"] | own["set"]
    if "set" in given and "settings" in parameters:
        given["settings"] = given.pop("set")
    if "out" in parameters and command != "bench":
        given.setdefault("out", str(place))
    errors += [_unknown("setting", key, parameters) for key in given if key not in parameters]
    for name, parameter in parameters.items():
        if name not in given:
            errors += [f"setting {name!r} is missing"] if parameter.default is parameter.empty else []
            continue
        try:
            checked[name] = as_given(parameter.annotation, resolved(given[name]))
        except UsageError as error:
            errors.append(f"setting {name!r}: {error}")
    return checked, errors, needs - {_FOLDER}


def _run_stage(recipe: Recipe, stage: RecipeStage, threads: int | None) -> JsonObject:
    """Run a stage, or take its kept result: its JSON form with `exit_code` and `complaint`."""
    from sportsllm.console import log
    from sportsllm.formats.artifact import partial_directory

    function, settings = load_command(stage.command), dict(stage.settings)
    parameters = inspect.signature(function).parameters
    if threads is not None and "threads" in parameters:
        settings.setdefault("threads", threads)
    if "resume" in parameters and has_state(partial_directory(Path(settings["out"]))):
        log(f"{stage.name}: continuing the interrupted run")
        settings["resume"] = True
    path, fingerprint = recipe.out / f"{stage.name}.json", None
    if stage.command in _KEPT:
        fingerprint = _fingerprint(stage.command, settings)
        if path.exists() and (kept := read_json(path)).pop("fingerprint", None) == fingerprint:
            log(f"{path}: up to date")
            return {"out": str(path), **kept, "cached": True}
    if stage.command in _SUFFIXES and "out" in settings:  # a file, which is made again
        settings["out"].unlink(missing_ok=True)
    result = function(**settings)
    assert isinstance(result, Result)
    found = result.to_json() | {"exit_code": result.exit_code, "complaint": result.complaint}
    if fingerprint is None:
        return found
    if stage.command == "generate":
        atomic_write_text(path.with_suffix(".txt"), found["prompt"] + found["text"] + "\n")
    atomic_write_text(path, json.dumps({"fingerprint": fingerprint, **found}, indent=1, default=str))
    return {"out": str(path), **found}


def _fingerprint(command: str, settings: JsonObject) -> str:
    """Digest of a stage's settings and of the content of every path among them, also of those written NAME=PATH."""
    from sportsllm.formats.manifest import digest

    if command != "bench":  # other results do not depend on the threads
        settings = {key: value for key, value in settings.items() if key != "threads"}
    parts: list[object] = [command, __version__, settings]
    kinds = Path if command == "generate" else (str, Path)  # its texts, such as a stop ".", are no paths
    for name, value in settings.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, kinds) and name != "out":
                # os.path, not pathlib: a text may be longer than a file's name
                places = (str(item), str(item).partition("=")[2])
                parts += [digest(Path(place)) for place in places if os.path.exists(place)]  # noqa: PTH110
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
