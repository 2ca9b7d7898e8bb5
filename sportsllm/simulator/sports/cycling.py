"""A cycling stage race: one stage, its result, and overall times before and after that add up."""

from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

from sportsllm.simulator.draws import skewed
from sportsllm.simulator.grammar import grammar
from sportsllm.simulator.scene import Scene
from sportsllm.simulator.wording import paragraphs
from sportsllm.simulator.world import Club, Person, Race, Stage, world

_SUITS = {
    "flat": {"sprinter": 9.0, "all-rounder": 2.0, "rouleur": 1.5, "leader": 0.5},
    "hilly": {"all-rounder": 6.0, "leader": 4.0, "climber": 3.0, "rouleur": 2.0, "sprinter": 0.7},
    "mountain": {"climber": 8.0, "leader": 6.0, "all-rounder": 1.5},
}
_STEPS = {"flat": 0, "hilly": 6, "mountain": 22}  # usual seconds between riders; a bunch sprint has none
_BREAKAWAY = ("rouleur", "domestique")
_SHOWN = 6
Rider = tuple[Person, Club]
Times = list[tuple[str, int]]  # surname and seconds behind the first, who comes first


@dataclass(slots=True)
class Day:
    """Everything that was drawn about one stage."""

    race: Race
    number: int  # of the stage, from 1
    stage: Stage
    top: list[Rider]  # as they finished
    gaps: list[int]  # seconds behind the winner
    before: Times
    after: Times
    away: list[Rider]  # the two of the early break
    lead: int  # seconds that they were given at most
    began: int  # km at which they went


def clock(seconds: int) -> str:
    """75 -> 1:15."""
    return f"{seconds // 60}:{seconds % 60:02d}"


def _draw(rng: Random, riders: list[Rider], terrain: str, count: int) -> list[Rider]:
    """Different riders, the ones the terrain suits first."""
    suits = [_SUITS[terrain].get(rider.role, 0.15) for rider, _ in riders]
    form = [1.2 + 0.35 * rider.skill + club.strength for rider, club in riders]
    sums = list(accumulate(max(0.05, one * other) ** 2 for one, other in zip(suits, form, strict=True)))
    found: dict[str, Rider] = {}
    while len(found) < count:
        rider, club = riders[bisect(sums, rng.random() * sums[-1])]
        found[rider.name] = (rider, club)
    return list(found.values())


def _overall(rng: Random, number: int, top: list[Rider], gaps: list[int]) -> tuple[Times, Times]:
    """Overall gaps before and after: the new gap is the old one plus the time lost, less the leader's."""
    behind, before = 0, dict[str, int]()
    for rider, _ in sorted(top, key=lambda one: -one[0].weight - one[0].skill):
        before[rider.last] = behind
        behind += 3 + skewed(rng, 6 * number, 1.5)
    after = {rider.last: before[rider.last] + gap for (rider, _), gap in zip(top, gaps, strict=True)}
    best = min(after.values())
    ranked = sorted(((name, gap - best) for name, gap in after.items()), key=lambda item: item[1])
    return sorted(before.items(), key=lambda item: item[1]), ranked


