"""Multiple-choice questions about a document; every answer can be read in, or worked out from, its text."""

from collections import Counter
from random import Random
from typing import Any

from sportsllm.simulator.records import Ask, Document, Question
from sportsllm.simulator.scene import nth
from sportsllm.simulator.world import world

CHOICES = 4


def questions(document: Document, rng: Random) -> list[Question]:
    """All questions the facts of `document` allow, in an order drawn from `rng`.

    Each has four distinct choices and one right answer. A question whose evidence the text leaves out (the
    ground in a report that never names it) is not asked.
    """
    found = []
    for ask in _asks(document.facts, document.text, rng):
        wrong = [text for text in dict.fromkeys(ask.wrong) if text != ask.answer]
        if len(wrong) < CHOICES - 1:
            continue
        choices = [ask.answer, *rng.sample(wrong, CHOICES - 1)]
        rng.shuffle(choices)
        name = f"{document.id}/{ask.kind}"
        answer = choices.index(ask.answer)
        found.append(Question(name, ask.question, tuple(choices), answer, ask.kind))
    rng.shuffle(found)
    return found


def _asks(facts: dict[str, Any], text: str, rng: Random) -> list[Ask]:
    """Questions of the sport itself, and those that every match of two clubs allows."""
    asks = [Ask(kind, question, answer, tuple(wrong)) for kind, question, answer, wrong in facts.get("asks", ())]
    if "teams" in facts:  # a match of two clubs
        asks += _result(facts, text) + _place(facts, text)
    if facts.get("scoring"):
        asks += _scorers(facts, rng)
    return asks


def _result(facts: dict[str, Any], text: str) -> list[Ask]:
    """Who won and how."""
    (home, away), (left, right) = facts["teams"], facts["score"]
    close = [(left + i, right + j) for i in (-2, -1, 0, 1, 2) for j in (-2, -1, 0, 1, 2)]
    wrong = [f"{home} {i}-{j} {away}" for i, j in [(right, left), *close] if min(i, j) >= 0]
    winner = home if left > right else away if right > left else "Neither, it was a draw"
    everyone = (home, away, "Neither, it was a draw", "It was called off")
    gaps = tuple(str(gap) for gap in range(max(0, abs(left - right) - 3), abs(left - right) + 4))
    totals = tuple(str(total) for total in range(max(0, left + right - 3), left + right + 4))
    final = f"{home} {left}-{right} {away}"
    asks = [Ask("winner", f"Who won, {home} or {away}?", winner, everyone)]
    if final in text:  # cricket has no such line: its totals are asked for by the sport itself
        together = f"How many {facts['total']} did the two teams score together?"
        asks.append(Ask("final_score", "What was the final score?", final, tuple(wrong)))
        asks.append(Ask("margin", "What was the margin at the end?", str(abs(left - right)), gaps))
        asks.append(Ask("total", together, str(left + right), totals))
    return asks


def _place(facts: dict[str, Any], text: str) -> list[Ask]:
    """Ground, crowd and league, where the text names them."""
    asks = []
    leagues = [league for group in world().leagues.values() for league in group]
    if facts["venue"] in text:
        wrong = tuple(club.ground for club in leagues[len(facts["venue"]) % len(leagues)].clubs)
        asks.append(Ask("venue", "Where was it played?", facts["venue"], wrong))
    if f"{facts['crowd']:,}" in text:
        size = facts["crowd"]
        wrong = tuple(f"{size + step:,}" for step in (-1200, -750, -310, 140, 480, 1050) if size + step > 0)
        asks.append(Ask("crowd", "How many people watched?", f"{size:,}", wrong))
    if facts["league"] in text:
        wrong = tuple(league.name for league in leagues)
        asks.append(Ask("league", "In which competition was it played?", facts["league"], wrong))
    return asks


def _scorers(facts: dict[str, Any], rng: Random) -> list[Ask]:
    """Who scored, when, and how the score stood."""
    unit, units = facts["unit"], facts["units"]
    scoring = [item for item in facts["scoring"] if item["kind"] == facts.get("asked", item["kind"])]
    if not scoring:
        return []
    names = [item["player"] for item in scoring]
    others = tuple(dict.fromkeys(names)) + tuple(rng.sample(facts["players"], 6))
    asks = []
    first, last = scoring[0], scoring[-1]
    if first["kind"] != "own":
        asks.append(Ask("first_scorer", f"Who scored the first {unit}?", first["player"], others))
    if last["kind"] != "own" and len(scoring) > 1:
        asks.append(Ask("last_scorer", f"Who scored the last {unit}?", last["player"], others))
    counts = Counter(item["player"] for item in scoring if item["kind"] != "own")
    own = {item["player"] for item in scoring if item["kind"] == "own"}
    most = counts.most_common(2)
    if most and most[0][1] > 1 and (len(most) == 1 or most[1][1] < most[0][1]):
        asks.append(Ask("top_scorer", f"Who scored the most {units}?", most[0][0], others))
    for name, count in counts.items():
        if name in own:
            continue
        numbers = tuple(str(n) for n in range(1, 6))
        asks.append(Ask("count", f"How many {units} did {name} score?", str(count), numbers))
        break
    single = [item for item in scoring if counts[item["player"]] == 1 and item["player"] not in own]
    if facts["clock"] == "minute" and single:
        item = single[int(rng.random() * len(single))]
        minute = item["minute"]
        near = [other["minute"] for other in scoring]
        near += [minute + step for step in (-9, -4, -2, 3, 6, 11) if 0 < minute + step < 90]
        question = f"In which minute did {item['player']} score a {unit}?"
        asks.append(Ask("minute", question, str(minute), tuple(map(str, near))))
    if len(scoring) > 2 and "asked" not in facts:
        index = int(rng.random() * (len(scoring) - 1))
        left, right = scoring[index]["score"]
        spread = [(left + i, right + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        wrong = tuple(f"{i}-{j}" for i, j in [(right, left), *spread] if min(i, j) >= 0)
        question = f"What was the score after the {nth(index + 1)} {unit}, home side first?"
        asks.append(Ask("score_after", question, f"{left}-{right}", wrong))
    return asks
