"""Basketball: every possession is played, the telling ones are told, and the box score adds up."""

from random import Random
from typing import Any

from sportsllm.simulator.basketball_text import BASKETBALL
from sportsllm.simulator.common_text import COMMON
from sportsllm.simulator.frame import compose, open_scene
from sportsllm.simulator.grammar import Grammar
from sportsllm.simulator.scene import Fixture, Scene, nth, scorer
from sportsllm.simulator.world import Person

GRAMMAR = Grammar(COMMON, BASKETBALL)
_VALUE = {"three": 3, "drive": 2, "post": 2, "jumper": 2, "dunk": 2, "free": 1}
_PER_QUARTER = 21  # possessions of each side
Happening = dict[str, Any]


def _how(rng: Random, player: Person, threes: float) -> str:
    """Mostly what the player likes best; some clubs shoot more threes."""
    draw = rng.random()
    if draw < 0.45:
        return player.trait
    if draw < 0.45 + threes:
        return "three"
    return ("drive", "jumper", "post", "free", "dunk")[int(rng.random() ** 1.4 * 5)]


def _quarter(rng: Random, match: Fixture, period: int, score: list[int], seconds: int) -> list[Happening]:
    """The baskets of one period, the sides taking turns."""
    baskets = []
    turns = 2 * _PER_QUARTER * seconds // 600
    first = int(rng.random() * 2)
    for turn in range(turns):
        side = (turn + first) % 2
        club, edge = match.clubs[side], match.edge if side == 0 else -match.edge
        stop = 0.04 if match.clubs[1 - side].style == "defence" else 0.0
        if rng.random() > 0.44 + 0.075 * edge - stop:
            continue
        player = scorer(rng, club)
        kind = _how(rng, player, 0.22 if club.style == "threes" else 0.1)
        score[side] += _VALUE[kind]
        left = seconds - int((turn + 0.2 + 0.7 * rng.random()) * seconds / turns)
        baskets.append(
            {
                "period": period,
                "left": left,
                "side": side,
                "player": player,
                "kind": kind,
                "score": tuple(score),
            }
        )
    return baskets


def _game(rng: Random, match: Fixture) -> tuple[list[Happening], list[tuple[int, int]]]:
    """All baskets, and the score at the end of every period; level scores go to overtime."""
    score, baskets, ends = [0, 0], list[Happening](), list[tuple[int, int]]()
    while len(ends) < 4 or score[0] == score[1]:
        baskets += _quarter(rng, match, len(ends) + 1, score, 600 if len(ends) < 4 else 300)
        ends.append((score[0], score[1]))
    last, run, before = -1, 0, (0, 0)
    for basket in baskets:
        run = (run if basket["side"] == last else 0) + _VALUE[basket["kind"]]
        basket["run"], basket["before"] = run, before
        last, before = basket["side"], basket["score"]
    return baskets, ends


def _told(baskets: list[Happening]) -> list[Happening]:
    """The baskets worth a line: ends of long runs, the first and last of a period, ties and turns."""
    told = []
    for index, basket in enumerate(baskets):
        following = baskets[index + 1] if index + 1 < len(baskets) else None
        run_ends = basket["run"] >= 7 and (following is None or following["side"] != basket["side"])
        edge = following is None or following["period"] != basket["period"]
        edge = edge or index == 0 or baskets[index - 1]["period"] != basket["period"]
        left, right = basket["score"]
        lead, before = left - right, basket["before"][0] - basket["before"][1]
        turn = lead * before <= 0 and (index % 3 == 0 or basket["period"] > 3)
        if run_ends or edge or turn:
            told.append(basket)
    return told