def _day(rng: Random) -> Day:
    """Which stage, and all that happens on it."""
    races = world().races
    race = races[skewed(rng, len(races), 1.3)]
    number = 1 + skewed(rng, len(race.stages), 1)
    stage = race.stages[number - 1]
    riders = [(rider, club) for club in world().leagues["cycling"][0].clubs for rider in club.squad]
    top = _draw(rng, [one for one in riders if one[0].role in _SUITS[stage.terrain]], stage.terrain, _SHOWN)
    step = _STEPS[stage.terrain]
    steps = [step // 2 + skewed(rng, step, 1.5) if step else 0 for _ in range(_SHOWN - 1)]
    gaps = list(accumulate(steps, initial=0))
    before, after = _overall(rng, number, top, gaps)
    away = _draw(rng, [one for one in riders if one[0].role in _BREAKAWAY], "hilly", 2)
    lead = 60 + skewed(rng, 300, 1.3)
    return Day(race, number, stage, top, gaps, before, after, away, lead, began=5 + skewed(rng, 20, 1.5))


def _slots(day: Day) -> dict[str, str]:
    """Slots for every sentence about the stage."""
    stage, ((winner, team), (second, _), (third, _)) = day.stage, day.top[:3]
    leader, runner_up = day.after[0][0], day.after[1]
    return {
        "race": day.race.name,
        "n": str(day.number),
        "start": stage.start,
        "finish": stage.finish,
        "km": str(stage.km),
        "terrain": stage.terrain,
        "climb": stage.climb,
        "climbkm": str(int(stage.km * 0.7)),
        "winner": winner.name,
        "wlast": winner.last,
        "wepi": winner.epithets[0],
        "whome": winner.home,
        "his": winner.pronouns["his"],
        "wteam": team.name,
        "second": second.name,
        "third": third.name,
        "gap": clock(day.gaps[1]),
        "leader": leader,
        "lteam": next(club.name for rider, club in day.top if rider.last == leader),
        "lgap": clock(runner_up[1]),
        "next": runner_up[0],
    }


def _ticker(scene: Scene, day: Day) -> str:
    """Kilometre by kilometre."""
    rng, km, top, gap = scene.rng, day.stage.km, day.top, day.lead // 2
    (one, one_club), (two, two_club) = day.away
    chase = top[skewed(rng, 3, 1)][1].name
    pair = {"p": one.name, "pteam": one_club.name, "q": two.name, "qteam": two_club.name}
    lines = [scene.say("start"), scene.say("break", pair, {"at": str(day.began)})]
    at = day.began
    while at < 0.62 * km:
        at += 12 + skewed(rng, 20, 1)
        if at < 0.62 * km:
            full = gap < day.lead and at > 0.3 * km
            gap = day.lead if full else int(day.lead * (0.5 + 0.4 * rng.random()))
            lines.append(scene.say("gap", {"at": str(at), "gap": clock(gap), "chase": chase}))
            if rng.random() < 0.3:
                rider, club = top[skewed(rng, len(top), 1)]
                unlucky = {"p": rider.name, "pteam": club.name, "at": str(at + 4)}
                lines.append(scene.say(("crash", "puncture")[skewed(rng, 2, 1)], unlucky))
                at += 4
    winner, second, third = (rider.last for rider, _ in top[:3])
    first_two = (winner, second) if day.stage.terrain == "mountain" else (one.last, two.last)
    over = max(int(km * 0.7), at + 1)
    lines.append(scene.say("climb", {"at": str(over), "p": first_two[0], "q": first_two[1]}))
    caught = min(over + 4 + int(0.2 * km * rng.random()), km - 3)
    lines.append(scene.say("caught", {"at": str(caught), "left": str(km - caught)}))
    lines.append(scene.say("sprint" if day.gaps[1] == 0 else "solo", {"p": winner, "q": second, "r": third}))
    return "\n".join(lines)


def _story(scene: Scene, day: Day) -> list[str | list[str]]:
    """The stage again, in the past tense, and the one that follows."""
    stage, (one, two) = day.stage, day.away
    pair = {"p": one[0].name, "q": two[0].name, "at": str(day.began), "gap": clock(day.lead)}
    told = [scene.say(f"lead_{stage.terrain}"), scene.say("tell_break", pair)]
    if stage.terrain == "mountain":
        told.append(scene.say("tell_climb", {"p": day.top[0][0].last}))
    kept = day.before[0][0] == day.after[0][0]
    after = [scene.say("quote"), scene.say("overall_same" if kept else "overall_new")]
    if day.number == len(day.race.stages):
        return [told, after, scene.say("last")]
    follow = day.race.stages[day.number]
    slots = {"m": str(day.number + 1), "start2": follow.start, "finish2": follow.finish, "km2": str(follow.km)}
    return [told, after, scene.say("tomorrow", slots)]


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One stage: its text and its facts."""
    day = _day(rng)
    scene = Scene(rng, grammar("cycling"), day.race.voice, _slots(day))
    live = rng.random() < 0.65
    parts: list[str | list[str]] = [scene.say("title_open" if live else "title_done"), scene.say("byline")]
    if live:
        parts.append(_ticker(scene, day))
    if not live or rng.random() < 0.8:
        parts += _story(scene, day)
    result = [(rider.last, gap) for (rider, _), gap in zip(day.top, day.gaps, strict=True)]
    parts.append(f"Overall before stage {day.number}\n" + _table(day.before, day.top))
    parts.append(f"Stage {day.number}, result\n" + _table(result, day.top))
    parts.append(f"Overall after stage {day.number}\n" + _table(day.after, day.top))
    return paragraphs(parts), {
        "race": day.race.name,
        "stage": day.number,
        "result": [list(entry) for entry in result],
        "before": [list(entry) for entry in day.before],
        "after": [list(entry) for entry in day.after],
        "km": day.stage.km,
        "asks": _asks(day),
    }


def _table(times: Times, top: list[Rider]) -> str:
    """Places with the gap to the first."""
    teams = {rider.last: club.short for rider, club in top}
    return "\n".join(
        f"{place}. {name} ({teams[name]}) {'+' if place > 1 else ''}{clock(gap)}"
        for place, (name, gap) in enumerate(times, 1)
    )


def _asks(day: Day) -> list[list[Any]]:
    """Winner, leader, gaps and distance."""
    stage, lasts, (runner_up, gap) = day.stage, [rider.last for rider, _ in day.top], day.after[1]
    teams = [club.short for club in world().leagues["cycling"][0].clubs]
    finishes = [other.finish for other in day.race.stages]
    gaps = [clock(gap + step) for step in (-7, -2, 4, 13, 21, 36) if gap + step >= 0]
    lengths = [str(stage.km + step) for step in (-22, -9, 7, 15, 31)]
    return [
        ["winner", "Who won the stage?", lasts[0], lasts],
        ["leader", "Who leads overall after the stage?", day.after[0][0], lasts],
        ["third", "Who was third on the stage?", lasts[2], lasts],
        ["gap", f"How far behind the leader is {runner_up} after the stage?", clock(gap), gaps],
        ["distance", "How many kilometres was the stage?", str(stage.km), lengths],
        ["finish", "Where did the stage finish?", stage.finish, finishes],
        ["team", f"Which town's team does {lasts[0]} ride for?", day.top[0][1].short, teams],
    ]
