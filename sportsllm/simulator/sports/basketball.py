"""Basketball: every possession is played, the telling ones are told, and the box score adds up."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from sportsllm.simulator.draws import skewed
from sportsllm.simulator.grammar import grammar
from sportsllm.simulator.scene import Scene
from sportsllm.simulator.sports.fixture import Fixture, scorer
from sportsllm.simulator.sports.report import compose, open_scene, result_kind
from sportsllm.simulator.wording import nth, summed
from sportsllm.simulator.world import Person

_VALUE = {"three": 3, "drive": 2, "post": 2, "jumper": 2, "dunk": 2, "free": 1}
_PER_QUARTER = 21  # possessions of each side
_LONG_RUN = 7  # points in a row that are worth a mention
Score = tuple[int, int]
Box = list[list[tuple[Person, int]]]  # of each side, the points of every player who scored, most first


@dataclass(slots=True)
class Basket:
    """One basket: when, by whom, the score after it, and the points in a row it makes."""

    period: int
    seconds_left: int
    side: int
    player: Person
    kind: str
    score: Score
    run: int

    @property
    def leads(self) -> tuple[int, int]:
        """By how much the side that scored led before and after it."""
        lead = self.score[self.side] - self.score[1 - self.side]
        return lead - _VALUE[self.kind], lead


def _how(rng: Random, player: Person, threes: float) -> str:
    """Mostly the player's favourite; some clubs shoot more threes."""
    draw = rng.random()
    if draw < 0.45:
        return player.trait
    if draw < 0.45 + threes:
        return "three"
    return ("drive", "jumper", "post", "free", "dunk")[skewed(rng, 5, 1.4)]


def _quarter(rng: Random, match: Fixture, baskets: list[Basket], period: int, seconds: int) -> None:
    """Add the baskets of one period, the sides taking turns."""
    turns = 2 * _PER_QUARTER * seconds // 600
    first = skewed(rng, 2, 1)
    for turn in range(turns):
        side = (turn + first) % 2
        club, edge = match.clubs[side], match.edge if side == 0 else -match.edge
        stop = 0.04 if match.clubs[1 - side].style == "defence" else 0.0
        if rng.random() > 0.44 + 0.075 * edge - stop:
            continue
        player = scorer(rng, club)
        kind = _how(rng, player, 0.22 if club.style == "threes" else 0.1)
        left = seconds - int((turn + 0.2 + 0.7 * rng.random()) * seconds / turns)
        before = baskets[-1].score if baskets else (0, 0)
        score = (before[0] + _VALUE[kind] * (side == 0), before[1] + _VALUE[kind] * (side == 1))
        run = _VALUE[kind] + (baskets[-1].run if baskets and baskets[-1].side == side else 0)
        baskets.append(Basket(period, left, side, player, kind, score, run))


def _game(rng: Random, match: Fixture) -> tuple[list[Basket], list[Score]]:
    """All baskets, and the score at the end of every period; level scores go to overtime."""
    baskets, ends = list[Basket](), list[Score]()
    while len(ends) < 4 or ends[-1][0] == ends[-1][1]:
        _quarter(rng, match, baskets, len(ends) + 1, 600 if len(ends) < 4 else 300)
        ends.append(baskets[-1].score if baskets else (0, 0))
    return baskets, ends


def _told(baskets: list[Basket]) -> list[Basket]:
    """The baskets worth a line: ends of long runs, the first and last of a period, ties and turns."""
    told = []
    for index, basket in enumerate(baskets):
        last = baskets[index - 1] if index else None
        following = baskets[index + 1] if index + 1 < len(baskets) else None
        run_ends = basket.run >= _LONG_RUN and (following is None or following.side != basket.side)
        edge = last is None or last.period != basket.period or following is None or following.period != basket.period
        turn = basket.leads[0] * basket.leads[1] <= 0 and (index % 3 == 0 or basket.period > 3)
        if run_ends or edge or turn:
            told.append(basket)
    return told


def _line(scene: Scene, match: Fixture, basket: Basket, opener: bool) -> str:
    """One basket: the time, how it was scored, and the new score."""
    club, rival = match.clubs[basket.side], match.clubs[1 - basket.side]
    other = scorer(scene.rng, club)
    while other is basket.player:
        other = scorer(scene.rng, club)
    slots = {**match.team(basket.side), **scene.person(basket.player), **scene.second(other)}
    slots["d"] = rival.squad[club.squad.index(basket.player) % 5].last
    slots["running"] = match.running(basket.score)
    slots["length"] = str(basket.run)
    period = f"Q{basket.period}" if basket.period < 5 else "OT"
    clock = f"{period} {basket.seconds_left // 60}:{basket.seconds_left % 60:02d}"
    before, lead = basket.leads
    rule = "tie" if lead == 0 else "swing" if before <= 0 < lead and not opener else "now"
    line = f"{clock} {scene.say('how_' + basket.kind, slots)} {scene.say(rule, slots)}"
    return line if basket.run < _LONG_RUN else f"{line} {scene.say('run', slots)}"


