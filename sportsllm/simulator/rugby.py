"""Rugby union: tries worth five, conversions two, penalties and drop goals three, and bonus points."""

from random import Random
from typing import Any

from sportsllm.simulator.common_text import COMMON
from sportsllm.simulator.frame import compose, open_scene, with_kinds
from sportsllm.simulator.grammar import Grammar
from sportsllm.simulator.rugby_text import RUGBY
from sportsllm.simulator.scene import Fixture, Scene, counted, nth, number, poisson, scorer, weighted
from sportsllm.simulator.world import Club, Person

POINTS = {"try": 5, "conversion": 2, "penalty": 3, "drop": 3}
_TRAITS = {"pace": "wide", "power": "power", "footwork": "break", "support": "kick"}
_STYLES = {"forwards": "maul", "backs": "wide", "kicking": "kick", "tempo": "break"}
GRAMMAR = Grammar(COMMON, with_kinds(RUGBY, [name[4:] for name in RUGBY if name.startswith("how_")]))
Happening = dict[str, Any]


def _how(rng: Random, player: Person, club: Club) -> str:
    weights = dict.fromkeys(_STYLES.values(), 0.7)
    if player.role in ("prop", "lock", "hooker", "number eight"):
        return "maul" if rng.random() < 0.6 else "power"
    weights[_TRAITS[player.trait]] = 5.0
    weights[_STYLES[club.style]] += 3.0
    return weighted(rng, weights)


def _happenings(rng: Random, match: Fixture) -> list[Happening]:
    """Scores and incidents in order of time, at most one a minute; conversions follow at once."""
    wet = 0.5 if match.weather in ("rain", "wind", "snow") else 0.0
    found: list[Happening] = []
    for side, edge in ((0, match.edge), (1, -match.edge)):
        kicking = 0.7 if match.clubs[side].style == "kicking" else 0.0
        means = {
            "try": max(0.4, 2.4 + 2.2 * edge - wet),
            "penalty": 1.7 + kicking + wet,
            "drop": 0.12 + kicking / 5,
        }
        means |= {"missed": 0.6 + wet, "scrum": 2.2 + wet, "sinbin": 0.5}
        for kind, mean in means.items():
            for _ in range(min(poisson(rng, mean), 8)):
                found.append({"minute": 2 + int(77 * rng.random()), "kind": kind, "side": side})
    found.sort(key=lambda event: (event["minute"], event["kind"], event["side"]))
    minutes = [0, *(event["minute"] for event in found)]
    return [event for last, event in zip(minutes, found, strict=False) if event["minute"] > last]


def _cast(rng: Random, match: Fixture, events: list[Happening]) -> list[Happening]:
    """Players and running score; inserts the conversion, made or missed, after each try."""
    score, done = [0, 0], []
    for event in events:
        side = event["side"]
        club, rival = match.clubs[side], match.clubs[1 - side]
        kicker = club.squad[0]
        event["player"], event["other"] = scorer(rng, club), scorer(rng, club)
        while event["other"] is event["player"]:
            event["other"] = scorer(rng, club)
        if event["kind"] in ("penalty", "drop", "missed"):
            event["player"] = kicker
            event["other"] = club.squad[1]
        elif event["kind"] in ("scrum", "sinbin"):
            event["other"] = scorer(rng, rival)
        elif event["kind"] == "try":
            event["how"] = _how(rng, event["player"], club)
        done.append(event)
        extra: Happening | None = None
        if event["kind"] == "try":
            made = rng.random() < 0.68 + 0.06 * kicker.skill
            extra = {
                **event,
                "kind": "conversion" if made else "wide",
                "player": kicker,
                "other": event["player"],
            }
        for one in (event, extra):
            if one is not None:
                one["before"] = match.running(score)
                score[side] += POINTS.get(one["kind"], 0)
                one["score"], one["running"] = list(score), match.running(score)
        if extra:
            done.append(extra)
    return done


def _slots(scene: Scene, event: Happening, team: list[dict[str, str]]) -> dict[str, str]:
    slots = {**team[event["side"]], **scene.person(event["player"]), **scene.second(event["other"])}
    return {**slots, "min": str(event["minute"]), "running": event["running"]}


def _ticker(scene: Scene, match: Fixture, events: list[Happening], team: list[dict[str, str]]) -> str:
    """Minute by minute; the conversion stands on the line of its try."""
    lines, half, score = [scene.say("kickoff")], False, [0, 0]
    for event in events:
        if not half and event["minute"] > 40:
            half = True
            lines.append(scene.say("half", {"running": match.running(score)}))
        rule = f"try_{event['how']}" if event["kind"] == "try" else event["kind"]
        said = scene.say(rule, _slots(scene, event, team))
        if event["kind"] in ("conversion", "wide"):
            lines[-1] += " " + said
        else:
            lines.append(said)
        score = event["score"]
    if not half:
        lines.append(scene.say("half", {"running": match.running(score)}))
    lines.append(scene.say("full"))
    return "\n".join(lines)


