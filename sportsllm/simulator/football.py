"""Association football: ninety minutes, goals with makers and reasons, saves and cards, told live and in a report."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from sportsllm.simulator.telling import Ask, Scene, counted, near, nth
from sportsllm.simulator.world import Club, Person, skewed, weighted, words, world

_GOALS = {"header": 2.2, "long": 1.2, "near": 2.6, "solo": 0.9, "freekick": 0.3}
_MEANS = {"goal": 1.35, "save": 2.3, "miss": 2.5, "corner": 1.3, "card": 1.2}  # of a side in a match
Score = tuple[int, int]  # home and away


class Match:
    """Two clubs, the day and the place."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.league = rng, rng.choice(list(world().leagues))
        self.rivals = world().leagues[self.league]
        home, away = rng.choices(self.rivals, [1 / (2 + rank) for rank in range(len(self.rivals))], k=2)
        while away is home:
            away = rng.choice(self.rivals)
        self.clubs: tuple[Club, Club] = (home, away)
        self.edge = home.strength - away.strength + 0.15
        self.weather = weighted(rng, home.region.climate)
        interest = 0.62 + 0.3 * away.strength + rng.gauss(0, 0.06)
        self.crowd = int(home.capacity * min(max(interest, 0.25), 1.0)) // 10 * 10

    def running(self, score: Score) -> str:
        """The score between the two names, home side first."""
        return f"{self.clubs[0].short} {score[0]}-{score[1]} {self.clubs[1].short}"

    def slots(self, score: Score) -> dict[str, str]:
        """Slots for every sentence; after a draw the home side stands as the winner."""
        first, number = 0 if score[0] >= score[1] else 1, self.rng.randrange(1, 2 * len(self.rivals) - 1)
        roles = zip(
            ("home", "away", "win", "lose"), (*self.clubs, self.clubs[first], self.clubs[1 - first]), strict=True
        )
        slots = {role + name: value for role, club in roles for name, value in club.slots.items()}
        slots |= {"venue": self.clubs[0].ground, "crowd": f"{self.crowd:,}", "league": self.league}
        slots |= {"round": str(number), "next": str(number + 1), "place": "away from home" if first else "at home"}
        slots |= {"score": f"{max(score)}-{min(score)}", "final": self.running(score)}
        return slots | {"day": words().days[skewed(self.rng, len(words().days), 2)]}


@dataclass(frozen=True)
class Event:
    """One thing that happens, with the score after it.

    `how` a goal came is empty for other events; `nth` of a goal is its number among the player's, 0 for an own goal.
    """

    minute: int
    kind: str
    side: int
    player: Person
    other: Person
    score: Score
    how: str
    nth: int

    @property
    def state(self) -> str:
        """What a goal does to the score, as the end of a rule's name."""
        own, other = self.score[self.side], self.score[1 - self.side]
        if own + other == 1:
            return "opener"
        far = "stretch" if own > other else "console"
        return {2: "double", 1: "ahead", 0: "level", -1: "close"}.get(own - other, far)


def _moments(match: Match) -> list[tuple[int, str, int]]:
    """When something happens (at most once a minute), of which kind, and on which side."""
    rng, found = match.rng, list[tuple[int, str, int]]()
    for side, edge in ((0, match.edge), (1, -match.edge)):
        for kind, usual in _MEANS.items():
            mean = max(0.25, usual * (1 + 0.6 * edge))
            for _ in range(sum(rng.random() < mean / 10 for _ in range(10))):
                found.append((2 + skewed(rng, 88, 0.85), kind, side))  # later ones are likelier, as legs tire
    return [moment for last, moment in pairwise([(0, "", 0), *sorted(found)]) if moment[0] > last[0]]


def _events(match: Match) -> list[Event]:
    """Every moment with its players, the ones who score most most often; nobody is booked twice."""
    rng, score, booked, goals, events = match.rng, [0, 0], set[Person](), Counter[Person](), list[Event]()
    for minute, kind, side in _moments(match):
        club, rivals, how = match.clubs[side], match.clubs[1 - side].squad, ""
        player = rng.choices(club.squad, [one.weight for one in club.squad])[0]
        other = rng.choice([one for one in club.squad[1:] if one is not player])
        if kind == "card":
            player, other = club.squad[1 + skewed(rng, 10, 1.6)], rivals[-1 - skewed(rng, 4, 1.5)]
            if player in booked:
                continue
            booked.add(player)
        if kind == "goal":
            score[side] += 1
            liked = Counter(_GOALS) + Counter({player.trait: 6.0}) + Counter({club.style: 4.0})
            how, draw = weighted(rng, liked), rng.random()
            if draw < 0.09:
                how = "pen"
            elif draw > 0.975:
                how, player, other = "own", rivals[1 + skewed(rng, 4, 1)], player
            goals[player] += how != "own"
        number = goals[player] if how not in ("", "own") else 0
        events.append(Event(minute, kind, side, player, other, (score[0], score[1]), how, number))
    return events


