"""Association football: ninety minutes, goals with makers and reasons, saves, cards, changes and a report."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from sportsllm.simulator.draws import poisson, skewed, weighted
from sportsllm.simulator.grammar import grammar
from sportsllm.simulator.scene import Scene
from sportsllm.simulator.sports.fixture import Fixture, scorer
from sportsllm.simulator.sports.report import compose, open_scene, result_kind
from sportsllm.simulator.wording import counted, nth, number
from sportsllm.simulator.world import Club, Person

_KINDS = {"header": 2.2, "long": 1.2, "near": 2.6, "solo": 0.9, "volley": 0.6, "left": 0.4, "freekick": 0.3}
_TRAIT_KIND = {"close": "near", "left foot": "left", "free kick": "freekick"}
_STYLE_KIND = {
    "counter": "counter",
    "set pieces": "header",
    "possession": "near",
    "direct": "volley",
    "pressing": "long",
}
_ORDER = ("goal", "save", "miss", "corner", "card", "red", "sub")  # within a minute
Moment = tuple[int, str, int]  # minute, kind, side
Goal = tuple[str, Person, Person]  # how it came, who scored it, who else had a part


@dataclass(slots=True)
class Event:
    """One thing that happens, with the score after it.

    `how` a goal came is empty for other events; `nth` of a goal is its number among the player's, 0 for an own goal.
    """

    minute: int
    kind: str
    side: int
    player: Person
    other: Person
    score: tuple[int, int]
    how: str
    nth: int


def _goal_kind(rng: Random, player: Person, club: Club) -> str:
    """Players score the way they like to, in the way their club likes to play."""
    weights = dict(_KINDS)
    for kind, more in ((_TRAIT_KIND.get(player.trait, player.trait), 6.0), (_STYLE_KIND[club.style], 4.0)):
        weights[kind] = weights.get(kind, 0.0) + more
    return weighted(rng, weights)


def _moments(rng: Random, match: Fixture) -> list[Moment]:
    """When something happens and of which kind, at most once a minute."""
    weather = -0.25 if match.weather in ("snow", "wind", "fog") else 0.0
    found: list[Moment] = []
    for side, edge in ((0, match.edge), (1, -match.edge)):
        strong = max(0.25, 1.35 + 0.9 * edge + weather)
        means = {"goal": strong, "save": 1.0 + strong, "miss": 1.2 + strong, "corner": 0.6 + 0.5 * strong}
        means |= {"card": 1.2 - 0.3 * edge, "red": 0.04}
        for kind, mean in means.items():
            for _ in range(min(poisson(rng, mean), 7)):
                minute = 2 + skewed(rng, 88, 0.85)  # later ones are likelier, as legs tire
                found.append((minute, kind, side))
        for _ in range(2 if rng.random() < 0.7 else 1):
            found.append((55 + rng.randrange(30), "sub", side))
    found.sort(key=lambda moment: (moment[0], _ORDER.index(moment[1])))
    return [moment for last, moment in pairwise([(0, "", 0), *found]) if moment[0] > last[0]]


def _goal(rng: Random, club: Club, player: Person, other: Person, mine: list[Person], theirs: list[Person]) -> Goal:
    """How a goal comes, who scores it and who has the other part in it."""
    how, draw = _goal_kind(rng, player, club), rng.random()
    if draw < 0.09:
        taker = max(mine, key=lambda one: one.skill if one.weight else -9.0)
        return "pen", taker, player if taker is other else other
    if draw > 0.975:
        return "own", theirs[1 + skewed(rng, 4, 1)], player
    return how, player, other


def _events(rng: Random, match: Fixture) -> list[Event]:
    """Give every moment its players; nobody acts after leaving the field."""
    moments = _moments(rng, match)
    # The ninth of the squad starts on the bench, so that both strikers are among the eleven on the field.
    on = [[*club.squad[:8], *club.squad[9:12]] for club in match.clubs]
    bench = [[club.squad[8], *club.squad[12:]] for club in match.clubs]
    score, booked, goals, events = [0, 0], set[str](), Counter[str](), list[Event]()
    for minute, kind, side in moments:
        how, club, mine, theirs = "", match.clubs[side], on[side], on[1 - side]
        player = scorer(rng, club)
        while player not in mine:
            player = scorer(rng, club)
        other = mine[1 + skewed(rng, len(mine) - 1, 0.7)]
        if other is player:
            other = mine[1] if player is not mine[1] else mine[2]
        if kind == "goal":
            how, player, other = _goal(rng, club, player, other, mine, theirs)
            score[side] += 1
            goals[player.name] += how != "own"
        elif kind in ("card", "red"):
            player = mine[1 + skewed(rng, len(mine) - 1, 1.6)]
            if player.last in booked or len(mine) < 11:
                continue
            booked.add(player.last)
            other = theirs[-1 - skewed(rng, 4, 1.5)]
            if kind == "red":
                mine.remove(player)
        elif kind == "sub":
            other = mine[-1 - skewed(rng, 6, 1)]
            player = bench[side].pop(skewed(rng, 2, 1))
            mine[mine.index(other)] = player
        nth_goal = 0 if how == "own" else goals[player.name]
        events.append(Event(minute, kind, side, player, other, (score[0], score[1]), how, nth_goal))
    return events


def _state(own: int, other: int) -> str:
    """The effect of a goal that made it own-other, as the end of a rule's name."""
    if (own, other) == (1, 0):
        return "opener"
    far = "stretch" if own > other else "console"
    return {2: "double", 1: "ahead", 0: "level", -1: "close"}.get(own - other, far)


