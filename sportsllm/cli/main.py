"""The entry point: `sportsllm-compress COMMAND`.

Commands are listed in `sportsllm.cli.flags` and loaded by name, so that a package depends on no other. A command is a
plain typed function that returns its result as a dict; this module adds `--json`, exit codes and one-line errors.
Nothing here imports torch, nor rich, which takes a third of the time of `--help`.
"""

from __future__ import annotations

import copy
import errno
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.models import ArgumentInfo

from sportsllm import __version__
from sportsllm.cli.flags import COMMANDS, Command, load_command
from sportsllm.errors import ArtifactError, ConflictError, InterruptedRun, ResourceError, SportsLLMError

_EXTRA_OF = {
    "gguf": "gguf",
    "onnxruntime_genai": "genai",
    "optimum": "optimum",
    "pyarrow": "parquet",
    "transformers": "optimum",
}
_COMPRESS = {"torch", "onnx", "onnx_ir", "safetensors", "bitsandbytes", "plotly", "jinja2", "huggingface_hub"}


def _with_json(function: Command) -> Callable[..., None]:
    @functools.wraps(function)
    def wrapper(*args: Any, json_output: bool = False, **kwargs: Any) -> None:
        from sportsllm import console

        console.use_stderr(json_output)
        # Inside, since typer would end both on its own: Ctrl-C without a word, a closed pipe as a bug.
        try:
            result = function(*args, **kwargs)
        except KeyboardInterrupt:
            raise InterruptedRun("interrupted; nothing was published") from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        failed, complaint = result.pop("exit_code", 0), result.pop("complaint", None)
        if json_output:
            sys.stdout.write(json.dumps(result, default=str) + "\n")
            sys.stdout.flush()
        if complaint:
            _complain(complaint)
        if failed:
            raise typer.Exit(failed)

    signature = inspect.signature(function, eval_str=True)
    option = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
    extra = inspect.Parameter("json_output", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
    parameters = [*map(_with_metavar, signature.parameters.values()), extra]
    wrapper.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


_METAVARS = {Path: "PATH", str: "TEXT", int: "INTEGER", float: "FLOAT"}


def _with_metavar(parameter: inspect.Parameter) -> inspect.Parameter:
    """Name the type of a flag, and an argument, as manuals do: `--steps INTEGER`, `CHECKPOINT`."""
    kind, *options = get_args(parameter.annotation)
    leaves = [leaf for part in (kind, *get_args(kind)) for leaf in (part, *get_args(part))]
    named = next((_METAVARS[leaf] for leaf in leaves if leaf in _METAVARS), None)
    option = copy.copy(options[0])
    if isinstance(option, ArgumentInfo):
        named = parameter.name.upper()
    if option.metavar is None:
        option.metavar = named
    return parameter.replace(annotation=Annotated[kind, option])


def build_app() -> typer.Typer:
    """The typer application with every command."""
    app = typer.Typer(
        name="sportsllm-compress",
        help="From a text corpus to a small, fast, proven ONNX language model.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback(invoke_without_command=True)
    def _root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    ) -> None:
        if version:
            sys.stdout.write(f"{__version__}\n")
            raise typer.Exit
        if context.invoked_subcommand is None:
            sys.stdout.write(context.get_help() + "\n")

    for name in COMMANDS:
        app.command(name)(_with_json(load_command(name)))
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code."""
    # Threads that spin long while they wait lose most of the machine when anything else runs, threads that sleep
    # at once wake late: training at 6,400 / 1,700 tokens/s alone / beside a busy process spins, at 4,600 / 3,600
    # sleeps, and with a short spin gets most of both (5,400 to 6,000 / 3,500).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # libgomp's own; it goes before the policy
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    sys.exit(_run(arguments))


def _command() -> Any:
    """The application as a command whose arguments show their name alone: `CHECKPOINT`, not `CHECKPOINT <path>`."""
    command: Any = typer.main.get_command(build_app())
    for part in command.commands.values():
        for parameter in part.params:
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None
    return command


def _run(arguments: list[str] | None) -> int:
    try:
        result = _command()(arguments, standalone_mode=True)
        return int(result or 0)
    except SystemExit as stop:
        return int(stop.code or 0)
    except SportsLLMError as error:
        _complain(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        return _missing_module(error)
    except MemoryError:
        _complain("out of memory; use a smaller batch, sequence or model")
        return ResourceError.exit_code
    except OSError as error:
        return _os_error(error)
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            _complain("out of memory; use a smaller batch, sequence or model")
            return ResourceError.exit_code
        raise


def _missing_module(error: ModuleNotFoundError) -> int:
    name = (error.name or "").partition(".")[0]
    extra = "compress" if name in _COMPRESS else _EXTRA_OF.get(name)
    if extra is None:
        raise error
    _complain(f"this needs the package {name!r}; install it with: pip install 'sportsllm-compress[{extra}]'")
    return ResourceError.exit_code


_OS_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file grew over the allowed size; raise the limit or free space",
    errno.EACCES: "permission denied; choose a folder that can be written",
    errno.EPERM: "permission denied; choose a folder that can be written",
    errno.EROFS: "the file system is read-only; choose a folder that can be written",
    errno.ENOMEM: "out of memory; use a smaller batch, sequence or model",
}


def _os_error(error: OSError) -> int:
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        _complain(f"{error.filename}: {(error.strerror or 'not usable').lower()}; check the path")
        return ArtifactError.exit_code
    if isinstance(error, FileExistsError):
        _complain(f"{error.filename}: exists and is not what is needed there; choose another path")
        return ConflictError.exit_code
    advice = _OS_ADVICE.get(error.errno or 0)
    if advice is None:
        raise error
    where = error.filename or error.filename2
    _complain(f"{where}: {advice}" if where else advice)
    return ResourceError.exit_code


def _complain(message: str) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


if __name__ == "__main__":
    main()
