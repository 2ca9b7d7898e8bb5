"""Association football: ninety minutes, goals with makers and reasons, saves, cards, changes and a report."""

from random import Random
from typing import Any

from sportsllm.simulator.common_text import COMMON
from sportsllm.simulator.football_text import FOOTBALL
from sportsllm.simulator.frame import best_player, compose, open_scene, with_kinds
from sportsllm.simulator.grammar import Grammar
from sportsllm.simulator.scene import Fixture, Scene, nth, number, poisson, scorer, state, weighted
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
_LINES = ("goal", "save", "miss", "corner", "card", "red", "sub")
Happening = dict[str, Any]


def _goal_kind(rng: Random, player: Person, club: Club) -> str:
    """Players score the way they like to, in the way their club likes to play."""
    weights = dict(_KINDS)
    liked = _TRAIT_KIND.get(player.trait, player.trait)
    weights[liked] = weights.get(liked, 0.0) + 6.0
    style = _STYLE_KIND[club.style]
    weights[style] = weights.get(style, 0.0) + 4.0
    return weighted(rng, weights)


def _minute(rng: Random) -> int:
    """Later minutes are likelier, as legs tire."""
    return 2 + int(88 * rng.random() ** 0.85)


def _happenings(rng: Random, match: Fixture) -> list[Happening]:
    """Everything that happens, in order of time, with nobody acting after leaving the field."""
    weather = -0.25 if match.weather in ("snow", "wind", "fog") else 0.0
    found: list[Happening] = []
    for side, edge in ((0, match.edge), (1, -match.edge)):
        strong = max(0.25, 1.35 + 0.9 * edge + weather)
        means = {"goal": strong, "save": 1.0 + strong, "miss": 1.2 + strong, "corner": 0.6 + 0.5 * strong}
        means |= {"card": 1.2 - 0.3 * edge, "red": 0.04}
        for kind, mean in means.items():
            for _ in range(min(poisson(rng, mean), 7)):
                found.append({"minute": _minute(rng), "kind": kind, "side": side})
        for _ in range(2 if rng.random() < 0.7 else 1):
            found.append({"minute": 55 + rng.randrange(30), "kind": "sub", "side": side})
    found.sort(key=lambda event: (event["minute"], _LINES.index(event["kind"])))
    minutes = [0, *(event["minute"] for event in found)]
    return [event for last, event in zip(minutes, found, strict=False) if event["minute"] > last]


def _cast(rng: Random, match: Fixture, events: list[Happening]) -> list[Happening]:
    """Give every event its players; drops what cannot be cast."""
    # The ninth of the squad starts on the bench, so that both strikers are among the eleven on the field.
    on = [[*club.squad[:8], *club.squad[9:12]] for club in match.clubs]
    bench = [[club.squad[8], *club.squad[12:]] for club in match.clubs]
    score, booked, done = [0, 0], set[str](), []
    for event in events:
        side, kind = event["side"], event["kind"]
        club, mine, theirs = match.clubs[side], on[side], on[1 - side]
        player = scorer(rng, club)
        while player not in mine:
            player = scorer(rng, club)
        other = mine[1 + int(rng.random() ** 0.7 * (len(mine) - 1))]
        if other is player:
            other = mine[1] if player is not mine[1] else mine[2]
        if kind == "goal":
            event["how"] = _goal_kind(rng, player, club)
            if (draw := rng.random()) < 0.09:
                event["how"] = "pen"
                taker = max(mine, key=lambda one: one.skill if one.weight else -9.0)
                if taker is other:
                    other = player
                player = taker
            elif draw > 0.975:
                event["how"] = "own"
                other, player = player, theirs[1 + int(rng.random() * 4)]
            score[side] += 1
            event["score"] = list(score)
        elif kind in ("card", "red"):
            player = mine[1 + int(rng.random() ** 1.6 * (len(mine) - 1))]
            if player.last in booked or len(mine) < 11:
                continue
            booked.add(player.last)
            other = theirs[-1 - int(rng.random() ** 1.5 * 4)]
            if kind == "red":
                mine.remove(player)
        elif kind == "sub":
            other = mine[-1 - int(rng.random() * 6)]
            player = bench[side].pop(int(rng.random() * 2))
            mine[mine.index(other)] = player
        event["player"], event["other"] = player, other
        done.append(event)
    return done


def _slots(scene: Scene, event: Happening, team: list[dict[str, str]]) -> dict[str, str]:
    """Slots of one event."""
    slots = {**team[event["side"]], **scene.person(event["player"]), **scene.second(event["other"])}
    slots["min"] = str(event["minute"])
    slots["himself"] = slots["him"] + "self"
    if "score" in event:
        slots["running"] = event["running"]
        slots["tally"] = f"{event['score'][0]}-{event['score'][1]}"
    return slots


