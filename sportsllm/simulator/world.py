"""The fixed world: towns, clubs, squads, coaches, grounds and writers, the same in every document.

Everything here comes from one constant seed and never from the seed of a corpus. A club that is met twice has
the same captain, ground and nickname both times, which is knowledge that a model can store.
"""

from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from random import Random

from sportsllm.simulator.grammar import TABLE_SIZE, Voice
from sportsllm.simulator.names import REGIONS, Region
from sportsllm.simulator.world_data import (
    COLOURS,
    GROUND_STARTS,
    GROUNDS,
    LEAGUES,
    NICKS,
    SQUADS,
    STYLES,
    SUFFIXES,
    TRAITS,
)

WORLD_SEED = 20_240_607
VOICES = 24


@dataclass(frozen=True, slots=True, eq=False)
class Person:
    """A player, rider or coach. `weight` is how often, among team-mates, this one scores."""

    name: str
    last: str
    he: str
    him: str
    his: str
    role: str
    weight: float
    skill: float
    trait: str
    epithets: tuple[str, ...]
    home: str


@dataclass(slots=True)
class Club:
    """A club and the slots it fills in a template, ready made."""

    name: str
    short: str
    nick: str
    ground: str
    capacity: int
    style: str
    strength: float
    region: Region
    voice: Voice
    coach: Person
    squad: tuple[Person, ...]
    league: str
    founded: int
    colours: str
    captain: Person
    rival: str = ""
    slots: dict[str, str] = field(default_factory=dict)  # as the team in question
    against: dict[str, str] = field(default_factory=dict)  # as the opponent
    sums: tuple[float, ...] = ()  # running sums of the squad's weights


@dataclass(frozen=True, slots=True)
class League:
    """Clubs of one competition; `popularity` is how often each is written about."""

    name: str
    clubs: tuple[Club, ...]
    popularity: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """A tennis tournament or a cycling race with its fixed places."""

    name: str
    town: str
    venue: str
    kind: str
    women: bool
    region: Region
    voice: Voice
    stages: tuple[tuple[str, str, int, str, str], ...] = ()  # from, to, km, terrain, last climb


@dataclass(frozen=True, slots=True)
class World:
    """All of it."""

    leagues: dict[str, tuple[League, ...]]
    tours: dict[str, tuple[Person, ...]]
    events: dict[str, tuple[Event, ...]]
    voices: tuple[Voice, ...]


