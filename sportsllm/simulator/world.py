"""The fixed world: towns, clubs, squads, coaches, grounds and writers, the same in every document.

Everything here comes from one constant seed and never from the seed of a corpus. A club that is met twice has
the same captain, ground and nickname both times, which is knowledge that a model can store.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from random import Random

from sportsllm.simulator.draws import skewed
from sportsllm.simulator.grammar import TABLE_SIZE, Voice
from sportsllm.simulator.vocabulary import CLUBS, RACES, REGIONS, SHARED, TENNIS, ClubWords, LeagueWords, Region

WORLD_SEED = 20_240_607
PRONOUNS = (
    {"he": "he", "him": "him", "his": "his", "himself": "himself"},
    {"he": "she", "him": "her", "his": "her", "himself": "herself"},
)
VOICES = 24
TOURNAMENT_COUNT = 20
RACE_COUNT = 10
STAGE_COUNT = 9


@dataclass(frozen=True, slots=True, eq=False)
class Person:
    """A player, rider or coach. `weight` is how often, among team-mates, this one scores."""

    name: str
    last: str
    pronouns: dict[str, str]  # he, him, his and himself
    role: str
    weight: float
    skill: float
    trait: str
    epithets: tuple[str, ...]
    home: str


@dataclass(eq=False)
class Club:
    """A club; `manner` is its style in words."""

    name: str
    short: str
    nick: str
    ground: str
    capacity: int
    style: str
    manner: str
    strength: float
    region: Region
    voice: Voice
    coach: Person
    squad: tuple[Person, ...]
    founded: int
    colours: str
    captain: Person
    rival: str = ""

    def slots(self, prefix: str) -> dict[str, str]:
        """The club's slots in a template, each with `prefix` before it: home, homefull, homenick..."""
        return {
            prefix: self.short,
            prefix + "full": self.name,
            prefix + "nick": self.nick,
            prefix + "boss": self.coach.name,
            prefix + "last": self.coach.last,
            prefix + "star": max(self.squad, key=lambda player: player.weight).name,
            prefix + "captain": self.captain.name,
            prefix + "colours": self.colours,
            prefix + "year": str(self.founded),
            prefix + "seats": f"{self.capacity:,}",
            prefix + "style": self.manner,
        }

    @cached_property
    def sums(self) -> tuple[float, ...]:
        """Running sums of the squad's weights."""
        return tuple(accumulate(player.weight for player in self.squad))


@dataclass(frozen=True, slots=True)
class League:
    """Clubs of one competition; `popularity` is how often each is written about."""

    name: str
    clubs: tuple[Club, ...]
    popularity: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Tournament:
    """A tennis tournament."""

    name: str
    town: str
    venue: str
    surface: str
    women: bool
    region: Region
    voice: Voice


@dataclass(frozen=True, slots=True)
class Stage:
    """One day of a race: from where to where, over which terrain and which last climb."""

    start: str
    finish: str
    km: int
    terrain: str
    climb: str


@dataclass(frozen=True, slots=True)
class Race:
    """A cycling race of several stages."""

    name: str
    voice: Voice
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class World:
    """All of it."""

    leagues: dict[str, tuple[League, ...]]  # by sport
    tours: tuple[tuple[Person, ...], tuple[Person, ...]]  # tennis: men and women, best first
    tournaments: tuple[Tournament, ...]
    races: tuple[Race, ...]