class _Teller:
    """Tells the events twice: minute by minute, and again in the report."""

    def __init__(self, match: Fixture, scene: Scene, events: list[Event]) -> None:
        self.match, self.scene, self.events = match, scene, events
        self.teams = [{**match.team(side), "keeper": match.clubs[1 - side].squad[0].last} for side in (0, 1)]

    def _slots(self, event: Event) -> dict[str, str]:
        slots = {**self.teams[event.side], **self.scene.person(event.player), **self.scene.second(event.other)}
        slots["min"] = str(event.minute)
        if event.kind == "goal":
            slots |= {"running": self.match.running(event.score), "tally": f"{event.score[0]}-{event.score[1]}"}
        return slots

    def _when(self, minute: int) -> dict[str, str]:
        """The same moment in a few ways."""
        draw = self.scene.rng.random()
        if draw < 0.45:
            return {"when": f"in the {nth(minute)} minute"}
        if draw < 0.8:
            return {"when": f"on {minute} minutes" if minute > 12 else f"after {number(minute)} minutes"}
        late = f"{90 - minute} minutes from time"
        return {"when": late if 70 <= minute < 89 else f"after {number(minute)} minutes"}

    def ticker(self) -> str:
        """Minute by minute."""
        say, score, half = self.scene.say, (0, 0), False
        lines = [say("kickoff")]
        for event in self.events:
            if not half and event.minute > 45:
                half = True
                lines.append(say("half", {"running": self.match.running(score)}))
            slots, score = self._slots(event), event.score
            if event.kind != "goal":
                lines.append(say(event.kind, slots))
                continue
            line = [say(f"goal_{event.how}", slots)]
            line.append(say(f"now_{_state(score[event.side], score[1 - event.side])}", slots))
            if event.nth in (2, 3, 4):
                line.append(say(f"tally{event.nth}", slots))
            lines.append(" ".join(line))
        if not half:
            lines.append(say("half", {"running": self.match.running(score)}))
        lines.append(say("full"))
        return "\n".join(lines)

    def story(self) -> list[str]:
        """The goals and sendings-off again, in the past tense."""
        say, score, half, told = self.scene.say, (0, 0), False, list[str]()
        for event in self.events:
            if not half and event.minute > 45 and score != (0, 0):
                half = True
                told.append(say("interval", {"running": self.match.running(score)}))
            score = event.score
            if event.kind == "red":
                slots = self._slots(event)
                told.append(say("sent", slots, self._when(event.minute)))
            if event.kind == "goal":
                slots, state = self._slots(event), _state(score[event.side], score[1 - event.side])
                rule = "told_own" if event.how == "own" else f"tell_{state}_{event.how}"
                told.append(say(rule, slots, self._when(event.minute)))
        return told or [say("no_goals")]


def _best_player(events: list[Event]) -> tuple[Person, int, str] | None:
    """Whoever had the largest hand in the goals (a goal is worth two assists); nobody without any."""
    goals, assists = Counter[str](), Counter[str]()
    found: dict[str, tuple[Person, int]] = {}
    for event in events:
        if event.kind != "goal" or event.how == "own":
            continue
        goals[event.player.name] += 1
        found.setdefault(event.player.name, (event.player, event.side))
        if event.how not in ("pen", "freekick"):
            assists[event.other.name] += 1
            found.setdefault(event.other.name, (event.other, event.side))
    if not found:
        return None
    name = max(found, key=lambda one: (2 * goals[one] + assists[one], goals[one]))
    feats = [counted(tally[name], noun) for tally, noun in ((goals, "goal"), (assists, "assist")) if tally[name]]
    return (*found[name], " and ".join(feats))


def _statistics(match: Fixture, events: list[Event], rng: Random) -> str:
    """Counts that add up with the minute-by-minute text."""
    count = Counter((event.kind, event.side) for event in events if event.how != "own")
    target = [count["goal", side] + count["save", side] for side in (0, 1)]
    share = int(50 + 9 * match.edge + rng.gauss(0, 3)) + (4 if match.home.style == "possession" else 0)
    share = min(max(share, 30), 70)
    rows = {
        "Shots": [target[side] + count["miss", side] for side in (0, 1)],
        "Shots on target": target,
        "Saves": [count["save", 1], count["save", 0]],
        "Corners": [count["corner", side] for side in (0, 1)],
        "Yellow cards": [count["card", side] for side in (0, 1)],
    }
    lines = [f"{title}: {match.home.short} {left}, {match.away.short} {right}" for title, (left, right) in rows.items()]
    lines.append(f"Possession: {match.home.short} {share}%, {match.away.short} {100 - share}%")
    return "\n".join(lines)


def _fact(goal: Event) -> dict[str, Any]:
    who = {"team": goal.side, "player": goal.player.name, "kind": goal.how}
    return {"minute": goal.minute, **who, "score": list(goal.score), "points": 1}


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One match: its text and its facts."""
    match = Fixture(rng, "football")
    events = _events(rng, match)
    score = events[-1].score if events else (0, 0)
    scene = open_scene(match, grammar("football", "common"), score)
    scene.slots["homekeeper"], scene.slots["awaykeeper"] = match.home.squad[0].name, match.away.squad[0].name
    scene.slots["wingoals"] = number(max(score))
    teller = _Teller(match, scene, events)
    text = compose(
        scene,
        match,
        result_kind(score, clear=2, rout=4),
        live=teller.ticker,
        story=teller.story,
        statistics=lambda: _statistics(match, events, rng),
        best=_best_player(events),
    )
    goals = [_fact(event) for event in events if event.kind == "goal"]
    return text, {**match.facts(score), "scoring": goals, "total": "goals"}
