"""Multiple-choice questions about a document; every answer can be read in, or worked out from, its text."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from sportsllm.simulator.draws import skewed
from sportsllm.simulator.records import Document, Question
from sportsllm.simulator.wording import nth
from sportsllm.simulator.world import world

CHOICES = 4
Ask = tuple[str, str, str, Sequence[str]]  # kind, question, right answer, plausible wrong ones


def questions(document: Document, rng: Random) -> list[Question]:
    """All questions the facts of `document` allow, in an order drawn from `rng`.

    Each has four distinct choices and one right answer. A question whose evidence the text leaves out (the
    ground in a report that never names it) is not asked.
    """
    found = []
    for kind, question, right, plausible in _asks(document.facts, document.text, rng):
        wrong = [text for text in dict.fromkeys(plausible) if text != right]
        if len(wrong) < CHOICES - 1:
            continue
        choices = [right, *rng.sample(wrong, CHOICES - 1)]
        rng.shuffle(choices)
        found.append(Question(f"{document.id}/{kind}", question, tuple(choices), choices.index(right), kind))
    rng.shuffle(found)
    return found


def _asks(facts: dict[str, Any], text: str, rng: Random) -> list[Ask]:
    """Questions of the sport itself, and those that every match of two clubs allows."""
    asks: list[Ask] = [*facts.get("asks", ())]
    if "teams" in facts:  # a match of two clubs
        asks += _result(facts, text) + _place(facts, text)
    if facts.get("scoring"):
        asks += _goals(facts, rng)
    return asks


def _result(facts: dict[str, Any], text: str) -> list[Ask]:
    """Who won and how."""
    (home, away), (left, right) = facts["teams"], facts["score"]
    close = [(left + i, right + j) for i in (-2, -1, 0, 1, 2) for j in (-2, -1, 0, 1, 2)]
    wrong = [f"{home} {i}-{j} {away}" for i, j in [(right, left), *close] if min(i, j) >= 0]
    winner = home if left > right else away if right > left else "Neither, it was a draw"
    everyone = (home, away, "Neither, it was a draw", "It was called off")
    final = f"{home} {left}-{right} {away}"
    asks: list[Ask] = [("winner", f"Who won, {home} or {away}?", winner, everyone)]
    if final in text:
        margin, total = abs(left - right), left + right
        together = f"How many {facts['total']} did the two teams score together?"
        asks.append(("final_score", "What was the final score?", final, wrong))
        asks.append(("margin", "What was the margin at the end?", str(margin), _near(margin)))
        asks.append(("total", together, str(total), _near(total)))
    return asks


def _near(count: int) -> list[str]:
    return [str(other) for other in range(max(0, count - 3), count + 4)]


def _place(facts: dict[str, Any], text: str) -> list[Ask]:
    """Ground, crowd and league, where the text names them."""
    asks: list[Ask] = []
    leagues = [league for group in world().leagues.values() for league in group]
    if facts["venue"] in text:
        grounds = [club.ground for club in leagues[len(facts["venue"]) % len(leagues)].clubs]
        asks.append(("venue", "Where was it played?", facts["venue"], grounds))
    if f"{facts['crowd']:,}" in text:
        size = facts["crowd"]
        sizes = [f"{size + step:,}" for step in (-1200, -750, -310, 140, 480, 1050) if size + step > 0]
        asks.append(("crowd", "How many people watched?", f"{size:,}", sizes))
    if facts["league"] in text:
        names = [league.name for league in leagues]
        asks.append(("league", "In which competition was it played?", facts["league"], names))
    return asks


def _goals(facts: dict[str, Any], rng: Random) -> list[Ask]:
    """Who scored, when, and how the score stood."""
    scoring = facts["scoring"]
    others = (*dict.fromkeys(goal["player"] for goal in scoring), *rng.sample(facts["players"], 6))
    asks: list[Ask] = []
    for place, goal in [("first", scoring[0]), ("last", scoring[-1])][: len(scoring)]:
        if goal["kind"] != "own":
            asks.append((f"{place}_scorer", f"Who scored the {place} goal?", goal["player"], others))
    counts = Counter(goal["player"] for goal in scoring if goal["kind"] != "own")
    own = {goal["player"] for goal in scoring if goal["kind"] == "own"}
    most = counts.most_common(2)
    if most and most[0][1] > 1 and (len(most) == 1 or most[1][1] < most[0][1]):
        asks.append(("top_scorer", "Who scored the most goals?", most[0][0], others))
    name = next((name for name in counts if name not in own), None)
    if name:
        asks.append(("count", f"How many goals did {name} score?", str(counts[name]), list("12345")))
    single = [goal for goal in scoring if counts[goal["player"]] == 1 and goal["player"] not in own]
    if single:
        goal = single[skewed(rng, len(single), 1)]
        minute = goal["minute"]
        near = [other["minute"] for other in scoring]
        near += [minute + step for step in (-9, -4, -2, 3, 6, 11) if 0 < minute + step < 90]
        question = f"In which minute did {goal['player']} score a goal?"
        asks.append(("minute", question, str(minute), list(map(str, near))))
    if len(scoring) > 2:
        index = skewed(rng, len(scoring) - 1, 1)
        left, right = scoring[index]["score"]
        spread = [(left + i, right + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        wrong = [f"{i}-{j}" for i, j in [(right, left), *spread] if min(i, j) >= 0]
        question = f"What was the score after the {nth(index + 1)} goal, home side first?"
        asks.append(("score_after", question, f"{left}-{right}", wrong))
    return asks
