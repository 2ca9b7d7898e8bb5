"""Several matches in one document: the results of a group, the table that follows, and a comment."""

from itertools import combinations
from random import Random
from typing import Any

from sportsllm.simulator.draws import poisson, skewed
from sportsllm.simulator.grammar import grammar
from sportsllm.simulator.scene import Scene
from sportsllm.simulator.wording import counted, number, paragraphs
from sportsllm.simulator.world import Club, League, world

Result = tuple[int, int, int, int]  # home club, away club, goals of each
Row = dict[str, int]


def _results(rng: Random, clubs: list[Club]) -> list[Result]:
    """Everybody against everybody once, the first-named at home."""
    found = []
    for pair in combinations(range(len(clubs)), 2):
        one, other = pair if rng.random() < 0.5 else pair[::-1]
        edge = clubs[one].strength - clubs[other].strength + 0.15
        left, right = (min(7, poisson(rng, max(0.25, 1.35 + sign * 1.1 * edge))) for sign in (1, -1))
        found.append((one, other, left, right))
    rng.shuffle(found)
    return found


def _rows(count: int, results: list[Result]) -> list[Row]:
    """Won, drawn, lost, goals for and against, and points."""
    rows = [dict.fromkeys(("won", "drawn", "lost", "for", "against", "points"), 0) for _ in range(count)]
    for one, other, left, right in results:
        for club, own, theirs in ((one, left, right), (other, right, left)):
            row = rows[club]
            outcome = "won" if own > theirs else "drawn" if own == theirs else "lost"
            row[outcome] += 1
            row["for"] += own
            row["against"] += theirs
            row["points"] += {"won": 3, "drawn": 1, "lost": 0}[outcome]
    return rows


def _comment(scene: Scene, clubs: list[Club], order: list[int], rows: list[Row], results: list[Result]) -> list[str]:
    """The table in words."""
    top, second, last = order[0], order[1], order[-1]
    said: list[str] = []

    def say(rule: str, first: int, other: int, **more: str) -> None:
        row, gap = rows[first], rows[first]["points"] - rows[other]["points"]
        slots = {
            "p": clubs[first].short,
            "pfull": clubs[first].name,
            "q": clubs[other].short,
            "qfull": clubs[other].name,
            "pts": counted(row["points"], "point"),
            "games": counted(len(clubs) - 1, "match", "matches"),
            "gap": counted(gap, "point"),
        }
        said.append(scene.say(rule, slots, more))

    say("lead", top, second)
    if rows[top]["points"] > rows[second]["points"]:
        say("gap", top, second)
    elif _difference(rows[top]) > _difference(rows[second]):
        say("level", top, second)
    elif rows[top]["for"] > rows[second]["for"]:
        say("level_goals", top, second)
    if rows[top]["lost"] == 0:
        say("unbeaten" if rows[top]["drawn"] else "perfect", top, second)
    one, other, left, right = max(results, key=lambda result: (abs(result[2] - result[3]), result[2] + result[3]))
    if left != right:
        won, lost = (one, other) if left > right else (other, one)
        say("biggest", won, lost, score=f"{max(left, right)}-{min(left, right)}")
    attack = max(order, key=lambda club: rows[club]["for"])
    if sum(row["for"] == rows[attack]["for"] for row in rows) == 1:
        say("attack", attack, last, goals=counted(rows[attack]["for"], "goal"))
    guard = min(order, key=lambda club: rows[club]["against"])
    if sum(row["against"] == rows[guard]["against"] for row in rows) == 1:
        say("defence", guard, last, goals=counted(rows[guard]["against"], "goal"))
    say("bottom", last, top)
    if rows[last]["won"] == 0:
        say("winless", last, top)
    said.append(scene.say("quote", {"coach": clubs[top].coach.name, "nick": clubs[top].nick}))
    return said


def _difference(row: Row) -> int:
    return row["for"] - row["against"]


def _group(rng: Random) -> tuple[League, int, list[Club]]:
    """Four to six clubs of one league, and the number that gives the group its letter."""
    leagues = world().leagues["football"]
    league = leagues[skewed(rng, len(leagues), 1)]
    start, size = skewed(rng, len(league.clubs), 1), 4 + int(2.2 * rng.random())
    clubs = [league.clubs[(start + 3 * step) % len(league.clubs)] for step in range(size)]
    while len({club.short for club in clubs}) < size:
        clubs = rng.sample(league.clubs, size)
    return league, start, clubs


def _table(clubs: list[Club], order: list[int], rows: list[Row]) -> str:
    """The final table, first place first."""
    lines = ["Table: club, played, won, drawn, lost, goals, points"]
    for place, club in enumerate(order, 1):
        row = rows[club]
        record = f"{len(clubs) - 1} {row['won']} {row['drawn']} {row['lost']} {row['for']}:{row['against']}"
        lines.append(f"{place}. {clubs[club].short} {record} {row['points']}")
    return "\n".join(lines)


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One group: its text and its facts."""
    league, start, clubs = _group(rng)
    results = _results(rng, clubs)
    rows = _rows(len(clubs), results)
    order = sorted(
        range(len(clubs)), key=lambda club: (-rows[club]["points"], -_difference(rows[club]), -rows[club]["for"], club)
    )
    slots = {"league": league.name, "size": number(len(clubs)), "letter": "ABCDEFGH"[start % 8]}
    scene = Scene(rng, grammar("table"), clubs[order[0]].voice, slots)
    lines = [f"{clubs[one].short} {left}-{right} {clubs[other].short}" for one, other, left, right in results]
    comment, table = _comment(scene, clubs, order, rows, results), _table(clubs, order, rows)
    parts: list[str | list[str]] = [scene.say("title"), scene.say("byline"), "\n".join(["Results", *lines])]
    parts += [comment, table] if rng.random() < 0.4 else [table, comment]
    return paragraphs(parts), {
        "clubs": [club.short for club in clubs],
        "results": [list(result) for result in results],
        "order": order,
        "rows": rows,
        "asks": _asks([club.short for club in clubs], order, rows),
    }


def _asks(names: list[str], order: list[int], rows: list[Row]) -> list[list[Any]]:
    """First, last, points and goals."""
    top, second, last = order[0], order[1], order[-1]
    goals, points = rows[top]["for"], rows[second]["points"]
    near = [str(goals + step) for step in (-2, -1, 1, 2, 3, 4) if goals + step >= 0]
    return [
        ["top", "Who finished top of the group?", names[top], names],
        ["bottom", "Who finished last?", names[last], names],
        ["points", f"How many points did {names[second]} take?", str(points), [str(n) for n in range(13)]],
        ["goals", f"How many goals did {names[top]} score?", str(goals), near],
    ]
