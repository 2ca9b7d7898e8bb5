"""The entry point: `sportsllm-compress COMMAND`.

The commands are in `sportsllm.commands`; each is a typed function that returns a `Result`. This module makes the
command line of their signatures, and adds `--json`, exit codes and one-line errors. It imports neither torch nor rich,
which takes a third of the time of `--help`.
"""

from __future__ import annotations

import atexit
import copy
import errno
import functools
import gc
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.models import ArgumentInfo

from sportsllm import __version__, processes, settings
from sportsllm.commands import COMMANDS, GROUPS, Command, load_command, types_in
from sportsllm.errors import (
    ArtifactError,
    ConflictError,
    InterruptedRun,
    ResourceError,
    SportsLLMError,
    UsageError,
    did_you_mean,
)
from sportsllm.files import clip, plain
from sportsllm.options import path as given_path
from sportsllm.results import Result

atexit.register(gc.freeze)  # Python's end would visit every object, which takes long with PyTorch loaded
LONGEST_MESSAGE = 400
_VERBOSE = "Print times, and progress every five seconds."
_TEXT_FIELD = (
    "Field of .jsonl records, and column of .parquet files, that holds the text. Like --quiet and --verbose, before or "
    "after the command."
)
_NPROC = "Train in this many processes on this machine."
_EXTRA_OF = {
    "gguf": "gguf",
    "lm_eval": "tasks",
    "onnxruntime_genai": "genai",
    "optimum": "optimum",
    "pyarrow": "parquet",
    "starlette": "serve",
    "transformers": "optimum",
    "uvicorn": "serve",
}
_COMPRESS = {"torch", "onnx", "onnx_ir", "safetensors", "bitsandbytes", "plotly", "huggingface_hub"}


@dataclass
class _Asked:
    """Options of the program that are for some commands only, and the words of the command line without `nproc`."""

    words: list[str]
    text_field: str | None = None
    nproc: int = 1