def _story(scene: Scene, match: Fixture, events: list[Happening], team: list[dict[str, str]]) -> list[str]:
    """Tries in order, then what the kickers added, then bonus points."""
    told, half, tries = [], False, [0, 0]
    for index, event in enumerate(events):
        if not half and event["minute"] > 40:
            half = True
            told.append(scene.say("interval", {"running": event["before"]}))
        if event["kind"] == "try":
            tries[event["side"]] += 1
            slots = _slots(scene, event, team)
            slots["running"] = events[index + 1]["running"]  # with the conversion, if it went over
            minute = event["minute"]
            slots["when"] = f"in the {nth(minute)} minute" if scene.random() < 0.7 else f"on {minute} minutes"
            told.append(scene.say("tell_try", slots))
    if not sum(tries):
        told.append(scene.say("no_tries"))
    for side in (0, 1):
        kicks = [POINTS[e["kind"]] for e in events if e["side"] == side and e["kind"] in POINTS and e["kind"] != "try"]
        if kicks:
            slots = {
                **team[side],
                **scene.person(match.clubs[side].squad[0]),
                "count": counted(sum(kicks), "point"),
            }
            told.append(scene.say("tell_kicks", slots))
        if tries[side] > 3:
            told.append(scene.say("bonus", team[side], {"tries": counted(tries[side], "try", "tries")}))
    return told


def _statistics(match: Fixture, events: list[Happening]) -> str:
    """How each total comes about."""
    lines = ["Scoring"]
    for side, club in enumerate(match.clubs):
        terms, total = [], 0
        for kind, plural in (
            ("try", "tries"),
            ("conversion", "conversions"),
            ("penalty", "penalties"),
            ("drop", "drop goals"),
        ):
            found = sum(event["kind"] == kind and event["side"] == side for event in events)
            total += found * POINTS[kind]
            if found:
                name = (kind if kind != "drop" else "drop goal") if found == 1 else plural
                terms.append(f"{found} {name} ({found * POINTS[kind]})")
        lines.append(f"{club.short}: {', '.join(terms) or 'none'} = {total}")
    return "\n".join(lines)


def _best(events: list[Happening]) -> tuple[Person, int, str] | None:
    """Whoever scored most points."""
    points: dict[str, int] = {}
    found: dict[str, tuple[Person, int]] = {}
    for event in events:
        if event["kind"] in POINTS:
            name = event["player"].name
            points[name] = points.get(name, 0) + POINTS[event["kind"]]
            found[name] = (event["player"], event["side"])
    if not points:
        return None
    name = max(points, key=lambda one: points[one])
    return (*found[name], counted(points[name], "point"))


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One match: its text and its facts."""
    match = Fixture(rng, "rugby")
    events = _cast(rng, match, _happenings(rng, match))
    score = events[-1]["score"] if events else [0, 0]
    kind, scene = open_scene(match, GRAMMAR, score, clear=8, rout=25)
    scene.slots["gap"] = counted(abs(score[0] - score[1]), "point")
    scene.slots["homekicker"] = match.home.squad[0].name
    scene.slots["awaykicker"] = match.away.squad[0].name
    team = [{**match.team(side), "team": match.clubs[side].short} for side in (0, 1)]

    def story() -> list[str]:
        told = _story(scene, match, events, team)
        return told + ([scene.say("losing")] if kind == "narrow" else [])

    text = compose(
        scene,
        match,
        kind,
        live=lambda: _ticker(scene, match, events, team),
        story=story,
        statistics=lambda: _statistics(match, events),
        best=_best(events),
    )
    scoring = [
        {
            "minute": event["minute"],
            "team": event["side"],
            "player": event["player"].name,
            "kind": event["kind"],
            "score": event["score"],
            "points": POINTS[event["kind"]],
        }
        for event in events
        if event["kind"] in POINTS
    ]
    tries = [sum(s["kind"] == "try" and s["team"] == side for s in scoring) for side in (0, 1)]
    numbers = [number(n) for n in range(9)]
    asks = [
        ["tries", f"How many tries did {club.short} score?", number(tries[side]), numbers]
        for side, club in enumerate(match.clubs)
    ]
    units = {
        "unit": "try",
        "units": "tries",
        "total": "points",
        "clock": "minute",
        "asked": "try",
        "asks": asks,
    }
    return text, {**match.facts(score), "scoring": scoring, "tries": tries, **units}
