"""A small template grammar, compiled once and expanded quickly.

    {slot}      the value of a slot of this event
    [a|b|c]     one of the alternatives, which may nest
    <rule>      one of the templates of another rule

Which alternative is taken is not uniform. Every writer (a `Voice`) has an own favourite for every choice,
drawn once for the whole world, and the others follow with falling probability: a reader who knows the byline,
or has read the first lines, can guess how the rest will be phrased. That is what a larger model learns and a
smaller one does not.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TABLE_SIZE = 1021  # a prime: choices are spread over the preference table by a checksum of their text
_TOKEN = re.compile(r"\{(\w+)\}|<(\w+)>|(\[)|(\|)|(\])")


class Slot(str):
    """The name of a slot; a type of its own so that it is told from literal text at no cost."""

    __slots__ = ()


@dataclass(slots=True)
class Pick:
    """A choice between alternatives; `inline` ones lean harder on the writer's favourite."""

    options: list[list["Part"]]
    key: int
    inline: bool


Part = str | Slot | Pick


@dataclass(frozen=True, slots=True)
class Voice:
    """A writer: name, newspaper, and an offset per entry of the preference table."""

    name: str
    paper: str
    offsets: tuple[int, ...]


class Grammar:
    """Rules by name; see the module's text for the notation."""

    def __init__(self, *rule_sets: Mapping[str, Sequence[str]]) -> None:
        """Compile the rule sets together.

        Raises:
            ValueError: a template is badly bracketed or names a rule that does not exist.
        """
        rules = {name: templates for rule_set in rule_sets for name, templates in rule_set.items()}
        self._rules = {name: Pick([], _key(templates), False) for name, templates in rules.items()}
        for name, templates in rules.items():
            self._rules[name].options = [self._parse(template) for template in templates]

    def say(self, rule: str, slots: Mapping[str, str], offsets: Sequence[int], random: Callable[[], float]) -> str:
        """One expansion of `rule`, its first letter a capital."""
        out: list[str] = []
        _expand(self._rules[rule], slots, offsets, random, out.append)
        text = "".join(out)
        return text[:1].upper() + text[1:]

    def _parse(self, template: str) -> list[Part]:
        """One template as literal text, slots and choices."""
        stack: list[list[list[Part]]] = [[[]]]
        starts: list[int] = []
        end = 0
        for match in _TOKEN.finditer(template):
            literal = template[end : match.start()]
            end = match.end()
            if literal:
                stack[-1][-1].append(literal)
            slot, rule, opened, bar, closed = match.groups()
            if slot:
                stack[-1][-1].append(Slot(slot))
            elif rule:
                if rule not in self._rules:
                    raise ValueError(f"template {template!r}: there is no rule <{rule}>")
                stack[-1][-1].append(self._rules[rule])
            elif opened:
                stack.append([[]])
                starts.append(match.start())
            elif len(stack) == 1:
                raise ValueError(f"template {template!r}: '{match.group()}' outside brackets")
            elif bar:
                stack[-1].append([])
            elif closed:
                options = stack.pop()
                stack[-1][-1].append(Pick(options, _key([template[starts.pop() : end]]), True))
        if len(stack) != 1:
            raise ValueError(f"template {template!r}: a bracket is not closed")
        if end < len(template):
            stack[0][0].append(template[end:])
        return stack[0][0]


def _key(texts: Sequence[str]) -> int:
    return zlib.crc32("\n".join(texts).encode()) % TABLE_SIZE


def _expand(
    pick: Pick,
    slots: Mapping[str, str],
    offsets: Sequence[int],
    random: Callable[[], float],
    out: Callable[[str], None],
) -> None:
    """Append one expansion, part by part; favourite first: P(rank k) falls like a power of k."""
    options = pick.options
    count = len(options)
    draw = random()
    skewed = draw * draw * draw if pick.inline else draw * draw
    for part in options[(int(skewed * count) + offsets[pick.key]) % count]:
        kind = type(part)
        if kind is str:
            out(part)  # type: ignore[arg-type]
        elif kind is Slot:
            out(slots[part])  # type: ignore[index]
        else:
            _expand(part, slots, offsets, random, out)  # type: ignore[arg-type]