class _Maker:
    """Draws the parts of the world in a fixed order from one generator."""

    def __init__(self) -> None:
        self.rng = Random(WORLD_SEED)
        self.taken: set[str] = set()  # surnames, which are unique within a sport
        self.towns = {
            region.name: [start + end for start in region.town_starts for end in region.town_ends] for region in REGIONS
        }
        for towns in self.towns.values():
            self.rng.shuffle(towns)
        self.used = dict.fromkeys(self.towns, 0)
        self.voices = [self.voice() for _ in range(VOICES)]

    def voice(self) -> Voice:
        rng = self.rng
        region = rng.choice(REGIONS)
        person = self.person(region, rng.random() < 0.5, "writer", 1.0, "none")
        offsets = tuple(rng.randrange(5040) for _ in range(TABLE_SIZE))
        return Voice(person.name, f"{self.towns[region.name][0]} {rng.choice(SHARED.papers)}", offsets)

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
        first, last = self._full_name(region, woman)
        while last in self.taken:
            region = rng.choice(REGIONS)
            first, last = self._full_name(region, woman)
        self.taken.add(last)
        home = rng.choice(self.towns[region.name])
        age = 18 + int(17 * rng.random() ** 1.3)
        epithets = [f"the {home}-born {role}", f"the {age}-year-old", f"the {role}"]
        if age > 31 or age < 21:
            epithets.append(f"the {'veteran' if age > 31 else 'youngster'} from {home}")
        skill = round(rng.gauss(0, 1), 2)
        return Person(f"{first} {last}", last, PRONOUNS[woman], role, weight, skill, trait, tuple(epithets), home)

    def _full_name(self, region: Region, woman: bool) -> tuple[str, str]:
        """First name and surname; the surname has no letter three times in a row."""
        first = self.rng.choice(region.women if woman else region.men)
        root, ending = self.rng.choice(region.roots), self.rng.choice(region.endings)
        return first, root + (ending[1:] if root[-2:] == 2 * ending[0] else ending)

    def league(self, words: ClubWords, league: LeagueWords) -> League:
        suffixes = list(words.suffixes) * (1 if words.called_by_suffix else 3)
        nicks = list(SHARED.nicks)
        self.rng.shuffle(suffixes)
        self.rng.shuffle(nicks)
        count = league.clubs
        clubs = [self._club(words, league.women, rank / count, suffixes.pop(), nicks.pop()) for rank in range(count)]
        seen: set[str] = set()
        for club in clubs:  # two clubs of a league may not share a town: the short names must differ
            while club.short in seen:
                club.name = club.name.replace(club.short, town := self.town(club.region))
                club.short = town
            seen.add(club.short)
        for left, right in zip(clubs[::2], clubs[1::2], strict=False):
            left.rival, right.rival = right.short, left.short
        order = list(range(count))
        self.rng.shuffle(order)
        return League(league.name, tuple(clubs), tuple(1 / (2 + rank) for rank in order))

    def _club(self, words: ClubWords, woman: bool, rank: float, suffix: str, nick: str) -> Club:
        """A club; `rank` is 0 for the strongest of its league and nearly 1 for the weakest."""
        rng = self.rng
        region = rng.choice(REGIONS)
        town = self.town(region)
        return Club(  # drawn in this order
            name=f"{suffix} {town}" if suffix in words.before_town else f"{town} {suffix}",
            short=town,
            nick=f"the {suffix if words.called_by_suffix else nick}",
            region=region,
            ground=f"{rng.choice(SHARED.ground_starts)} {rng.choice(words.grounds)}",
            coach=self.person(region, woman and rng.random() < 0.6, "coach", 0.0, "none"),
            squad=(
                squad := tuple(self.person(region, woman, *place, rng.choice(words.traits)) for place in words.squad)
            ),
            strength=0.9 * (0.5 - rank) + rng.gauss(0, 0.12),
            capacity=100 * round((40 + 260 * (1 - rank) + rng.randrange(60)) * words.ground_size),
            style=(style := rng.choice(list(words.styles))),
            manner=words.styles[style],
            voice=rng.choice(self.voices),
            colours=f"{rng.choice(SHARED.colours)} and {rng.choice(SHARED.second_colours)}",
            captain=squad[skewed(rng, len(squad), 2)],
            founded=rng.randrange(1872, 1986),
        )

    def tour(self, women: bool) -> tuple[Person, ...]:
        """Tennis players, best first."""
        traits, rng = list(TENNIS.traits) * 12, self.rng
        return tuple(
            self.person(rng.choice(REGIONS), women, "player", 1 / (3 + rank), trait)
            for rank, trait in enumerate(traits)
        )

    def tournament(self, number: int) -> Tournament:
        rng = self.rng
        region = REGIONS[number % len(REGIONS)]
        town = self.town(region)
        voice = rng.choice(self.voices)
        surface = rng.choice(TENNIS.surfaces)
        name = f"{town} {rng.choice(TENNIS.tournaments)}"
        venue = f"{rng.choice(SHARED.ground_starts)} {rng.choice(TENNIS.venues)}"
        return Tournament(name, town, venue, surface, number % 2 == 1, region, voice)

    def race(self, number: int) -> Race:
        """A race through one region, each stage starting where the last one ended."""
        rng, words = self.rng, RACES
        region = REGIONS[number % len(REGIONS)]
        start = self.town(region)
        voice = rng.choice(self.voices)
        name = f"{rng.choice(words.names)} {region.name}"
        stages = []
        for _ in range(STAGE_COUNT):
            finish = rng.choice([town for town in self.towns[region.name] if town != start])
            terrain = rng.choice(words.terrains)
            climb = f"{rng.choice(words.climbs)} {rng.choice(region.roots)}"
            km = rng.randrange(128, 226)
            stages.append(Stage(start, finish, km, terrain, climb + rng.choice(words.climb_endings)))
            start = finish
        return Race(name, voice, tuple(stages))


@cache
def world() -> World:
    """The world, built on first use."""
    maker = _Maker()
    leagues = {}
    for sport, words in CLUBS.items():
        maker.taken.clear()
        leagues[sport] = tuple(maker.league(words, league) for league in words.leagues)
    maker.taken.clear()
    tours = (maker.tour(women=False), maker.tour(women=True))
    tournaments = tuple(maker.tournament(number) for number in range(TOURNAMENT_COUNT))
    return World(leagues, tours, tournaments, tuple(maker.race(number) for number in range(RACE_COUNT)))
