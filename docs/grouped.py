"""For mkdocstrings: an entry `a, b: meaning` of a docstring documents a and b, each with the meaning."""

import re

import griffe

ENTRY = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)", re.MULTILINE)


class Grouped(griffe.Extension):
    """Repeats the meaning, since griffe takes one name per entry."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ENTRY.sub(self._each, obj.docstring.value)

    @staticmethod
    def _each(found: re.Match[str]) -> str:
        return "\n".join(f"{found[1]}{name}: {found[3]}" for name in found[2].split(", "))
