"""The simulator: the same seed gives the same text, and every number in it adds up."""

import json
import re
from functools import cache
from pathlib import Path
from random import Random

import pytest

from sportsllm.errors import ArtifactError
from sportsllm.simulator import Document, simulate, telling, write_corpus
from sportsllm.simulator.corpus import SPORTS, is_valid
from sportsllm.simulator.telling import expand
from sportsllm.simulator.world import PREFERENCES, Writer, world

PER_SPORT = 200
WRITER = Writer("Someone", "Somewhere Post", (0,) * PREFERENCES)
IN_THE_TEXT = {"final_score", "venue", "crowd", "first_scorer", "last_scorer", "winner", "tournament"}


@cache
def documents(sport: str) -> tuple[Document, ...]:
    """PER_SPORT documents of one sport, drawn directly so that rare sports cost no more than common ones."""
    play = SPORTS[sport][0]
    return tuple(
        Document(f"{sport}-{index}", sport, *play(Random(f"test {sport} {index}"))) for index in range(PER_SPORT)
    )


def test_same_seed_and_index_give_the_same_document() -> None:
    assert [simulate(7, index) for index in range(40)] == [simulate(7, index) for index in range(40)]
    assert simulate(7, 3) != simulate(8, 3)
    assert len({simulate(7, index).text for index in range(200)}) == 200


@pytest.mark.parametrize("sport", sorted(SPORTS))
def test_texts_are_clean(sport: str) -> None:
    lengths = []
    for _, _, text, _ in documents(sport):
        lengths.append(len(text))
        assert not re.search(r"[{}<>\[\]|\0]|  | [.,;]|\b[Aa] (?:own|easy|eight|eleven|8|11|18)\b|^[a-z]", text), text
        assert "one goals" not in text and "two goal " not in text
    assert 700 < sum(lengths) / PER_SPORT < 3500 and max(lengths) < 6500


def test_football_scores_and_statistics_count_the_events() -> None:
    """Read back from the text alone: every goal adds one, in order, up to the final score, and shots add up."""
    goals, tables = 0, 0
    for _, _, text, asks in documents("football"):
        minutes = [int(minute) for minute in re.findall(r"^(\d+)' ", text, re.MULTILINE)]
        assert minutes == sorted(minutes)
        result = next((ask.right for ask in asks if ask.kind == "final_score"), None)
        if minutes:
            final = re.findall(r"^90' .*: (.*) (\d+)-(\d+) (.*)\.$", text, re.MULTILINE)
            (home, left, right, away), score = final[-1], [0, 0]
            assert result == f"{home} {left}-{right} {away}"
            pair = rf"{re.escape(home)} (\d+)-(\d+) {re.escape(away)}"
            for line in re.findall(r"^\d+' (?:Goal|GOAL)!.*$", text, re.MULTILINE):
                found = re.search(pair, line)
                assert found, line
                before, score = score, [int(found[1]), int(found[2])]
                assert sorted([score[0] - before[0], score[1] - before[1]]) == [0, 1], text
                goals += 1
            assert score == [int(left), int(right)]
        rows = dict(re.findall(r"^([\w ]+): [^\d\n]+ (\d+, [^\d\n]+ \d+)$", text, re.MULTILINE))
        if not rows:
            continue
        tables += 1
        shots, target, saves = (
            [int(n) for n in re.findall(r"\d+", rows[name])] for name in ("Shots", "Shots on target", "Saves")
        )
        assert all(all_shots >= on for all_shots, on in zip(shots, target, strict=True))
        if result and "own goal" not in text and "own net" not in text and "own keeper" not in text:
            scored = [int(n) for n in re.findall(r"\d+", result.replace("-", " "))]
            assert [target[side] - saves[1 - side] for side in (0, 1)] == scored, text
    assert goals > 200 and tables > 50


def test_tennis_results_follow_from_the_games() -> None:
    lines = 0
    for _, _, text, _ in documents("tennis"):
        for terms, total in re.findall(r"((?:\d+ \+ )+\d+) = (\d+)", text):
            assert sum(map(int, terms.split(" + "))) == int(total)
        games = [(int(left), int(right)) for left, right in re.findall(r"^(\d+)-(\d+) ", text, re.MULTILINE)]
        last, ends = (0, 0), list[tuple[int, int]]()
        for score in games:
            if sum(score) == 1:
                ends += [last] if last != (0, 0) else []
                last = (0, 0)
            assert sorted([score[0] - last[0], score[1] - last[1]]) == [0, 1], text
            last = score
        if not games:
            continue
        lines += len(games)
        ends.append(last)
        assert all(sorted(end) in [[0, 6], [1, 6], [2, 6], [3, 6], [4, 6], [5, 7], [6, 7]] for end in ends)
        best = [left > right for left, right in ends]
        assert sorted((best.count(True), best.count(False)))[1] == 2 and best[-1] == (best.count(True) == 2)
        shown = " ".join(
            f"{max(end)}-{min(end)}" if won == best[-1] else f"{min(end)}-{max(end)}"
            for end, won in zip(ends, best, strict=True)
        )
        assert re.search(rf"the match, [^\n]*: {shown}\.|and match, [^\n]*: {shown}\.", text), text
    assert lines > 1_000


