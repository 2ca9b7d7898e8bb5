"""A match of two clubs: the opponents, the place, the weather and the crowd."""

from bisect import bisect
from collections.abc import Sequence
from random import Random
from typing import Any

from sportsllm.simulator.draws import skewed, weighted
from sportsllm.simulator.vocabulary import CLUBS, SHARED
from sportsllm.simulator.world import Club, Person, world


def scorer(rng: Random, club: Club) -> Person:
    """A player of the squad, the ones who score most most often."""
    return club.squad[bisect(club.sums, rng.random() * club.sums[-1])]


class Fixture:
    """Two clubs, the day and the place; `slots` say so in templates."""

    def __init__(self, rng: Random, sport: str) -> None:
        leagues = world().leagues[sport]
        league = leagues[skewed(rng, len(leagues), 1.5)]
        home, away = rng.choices(league.clubs, league.popularity, k=2)
        while away is home:
            away = rng.choice(league.clubs)
        if home.rival and rng.random() < 0.12:
            away = next(club for club in league.clubs if club.short == home.rival)
        self.rng, self.league, self.home, self.away = rng, league, home, away
        self.clubs: tuple[Club, Club] = (home, away)
        self.voice = home.voice if rng.random() < 0.85 else away.voice
        self.edge = home.strength - away.strength + 0.15
        self.derby = home.rival == away.short
        self.weather = "indoor" if CLUBS[sport].indoor else weighted(rng, home.region.climate)
        interest = 0.62 + 0.3 * away.strength + (0.2 if self.derby else 0.0) + rng.gauss(0, 0.06)
        self.crowd = int(home.capacity * min(max(interest, 0.25), 1.0)) // 10 * 10
        if self.derby and self.crowd > 0.9 * home.capacity:
            self.crowd = home.capacity
        number = rng.randrange(1, 2 * len(league.clubs) - 1)
        self.slots = {
            **home.slots("home"),
            **away.slots("away"),
            "venue": home.ground,
            "crowd": f"{self.crowd:,}",
            "league": league.name,
            "round": str(number),
            "next": str(number + 1),
            "day": SHARED.days[skewed(rng, len(SHARED.days), 2)],
            "region": home.region.name,
        }

    def team(self, side: int) -> dict[str, str]:
        """Slots as seen from one side: 0 home, 1 away."""
        own, other = self.clubs[side], self.clubs[1 - side]
        slots = {"team": own.short, "nick": own.nick, "boss": own.coach.last}
        return slots | {"oshort": other.short, "onick": other.nick, "oboss": other.coach.last}

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
