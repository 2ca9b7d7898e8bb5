"""Runs llama.cpp's converter on a checkpoint with a tokenizer of ours, which gives a GGUF file.

    PYTHON export/gguf/convert.py LLAMA_CPP/convert_hf_to_gguf.py CHECKPOINT --outfile model.gguf [its other flags]

The converter only accepts BPE tokenizers that it knows by hash, so it refuses every newly trained one. This script
tells it of those that use GPT-2's pre-tokenizer, or SmolLM's, which cuts off every digit first, as ours do; it reads
that from tokenizer.json. All else, other tokenizers included, is left to the converter.

Standard library only: it runs in the converter's environment, which is not this project's.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

GPT2, SINGLE_DIGITS = "gpt-2", "smollm"
METHOD = "get_vocab_base_pre"  # of the converter; names a tokenizer's pre-tokenizer
USAGE = "usage: convert.py LLAMA_CPP/convert_hf_to_gguf.py CHECKPOINT [the converter's flags]"


def pre_tokenizer_of(checkpoint: Path) -> str | None:
    """llama.cpp's name of the pre-tokenizer in tokenizer.json: byte-level BPE that splits text by GPT-2's expression,
    and may have every digit cut off before; None for any other.
    """
    try:
        data = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
        split, name = data["pre_tokenizer"], GPT2
        if split["type"] == "Sequence":
            (digits, split), name = split["pretokenizers"], SINGLE_DIGITS
            if digits != {"type": "Digits", "individual_digits": True}:
                return None
        plain = data.get("normalizer") is None and data["model"]["type"] == "BPE" and split["type"] == "ByteLevel"
        known = plain and not split["add_prefix_space"] and split.get("use_regex", True) is True
        return name if known else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def load(converter: Path) -> Any:
    """The converter's module, which imports from its own folder and not from this file's."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(converter.parent), *(entry for entry in sys.path if Path(entry).resolve() != here)]
    return importlib.import_module(converter.stem)


def patch_pre_tokenizer(folder: Path, name: str) -> bool:
    """Let `METHOD` of every class that was imported from a folder return `name`; whether there was such a class."""
    patched = False
    for module in list(sys.modules.values()):
        place = getattr(module, "__file__", None)
        if place is None or folder.resolve() not in Path(place).resolve().parents:
            continue
        for value in vars(module).values():
            if isinstance(value, type) and METHOD in vars(value):
                setattr(value, METHOD, lambda self, tokenizer: name)
                patched = True
    return patched


def main(arguments: list[str]) -> int:
    """Run the converter; 2 for wrong use, else its exit code."""
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
    name = pre_tokenizer_of(checkpoint)
    if name is None:
        print(f"{checkpoint}: does not use GPT-2's pre-tokenizer; the converter must know its own", file=sys.stderr)
    elif not patch_pre_tokenizer(converter.parent, name):
        print(f"error: {converter}: has no {METHOD}; use another release of llama.cpp", file=sys.stderr)
        return 2
    return module.main() or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