class _Maker:
    """Draws the parts of the world in a fixed order from one generator."""

    def __init__(self) -> None:
        self.rng = Random(WORLD_SEED)
        self.taken: set[str] = set()
        self.towns = {
            region.name: [start + end for start in region.town_starts for end in region.town_ends] for region in REGIONS
        }
        for towns in self.towns.values():
            self.rng.shuffle(towns)
        self.used = dict.fromkeys(self.towns, 0)
        self.suffixes: list[str] = []
        self.nicks: list[str] = []
        self.voices = tuple(self.voice() for _ in range(VOICES))
        self.taken.clear()

    def voice(self) -> Voice:
        region = self.rng.choice(REGIONS)
        person = self.person(region, self.rng.random() < 0.5, "writer", 1.0, "none")
        papers = ("Gazette", "Courier", "Herald", "Evening Post", "Sports Mail", "Chronicle", "Observer")
        offsets = tuple(self.rng.randrange(5040) for _ in range(TABLE_SIZE))
        return Voice(person.name, f"{self.towns[region.name][0]} {self.rng.choice(papers)}", offsets)

    def town(self, region: Region) -> str:
        """Towns are used in turn, so that large ones have clubs in several sports."""
        towns = self.towns[region.name]
        self.used[region.name] = (self.used[region.name] + 1) % len(towns)
        return towns[self.used[region.name]]

    def person(self, region: Region, woman: bool, role: str, weight: float, trait: str) -> Person:
        """A person whose surname nobody else in the same sport has."""
        rng = self.rng
        if rng.random() > 0.65:
            region = rng.choice(REGIONS)
        first = rng.choice(region.women if woman else region.men)
        last = _surname(rng, region)
        while last in self.taken:
            region = rng.choice(REGIONS)
            first = rng.choice(region.women if woman else region.men)
            last = _surname(rng, region)
        self.taken.add(last)
        home = rng.choice(self.towns[region.name])
        age = 18 + int(17 * rng.random() ** 1.3)
        nouns = ("veteran",) if age > 31 else ("youngster",) if age < 21 else ()
        epithets = (
            f"the {home}-born {role}",
            f"the {age}-year-old",
            f"the {role}",
            *(f"the {noun} from {home}" for noun in nouns),
        )
        he, him, his = ("she", "her", "her") if woman else ("he", "him", "his")
        skill = round(rng.gauss(0, 1), 2)
        return Person(f"{first} {last}", last, he, him, his, role, weight, skill, trait, epithets, home)

    def club(self, sport: str, league: str, woman: bool, rank: float) -> Club:
        rng = self.rng
        region = rng.choice(REGIONS)
        town = self.town(region)
        nick = "the " + self.nicks.pop()
        suffix = self.suffixes.pop()
        ground = f"{rng.choice(GROUND_STARTS)} {rng.choice(GROUNDS[sport])}"
        if suffix in ("Sporting", "Union"):
            name = f"{suffix} {town}"
        elif sport in ("hockey", "basketball"):
            name, nick = f"{town} {suffix}", f"the {suffix}"
        else:
            name = f"{town} {suffix}"
        coach = self.person(region, woman and rng.random() < 0.6, "coach", 0.0, "none")
        squad = tuple(
            self.person(region, woman, role, weight, rng.choice(TRAITS[sport])) for role, weight in SQUADS[sport]
        )
        strength = 0.9 * (0.5 - rank) + rng.gauss(0, 0.12)
        capacity = 100 * round((40 + 260 * (1 - rank) + rng.randrange(60)) * (0.3 if sport != "football" else 1))
        style = rng.choice(STYLES[sport])
        voice = self.voices[rng.randrange(VOICES)]
        colours = f"{rng.choice(COLOURS)} and {rng.choice(('white', 'black', 'gold', 'grey'))}"
        captain = squad[int(len(squad) * rng.random() ** 2)]
        who = (coach, squad, league, rng.randrange(1872, 1986), colours, captain)
        return Club(name, town, nick, ground, capacity, style, strength, region, voice, *who)

    def league(self, sport: str, name: str, count: int, woman: bool) -> League:
        self.suffixes = list(SUFFIXES[sport]) * 3
        if sport in ("hockey", "basketball"):  # where the suffix is what the club is called by
            self.suffixes = list(SUFFIXES[sport])
        self.nicks = list(NICKS)
        self.rng.shuffle(self.suffixes)
        self.rng.shuffle(self.nicks)
        clubs = [self.club(sport, name, woman, rank / count) for rank in range(count)]
        seen: set[str] = set()
        for club in clubs:  # two clubs of a league may not share a town: the short names must differ
            while club.short in seen:
                club.name = club.name.replace(club.short, town := self.town(club.region))
                club.short = town
            seen.add(club.short)
        for left, right in zip(clubs[::2], clubs[1::2], strict=False):
            left.rival, right.rival = right.short, left.short
        for club in clubs:
            _fill(club)
        order = list(range(count))
        self.rng.shuffle(order)
        return League(name, tuple(clubs), tuple(1 / (2 + rank) for rank in order))

    def event(self, sport: str, number: int) -> Event:
        rng = self.rng
        region = REGIONS[number % len(REGIONS)]
        town = self.town(region)
        voice = self.voices[rng.randrange(VOICES)]
        if sport == "tennis":
            kind = rng.choice(("clay", "hard court", "grass", "indoor hard court"))
            name = f"{town} {rng.choice(('Open', 'Masters', 'Classic', 'Cup', 'International'))}"
            venue = f"{rng.choice(GROUND_STARTS)} {rng.choice(('Tennis Club', 'Centre Court', 'Lawns', 'Arena'))}"
            return Event(name, town, venue, kind, number % 2 == 1, region, voice)
        name = f"{rng.choice(('Tour of', 'Ronde of', 'Volta of', 'Circuit of'))} {region.name}"
        stages = []
        start = town
        for _ in range(9):
            finish = rng.choice([t for t in self.towns[region.name] if t != start])
            terrain = rng.choice(("flat", "flat", "hilly", "mountain", "mountain"))
            climb = rng.choice(("Col de", "Passo", "Alto", "Mount", "Cote de")) + " " + rng.choice(region.roots)
            stages.append((start, finish, rng.randrange(128, 226), terrain, climb + rng.choice("aeio")))
            start = finish
        return Event(name, town, "", "stage race", False, region, voice, tuple(stages))


def _surname(rng: Random, region: Region) -> str:
    """Root and ending, without a letter three times in a row."""
    root, ending = rng.choice(region.roots), rng.choice(region.endings)
    return root + (ending[1:] if root[-2:] == 2 * ending[0] else ending)


def _fill(club: Club) -> None:
    """The slots of a club for both roles it can have in a sentence."""
    shared = {"": club.name, "short": club.short, "nick": club.nick, "coach": club.coach.name}
    shared |= {"boss": club.coach.last, "ground": club.ground}
    club.slots = {("full" if key == "" else key): text for key, text in shared.items()}
    club.slots["star"] = max(club.squad, key=lambda player: player.weight).name
    club.slots["captain"] = club.captain.name
    club.slots["colours"] = club.colours
    club.slots["year"] = str(club.founded)
    club.slots["seats"] = f"{club.capacity:,}"
    club.against = {"o" + ("full" if key == "" else key): text for key, text in shared.items()}
    club.sums = tuple(accumulate(player.weight for player in club.squad))


@cache
def world() -> World:
    """The world, built on first use."""
    maker = _Maker()
    leagues = {}
    for sport, entries in LEAGUES.items():
        maker.taken.clear()
        leagues[sport] = tuple(maker.league(sport, *entry) for entry in entries)
    maker.taken.clear()
    tours = {
        tour: tuple(
            maker.person(maker.rng.choice(REGIONS), tour == "women", "player", 1 / (3 + rank), trait)
            for rank, trait in enumerate(TRAITS["tennis"] * 12)
        )
        for tour in ("men", "women")
    }
    events = {
        "tennis": tuple(maker.event("tennis", number) for number in range(20)),
        "cycling": tuple(maker.event("cycling", number) for number in range(10)),
    }
    return World(leagues, tours, events, maker.voices)
