"""The fixed world: towns, clubs, squads, coaches, grounds, tennis players and writers, the same in every document.

Everything here comes from world.toml and one constant seed, never from the seed of a corpus. A club that is met twice
has the same captain, ground and nickname both times, which is knowledge that a model can store.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from sportsllm.files import read_toml, validate

WORLD_SEED = 20_240_607
PREFERENCES = 1021  # choices are spread over a writer's preferences by a checksum of their text
_WRITERS, _CLUBS, _TOURNAMENTS, _TOUR = 24, 19, 20, 72
_MEN = {"he": "he", "him": "him", "his": "his", "himself": "himself"}
_WOMEN = {"he": "she", "him": "her", "his": "her", "himself": "herself"}


@dataclass(frozen=True)
class Region:
    """Parts of names, with blanks between, and how often each kind of weather comes."""

    men: str
    women: str
    roots: str
    endings: str
    town_starts: str
    town_ends: str
    climate: dict[str, int]


@dataclass(frozen=True)
class Words:
    """world.toml."""

    nicks: tuple[str, ...]
    ground_starts: tuple[str, ...]
    colours: tuple[str, ...]
    second_colours: tuple[str, ...]
    papers: tuple[str, ...]
    days: tuple[str, ...]
    suffixes: tuple[str, ...]
    grounds: tuple[str, ...]
    traits: tuple[str, ...]
    squad: tuple[tuple[str, float], ...]
    leagues: tuple[str, ...]
    tournaments: tuple[str, ...]
    venues: tuple[str, ...]
    surfaces: tuple[str, ...]
    styles: dict[str, str]
    strengths: dict[str, str]
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Writer:
    """A writer: name, newspaper, and a favourite for every choice."""

    name: str
    paper: str
    offsets: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Person:
    """A player. `weight` is how often, among team-mates, this one scores; in tennis the strength."""

    name: str
    last: str
    pronouns: Mapping[str, str]
    weight: float
    trait: str
    epithets: tuple[str, str, str]


@dataclass(frozen=True, eq=False)
class Club:
    """A football club. `style` is a kind of goal; `slots` describe the club in templates."""

    short: str
    nick: str
    ground: str
    capacity: int
    style: str
    strength: float
    region: Region
    writer: Writer
    squad: tuple[Person, ...]
    slots: dict[str, str]


@dataclass(frozen=True)
class Tournament:
    """A tennis tournament."""

    name: str
    town: str
    venue: str
    surface: str
    tour: tuple[Person, ...]
    writer: Writer


class World(NamedTuple):
    """Clubs by league, those first that are written about most, and tournaments."""

    leagues: dict[str, tuple[Club, ...]]
    tournaments: tuple[Tournament, ...]


class _Maker:
    """Draws the parts of the world in a fixed order from one generator."""

    def __init__(self) -> None:
        self.rng, self.words = Random(WORLD_SEED), words()
        self.taken: set[str] = set()  # surnames and towns
        self.writers = tuple(self.writer() for _ in range(_WRITERS))

    def _joined(self, starts: str, ends: str) -> str:
        """A new name of a start and an end, with no letter three times in a row."""
        name = ""
        while not name or name in self.taken:
            start, end = self.rng.choice(starts.split()), self.rng.choice(ends.split())
            name = start + (end[1:] if start[-2:] == 2 * end[0] else end)
        return name

    def town(self, region: Region) -> str:
        self.taken.add(town := self._joined(region.town_starts, region.town_ends))
        return town

    def person(self, woman: bool, role: str, weight: float, trait: str, region: Region | None = None) -> Person:
        """A person whose surname nobody else has, most of them from the region."""
        rng = self.rng
        if region is None or rng.random() > 0.65:
            region = rng.choice(self.words.regions)
        self.taken.add(last := self._joined(region.roots, region.endings))
        first = rng.choice((region.women if woman else region.men).split())
        home, age = self._joined(region.town_starts, region.town_ends), 18 + int(17 * rng.random() ** 1.3)
        epithets = (f"the {home}-born {role}", f"the {age}-year-old", f"the {role}")
        return Person(f"{first} {last}", last, _WOMEN if woman else _MEN, weight, trait, epithets)

    def writer(self) -> Writer:
        rng, region = self.rng, self.rng.choice(self.words.regions)
        name = self.person(rng.random() < 0.5, "writer", 0.0, "", region).name
        paper = f"{self._joined(region.town_starts, region.town_ends)} {rng.choice(self.words.papers)}"
        return Writer(name, paper, tuple(rng.randrange(5040) for _ in range(PREFERENCES)))

    def club(self, woman: bool, nick: str) -> Club:
        rng, words, region = self.rng, self.words, self.rng.choice(self.words.regions)
        squad = tuple(self.person(woman, *place, rng.choice(words.traits), region) for place in words.squad)
        town, style, strength = self.town(region), rng.choice(list(words.styles)), rng.gauss(0, 0.3)
        capacity = 100 * round(150 + 250 * max(strength, -0.4) + rng.randrange(60))
        slots = {
            "": town,
            "full": f"{town} {rng.choice(words.suffixes)}",
            "nick": nick,
            "boss": self.person(woman and rng.random() < 0.6, "coach", 0.0, "", region).last,
            "star": max(squad, key=lambda player: player.weight).name,
            "captain": squad[skewed(rng, len(squad), 2)].name,
            "colours": f"{rng.choice(words.colours)} and {rng.choice(words.second_colours)}",
            "year": str(rng.randrange(1872, 1986)),
            "seats": f"{capacity:,}",
            "style": words.styles[style],
        }
        ground = f"{rng.choice(words.ground_starts)} {rng.choice(words.grounds)}"
        return Club(town, nick, ground, capacity, style, strength, region, rng.choice(self.writers), squad, slots)

    def tour(self, women: bool) -> tuple[Person, ...]:
        """Tennis players, best first."""
        traits = list(self.words.strengths)
        return tuple(self.person(women, "player", 1 / (3 + rank), traits[rank % len(traits)]) for rank in range(_TOUR))

    def tournament(self, tour: tuple[Person, ...]) -> Tournament:
        rng, words = self.rng, self.words
        town = self.town(rng.choice(words.regions))
        venue = f"{rng.choice(words.ground_starts)} {rng.choice(words.venues)}"
        name, surface = f"{town} {rng.choice(words.tournaments)}", rng.choice(words.surfaces)
        return Tournament(name, town, venue, surface, tour, rng.choice(self.writers))


@cache
def words() -> Words:
    """The words in world.toml, read on first use."""
    path = Path(__file__).with_name("world.toml")
    return validate(Words, read_toml(path), path)


@cache
def world() -> World:
    """The world, built on first use."""
    maker, leagues = _Maker(), dict[str, tuple[Club, ...]]()
    for number, name in enumerate(words().leagues):
        nicks = maker.rng.sample(words().nicks, _CLUBS)
        leagues[name] = tuple(maker.club(number % 2 == 1, f"the {nick}") for nick in nicks)
    tours = (maker.tour(women=False), maker.tour(women=True))
    return World(leagues, tuple(maker.tournament(tours[number % 2]) for number in range(_TOURNAMENTS)))


def skewed(rng: Random, count: int, power: float) -> int:
    """An index below `count`; the higher the power, the likelier the low ones. A power of 1 is uniform."""
    return int(count * rng.random() ** power)


def weighted(rng: Random, weights: Mapping[str, float]) -> str:
    """A key, with probability in proportion to its weight."""
    return rng.choices(list(weights), list(weights.values()))[0]
