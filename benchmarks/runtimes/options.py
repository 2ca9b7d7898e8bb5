"""The flags of `bench` that name other runtimes: --against, --peer-directory, --peer-python and --peer-option."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.cli.flag_groups import FlagGroup
from sportsllm.errors import UsageError

OURS = "ours"
OTHER = "other"  # a second export of this project, as `benchmarks.runtimes.worker` calls it, which is slow to import
# Take settings when they open a model; the others keep theirs beside it.
WITH_OPTIONS = ("openvino", "llama.cpp", "ik_llama.cpp")
INSTALL = {
    "genai": "pip install onnxruntime-genai",
    "openvino": "pip install openvino-genai",
    "llama.cpp": "pip install llama-cpp-python",
    "ik_llama.cpp": "pip install ik-llama-cpp-python",
    "optimum": "pip install 'sportsllm-compress[optimum]' torch",
    OTHER: "pip install sportsllm-compress",
}
_GGUF = "export/gguf/convert.py CONVERT_HF_TO_GGUF.PY CHECKPOINT --outfile FILE.gguf, then llama-quantize"
CONVERT = {  # what makes a model for the runtimes that cannot read our export
    "openvino": "optimum-cli export openvino --model CHECKPOINT --weight-format int4 DIR",
    "llama.cpp": _GGUF,
    "ik_llama.cpp": _GGUF,
}


@dataclass(frozen=True)
class Runtime:
    """A runtime to measure, with a label, `openvino+128`, where it takes part several times; see `RuntimeFlags`."""

    name: str
    python: str
    directory: Path | None
    options: Mapping[str, Any] = field(default_factory=dict)
    kernels: str = "auto"  # of this program's own runtime

    @property
    def kind(self) -> str:
        """The name without a label."""
        return _kind(self.name)


def _kind(name: str) -> str:
    return name.partition("+")[0]


def portable_too(directory: Path) -> Runtime:
    """This program's runtime with ONNX Runtime's operators, to be measured beside its own kernels."""
    return Runtime(f"{OURS}+portable", sys.executable, directory, kernels="portable")


@dataclass(frozen=True)
class RuntimeFlags(FlagGroup):
    """Other runtimes to measure beside this one."""

    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Runtimes to measure beside this one: genai, openvino, llama.cpp, ik_llama.cpp, optimum; "
            "other is a second export. NAME+LABEL measures one several times.",
        ),
    ] = None
    peer_directory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="The model converted for a runtime; may be repeated.",
            show_default="the export itself",
        ),
    ] = None
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PYTHON",
            help="The Python interpreter that has a runtime; may be repeated.",
            show_default="this one",
        ),
    ] = None
    peer_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=KEY=VALUE",
            help="A setting of openvino, llama.cpp or ik_llama.cpp, by its own name; may be repeated.",
            show_default="the runtime's own",
        ),
    ] = None

    def runtimes(self, export: Path) -> list[Runtime]:
        """The runtimes that the flags ask for; `export` is read by those that need no model of their own.

        A labelled name without a directory or interpreter takes that of the plain name; options are not shared.

        Raises:
            UsageError: no such runtime, a flag without its runtime, a runtime without options, or a missing path.
        """
        names = list(dict.fromkeys(name.strip() for name in (self.against or "").split(",") if name.strip()))
        for name in names:
            if _kind(name) not in INSTALL:
                raise UsageError(f"--against {name}: no such runtime; choose from {', '.join(INSTALL)}")
        known = {*names, *map(_kind, names)}
        directories = dict(_pairs("--peer-directory", self.peer_directory, known))
        pythons = dict(_pairs("--peer-python", self.peer_python, known))
        options = _parse_options(self.peer_option, names)
        found = []
        for name in names:
            kind = _kind(name)
            place = directories.get(name, directories.get(kind))
            if kind == OTHER and place is None:
                raise UsageError(f"--against {name}: name the second export with --peer-directory {name}=DIR")
            directory = Path(place) if place else None if kind in CONVERT else export
            if directory is not None and not directory.exists():
                raise UsageError(f"--peer-directory {name}={directory}: not found; check the path")
            asked = pythons.get(name, pythons.get(kind, sys.executable))
            python = shutil.which(asked)
            if python is None:
                raise UsageError(f"--peer-python {name}={asked}: no such program; check the path")
            found.append(Runtime(name, python, directory, options.get(name, {})))
        return found


def _pairs(
    flag: str, texts: Sequence[str] | None, known: Collection[str], form: str = "NAME=PATH"
) -> Iterator[tuple[str, str]]:
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not value or name not in known:
            raise UsageError(f"{flag} {text}: give {form} with a NAME of --against")
        yield name, value


def _parse_options(texts: Sequence[str] | None, wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by runtime; a value is JSON where it is valid JSON (`true`, `128`), else text."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in _pairs("--peer-option", texts, wanted, "NAME=KEY=VALUE"):
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--peer-option {name}={text}: give NAME=KEY=VALUE")
        if _kind(name) not in WITH_OPTIONS:
            raise UsageError(f"--peer-option {name}={text}: only {' and '.join(WITH_OPTIONS)} take options")
        try:
            found.setdefault(name, {})[key] = json.loads(value)
        except ValueError:
            found.setdefault(name, {})[key] = value
    return found
