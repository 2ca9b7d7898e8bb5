"""What a single field of a model's config may hold; `config.py` checks how fields go together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Real

from sportsllm.errors import UsageError

MOST_LAYERS = 2**12
_BOUNDS = {
    "vocab_size": (1, 2**24),
    "max_position_embeddings": (2, 2**24),
    "num_hidden_layers": (1, MOST_LAYERS),
    "dense_layers": (0, MOST_LAYERS),
    "sliding_window": (1, 2**24),
    "bos_token_id": (0, 2**24),
    "eos_token_id": (-1, 2**24),  # some models without such a token have -1
    "pad_token_id": (-1, 2**24),
}
"""Least and most of a whole number, 1 to 2**20 if not given: a damaged file ends in a line and not in a full memory."""


def check_size(name: str, value: object, least: int = 1, most: int = 2**20) -> None:
    """Refuse what is no whole number in a range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"config: {name} is {value!r}; it must be a whole number from {least} to {most:,}")


def check_field(name: str, value: object, declared: str) -> None:
    """Refuse a value of a field that is not of the type that it is declared as."""
    kind = declared.removesuffix(" | None")
    if value is None and kind != declared:
        return
    if kind.startswith("int"):
        for each in value if isinstance(value, tuple) and "tuple" in kind else (value,):
            check_size(name, each, *_BOUNDS.get(name, (1, 2**20)))
        return
    match kind:
        case "bool":
            fits, words = isinstance(value, bool), "true or false"
        case "float":
            fits = isinstance(value, Real) and not isinstance(value, bool)
            fits = fits and abs(value) <= sys.float_info.max  # type: ignore[operator, arg-type]
            words = "a finite number"
        case "str":
            fits, words = isinstance(value, str), "a string"
        case "tuple[str, ...]":
            fits = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
            words = "a list of strings"
        case _:  # a record, which checks itself
            return
    if not fits:
        raise UsageError(f"config: {name} is {value!r}; it must be {words}")


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse what is none of the known values."""
    if value not in known:
        raise UsageError(f"config: {name} is {value!r}; use one of {', '.join(known)}")