def _ticker(scene: Scene, match: Fixture, baskets: list[Happening], ends: list[tuple[int, int]]) -> str:
    """The telling baskets with the running score, and the score after every quarter."""
    team = [{**match.team(side), "team": match.clubs[side].short} for side in (0, 1)]
    lines, period = [scene.say("tip", team[baskets[0]["side"]])], 1
    for basket in _told(baskets):
        while basket["period"] > period:
            rule = "again" if period == 4 else "quarter"
            lines.append(scene.say(rule, {"nth": nth(period), "running": match.running(ends[period - 1])}))
            period += 1
        club, rival = match.clubs[basket["side"]], match.clubs[1 - basket["side"]]
        other = scorer(scene.rng, club)
        while other is basket["player"]:
            other = scorer(scene.rng, club)
        slots = {**team[basket["side"]], **scene.person(basket["player"]), **scene.second(other)}
        slots["d"] = rival.squad[club.squad.index(basket["player"]) % 5].last
        slots["running"] = match.running(basket["score"])
        name = f"Q{period}" if period < 5 else "OT"
        slots["clock"] = f"{name} {basket['left'] // 60}:{basket['left'] % 60:02d}"
        lead = (basket["score"][0] - basket["score"][1]) * (1 if basket["side"] == 0 else -1)
        before = lead - _VALUE[basket["kind"]]
        rule = "tie" if lead == 0 else "swing" if before <= 0 < lead and basket is not baskets[0] else "now"
        line = f"{slots['clock']} {scene.say('how_' + basket['kind'], slots)} {scene.say(rule, slots)}"
        if basket["run"] >= 7:
            line += " " + scene.say("run", slots, {"length": str(basket["run"])})
        lines.append(line)
    lines.append(scene.say("full"))
    return "\n".join(lines)


def _box(match: Fixture, baskets: list[Happening]) -> list[list[tuple[Person, int]]]:
    """Points of every player who scored, most first."""
    out = []
    for side, club in enumerate(match.clubs):
        points = dict.fromkeys((player.name for player in club.squad), 0)
        for basket in baskets:
            if basket["side"] == side:
                points[basket["player"].name] += _VALUE[basket["kind"]]
        found = [(player, points[player.name]) for player in club.squad if points[player.name]]
        out.append(sorted(found, key=lambda item: -item[1]))
    return out


def _story(scene: Scene, match: Fixture, ends: list[tuple[int, int]], box: list[list[tuple[Person, int]]]) -> list[str]:
    """Quarter by quarter, then the best of both sides."""
    told, last = [], (0, 0)
    for period, end in enumerate(ends, 1):
        part = (end[0] - last[0], end[1] - last[1])
        last = end
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


def _statistics(match: Fixture, ends: list[tuple[int, int]], box: list[list[tuple[Person, int]]]) -> str:
    """Quarters and points per player, both of which sum to the final score."""
    lines = []
    for side, club in enumerate(match.clubs):
        parts = [end[side] - last[side] for last, end in zip([(0, 0), *ends[:-1]], ends, strict=True)]
        lines.append(f"{club.short} by quarter: {' + '.join(map(str, parts))} = {ends[-1][side]}")
    for side, club in enumerate(match.clubs):
        lines.append(f"{club.short}: " + ", ".join(f"{player.last} {points}" for player, points in box[side]))
    return "\n".join(lines)


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One game: its text and its facts."""
    match = Fixture(rng, "basketball")
    baskets, ends = _game(rng, match)
    box = _box(match, baskets)
    kind, scene = open_scene(match, GRAMMAR, ends[-1], clear=6, rout=22)
    text = compose(
        scene,
        match,
        kind,
        live=lambda: _ticker(scene, match, baskets, ends),
        story=lambda: _story(scene, match, ends, box),
        statistics=lambda: _statistics(match, ends, box),
    )
    names = [player.name for club in match.clubs for player in club.squad]
    asks = []
    (best, points), (_, fewer) = sorted((box[0][0], box[1][0]), key=lambda item: -item[1])
    if best.name in text and points > fewer and f"{points} points" in text:
        asks.append(["top_scorer", "Who scored the most points?", best.name, names])
        near = [str(points + step) for step in (-5, -3, -2, 2, 4, 6)]
        asks.append(["points", f"How many points did {best.name} score?", str(points), near])
    half = ends[1]
    if match.running(half) in text:
        spread = [match.running((half[0] + i, half[1] + j)) for i in (-3, 0, 2) for j in (-2, 0, 4)]
        asks.append(["half_time", "What was the score at half-time?", match.running(half), spread])
    facts = match.facts(ends[-1])
    facts["quarters"] = [list(end) for end in ends]
    facts["box"] = [[[player.name, points] for player, points in side] for side in box]
    return text, {
        **facts,
        "scoring": [],
        "unit": "basket",
        "units": "baskets",
        "total": "points",
        "asks": asks,
    }
