"""llama.cpp's own converter on a checkpoint with a tokenizer of ours: a GGUF file, for llama.cpp and what builds on it.

    PYTHON export/gguf/convert.py LLAMA_CPP/convert_hf_to_gguf.py CHECKPOINT --outfile model.gguf [its other flags]

The converter tells how a BPE tokenizer cuts text by a digest of what it makes of one text, which it looks up in a list
of published models. It refuses every tokenizer that was trained anew, however ordinary. Ours cut as GPT-2's does, which
is looked up in tokenizer.json and then told to the converter; all else is left to it, other tokenizers too.

Standard library only: it runs in the environment that the converter needs, which is not this project's.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

GPT2 = "gpt-2"
ASKED = "get_vocab_base_pre"
"""The converter's method that names a way of cutting text."""
USAGE = "usage: convert.py LLAMA_CPP/convert_hf_to_gguf.py CHECKPOINT [the converter's flags]"


def cuts_as_gpt2(checkpoint: Path) -> bool:
    """Whether a checkpoint's tokenizer.json is byte-level BPE that cuts text by GPT-2's expression and nothing else."""
    try:
        data = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
        cut = data["pre_tokenizer"]
        plain = data.get("normalizer") is None and data["model"]["type"] == "BPE" and cut["type"] == "ByteLevel"
        return plain and not cut["add_prefix_space"] and cut.get("use_regex", True) is True
    except (OSError, ValueError, LookupError, TypeError):
        return False


def load(converter: Path) -> Any:
    """The converter's module, imported beside what lies next to it and not beside what lies next to this file."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(converter.parent), *(entry for entry in sys.path if Path(entry).resolve() != here)]
    return importlib.import_module(converter.stem)


def patch_pre_tokenizer(folder: Path) -> bool:
    """Let every class that was imported from a folder answer GPT-2; whether there was one to ask."""
    told = False
    for module in list(sys.modules.values()):
        place = getattr(module, "__file__", None)
        if place is None or folder.resolve() not in Path(place).resolve().parents:
            continue
        for value in vars(module).values():
            if isinstance(value, type) and ASKED in vars(value):
                setattr(value, ASKED, lambda self, tokenizer: GPT2)
                told = True
    return told


def main(arguments: list[str]) -> int:
    """Run the converter; 2 for wrong use, else what it returns."""
    if len(arguments) < 2:
        print(USAGE, file=sys.stderr)
        return 2
    converter, checkpoint = Path(arguments[0]), Path(arguments[1])
    for path, wanted in ((converter, "a converter"), (checkpoint / "config.json", "a checkpoint's config")):
        if not path.is_file():
            print(f"error: {path}: not found; give {wanted}", file=sys.stderr)
            return 2
    sys.argv = [str(converter), *arguments[1:]]
    module = load(converter)
    if not cuts_as_gpt2(checkpoint):
        print(f"{checkpoint}: cuts text in another way than GPT-2; the converter has to know it", file=sys.stderr)
    elif not patch_pre_tokenizer(converter.parent):
        print(f"error: {converter}: has no {ASKED}; use another release of llama.cpp", file=sys.stderr)
        return 2
    return module.main() or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