def _ticker(match: Fixture, scene: Scene, events: list[Happening], team: list[dict[str, str]]) -> str:
    """Minute by minute."""
    lines, half, score = [scene.say("kickoff")], False, [0, 0]
    for event in events:
        if not half and event["minute"] > 45:
            half = True
            lines.append(scene.say("half", {"running": match.running(score)}))
        slots = _slots(scene, event, team)
        if event["kind"] != "goal":
            lines.append(scene.say(event["kind"], slots))
            continue
        score, side = event["score"], event["side"]
        line = [scene.say("goal_" + event["how"], slots)]
        line.append(scene.say("now_" + state(score[side], score[1 - side]), slots))
        if event["nth"] in (2, 3, 4):
            line.append(scene.say(f"tally{event['nth']}", slots))
        lines.append(" ".join(line))
    if not half:
        lines.append(scene.say("half", {"running": match.running(score)}))
    lines.append(scene.say("full"))
    return "\n".join(lines)


def _when(scene: Scene, minute: int) -> str:
    """The same moment in a few ways."""
    draw = scene.random()
    if draw < 0.45:
        return f"in the {nth(minute)} minute"
    if draw < 0.8:
        return f"on {minute} minutes" if minute > 12 else f"after {number(minute)} minutes"
    return f"{90 - minute} minutes from time" if 70 <= minute < 89 else f"after {number(minute)} minutes"


def _story(scene: Scene, events: list[Happening], team: list[dict[str, str]]) -> list[str]:
    """The goals and sendings-off again, in the past tense."""
    told, half, goals = [], False, 0
    for event in events:
        if not half and event["minute"] > 45 and goals:
            half = True
            told.append(scene.say("interval", {"running": event["before"]}))
        if event["kind"] == "red":
            slots = _slots(scene, event, team)
            told.append(scene.say("sent", slots, {"when": _when(scene, event["minute"])}))
        if event["kind"] == "goal":
            goals += 1
            score, side = event["score"], event["side"]
            slots = _slots(scene, event, team)
            rule = "told_own" if event["how"] == "own" else f"tell_{state(score[side], score[1 - side])}_{event['how']}"
            told.append(scene.say(rule, slots, {"when": _when(scene, event["minute"])}))
    return told


def _statistics(match: Fixture, events: list[Happening], rng: Random) -> str:
    """Counts that add up with the minute-by-minute text."""
    count = [
        {k: sum(event["kind"] == k and event["side"] == side for event in events) for k in _LINES} for side in (0, 1)
    ]
    lines = []
    own = [sum(event.get("how") == "own" and event["side"] == side for event in events) for side in (0, 1)]
    target = [count[side]["goal"] - own[side] + count[side]["save"] for side in (0, 1)]
    share = int(50 + 9 * match.edge + rng.gauss(0, 3)) + (4 if match.home.style == "possession" else 0)
    share = min(max(share, 30), 70)
    for title, values in (
        ("Shots", [target[side] + count[side]["miss"] for side in (0, 1)]),
        ("Shots on target", target),
        ("Saves", [count[1]["save"], count[0]["save"]]),
        ("Corners", [count[side]["corner"] for side in (0, 1)]),
        ("Yellow cards", [count[side]["card"] for side in (0, 1)]),
    ):
        lines.append(f"{title}: {match.home.short} {values[0]}, {match.away.short} {values[1]}")
    lines.append(f"Possession: {match.home.short} {share}%, {match.away.short} {100 - share}%")
    return "\n".join(lines)


GRAMMAR = Grammar(COMMON, with_kinds(FOOTBALL, [name[4:] for name in FOOTBALL if name.startswith("how_")]))


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One match: its text and its facts."""
    match = Fixture(rng, "football")
    events = _cast(rng, match, _happenings(rng, match))
    score, tallies = [0, 0], dict[str, int]()
    for event in events:
        event["before"] = match.running(score)
        if event["kind"] == "goal":
            score = event["score"]
            event["running"] = match.running(score)
            own = event["how"] == "own"
            tallies[event["player"].name] = tallies.get(event["player"].name, 0) + (not own)
            event["nth"] = 0 if own else tallies[event["player"].name]
    kind, scene = open_scene(match, GRAMMAR, score, clear=2, rout=4)
    scene.slots["wingoals"] = number(max(score))
    team = [{**match.team(side), "team": match.clubs[side].short} for side in (0, 1)]
    for side in (0, 1):
        team[side]["keeper"] = match.clubs[1 - side].squad[0].last
    text = compose(
        scene,
        match,
        kind,
        live=lambda: _ticker(match, scene, events, team),
        story=lambda: _story(scene, events, team) or [scene.say("no_goals")],
        statistics=lambda: _statistics(match, events, rng),
        best=best_player(events),
    )
    goals = [
        {
            "minute": event["minute"],
            "team": event["side"],
            "player": event["player"].name,
            "kind": event["how"],
            "score": event["score"],
            "points": 1,
        }
        for event in events
        if event["kind"] == "goal"
    ]
    units = {"unit": "goal", "units": "goals", "total": "goals", "clock": "minute"}
    return text, {**match.facts(score), "scoring": goals, **units}
