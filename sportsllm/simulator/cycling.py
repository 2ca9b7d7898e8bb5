"""A cycling stage race: one stage, its result, and overall times before and after that add up."""

from bisect import bisect
from itertools import accumulate
from random import Random
from typing import Any

from sportsllm.simulator.cycling_text import CYCLING
from sportsllm.simulator.grammar import Grammar
from sportsllm.simulator.scene import Scene, paragraphs
from sportsllm.simulator.world import Club, Person, world

GRAMMAR = Grammar(CYCLING)
_SUITS = {
    "flat": {"sprinter": 9.0, "all-rounder": 2.0, "rouleur": 1.5, "leader": 0.5},
    "hilly": {"all-rounder": 6.0, "leader": 4.0, "climber": 3.0, "rouleur": 2.0, "sprinter": 0.7},
    "mountain": {"climber": 8.0, "leader": 6.0, "all-rounder": 1.5},
}
_SHOWN = 6


def clock(seconds: int) -> str:
    """75 -> 1:15."""
    return f"{seconds // 60}:{seconds % 60:02d}"


def _field(clubs: tuple[Club, ...], terrain: str, days: int) -> list[tuple[Person, Club, float]]:
    """Every rider who may do well on such a stage, with a weight."""
    suits = _SUITS[terrain]
    return [
        (
            rider,
            club,
            max(0.05, suits.get(rider.role, 0.15) * (1.2 + 0.35 * rider.skill + club.strength)) ** 2,
        )
        for club in clubs
        for rider in club.squad
        if days or rider.role in suits
    ]


def _draw(rng: Random, field: list[tuple[Person, Club, float]], count: int) -> list[tuple[Person, Club]]:
    """Different riders, likely ones first."""
    sums = list(accumulate(weight for _, _, weight in field))
    found: dict[str, tuple[Person, Club]] = {}
    while len(found) < count:
        rider, club, _ = field[bisect(sums, rng.random() * sums[-1])]
        found[rider.name] = (rider, club)
    return list(found.values())


