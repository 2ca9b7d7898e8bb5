"""A language model from a text corpus to a device: train, distil, prune, quantize, export, benchmark.

The commands are functions here, with the same parameters and typed results:

    import sportsllm

    student = sportsllm.distill(teacher="runs/large", student="small", tokens=5_000_000)
    export = sportsllm.export(student.out, out="runs/small-onnx")
    model = sportsllm.load(export.out)
    for text in model.generate("Full-time"):
        print(text, end="")

Importing this package loads nothing else; a function loads what it needs when it is first called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_COMMANDS = ("train", "distill", "prune", "quantize", "export", "generate", "serve", "eval", "bench", "fit", "plan",
             "inspect", "report", "run", "verify")  # fmt: skip
__all__ = ["load", *_COMMANDS]

if TYPE_CHECKING:
    from sportsllm.model import load as load


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])  # notebooks complete these names


def __getattr__(name: str) -> Any:
    if name == "load":
        from sportsllm.model import load

        return load
    if name in _COMMANDS:
        from sportsllm.commands import python_command

        return python_command(name)
    raise AttributeError(f"module 'sportsllm' has no attribute {name!r}")
