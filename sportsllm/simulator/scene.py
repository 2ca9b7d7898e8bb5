"""What every match has: two clubs, a writer, the weather, a crowd, and a way to say things."""

from bisect import bisect
from collections.abc import Mapping, Sequence
from math import exp
from random import Random
from typing import Any

from sportsllm.simulator.grammar import Grammar, Voice
from sportsllm.simulator.world import Club, League, Person, world

INDOOR = ("hockey", "basketball")
_NUMBERS = (
    *("no", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
_ORDINALS = (
    *("zeroth", "first", "second", "third", "fourth", "fifth"),
    *("sixth", "seventh", "eighth", "ninth", "tenth"),
)
_NAMED = ("full", "nick", "star", "captain", "colours", "year", "seats")
_DAYS = ("Saturday", "Sunday", "Friday", "Wednesday", "Tuesday", "Monday", "Thursday")


def number(count: int) -> str:
    """2 -> two, 14 -> 14."""
    return _NUMBERS[count] if 0 <= count <= 12 else str(count)


def counted(count: int, noun: str, plural: str = "") -> str:
    """1, goal -> one goal; 3, goal -> three goals."""
    return f"{number(count)} {noun if count == 1 else plural or noun + 's'}"


def nth(count: int) -> str:
    """2 -> second, 21 -> 21st."""
    if 0 < count <= 10:
        return _ORDINALS[count]
    suffix = "th" if 10 < count % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{suffix}"


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def poisson(rng: Random, mean: float) -> int:
    """A Poisson draw (Knuth's product of uniforms); means are small here."""
    limit, product, count = exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


def weighted(rng: Random, weights: Mapping[str, float]) -> str:
    """A key, with probability in proportion to its weight."""
    draw = rng.random() * sum(weights.values())
    for key, weight in weights.items():
        draw -= weight
        if draw < 0:
            return key
    return key


def scorer(rng: Random, club: Club) -> Person:
    """A player of the squad, the ones who score most most often."""
    return club.squad[bisect(club.sums, rng.random() * club.sums[-1])]


def state(own: int, other: int, step: int = 1) -> str:
    """What a score that made it own-other did to the match, as the name of a rule."""
    before = own - step
    if before == 0 and other == 0:
        return "opener"
    if own == other:
        return "level"
    if before < other < own:
        return "turn"
    if before == other:
        return "ahead"
    if own > other:
        return "double" if own - other <= 2 * step else "stretch"
    return "close" if other - own <= step else "console"


class Scene:
    """Says things about one match in one writer's voice, full names first and surnames after that."""

    def __init__(self, rng: Random, grammar: Grammar, voice: Voice, slots: dict[str, str]) -> None:
        self.rng = rng
        self.random = rng.random
        self.grammar = grammar
        self.voice = voice
        self.slots = slots
        self.met: set[str] = set()  # surnames of those whose full name the text has given
        self.due: list[Person] = []  # the players of the event at hand

    def say(self, rule: str, *extra: Mapping[str, str]) -> str:
        """One sentence or more from `rule`; later slots win over earlier ones."""
        slots = self.slots
        if extra:
            slots = dict(slots)
            for more in extra:
                slots.update(more)
        text = self.grammar.say(rule, slots, self.voice.offsets, self.random)
        for player in self.due:
            if player.name in text:
                self.met.add(player.last)
        return text

    def person(self, player: Person) -> dict[str, str]:
        """Slots for the player an event is about."""
        self.due = [player]
        return {
            "p": player.last if player.last in self.met else player.name,
            "last": player.last,
            "he": player.he,
            "him": player.him,
            "his": player.his,
            "role": player.role,
            "epi": player.epithets[int(self.random() ** 2 * len(player.epithets))],
        }

    def second(self, player: Person) -> dict[str, str]:
        """Slots for another player in the same event."""
        self.due.append(player)
        return {"q": player.last if player.last in self.met else player.name}


class Fixture:
    """Who plays whom, where, in what weather and in front of how many."""

    def __init__(self, rng: Random, sport: str) -> None:
        leagues = world().leagues[sport]
        league: League = leagues[min(int(rng.random() ** 1.5 * len(leagues)), len(leagues) - 1)]
        home, away = rng.choices(league.clubs, league.popularity, k=2)
        while away is home:
            away = rng.choice(league.clubs)
        if home.rival and rng.random() < 0.12:
            away = next(club for club in league.clubs if club.short == home.rival)
        self.rng, self.sport, self.league, self.home, self.away = rng, sport, league, home, away
        self.clubs: tuple[Club, Club] = (home, away)
        self.voice = home.voice if rng.random() < 0.85 else away.voice
        self.edge = home.strength - away.strength + 0.15
        self.derby = home.rival == away.short
        self.weather = "indoor" if sport in INDOOR else weighted(rng, home.region.climate)
        if sport == "cricket" and self.weather == "snow":
            self.weather = "clear"  # nobody plays cricket in it
        interest = 0.62 + 0.3 * away.strength + (0.2 if self.derby else 0.0) + rng.gauss(0, 0.06)
        self.crowd = int(home.capacity * min(max(interest, 0.25), 1.0)) // 10 * 10
        if self.derby and self.crowd > 0.9 * home.capacity:
            self.crowd = home.capacity
        self.round = rng.randrange(1, 2 * len(league.clubs) - 1)
        day = _DAYS[int(rng.random() ** 2 * 7)]
        self.slots = {
            **home.slots,
            **away.against,
            "home": home.short,
            "away": away.short,
            **{"home" + key: home.slots[key] for key in _NAMED},
            **{"away" + key: away.slots[key] for key in _NAMED},
            "homeboss": home.coach.name,
            "awayboss": away.coach.name,
            "venue": home.ground,
            "crowd": f"{self.crowd:,}",
            "league": league.name,
            "round": str(self.round),
            "day": day,
            "writer": self.voice.name,
            "paper": self.voice.paper,
            "region": home.region.name,
        }

    def team(self, side: int) -> dict[str, str]:
        """Slots as seen from one side: 0 home, 1 away."""
        return {**self.clubs[side].slots, **self.clubs[1 - side].against}

    def result(self, score: Sequence[int], clear: int, rout: int) -> tuple[str, dict[str, str]]:
        """The kind of result, and the slots of winner (`win...`) and loser (`lose...`)."""
        margin = abs(score[0] - score[1])
        kind = "draw" if not margin else "narrow" if margin < clear else "easy" if margin < rout else "rout"
        first = 0 if score[0] >= score[1] else 1
        winner, loser = self.clubs[first], self.clubs[1 - first]
        slots = {
            "win": winner.short,
            "winfull": winner.name,
            "winnick": winner.nick,
            "winboss": winner.coach.name,
            "winlast": winner.coach.last,
            "lose": loser.short,
            "losefull": loser.name,
            "losenick": loser.nick,
            "loseboss": loser.coach.name,
            "loselast": loser.coach.last,
            "score": f"{max(score)}-{min(score)}",
            "final": f"{self.home.short} {score[0]}-{score[1]} {self.away.short}",
            "margin": number(margin),
            "place": "at home" if first == 0 else "away from home",
        }
        return kind, slots

    def running(self, score: Sequence[int]) -> str:
        """The score between the two names, home side first."""
        return f"{self.home.short} {score[0]}-{score[1]} {self.away.short}"

    def facts(self, score: Sequence[int]) -> dict[str, Any]:
        """The facts every match of clubs has."""
        return {
            "teams": [self.home.short, self.away.short],
            "clubs": [self.home.name, self.away.name],
            "score": list(score),
            "league": self.league.name,
            "venue": self.home.ground,
            "crowd": self.crowd,
            "coaches": [self.home.coach.name, self.away.coach.name],
            "players": [player.name for club in self.clubs for player in club.squad],
        }


def paragraphs(parts: Sequence[str | Sequence[str]]) -> str:
    """Blocks of text with a blank line between; a block given as a list is one paragraph of sentences."""
    return "\n\n".join(part if isinstance(part, str) else " ".join(part) for part in parts if part)