class _Teller:
    """Tells the events twice: minute by minute, and again in the report."""

    def __init__(self, match: Match, scene: Scene, events: list[Event]) -> None:
        self.match, self.scene, self.events = match, scene, events
        self.goals = [event for event in events if event.kind == "goal"]

    def say(self, rule: str, event: Event) -> str:
        """A sentence about an event."""
        own, other, minute = self.match.clubs[event.side], self.match.clubs[1 - event.side], event.minute
        moments = [f"in the {nth(minute)} minute", f"on {minute} minutes"]
        moments += [f"{90 - minute} minutes from time" if 70 <= minute < 89 else f"after {minute} minutes"]
        slots = {"team": own.short, "nick": own.nick, "oshort": other.short, "onick": other.nick}
        slots |= {"keeper": other.squad[0].last, "min": str(minute), "when": moments[skewed(self.scene.rng, 3, 1.2)]}
        slots |= {"kind": event.how, "state": event.state, "tally": f"{event.score[0]}-{event.score[1]}"}
        slots["running"] = self.match.running(event.score)
        return self.scene.say(rule, slots, of=(event.player, event.other))

    def live(self) -> Iterator[str]:
        """Minute by minute."""
        yield self.scene.say("kickoff")
        score, half = (0, 0), False
        for event in [*self.events, None]:
            if not half and (event is None or event.minute > 45):
                half = True
                yield self.scene.say("half", {"running": self.match.running(score)})
            if event is not None:
                score, line = event.score, self.say(event.kind, event)
                yield f"{line} {self.say(f'tally{event.nth}', event)}" if event.nth in (2, 3) else line
        yield self.scene.say("full")

    def report(self) -> Iterator[str]:
        """The goals again, in the past tense, and the player with most of them."""
        for event in self.goals:
            yield self.say("tell_own" if event.how == "own" else f"tell_{event.state}", event)
        if not self.goals:
            yield self.scene.say("no_goals")
        elif (best := max(self.goals, key=lambda event: event.nth)).nth > 0:
            feat = {"feat": counted(best.nth, "goal"), "team": self.match.clubs[best.side].short}
            yield self.scene.say("best", feat, of=(best.player,))

    def statistics(self) -> Iterator[str]:
        """Counts that add up with the minute-by-minute text."""
        count = Counter((event.kind, event.side) for event in self.events if event.how != "own")
        target = [count["goal", side] + count["save", side] for side in (0, 1)]
        rows = {"Shots": [target[side] + count["miss", side] for side in (0, 1)], "Shots on target": target}
        rows |= {"Saves": [count["save", 1], count["save", 0]], "Corners": [count["corner", 0], count["corner", 1]]}
        rows["Yellow cards"] = [count["card", side] for side in (0, 1)]
        for title, (left, right) in rows.items():
            yield f"{title}: {self.match.clubs[0].short} {left}, {self.match.clubs[1].short} {right}"


def _asks(match: Match, events: list[Event], score: Score, text: str) -> Iterator[Ask]:
    """The result, the place where the text names it, and the goals."""
    (home, away), (left, right), crowd = match.clubs, score, match.crowd
    everyone = (home.short, "Neither, it was a draw", away.short, "It was called off")
    winner = everyone[1 + (right > left) - (left > right)]
    yield Ask("winner", f"Who won, {home.short} or {away.short}?", winner, everyone)
    if (final := match.running(score)) in text:
        close = [(right, left), *((left + i, right + j) for i in (-1, 0, 1, 2) for j in (-1, 0, 1, 2))]
        others = [match.running(each) for each in close if min(each) >= 0]
        yield Ask("final_score", "What was the final score?", final, others)
        yield Ask("total", "How many goals did the two teams score together?", str(left + right), near(left + right))
    if home.ground in text:
        yield Ask("venue", "Where was it played?", home.ground, [club.ground for club in match.rivals])
    if f"{crowd:,}" in text:
        sizes = [f"{crowd + step:,}" for step in (-1200, -750, -310, 140, 480, 1050)]
        yield Ask("crowd", "How many people watched?", f"{crowd:,}", sizes)
    goals = [event for event in events if event.kind == "goal"]
    names = [player.name for club in match.clubs for player in club.squad]
    tally = Counter(goal.player for goal in goals)
    if all(goal.nth for goal in goals):  # no own goal
        for place, goal in zip(("first", "last"), goals[:1] + goals[-1:], strict=False):
            yield Ask(f"{place}_scorer", f"Who scored the {place} goal?", goal.player.name, names)
    for goal in [goal for goal in goals if tally[goal.player] == 1][:1]:
        minutes = [str(goal.minute + step) for step in (-9, -4, -2, 3, 6, 11) if 0 < goal.minute + step < 90]
        yield Ask("minute", f"In which minute did {goal.player.name} score?", str(goal.minute), minutes)


def play(rng: Random) -> tuple[str, list[Ask]]:
    """One match: some of headline, preview, the match as it happened, report, quotes and statistics; and questions.

    A headline over a live text does not give the result away, so that what follows has to be followed.
    """
    match = Match(rng)
    events = _events(match)
    score = events[-1].score if events else (0, 0)
    kind = ("draw", "narrow", "easy", "easy", "rout")[min(abs(score[0] - score[1]), 4)]
    scene = Scene(rng, "football", match.clubs[rng.random() < 0.15].writer, match.slots(score))
    teller, live, report = _Teller(match, scene, events), rng.random() < 0.62, rng.random() < 0.8
    parts = [scene.say("title_open" if live else f"title_{kind}"), scene.say("byline")]
    if live:
        parts += [scene.say("preview")] if rng.random() < 0.5 else []
        parts.append("\n".join(teller.live()))
    if report or not live:
        scene.met.clear()
        parts.append(" ".join(scene.say(rule) for rule in (f"lead_{kind}", f"weather_{match.weather}", "crowd")))
        parts.append(" ".join(teller.report()))
        parts.append(f"{scene.say(f'quotes_{kind}')} {scene.say('next')}")
        parts.append(f"Final score: {match.running(score)}")
    if not live or rng.random() < 0.5:
        parts.append("\n".join(teller.statistics()))
    text = "\n\n".join(parts)
    return text, list(_asks(match, events, score, text))