class _Program(TyperGroup):
    """The root of the commands. Its options may stand before or after a command's name, up to `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, others = _split(args)
        ctx.obj = _Asked([*(word for word in own if not word.startswith("--nproc=")), *others])
        return super().parse_args(ctx, [*own, *others])


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The program's options, and all other words."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, others, words = list[str](), list[str](), iter(arguments[:end])
    for word in words:
        if word in ("--text-field", "--nproc"):
            word += f"={next(words, '')}"
        (own if re.fullmatch("--(quiet|verbose|(text-field|nproc)=.*)", word) else others).append(word)
    return own, [*others, *arguments[end:]]


def build_app(loaded: Collection[str] = COMMANDS) -> typer.Typer:
    """The typer application; commands that are not `loaded` are listed only."""
    app = typer.Typer(
        name="sportsllm-compress",
        cls=_Program,
        help="Make a language model small and fast enough for a device.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback(invoke_without_command=True)
    def _root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="Print results and errors only.")] = False,
        verbose: Annotated[bool, typer.Option("--verbose", help=_VERBOSE)] = False,
        text_field: Annotated[str | None, typer.Option("--text-field", metavar="NAME", help=_TEXT_FIELD)] = None,
        nproc: Annotated[int, typer.Option("--nproc", metavar="N", min=1, help=_NPROC)] = 1,
    ) -> None:
        if version:
            sys.stdout.write(f"{__version__}\n")
            raise typer.Exit
        if quiet and verbose:
            raise UsageError("give --quiet or --verbose, not both")
        if context.invoked_subcommand is None:
            sys.stdout.write(context.get_help() + "\n")
            return
        from sportsllm.console import set_verbosity

        set_verbosity(quiet or processes.rank() > 0, verbose)
        if text_field == "":
            raise UsageError("--text-field needs the name of a field")
        context.obj.text_field, context.obj.nproc = text_field, nproc

    groups = {
        name: typer.Typer(help=text, rich_markup_mode=None, no_args_is_help=True) for name, text in GROUPS.items()
    }
    for name, entry in COMMANDS.items():
        group, _, verb = name.rpartition(" ")
        if name in loaded:
            groups.get(group, app).command(verb, short_help=entry.summary)(_with_json(load_command(name), name))
        else:
            groups.get(group, app).command(verb, help=entry.summary)(lambda: None)
    for name, part in groups.items():
        app.add_typer(part, name=name)
    return app


def _with_json(function: Command, name: str) -> Command:
    """The function as a command: it prints its result as JSON if asked to, and ends with the result's exit code."""

    @functools.wraps(function)
    def wrapper(*args: object, invocation: typer.Context, json_output: bool = False, **kwargs: Any) -> None:
        from sportsllm.console import silenced, use_stderr

        use_stderr(json_output)
        asked: _Asked = invocation.obj
        if asked.text_field is not None:
            commands = settings.GROUPS["Text"][0]
            if invocation.command_path.partition(" ")[2] not in commands.split(", "):
                raise UsageError(f"--text-field is for {commands}")
            kwargs["settings"] = [*(kwargs["settings"] or ()), f"text_field={asked.text_field}"]
        if max(processes.count(), asked.nproc) > 1 and function.__name__ not in _TOGETHER:
            raise UsageError(f"runs in one process; {' and '.join(_TOGETHER)} take several")
        if asked.nproc > 1:
            raise typer.Exit(processes.start(asked.nproc, asked.words))
        # Inside, since typer would end both on its own: Ctrl-C without a word, a closed pipe as a bug.
        try:
            with silenced(processes.rank() > 0):
                result = function(*args, **kwargs)
            assert isinstance(result, Result)
            if json_output and processes.rank() == 0:
                sys.stdout.write(json.dumps(result.to_json(), default=str) + "\n")
            sys.stdout.flush()
        except UsageError as error:
            error.args = (_in_flags(str(error), signature, name),)
            raise
        except KeyboardInterrupt:
            free = kwargs.get("out") and not kwargs["out"].exists()
            again = "; nothing was published, the same command starts again" if free else ""
            raise InterruptedRun(f"interrupted{again}") from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        if result.complaint:
            _complain(result.complaint)
        if result.exit_code:
            raise typer.Exit(result.exit_code)

    wrapper.__doc__ = (inspect.getdoc(function) or "").partition("\n\nRaises:")[0]  # errors are for callers from Python
    signature = inspect.signature(function, eval_str=True)
    json_flag = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
    extra = inspect.Parameter("json_output", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=json_flag)
    where = inspect.Parameter("invocation", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [*(_with_metavar(each, name) for each in signature.parameters.values()), extra, where]
    wrapper.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _in_flags(message: str, signature: inspect.Signature, command: str) -> str:
    """An error that begins with the name of a value, as Python and recipes write it, with the option in its place."""
    named = re.match(r"(\w+)(?= is |=)", message)
    if named is None or not {named[1]} & {*signature.parameters, *settings.settings_of(command)}:
        return message
    if named[1] in signature.parameters or named[1] == "text_field":
        return f"--{named[1].replace('_', '-')}{message[named.end() :]}"
    return f"--{'limit' if named[1] in settings.LIMITS else 'set'} {message}"


_TOGETHER = ("train", "distill")  # commands that several processes run
_METAVARS = {Path: "PATH", str: "TEXT", int: "INTEGER", float: "FLOAT"}


def _with_metavar(parameter: inspect.Parameter, command: str) -> inspect.Parameter:
    """Name the type of a flag, and an argument, as manuals do: `--steps INTEGER`, `CHECKPOINT`; and the settings."""
    kind, *options = get_args(parameter.annotation)
    option, kinds = copy.copy(options[0]), types_in(kind)
    if parameter.name == "settings":
        names = (name for name in settings.settings_of(command) if name not in settings.LIMITS)
        option.help = f"{option.help} Names: {', '.join(names)}."
    if Path in kinds:
        option.parser = given_path
    if isinstance(option, ArgumentInfo):
        option.metavar = option.metavar or parameter.name.upper()
    option.metavar = option.metavar or next((name for type_, name in _METAVARS.items() if type_ in kinds), None)
    return parameter.replace(annotation=Annotated[kind, option])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code."""
    # Threads that spin long while they wait lose most of the machine when anything else runs, threads that sleep
    # at once wake late: training at 6,400 / 1,700 tokens/s alone / beside a busy process spins, at 4,600 / 3,600
    # sleeps, and with a short spin gets most of both (5,400 to 6,000 / 3,500).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # libgomp's own; it goes before the policy
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # saves what Ctrl-C saves
    code = _run(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends processes that are ending
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    try:
        Path.cwd()  # if that directory was removed, MKL would end the process with a message of its own
        return int(_command(arguments)(arguments, prog_name="sportsllm-compress", standalone_mode=False) or 0)
    except SystemExit as stop:
        return int(stop.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, RuntimeError) and processes.count() > 1 and "peer" in str(error):
            return ResourceError.exit_code  # another process has ended; it has said why
        known = error if isinstance(error, SportsLLMError) else _in_our_words(error, arguments)
        if known is None:
            raise
        if processes.rank() == 0 or known is not error or isinstance(error, (ArtifactError, ResourceError)):
            _complain(str(known))  # all processes meet the others
        return known.exit_code


def _in_our_words(error: BaseException, arguments: list[str]) -> SportsLLMError | None:
    """What another library's error means to the user; None if it is a bug."""
    if isinstance(error, TyperException):
        return UsageError(_usage(error, arguments))
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRun("interrupted")
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        extra = "compress" if name in _COMPRESS else _EXTRA_OF.get(name)
        message = f"this needs the package {name!r}; install it with: pip install 'sportsllm-compress[{extra}]'"
        return None if extra is None else ResourceError(message)
    if isinstance(error, OSError):
        return _os_error(error)
    full = isinstance(error, RuntimeError) and re.search("can't allocate memory|out of memory", str(error))
    return ResourceError(_OUT_OF_MEMORY) if full or isinstance(error, MemoryError) else None


def _command(arguments: list[str]) -> Any:
    """The application as a command. Only commands of the first word are loaded, with help in panels."""
    first = next((word for word in _split(arguments)[1] if not word.startswith("-")), "")
    completing = any(key.endswith("_COMPLETE") for key in os.environ)
    named = [name for name in COMMANDS if completing or name.partition(" ")[0] == first]
    command: Any = typer.main.get_command(build_app(named))
    parts = [command]
    for part in parts:
        parts += getattr(part, "commands", {}).values()
        part.rich_markup_mode = "rich" if named else None
        for parameter in [*part.params, part.get_help_option(part.context_class(part))]:
            if parameter.param_type_name == "argument" or parameter.is_flag:
                parameter.display_type_rich = lambda ctx: None  # `CHECKPOINT` and `--json`, not `--json <bool>`
    return command


def _usage(error: TyperException, arguments: list[str]) -> str:
    """A mistake on the command line in one line, with the nearest command or option."""
    message = plain(" ".join(error.format_message().split()).removesuffix("."))
    message = re.sub("^Invalid value for '([^']+)': ", r"\1: ", message)
    context: Any = getattr(error, "ctx", None)
    given = getattr(error, "option_name", None)
    if message.startswith("No such option") and context is not None:  # it names every option that begins alike
        options = [*context.command.params, *context.find_root().command.params]
        near = _owners(str(given)) or did_you_mean(str(given), [name for each in options for name in each.opts])
        setting = str(given).lstrip("-").replace("-", "_")
        command = context.command_path.partition(" ")[2]
        if command and setting in settings.settings_of(command):
            near = f"write {'--limit' if setting in settings.LIMITS else '--set'} {setting}=VALUE"
        message = f"no option {given}" + (f"; {near}" if near else "")
    where = context.command_path if context is not None else "sportsllm-compress"
    if message.startswith("No such command"):
        name = message.split("'")[1]
        if longer := [each for each in COMMANDS if each.endswith(f" {name}")]:
            message = f"no command '{name}'; did you mean {longer[0]}?"
    return f"{message or 'a command is missing'} (see {where} --help)"


def _owners(option: str) -> str:
    """The commands that have an option, for an error of one that has not."""
    program: Any = typer.main.get_command(build_app())
    leaves = {
        name: functools.reduce(lambda part, word: part.commands[word], name.split(), program) for name in COMMANDS
    }
    names = [name for name, leaf in leaves.items() if any(option in each.opts for each in leaf.params)][:3]
    listed = " and ".join(names).replace(" and ", ", ", len(names) - 2)  # all but the last
    return listed and f"{listed} {'have' if names[1:] else 'has'} it"


_OUT_OF_MEMORY = "out of memory; use a smaller batch, sequence or model"
_OS_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file grew over the allowed size; raise the limit or free space",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "permission denied; change the permissions, or choose another path"),
    errno.EROFS: "the file system is read-only; choose a folder that can be written",
    errno.ENOMEM: _OUT_OF_MEMORY,
    errno.ENAMETOOLONG: "the name is too long; check the path",
}


def _os_error(error: OSError) -> SportsLLMError | None:
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        where, what = error.filename or "the working directory", (error.strerror or "not usable").lower()
        return ArtifactError(f"{where}: {what}; check the path")
    if isinstance(error, FileExistsError):
        return ConflictError(f"{error.filename}: exists and is not what is needed there; choose another path")
    if (advice := _OS_ADVICE.get(error.errno or 0)) is None:
        return None
    kind = ArtifactError if error.errno == errno.ENAMETOOLONG else ResourceError
    return kind(f"{where}: {advice}" if (where := error.filename2 or error.filename) else advice)


def _complain(message: str) -> None:
    """Print one line, with the middle of a long one left out."""
    where = f"process {processes.rank()}: " if processes.rank() else ""
    sys.stderr.write(f"{clip(f'error: {where}{message}', LONGEST_MESSAGE)}\n")


if __name__ == "__main__":
    try:
        main()
    except SystemExit as stop:
        if processes.count() > 1:  # threads of torch.distributed may abort Python's own end, which hides the code
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(stop.code or 0))
        raise
