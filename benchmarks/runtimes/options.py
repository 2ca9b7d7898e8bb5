"""Runtimes to measure in turn with ours: what --against names."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """A runtime to measure, with a label, `openvino+128`, where it takes part several times; see `parse_runtimes`."""

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


def parse_runtimes(texts: Sequence[str] | None, export: Path) -> list[Runtime]:
    """The runtimes that --against names; `export` is read by those that need no model of their own.

    Each text is `NAME[+LABEL][=DIR][,python=PATH][,KEY=VALUE ...]`: the model converted for the runtime, the
    interpreter that has it, and settings by the runtime's own names (JSON if valid, else text).

    Raises:
        UsageError: no such runtime, one without options, or a missing path.
    """
    found: dict[str, Runtime] = {}
    for text in texts or ():
        first, *others = (part.strip() for part in text.split(","))
        name, _, place = first.partition("=")
        kind = _kind(name)
        if kind not in INSTALL:
            near = difflib.get_close_matches(kind, INSTALL, 1)
            advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(INSTALL)}"
            raise UsageError(f"--against {text}: no such runtime; {advice}")
        if kind == OTHER and not place:
            raise UsageError(f"--against {text}: name the second export, --against {name}=DIR")
        directory = Path(place) if place else None if kind in CONVERT else export
        if directory is not None and not directory.exists():
            raise UsageError(f"--against {text}: {directory} not found; check the path")
        options, asked = dict[str, Any](), sys.executable
        for other in others:
            key, equals, value = other.partition("=")
            if not key or not equals:
                raise UsageError(f"--against {text}: write KEY=VALUE after the comma")
            if key == "python":
                asked = value
                continue
            if kind not in WITH_OPTIONS:
                raise UsageError(f"--against {text}: only {' and '.join(WITH_OPTIONS)} take options")
            try:
                options[key] = json.loads(value)
            except ValueError:
                options[key] = value
        python = shutil.which(asked)
        if python is None:
            raise UsageError(f"--against {text}: no program {asked}; check the path")
        found[name] = Runtime(name, python, directory, options)
    return list(found.values())
