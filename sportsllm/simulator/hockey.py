"""Ice hockey: three periods by the clock, power plays, and overtime when the score is level."""

from random import Random
from typing import Any

from sportsllm.simulator.common_text import COMMON
from sportsllm.simulator.frame import best_player, compose, open_scene, with_kinds
from sportsllm.simulator.grammar import Grammar
from sportsllm.simulator.hockey_text import HOCKEY
from sportsllm.simulator.scene import Fixture, Scene, counted, nth, poisson, scorer, state, weighted
from sportsllm.simulator.world import Club, Person

PERIOD = 1200  # seconds
_TRAITS = {
    "slap shot": "slap",
    "wrist shot": "wrist",
    "deflection": "tip",
    "backhand": "back",
    "rebound": "rebound",
    "breakaway": "break",
}
_STYLES = {"forecheck": "rebound", "trap": "break", "rush": "wrist", "cycle": "tip"}
_KINDS = [name[4:] for name in HOCKEY if name.startswith("how_")]
GRAMMAR = Grammar(COMMON, with_kinds(HOCKEY, _KINDS))
Happening = dict[str, Any]


def _how(rng: Random, player: Person, club: Club) -> str:
    weights = dict.fromkeys(_TRAITS.values(), 1.0)
    weights[_TRAITS[player.trait]] += 7.0
    weights[_STYLES[club.style]] += 3.0
    return weighted(rng, weights)


def _happenings(rng: Random, match: Fixture) -> list[Happening]:
    """Goals, saves, checks and penalties in order of time; times differ by at least twenty seconds."""
    found: list[Happening] = []
    for side, edge in ((0, match.edge), (1, -match.edge)):
        goals = max(0.5, 2.4 + 1.3 * edge)
        for kind, mean in (
            ("goal", goals),
            ("save", 2.5 + goals),
            ("hit", 0.9),
            ("penalty", 1.5 - 0.4 * edge),
        ):
            for _ in range(min(poisson(rng, mean), 9)):
                found.append({"at": 20 + int(rng.random() * (3 * PERIOD - 40)), "kind": kind, "side": side})
    found.sort(key=lambda event: (event["at"], event["kind"], event["side"]))
    kept, last = [], -99
    for event in found:
        if event["at"] - last >= 20:
            kept.append(event)
            last = event["at"]
    score = [sum(event["kind"] == "goal" and event["side"] == side for event in kept) for side in (0, 1)]
    if score[0] == score[1]:  # sudden death
        side = int(rng.random() < 0.5 - 0.4 * match.edge)
        kept.append({"at": 3 * PERIOD + 30 + int(500 * rng.random() ** 1.5), "kind": "goal", "side": side})
    return kept


def _cast(rng: Random, match: Fixture, events: list[Happening]) -> None:
    """Players, score, clock and the reason of every event."""
    score, short_until, tallies = [0, 0], [-1, -1], dict[str, int]()
    for event in events:
        side, at = event["side"], event["at"]
        club, rival = match.clubs[side], match.clubs[1 - side]
        event["player"] = scorer(rng, club)
        event["other"] = scorer(rng, club)
        while event["other"] is event["player"]:
            event["other"] = scorer(rng, club)
        event["period"] = at // PERIOD + 1
        event["time"] = f"{at % PERIOD // 60:02d}:{at % 60:02d}"
        event["before"] = match.running(score)
        if event["kind"] in ("penalty", "hit"):
            event["player"] = club.squad[1 + int(rng.random() ** 1.6 * (len(club.squad) - 1))]
            event["other"] = scorer(rng, rival)
        if event["kind"] == "penalty":
            short_until[side] = at + 120
        elif event["kind"] == "goal":
            event["how"] = "power" if at < short_until[1 - side] else _how(rng, event["player"], club)
            score[side] += 1
            name = event["player"].name
            tallies[name] = event["nth"] = tallies.get(name, 0) + 1
            event["score"], event["running"] = list(score), match.running(score)


def _slots(scene: Scene, event: Happening, team: list[dict[str, str]]) -> dict[str, str]:
    slots = {**team[event["side"]], **scene.person(event["player"]), **scene.second(event["other"])}
    slots["time"] = event["time"]
    if "score" in event:
        slots["running"] = event["running"]
        slots["tally"] = f"{event['score'][0]}-{event['score'][1]}"
    return slots


