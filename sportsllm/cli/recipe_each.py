"""Stages that a recipe repeats: `[each]` gives a name and its values, `{name}` in a stage stands for each of them.

[each]
model = ["deep", "wide"]

[[stage]]
name = "{model}-int4"                # deep-int4, wide-int4
command = "quantize"
checkpoint = "@{model}"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def repeated(entries: Sequence[Any], each: Mapping[str, Any]) -> list[Any]:
    """The stages, those with `{name}` in their own name once for every value, in the values' order."""
    for name, values in each.items():
        entries = [copy for entry in entries for copy in _copies(entry, f"{{{name}}}", values)]
    return list(entries)


def each_problems(each: Any) -> list[str]:
    """What is wrong with the table `[each]`."""
    if not isinstance(each, Mapping):
        return ["each: is not a table; write [each]"]
    return [
        f"each.{name}: must be a list of texts"
        for name, values in each.items()
        if not (isinstance(values, list) and values and all(isinstance(value, str) for value in values))
    ]


def _copies(entry: Any, placeholder: str, values: Sequence[str]) -> list[Any]:
    if not isinstance(entry, Mapping) or placeholder not in str(entry.get("name", "")):
        return [entry]
    return [_filled(entry, placeholder, value) for value in values]


def _filled(item: Any, placeholder: str, value: str) -> Any:
    if isinstance(item, Mapping):
        return {key: _filled(part, placeholder, value) for key, part in item.items()}
    if isinstance(item, list):
        return [_filled(part, placeholder, value) for part in item]
    return item.replace(placeholder, value) if isinstance(item, str) else item