def _ticker(scene: Scene, match: Fixture, baskets: list[Basket], ends: list[Score]) -> str:
    """The telling baskets with the running score, and the score after every quarter."""
    lines, period = [scene.say("tip", match.team(baskets[0].side))], 1
    for basket in _told(baskets):
        while basket.period > period:
            slots = {"nth": nth(period), "running": match.running(ends[period - 1])}
            lines.append(scene.say("again" if period == 4 else "quarter", slots))
            period += 1
        lines.append(_line(scene, match, basket, opener=basket is baskets[0]))
    lines.append(scene.say("full"))
    return "\n".join(lines)


def _box(match: Fixture, baskets: list[Basket]) -> Box:
    points = Counter[str]()
    for basket in baskets:
        points[basket.player.name] += _VALUE[basket.kind]
    found = [[(player, points[player.name]) for player in club.squad if points[player.name]] for club in match.clubs]
    return [sorted(side, key=lambda item: -item[1]) for side in found]


def _story(scene: Scene, match: Fixture, ends: list[Score], box: Box) -> list[str]:
    """Quarter by quarter, then the best of both sides."""
    told = []
    for period, (last, end) in enumerate(pairwise([(0, 0), *ends]), 1):
        part = (end[0] - last[0], end[1] - last[1])
        slots = {"nth": nth(period), "part": f"{max(part)}-{min(part)}", "running": match.running(end)}
        slots["team"] = match.clubs[int(part[1] > part[0])].short
        if period > 4 and part[0] != part[1]:
            told.append(scene.say("extra_story", slots))
        elif period < 5:
            told.append(scene.say("drawn_quarter" if part[0] == part[1] else "won_quarter", slots))
    first = 0 if box[0][0][1] >= box[1][0][1] else 1
    for side, rule in ((first, "star"), (1 - first, "other_star")):
        (best, points), (second, more) = box[side][:2]
        slots = {**scene.person(best), **scene.second(second), "points": str(points), "more": str(more)}
        slots["team"] = match.clubs[side].short
        told.append(scene.say(rule, slots))
        slots["p"] = best.last
        told.append(scene.say("support", slots))
    return told


def _statistics(match: Fixture, ends: list[Score], box: Box) -> str:
    """Quarters and points per player, both of which sum to the final score."""
    lines = []
    for side, club in enumerate(match.clubs):
        parts = [end[side] - last[side] for last, end in pairwise([(0, 0), *ends])]
        lines.append(f"{club.short} by quarter: {summed(parts)}")
    for side, club in enumerate(match.clubs):
        lines.append(f"{club.short}: " + ", ".join(f"{player.last} {points}" for player, points in box[side]))
    return "\n".join(lines)


def _asks(text: str, match: Fixture, half: Score, box: Box) -> list[list[Any]]:
    """The best scorer, the points, and the score at half-time, where the text gives them."""
    asks: list[list[Any]] = []
    (best, points), (_, fewer) = sorted((box[0][0], box[1][0]), key=lambda item: -item[1])
    if best.name in text and points > fewer and f"{points} points" in text:
        names = [player.name for club in match.clubs for player in club.squad]
        asks.append(["top_scorer", "Who scored the most points?", best.name, names])
        near = [str(points + step) for step in (-5, -3, -2, 2, 4, 6)]
        asks.append(["points", f"How many points did {best.name} score?", str(points), near])
    if match.running(half) in text:
        spread = [match.running((half[0] + i, half[1] + j)) for i in (-3, 0, 2) for j in (-2, 0, 4)]
        asks.append(["half_time", "What was the score at half-time?", match.running(half), spread])
    return asks


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One game: its text and its facts."""
    match = Fixture(rng, "basketball")
    baskets, ends = _game(rng, match)
    box = _box(match, baskets)
    scene = open_scene(match, grammar("basketball", "common"), ends[-1])
    text = compose(
        scene,
        match,
        result_kind(ends[-1], clear=6, rout=22),
        live=lambda: _ticker(scene, match, baskets, ends),
        story=lambda: _story(scene, match, ends, box),
        statistics=lambda: _statistics(match, ends, box),
    )
    return text, {
        **match.facts(ends[-1]),
        "scoring": [],
        "total": "points",
        "quarters": [list(end) for end in ends],
        "box": [[[player.name, points] for player, points in side] for side in box],
        "asks": _asks(text, match, ends[1], box),
    }