def _ticker(match: Fixture, scene: Scene, events: list[Happening], team: list[dict[str, str]]) -> str:
    """Period by period."""
    lines, score, period = [scene.say("face")], [0, 0], 0
    for event in [*events, None]:
        now = event["period"] if event else 4
        while period < now:
            if 0 < period < 3 or (period == 3 and event is not None):
                slots = {"period": nth(period), "running": match.running(score)}
                lines.append(scene.say("end", slots))
            period += 1
            if period < 4:
                lines.append(scene.say("period", {"period": nth(period), "Period": nth(period).capitalize()}))
            elif event:
                lines.append(scene.say("extra", {"running": match.running(score)}))
        if event is None:
            break
        slots = _slots(scene, event, team)
        if event["kind"] != "goal":
            lines.append(scene.say(event["kind"], slots))
            continue
        score, side = event["score"], event["side"]
        line = [scene.say("goal_" + event["how"], slots)]
        if event["period"] < 4:
            line.append(scene.say("now_" + state(score[side], score[1 - side]), slots))
        if event["nth"] in (2, 3):
            line.append(scene.say(f"tally{event['nth']}", slots))
        lines.append(" ".join(line))
    lines.append(scene.say("full_extra" if events[-1]["period"] == 4 else "full"))
    return "\n".join(lines)


def _story(scene: Scene, match: Fixture, events: list[Happening], team: list[dict[str, str]]) -> list[str]:
    """The goals again, with the score at the breaks, and the goalkeepers' work."""
    told, score, period = [], [0, 0], 1
    for event in events:
        if event["kind"] != "goal":
            continue
        if event["period"] > period:
            period = event["period"]
            told.append(scene.say("after", {"period": nth(period - 1), "running": match.running(score)}))
        score, side = event["score"], event["side"]
        minute = event["at"] % PERIOD // 60
        where = "in overtime" if period == 4 else f"in the {nth(period)} period"
        when = f"at {event['time']} of the {nth(period)}" if period < 4 and scene.random() < 0.6 else where
        if period < 4 and minute >= 18 and scene.random() < 0.5:
            when = f"late in the {nth(period)} period"
        rule = "tell_winner" if period == 4 else "tell_" + state(score[side], score[1 - side])
        told.append(scene.say(f"{rule}_{event['how']}", _slots(scene, event, team), {"when": when}))
    saves = [_count(events, "save", 1 - side) for side in (0, 1)]
    slots = {"homesaves": counted(saves[0], "save"), "awaysaves": counted(saves[1], "save")}
    told.append(scene.say("keepers", slots))
    return told


def _count(events: list[Happening], kind: str, side: int, period: int = 0) -> int:
    return sum(e["kind"] == kind and e["side"] == side and period in (0, e["period"]) for e in events)


def _statistics(match: Fixture, events: list[Happening]) -> str:
    """Goals by period and counts that add up with the rest of the text."""
    last = events[-1]["period"]
    lines = []
    for side, club in enumerate(match.clubs):
        goals = [_count(events, "goal", side, period) for period in range(1, max(last, 3) + 1)]
        total = " + ".join(map(str, goals))
        shots = sum(goals) + _count(events, "save", side)
        minutes = 2 * _count(events, "penalty", side)
        lines.append(f"{club.short}: {total} = {sum(goals)}, shots {shots}, penalty minutes {minutes}")
    return "Goals by period\n" + "\n".join(lines)


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One game: its text and its facts."""
    match = Fixture(rng, "hockey")
    events = _happenings(rng, match)
    _cast(rng, match, events)
    goals = [event for event in events if event["kind"] == "goal"]
    score, extra = goals[-1]["score"], events[-1]["period"] == 4
    kind, scene = open_scene(match, GRAMMAR, score, clear=2, rout=4)
    team = [{**match.team(side), "team": match.clubs[side].short} for side in (0, 1)]
    for side in (0, 1):
        team[side]["keeper"] = match.clubs[1 - side].squad[0].last
    text = compose(
        scene,
        match,
        kind,
        live=lambda: _ticker(match, scene, events, team),
        story=lambda: _story(scene, match, events, team),
        statistics=lambda: _statistics(match, events),
        lead="lead_overtime" if extra else "",
        best=best_player(events),
    )
    scoring = [
        {
            "minute": goal["at"] // 60 + 1,
            "team": goal["side"],
            "player": goal["player"].name,
            "kind": goal["how"],
            "score": goal["score"],
            "points": 1,
        }
        for goal in goals
    ]
    units = {"unit": "goal", "units": "goals", "total": "goals", "clock": "period"}
    decided = ("In regulation time", "In overtime", "In a replay", "By forfeit")
    asks = [["overtime", "How was it decided?", decided[extra], list(decided)]]
    return text, {**match.facts(score), "scoring": scoring, "overtime": extra, "asks": asks, **units}
