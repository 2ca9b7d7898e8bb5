"""Twenty-over cricket: every ball is bowled; wickets, milestones and a scorecard that adds up."""

from random import Random
from typing import Any

from sportsllm.simulator.common_text import COMMON
from sportsllm.simulator.cricket_text import CRICKET, SHOTS
from sportsllm.simulator.frame import open_scene, with_kinds
from sportsllm.simulator.grammar import Grammar
from sportsllm.simulator.scene import Fixture, Scene, counted, nth, paragraphs, weighted
from sportsllm.simulator.world import Person

GRAMMAR = Grammar(COMMON, with_kinds(CRICKET, [name[4:] for name in CRICKET if name.startswith("out_")]))
_OUT = {"caught": 6.0, "bowled": 2.5, "lbw": 1.2, "runout": 0.7}
Innings = dict[str, Any]


def _innings(rng: Random, match: Fixture, side: int, target: int) -> Innings:
    """Up to 120 balls; ends when ten are out or the target is reached (0 is no target)."""
    batting, bowling = match.clubs[side].squad, match.clubs[1 - side].squad
    edge = match.edge if side == 0 else -match.edge
    runs, balls, extras, wickets, stand = dict[str, int](), dict[str, int](), 0, 0, 0
    figures = {player.last: [0, 0] for player in bowling[5:]}
    events, stands, total = list[dict[str, Any]](), list[tuple[int, str, str]](), 0
    pair = [batting[0], batting[1]]
    bowler = bowling[-1]
    for ball in range(120):
        over, number = divmod(ball, 6)
        if number == 0:
            bowler = bowling[10 - over % 5 if over < 10 else 10 - (over * 2 + 1) % 5]
            if over:
                pair.reverse()
        player = pair[0]
        skill = player.weight / 8 + 0.5 * edge + 0.08 * player.skill
        balls[player.name] = balls.get(player.name, 0) + 1
        draw = rng.random()
        name = {"over": f"{over}.{number + 1}", "player": player, "bowler": bowler}
        if draw < 0.062 - 0.025 * skill + (0.02 if over > 15 else 0.0):
            how = weighted(rng, {**_OUT, "stumped": 1.0 if "spin" in bowler.role else 0.0})
            fielder = bowling[4] if how == "stumped" else bowling[int(rng.random() * 11)]
            if fielder is bowler and how in ("caught", "runout"):
                fielder = bowling[3]
            wickets += 1
            made = runs.get(player.name, 0)
            runs[player.name] = made
            if how != "runout":
                figures[bowler.last][0] += 1
            events.append({**name, "kind": how, "fielder": fielder, "runs": made, "total": total, "down": wickets})
            stands.append((stand, pair[0].name, pair[1].name))
            stand = 0
            if wickets == 10:
                break
            pair[0] = batting[wickets + 1]
            continue
        if draw > 0.965:
            extras += 1
            total += 1
            stand += 1
            figures[bowler.last][1] += 1
        else:
            power = 0.13 * skill + (0.1 if over > 14 else 0.0)
            scored = 6 if draw > 0.93 - power * 0.4 else 4 if draw > 0.83 - power else 2 if draw > 0.76 - power else 1
            scored = 0 if draw < 0.40 - power else scored
            before = runs.get(player.name, 0)
            runs[player.name] = before + scored
            figures[bowler.last][1] += scored
            total += scored
            stand += scored
            for mark, kind in ((50, "fifty"), (100, "hundred")):
                if before < mark <= before + scored:
                    events.append({**name, "kind": kind, "total": total, "down": wickets})
            if scored == 6:
                events.append({**name, "kind": "six", "total": total, "down": wickets})
            if scored % 2:
                pair.reverse()
        if ball % 30 == 29 and ball < 119:
            events.append({**name, "kind": "over", "n": over + 1, "total": total, "down": wickets})
        if target and total >= target:
            break
    stands.append((stand, pair[0].name, pair[1].name))
    for player in pair:
        runs.setdefault(player.name, 0)
        balls.setdefault(player.name, 0)
    return {
        "side": side,
        "total": total,
        "wickets": wickets,
        "extras": extras,
        "runs": runs,
        "balls": balls,
        "figures": figures,
        "events": events,
        "stands": stands,
        "out": {event["player"].name for event in events if event["kind"] in (*_OUT, "stumped")},
    }


def _total(total: int, down: int) -> str:
    return f"{total} all out" if down == 10 else f"{total}-{down}"


def _ticker(scene: Scene, match: Fixture, innings: Innings, team: dict[str, str]) -> str:
    """Wickets, milestones, some of the sixes and the score every five overs."""
    lines = [scene.say("innings", team) + ":"]
    for index, event in enumerate(innings["events"]):
        kind = event["kind"]
        slots = {**team, "over": event["over"], "total": _total(event["total"], event["down"])}
        if kind == "over":
            lines.append(scene.say("over", slots, {"n": str(event["n"])}))
            continue
        if kind == "six" and index % 2:
            continue
        slots |= {**scene.person(event["player"]), "q": event["bowler"].last}
        slots["shot"] = SHOTS[event["player"].trait]
        if kind in ("six", "fifty", "hundred"):
            lines.append(scene.say(kind, slots))
            continue
        slots |= {"f": event["fielder"].last, "runs": str(event["runs"])}
        lines.append(scene.say(f"wicket_{kind}", slots, {"p": event["player"].last}))
    lines.append(scene.say("closed", team, {"total": _total(innings["total"], innings["wickets"])}))
    return "\n".join(lines)