def _stage_gaps(rng: Random, terrain: str, count: int) -> list[int]:
    """Seconds behind the winner; a bunch sprint has none."""
    step = {"flat": 0, "hilly": 6, "mountain": 22}[terrain]
    gaps = [0]
    for _ in range(count - 1):
        gaps.append(gaps[-1] + (step // 2 + int(step * rng.random() ** 1.5) if step else 0))
    return gaps


def _overall(
    rng: Random, stage: int, field: list[tuple[Person, Club]], finish: list[int]
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Overall gaps before and after: the new gap is the old one plus the time lost, less the leader's."""
    order = sorted(range(len(field)), key=lambda index: -field[index][0].weight - field[index][0].skill)
    behind = 0
    before: dict[str, int] = {}
    for index in order:
        before[field[index][0].last] = behind
        behind += 3 + int(6 * stage * rng.random() ** 1.5)
    after = {rider.last: before[rider.last] + finish[index] for index, (rider, _) in enumerate(field)}
    best = min(after.values())
    ranked = sorted(((name, gap - best) for name, gap in after.items()), key=lambda item: item[1])
    return sorted(before.items(), key=lambda item: item[1]), ranked


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One stage: its text and its facts."""
    races = world().events["cycling"]
    race = races[int(len(races) * rng.random() ** 1.3)]
    clubs = world().leagues["cycling"][0].clubs
    number = 1 + int(len(race.stages) * rng.random())
    start, finish, km, terrain, climb = race.stages[number - 1]
    top = _draw(rng, _field(clubs, terrain, 0), _SHOWN)
    gaps = _stage_gaps(rng, terrain, _SHOWN)
    before, after = _overall(rng, number, top, gaps)
    teams = {rider.last: club for rider, club in top}
    away = _draw(rng, [one for one in _field(clubs, "hilly", 1) if one[0].role in ("rouleur", "domestique")], 2)
    (winner, wclub), (second, _), (third, _) = top[:3]
    lead = 60 + int(300 * rng.random() ** 1.3)
    leader, runner = after[0], after[1]
    slots = {
        **{
            "race": race.name,
            "n": str(number),
            "start": start,
            "finish": finish,
            "km": str(km),
            "terrain": terrain,
        },
        **{"climb": climb, "writer": race.voice.name, "paper": race.voice.paper, "wlast": winner.last},
        **{
            "winner": winner.name,
            "wteam": wclub.name,
            "second": second.name,
            "third": third.name,
            "gap": clock(gaps[1]),
        },
        **{"whome": winner.home, "wepi": winner.epithets[0], "his": winner.his, "leader": leader[0]},
        **{"lteam": teams[leader[0]].name, "lgap": clock(runner[1]), "next": runner[0]},
        **{"climbkm": str(int(km * 0.7))},
    }
    scene = Scene(rng, GRAMMAR, race.voice, slots)
    began = 5 + int(20 * rng.random() ** 1.5)
    live = rng.random() < 0.65
    parts: list[str | list[str]] = [scene.say("title_open" if live else "title_done"), scene.say("byline")]
    if live:
        parts.append(_ticker(scene, terrain, km, began, lead, away, top, gaps))
    if not live or rng.random() < 0.8:
        pair = {"p": away[0][0].name, "q": away[1][0].name, "at": str(began), "gap": clock(lead)}
        told = [scene.say(f"lead_{terrain}"), scene.say("tell_break", pair)]
        if terrain == "mountain":
            told.append(scene.say("tell_climb", {"p": winner.last}))
        parts += [
            told,
            [scene.say("quote"), scene.say("overall_same" if before[0][0] == leader[0] else "overall_new")],
        ]
        if number < len(race.stages):
            follow = race.stages[number]
            more = {"m": str(number + 1), "start2": follow[0], "finish2": follow[1], "km2": str(follow[2])}
            parts.append(scene.say("tomorrow", more))
        else:
            parts.append(scene.say("last"))
    parts.append(f"Overall before stage {number}\n" + _table(before, teams))
    names = [(rider.last, gap) for (rider, _), gap in zip(top, gaps, strict=True)]
    parts.append(f"Stage {number}, result\n" + _table(names, teams))
    parts.append(f"Overall after stage {number}\n" + _table(after, teams))
    return paragraphs(parts), {
        "race": race.name,
        "stage": number,
        "result": [list(name) for name in names],
        "before": [list(entry) for entry in before],
        "after": [list(entry) for entry in after],
        "km": km,
        "asks": _asks(top, after, finish, km, race.stages),
    }


def _table(entries: list[tuple[str, int]], teams: dict[str, Club]) -> str:
    """Places with the gap to the first."""
    return "\n".join(
        f"{place}. {name} ({teams[name].short}) {'+' + clock(gap) if place > 1 else clock(gap)}"
        for place, (name, gap) in enumerate(entries, 1)
    )


def _ticker(
    scene: Scene,
    terrain: str,
    km: int,
    began: int,
    lead: int,
    away: list[tuple[Person, Club]],
    top: list[tuple[Person, Club]],
    gaps: list[int],
) -> str:
    """Kilometre by kilometre."""
    rng, random = scene.rng, scene.random
    (one, one_club), (two, two_club) = away
    chase = top[int(random() * 3)][1].name
    pair = {"p": one.name, "pteam": one_club.name, "q": two.name, "qteam": two_club.name}
    lines = [scene.say("start"), scene.say("break", pair, {"at": str(began)})]
    gap, at = lead // 2, began
    while at < 0.62 * km:
        at += 12 + int(20 * random())
        if at < 0.62 * km:
            gap = lead if gap < lead and at > 0.3 * km else int(lead * (0.5 + 0.4 * random()))
            lines.append(scene.say("gap", {"at": str(at), "gap": clock(gap), "chase": chase}))
            if random() < 0.3:
                rider, club = top[int(random() * len(top))]
                unlucky = {"p": rider.name, "pteam": club.name, "at": str(at + 4)}
                lines.append(scene.say(("crash", "puncture")[int(rng.random() * 2)], unlucky))
                at += 4
    winner, second, third = (rider for rider, _ in top[:3])
    order = (winner, second) if terrain == "mountain" else (one, two)
    over = max(int(km * 0.7), at + 1)
    lines.append(scene.say("climb", {"at": str(over), "p": order[0].last, "q": order[1].last}))
    caught = min(over + 4 + int(0.2 * km * random()), km - 3)
    lines.append(scene.say("caught", {"at": str(caught), "left": str(km - caught)}))
    slots = {"p": winner.last, "q": second.last, "r": third.last, "gap": clock(gaps[1])}
    lines.append(scene.say("sprint" if gaps[1] == 0 else "solo", slots))
    return "\n".join(lines)


def _asks(
    top: list[tuple[Person, Club]],
    after: list[tuple[str, int]],
    finish: str,
    km: int,
    stages: tuple[tuple[str, str, int, str, str], ...],
) -> list[list[Any]]:
    """Winner, leader, gaps and distance."""
    lasts = [rider.last for rider, _ in top]
    teams = [club.short for club in world().leagues["cycling"][0].clubs]
    gaps = [clock(after[1][1] + step) for step in (-7, -2, 4, 13, 21, 36) if after[1][1] + step >= 0]
    return [
        ["winner", "Who won the stage?", lasts[0], lasts],
        ["leader", "Who leads overall after the stage?", after[0][0], lasts],
        ["third", "Who was third on the stage?", lasts[2], lasts],
        ["gap", f"How far behind the leader is {after[1][0]} after the stage?", clock(after[1][1]), gaps],
        [
            "distance",
            "How many kilometres was the stage?",
            str(km),
            [str(km + step) for step in (-22, -9, 7, 15, 31)],
        ],
        ["finish", "Where did the stage finish?", finish, [stage[1] for stage in stages]],
        ["team", f"Which town's team does {lasts[0]} ride for?", top[0][1].short, teams],
    ]
