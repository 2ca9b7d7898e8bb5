"""Sentences from templates, in a writer's voice.

    {slot}      the value of a slot of this event
    [a|b|c]     one of the alternatives, which may nest
    <rule>      one of the templates of another rule; <how_{kind}>: of the rule that a slot completes
    \\n          a new line

Every writer has a favourite alternative for every choice, drawn once for the whole world, and the others follow with
falling probability: a reader who knows the byline, or has read the first lines, can guess how the rest will be phrased.
That is what a larger model learns and a smaller one does not.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from sportsllm.errors import ArtifactError
from sportsllm.files import read_toml
from sportsllm.simulator.world import PREFERENCES, Person, Writer

_CHOICE = re.compile(r"\[([^\[\]]*)\]|<([\w{}]+)>")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_ORDINALS = ("zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@cache
def rules(sport: str) -> dict[str, list[str]]:
    """The templates of a sport's rules, read on first use."""
    found = read_toml(Path(__file__).with_name(f"{sport}.toml"))["rules"]
    return {name: text.strip().replace("\\n", "\0").splitlines() for name, text in found.items()}


def expand(templates: Mapping[str, list[str]], rule: str, slots: Mapping[str, str], writer: Writer, rng: Random) -> str:
    """One expansion of `rule`, its first letter a capital.

    Raises:
        ArtifactError: there is no such rule, or it names a slot that has no value in this event.
    """

    def choose(options: Sequence[str], power: int) -> str:
        """The higher the power, the likelier the writer's favourite."""
        favourite = writer.offsets[zlib.crc32("|".join(options).encode()) % PREFERENCES]
        return options[(int(rng.random() ** power * len(options)) + favourite) % len(options)]

    try:
        text = choose(templates[rule], 2)
        while choice := _CHOICE.search(text):  # the innermost first
            alternatives, other = choice.groups()
            options, power = (alternatives.split("|"), 3) if other is None else (templates[other.format_map(slots)], 2)
            text = text[: choice.start()] + choose(options, power) + text[choice.end() :]
        text = text.format_map(slots).replace("\0", "\n")
    except KeyError as error:
        raise ArtifactError(f"rule '{rule}': there is no rule or slot {error}; add it to the template file") from None
    return text[:1].upper() + text[1:]


class Ask(NamedTuple):
    """A question that a contest answers, with wrong answers that are plausible."""

    kind: str
    question: str
    right: str
    plausible: Sequence[str]


class Scene:
    """One contest as its writer tells it: full names first, surnames after that. `slots` hold in every sentence."""

    def __init__(self, rng: Random, sport: str, writer: Writer, slots: dict[str, str]) -> None:
        self.rng, self.templates, self.writer = rng, rules(sport), writer
        self.slots = {**slots, "writer": writer.name, "paper": writer.paper}
        self.met: set[str] = set()  # surnames of those whose full name the text has given

    def say(self, rule: str, *more: Mapping[str, str], of: Sequence[Person] = ()) -> str:
        """One sentence or more from `rule`, about the players `of`; later slots win over earlier ones."""
        slots = dict(self.slots)
        for each in more:
            slots |= each
        for letter, player in zip("pq", of, strict=False):
            slots[letter] = player.last if player.last in self.met else player.name
        if of:
            slots |= {"last": of[0].last, "epi": of[0].epithets[int(self.rng.random() ** 2 * 3)], **of[0].pronouns}
        text = expand(self.templates, rule, slots, self.writer, self.rng)
        self.met.update(player.last for player in of if player.name in text)
        return text


def counted(count: int, noun: str) -> str:
    """1, goal -> one goal; 3, goal -> three goals."""
    number = _NUMBERS[count] if count < len(_NUMBERS) else str(count)
    return f"{number} {noun}{'' if count == 1 else 's'}"


def nth(count: int) -> str:
    """2 -> second, 21 -> 21st."""
    if 0 < count < len(_ORDINALS):
        return _ORDINALS[count]
    suffix = "th" if 10 < count % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{suffix}"


def near(count: int) -> list[str]:
    """Other numbers that could have been the answer."""
    return [str(other) for other in range(max(0, count - 3), count + 4) if other != count]
