"""The YAML block at the top of a model card, without a YAML library.

Written are texts and lists of texts, which is what the fields of a card are. Of a card that somebody else wrote, fields
of those two kinds are read, and others are passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

Fields = dict[str, str | list[str]]
_FIELD = re.compile(r"([A-Za-z_][\w-]*):(?:[ \t]+(.*))?")
_PLAIN = re.compile(r"[A-Za-z][\w./+-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}  # no texts in YAML 1.1


def front_matter(fields: Mapping[str, str | list[str]]) -> str:
    """The block with its two lines of dashes; fields without a value are left out."""
    lines = ["---"]
    for key, value in fields.items():
        if isinstance(value, str):
            lines += [f"{key}: {_scalar(value)}"] if value else []
        elif value:
            lines += [f"{key}:", *(f"- {_scalar(item)}" for item in value)]
    return "\n".join([*lines, "---", ""])


def _scalar(text: str) -> str:
    """A text that YAML reads as this text; a JSON string is one in YAML too."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)


def read_front_matter(card: Path) -> Fields:
    """The fields of a card; none where there is no card or no block."""
    return front_matter_of(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else {}


def front_matter_of(text: str) -> Fields:
    """The fields of a card's text; none where there is no block."""
    lines = text.splitlines()
    if not lines or lines[0].rstrip() != "---" or "---" not in [line.rstrip() for line in lines[1:]]:
        return {}
    found: Fields = {}
    items: list[str] | None = None
    for line in lines[1 : [line.rstrip() for line in lines].index("---", 1)]:
        field = _FIELD.fullmatch(line.rstrip())
        entry = re.fullmatch(r"\s*-\s+(.+)", line)
        if field is not None:
            items = None
            value = (field.group(2) or "").strip()
            if value.startswith("[") and value.endswith("]"):
                found[field.group(1)] = [_text(item) for item in value[1:-1].split(",") if item.strip()]
            elif value and value[0] not in "{|>&*!#":
                found[field.group(1)] = _text(value)
            elif not value:
                found[field.group(1)] = items = []
        elif entry is not None and items is not None:
            items.append(_text(entry.group(1)))
    return {key: value for key, value in found.items() if value}


def _text(value: str) -> str:
    value = value.strip()
    if value[:1] == '"' and value[-1:] == '"':
        try:
            return str(json.loads(value))
        except json.JSONDecodeError:
            return value[1:-1]
    if value[:1] == "'" and value[-1:] == "'":
        return value[1:-1].replace("''", "'")
    return re.split(r"\s#", value)[0].rstrip()
