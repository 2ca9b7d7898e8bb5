"""Small pieces of Markdown for model cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from sportsllm.formats.hub import origin


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = (0,)) -> str:
    """A table; the columns in `texts` are words, the others numbers."""
    lines = [headers, ["---" if index in texts else "---:" for index in range(len(headers))], *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def short_path(text: str) -> str:
    """The last two parts of an absolute path, since the rest is a matter of one machine; other text as it is.

    A model that was downloaded is called by its name and commit.
    """
    path = PurePath(text)
    if (model := origin(Path(text))) is not None:
        return f"{model['model']}@{model['revision']}"
    return "/".join(path.parts[-2:]) if path.is_absolute() and len(path.parts) > 2 else text


def of_text(paths: Any) -> str:
    """Files and folders of text by their names: `wiki/train.jsonl`."""
    names = [paths] if isinstance(paths, str) else list(paths or [])
    return ", ".join(f"`{'/'.join(PurePath(str(name)).parts[-2:])}`" for name in names)


def plain(values: Mapping[str, Any]) -> str:
    """`hidden 96, layers 3`."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
