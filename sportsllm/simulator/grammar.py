"""A small template grammar, compiled once and expanded quickly.

    {slot}          the value of a slot of this event
    [a|b|c]         one of the alternatives, which may nest
    <rule>          one of the templates of another rule
    <told_{kind}>   in rule tell: makes a rule tell_x for every rule told_x
    \\n              a new line

Which alternative is taken is not uniform. Every writer (a `Voice`) has an own favourite for every choice,
drawn once for the whole world, and the others follow with falling probability: a reader who knows the byline,
or has read the first lines, can guess how the rest will be phrased. That is what a larger model learns and a
smaller one does not.
"""

import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sportsllm.errors import ArtifactError
from sportsllm.simulator.toml_file import Model, read

TEMPLATES = Path(__file__).parent / "templates"
TABLE_SIZE = 1021  # a prime: choices are spread over the preference table by a checksum of their text
_TOKEN = re.compile(r"\{(\w+)\}|<(\w+)>|(\[)|(\|)|(\])")
_FAMILY = re.compile(r"<(\w+_)\{\w+\}>")


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

    def __init__(
        self,
        rules: Mapping[str, Sequence[str]],
        source: Path | str = "templates",
        slots: Collection[str] = (),
        base: "Grammar | None" = None,
    ) -> None:
        """Compile rules.

        Args:
            rules: the templates of each rule.
            source: the file they are from, for messages.
            slots: the slots that templates may name, besides those of `base`.
            base: a grammar whose rules these may use and add to.

        Raises:
            ArtifactError: a template is badly bracketed, or names a rule or a slot that does not exist.
        """
        self.source = source
        whole = _written_out(rules, source)
        self.slots: set[str] = {*slots, *(base.slots if base else ())}
        self.rules: dict[str, Pick] = dict(base.rules if base else {})
        self.rules |= {name: Pick([], _key(templates), False) for name, templates in whole.items()}
        for name, templates in whole.items():
            if not templates:
                raise ArtifactError(f"{source}: rule '{name}' has no template; write one a line")
            self.rules[name].options = [self._parse(name, template) for template in templates]

    def say(self, rule: str, slots: Mapping[str, str], offsets: Sequence[int], random: Callable[[], float]) -> str:
        """One expansion of `rule`, its first letter a capital.

        Raises:
            ArtifactError: there is no such rule, or it names a slot that has no value in this event.
        """
        out: list[str] = []
        try:
            _expand(self.rules[rule], slots, offsets, random, out.append)
        except KeyError as error:
            if rule not in self.rules:
                raise ArtifactError(f"{self.source}: there is no rule '{rule}'; write it") from None
            problem = f"nothing fills the slot {{{error.args[0]}}} in this rule; use another slot"
            raise ArtifactError(f"{self.source}: rule '{rule}': {problem}") from None
        text = "".join(out)
        return text[:1].upper() + text[1:]

    def _parse(self, name: str, template: str) -> list[Part]:
        """One template of the rule `name` as literal text, slots and choices."""

        def wrong(problem: str) -> ArtifactError:
            return ArtifactError(f"{self.source}: rule '{name}', template '{template}': {problem}")

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
                if slot not in self.slots:
                    raise wrong(f"nothing fills the slot {{{slot}}}; use one of those under [slots]")
                stack[-1][-1].append(Slot(slot))
            elif rule:
                if rule not in self.rules:
                    raise wrong(f"there is no rule <{rule}>; write it or use another")
                stack[-1][-1].append(self.rules[rule])
            elif opened:
                stack.append([[]])
                starts.append(match.start())
            elif len(stack) == 1:
                raise wrong(f"'{match.group()}' outside brackets; write [a|b]")
            elif bar:
                stack[-1].append([])
            elif closed:
                options = stack.pop()
                stack[-1][-1].append(Pick(options, _key([template[starts.pop() : end]]), True))
        if len(stack) != 1:
            raise wrong("a bracket is not closed; write [a|b]")
        if end < len(template):
            stack[0][0].append(template[end:])
        return stack[0][0]


def _written_out(rules: Mapping[str, Sequence[str]], source: Path | str) -> dict[str, Sequence[str]]:
    """Each rule that refers to <told_{kind}> written once for every rule told_x, as name_x."""
    out: dict[str, Sequence[str]] = {}
    for name, templates in rules.items():
        family = _FAMILY.search("\n".join(templates))
        if not family:
            out[name] = templates
            continue
        endings = [rule.removeprefix(family[1]) for rule in rules if rule.startswith(family[1])]
        if not endings:
            raise ArtifactError(f"{source}: rule '{name}': no rule begins with '{family[1]}', as {family[0]} needs")
        for ending in endings:
            out[f"{name}_{ending}"] = [_FAMILY.sub(rf"<\g<1>{ending}>", template) for template in templates]
    return out


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


class _TemplateFile(Model):
    """A file of templates: the slots with their meaning, and the rules with one template a line."""

    slots: dict[str, str]
    rules: dict[str, str]


def load_grammar(path: Path, base: Grammar | None = None) -> Grammar:
    """The grammar in one file of templates; its rules may use those of `base`.

    Raises:
        ArtifactError: the file or one of its templates is malformed, or names a slot that nothing fills.
    """
    file = read(path, _TemplateFile)
    rules = {
        name: [line.strip().replace("\\n", "\n") for line in text.splitlines() if line.strip()]
        for name, text in file.rules.items()
    }
    return Grammar(rules, path, file.slots, base)


@cache
def grammar(name: str, base: str | None = None) -> Grammar:
    """The grammar in templates/<name>.toml, read and compiled on first use."""
    return load_grammar(TEMPLATES / f"{name}.toml", grammar(base) if base else None)