@pytest.mark.parametrize("sport", sorted(SPORTS))
def test_questions_have_four_choices_and_their_answer_in_the_text(sport: str) -> None:
    for _, _, text, asks in documents(sport):
        for kind, _, right, plausible in asks:
            assert len({right, *plausible}) >= 4, (kind, plausible)
            if kind in IN_THE_TEXT:
                assert right in text or right.startswith("Neither"), (kind, right, text)
        assert asks


def test_a_corpus_is_reproducible_split_and_of_the_size_asked(tmp_path: Path) -> None:
    contents = []
    reported: list[int] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        counts = write_corpus(tmp_path / name, seed=3, megabytes=0.3, questions=20, progress=reported.append)
        contents.append({path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())})
    assert contents[0] == contents[1]
    assert list(contents[0]) == ["questions.jsonl", "train.jsonl", "valid.jsonl"]
    train, valid, asked = (
        [json.loads(line) for line in contents[0][f"{name}.jsonl"].splitlines()]
        for name in ("train", "valid", "questions")
    )
    assert abs(sum(len(record["text"].encode()) for record in train) / 0.3e6 - 1) < 0.05
    assert not {record["text"] for record in train} & {record["text"] for record in valid}
    assert all(is_valid(record["id"]) for record in valid) and not any(is_valid(record["id"]) for record in train)
    assert (counts["train_documents"], counts["valid_documents"]) == (len(train), len(valid))
    assert counts["questions"] == len(asked) == 20
    assert any("\nQuestion: " in record["text"] for record in train)
    texts = {record["text"] for record in valid}
    for record in asked:
        text, _, rest = record["question"].partition("\nQuestion: ")
        assert text in texts and rest.endswith(" Answer:")
        assert len(set(record["choices"])) == 4 and all(choice.startswith(" ") for choice in record["choices"])
    assert sum(reported) == 2 * counts["train_bytes"]


def test_names_are_distinct() -> None:
    last = [player.last for clubs in world().leagues.values() for club in clubs for player in club.squad]
    assert len(last) == len(set(last))
    for clubs in world().leagues.values():
        assert len({club.short for club in clubs}) == len({club.nick for club in clubs}) == len(clubs)


def test_a_rule_or_a_slot_that_is_missing_is_named() -> None:
    templates = {
        "kickoff": ["{home} start"],
        "goal": ["[GOAL|[Goal|Yes]]! <how_{kind}>"],
        "how_pen": ["from the spot."],
    }
    said = {expand(templates, "goal", {"kind": "pen"}, WRITER, Random(seed)) for seed in range(40)}
    assert said == {f"{cry}! from the spot." for cry in ("GOAL", "Goal", "Yes")}
    for rule, missing in (("kickoff", "home"), ("full", "full")):
        with pytest.raises(ArtifactError, match=f"rule '{rule}': there is no rule or slot '{missing}'"):
            expand(templates, rule, {}, WRITER, Random(1))


def test_every_slot_is_filled_in_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in alternatives that are seldom drawn; brackets are balanced."""
    used = set[tuple[str, str]]()

    def watch(templates: dict[str, list[str]], rule: str, slots: dict[str, str], *voice: object) -> str:
        waiting, seen = [rule], set[str]()
        while waiting:
            seen.add(name := waiting.pop())
            text = "\n".join(templates[name])
            assert set(re.findall(r"\{(\w+)\}", text)) <= slots.keys(), (rule, name)
            waiting += {other.format_map(slots) for other in re.findall(r"<([\w{}]+)>", text)} - seen
        used.update((sport, name) for name in seen)
        return expand(templates, rule, slots, *voice)  # type: ignore[arg-type]

    monkeypatch.setattr(telling, "expand", watch)
    for sport, (play, _) in SPORTS.items():
        for index in range(PER_SPORT):
            play(Random(f"slots {sport} {index}"))
        rules = telling.rules(sport)
        assert {name for room, name in used if room == sport} == rules.keys()
        for template in (template for templates in rules.values() for template in templates):
            depths = [template[:at].count("[") - template[:at].count("]") for at in range(len(template) + 1)]
            assert min(depths) == depths[-1] == 0, template