def _card(match: Fixture, innings: Innings) -> str:
    """The batting, with extras, to the total."""
    club = match.clubs[innings["side"]]
    last = {player.name: player.last for player in club.squad}
    terms = [f"{last[name]} {runs}{'' if name in innings['out'] else '*'}" for name, runs in innings["runs"].items()]
    total = _total(innings["total"], innings["wickets"])
    return f"{club.short}: {', '.join(terms)}, extras {innings['extras']}. Total {total}"


def _best_bat(match: Fixture, innings: Innings) -> tuple[Person, int, int]:
    name = max(innings["runs"], key=lambda one: (innings["runs"][one], -innings["balls"][one]))
    player = next(one for one in match.clubs[innings["side"]].squad if one.name == name)
    return player, innings["runs"][name], innings["balls"][name]


def _best_bowl(match: Fixture, innings: Innings) -> tuple[Person, str]:
    bowlers = innings["figures"]
    last = max(bowlers, key=lambda one: (bowlers[one][0], -bowlers[one][1]))
    player = next(one for one in match.clubs[1 - innings["side"]].squad if one.last == last)
    return player, f"{counted(bowlers[last][0], 'wicket')} for {bowlers[last][1]}"


def _story(scene: Scene, match: Fixture, both: tuple[Innings, Innings], team: list[dict[str, str]]) -> list[str]:
    """Each innings: total, best batter, best stand, best bowler."""
    told = []
    for innings in both:
        mine = team[innings["side"]]
        player, runs, balls = _best_bat(match, innings)
        told.append(scene.say("tell_total", mine, {"total": _total(innings["total"], innings["wickets"])}))
        told.append(scene.say("tell_bat", {**mine, **scene.person(player), "runs": str(runs), "balls": str(balls)}))
        stand, one, other = max(innings["stands"])
        if stand > 30:
            order = nth(innings["stands"].index((stand, one, other)) + 1)
            told.append(scene.say("pair", {**mine, "p": one, "q": other, "stand": str(stand), "nth": order}))
        bowler, figures = _best_bowl(match, innings)
        told.append(scene.say("tell_bowl", scene.person(bowler), {"figures": figures}))
    return told


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One match: its text and its facts."""
    match = Fixture(rng, "cricket")
    first = int(rng.random() * 2)
    one = _innings(rng, match, first, 0)
    two = _innings(rng, match, 1 - first, one["total"] + 1)
    score = [0, 0]
    score[first], score[1 - first] = one["total"], two["total"]
    margin = abs(score[0] - score[1])
    chased = two["total"] > one["total"]
    by = counted(10 - two["wickets"], "wicket") if chased else counted(margin, "run")
    kind, scene = open_scene(match, GRAMMAR, score, clear=20, rout=60)
    if chased:
        kind = "easy" if two["wickets"] < 7 else "narrow"
    teams = [{**match.team(side), "team": match.clubs[side].short} for side in (0, 1)]
    winner = match.clubs[int(score[1] > score[0])].short
    verdict = f"{winner} won by {by}" if margin else "the match is tied"
    scene.slots |= {"by": by, "tied": str(score[0]), "verdict": verdict, "need": str(one["total"] + 1)}
    live = rng.random() < 0.6
    parts: list[str | list[str]] = [scene.say("title_open" if live else f"title_{kind}"), scene.say("byline")]
    if live:
        parts.append([scene.say("preview"), scene.say("toss", teams[first])] if rng.random() < 0.4 else "")
        parts.append(_ticker(scene, match, one, teams[first]))
        parts.append(scene.say("target", teams[1 - first]))
        parts.append(_ticker(scene, match, two, teams[1 - first]) + "\n" + scene.say("done"))
    if not live or rng.random() < 0.7:
        scene.met.clear()
        opening = scene.say("lead" if margin else "lead_tie")
        parts.append([opening, scene.say("weather_" + match.weather), scene.say("crowd")])
        parts.append(_story(scene, match, (one, two), teams))
        parts.append([scene.say("quotes_" + kind), scene.say("next_win" if margin else "next_draw")])
    if not live or rng.random() < 0.6:
        parts.append(f"{_card(match, one)}\n{_card(match, two)}\nResult: {verdict}")
    text = paragraphs(parts)
    facts = match.facts(score)
    wickets = [0, 0]
    wickets[first], wickets[1 - first] = one["wickets"], two["wickets"]
    cards = {str(part["side"]): {"runs": part["runs"], "extras": part["extras"]} for part in (one, two)}
    facts |= {"wickets": wickets, "cards": cards, "verdict": verdict, "scoring": [], "first": first}
    facts["asks"] = _asks(match, (one, two), score, by if margin else "", text)
    return text, {**facts, "unit": "run", "units": "runs", "total": "runs"}


def _asks(match: Fixture, both: tuple[Innings, Innings], score: list[int], by: str, text: str) -> list[list[Any]]:
    """Margin, totals and best batters."""
    asks: list[list[Any]] = []
    if by:
        word = "wicket" if "wicket" in by else "run"
        options = [counted(step, word) for step in (1, 2, 3, 5, 6, 8, 9, 14, 27)]
        asks.append(["by", "By how much was it won?", by, options])
    for innings in both:
        club = match.clubs[innings["side"]]
        total = innings["total"]
        near = [str(total + step) for step in (-21, -10, -3, 4, 11, 19)]
        asks.append(["innings_total", f"How many runs did {club.short} make?", str(total), near])
    player, runs, _ = _best_bat(match, both[0])
    if list(both[0]["runs"].values()).count(runs) == 1 and f"{player.last} {runs}" in text:
        names = [one.name for one in match.clubs[both[0]["side"]].squad]
        asks.append(["best_bat", f"Who made most runs for {match.clubs[both[0]['side']].short}?", player.name, names])
    return asks
