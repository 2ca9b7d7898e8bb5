"""The simulator: the same seed gives the same text, and every number in it adds up."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sportsllm.errors import ArtifactError
from sportsllm.simulator import Document, questions, simulate, write_corpus
from sportsllm.simulator.corpus import SPORTS, is_valid
from sportsllm.simulator.grammar import TABLE_SIZE, Grammar, Pick, Slot, load_grammar
from sportsllm.simulator.toml_file import read
from sportsllm.simulator.vocabulary import Races
from sportsllm.simulator.world import world

PER_SPORT = 200


@cache
def documents(sport: str) -> tuple[Document, ...]:
    """PER_SPORT documents of one sport, drawn directly so that rare sports cost no more than common ones."""
    play = SPORTS[sport][0]
    found = []
    for index in range(PER_SPORT):
        text, facts = play(Random(f"test {sport} {index}"))
        found.append(Document(f"{sport}-{index}", sport, text, facts))
    return tuple(found)


def _sections(text: str, start: str) -> Iterator[list[str]]:
    """The lines after every line that begins with `start`, up to a blank one."""
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines and lines[0].startswith(start):
            yield lines[1:]


def test_same_seed_and_index_give_the_same_document() -> None:
    assert [simulate(7, index) for index in range(40)] == [simulate(7, index) for index in range(40)]
    assert simulate(7, 3) == simulate(7, 3) != simulate(8, 3)
    assert len({simulate(7, index).text for index in range(200)}) == 200


def test_the_world_does_not_depend_on_the_seed() -> None:
    grounds: dict[str, str] = {}
    for seed in (1, 2):
        for index in range(300):
            facts = simulate(seed, index).facts
            if "teams" in facts:
                assert grounds.setdefault(f"{facts['clubs'][0]} {facts['league']}", facts["venue"]) == facts["venue"]


@pytest.mark.parametrize("sport", sorted(SPORTS))
def test_texts_are_clean(sport: str) -> None:
    lengths = []
    for document in documents(sport):
        json.dumps(document.facts)
        lengths.append(len(document.text))
        assert not re.search(
            r"[{}<>\[\]|]|  | [.,;]|\b[Aa] (?:own|easy|eight|eleven|8|11|18)\b|^[a-z]", document.text
        ), document.text
        assert "one goals" not in document.text and "two goal " not in document.text
    assert 700 < sum(lengths) / PER_SPORT < 3500
    assert max(lengths) < 6500


def test_football_scores_add_up() -> None:
    for document in documents("football"):
        facts, text = document.facts, document.text
        running = [0, 0]
        minutes = [item["minute"] for item in facts["scoring"]]
        assert minutes == sorted(minutes)
        for item in facts["scoring"]:
            running[item["team"]] += item["points"]
            assert item["score"] == running
        assert running == facts["score"]
        final = f"{facts['teams'][0]} {running[0]}-{running[1]} {facts['teams'][1]}"
        assert final in text
        # No score stands in the text that the match never had.
        home, away = map(re.escape, facts["teams"])
        reached = {(0, 0), *(tuple(item["score"]) for item in facts["scoring"])}
        for left, right in re.findall(rf"{home} (\d+)-(\d+) {away}", text):
            assert (int(left), int(right)) in reached


def test_minutes_are_in_order() -> None:
    for document in documents("football"):
        minutes = [int(minute) for minute in re.findall(r"^(\d+)' ", document.text, re.MULTILINE)]
        assert minutes == sorted(minutes)


def test_football_statistics_count_the_events() -> None:
    for document in documents("football"):
        facts, text = document.facts, document.text
        counts = {
            title: (int(left), int(right))
            for title, left, right in re.findall(r"^([\w ]+): [^\d\n]+ (\d+)%?, [^\d\n]+ (\d+)%?$", text, re.MULTILINE)
        }
        if not counts:
            continue
        own = [sum(g["kind"] == "own" and g["team"] == side for g in facts["scoring"]) for side in (0, 1)]
        for side in (0, 1):
            goals = facts["score"][side] - own[side]
            assert counts["Shots on target"][side] == goals + counts["Saves"][1 - side]
            assert counts["Shots"][side] >= counts["Shots on target"][side]
        assert sum(counts["Possession"]) == 100


def test_written_sums_are_right() -> None:
    """`21 + 16 = 37` wherever it stands."""
    seen = 0
    for sport in ("basketball", "tennis"):
        for document in documents(sport):
            for terms, total in re.findall(r"((?:\d+ \+ )+\d+) = (\d+)", document.text):
                assert sum(map(int, terms.split(" + "))) == int(total)
                seen += 1
    assert seen > 300


def test_basketball_box_scores_add_up() -> None:
    for document in documents("basketball"):
        facts = document.facts
        assert [sum(points for _, points in side) for side in facts["box"]] == facts["score"] == facts["quarters"][-1]
        assert facts["score"][0] != facts["score"][1]
        left = [
            (10 if name.startswith("Q") else 20, name, -60 * int(minute) - int(second))
            for name, minute, second in re.findall(r"^(Q\d|OT) (\d+):(\d\d) ", document.text, re.MULTILINE)
        ]
        regular = [entry for entry in left if entry[0] == 10]
        assert regular == sorted(regular)


def test_tennis_results_follow_from_the_games() -> None:
    for document in documents("tennis"):
        facts, text = document.facts, document.text
        won = [sum(games[side] > games[1 - side] for games in facts["sets"]) for side in (0, 1)]
        assert won == facts["score"] and max(won) == 2
        best = won.index(2)
        assert facts["players"][best] == facts["winner"]
        assert facts["result"] == " ".join(f"{games[best]}-{games[1 - best]}" for games in facts["sets"])
        assert facts["result"] in text
        for games in facts["sets"]:
            assert sorted(games) in [[0, 6], [1, 6], [2, 6], [3, 6], [4, 6], [5, 7], [6, 7]]


def test_cycling_gaps_add_up() -> None:
    for document in documents("cycling"):
        facts = document.facts
        before, lost = dict(facts["before"]), dict(facts["result"])
        total = {name: before[name] + lost[name] for name in before}
        best = min(total.values())
        assert {name: gap - best for name, gap in total.items()} == dict(facts["after"])
        assert [gap for _, gap in facts["after"]] == sorted(dict(facts["after"]).values())
        at = [int(km) for km in re.findall(r"^Km (\d+) ", document.text, re.MULTILINE)]
        assert at == sorted(at) and (not at or at[-1] == facts["km"])


def test_tables_follow_from_the_results() -> None:
    for document in documents("table"):
        results = next(_sections(document.text, "Results"))
        points: dict[str, int] = {}
        goals: dict[str, list[int]] = {}
        for line in results:
            home, left, right, away = re.fullmatch(r"(.+) (\d+)-(\d+) (.+)", line).groups()  # type: ignore[union-attr]
            for team, own, other in ((home, int(left), int(right)), (away, int(right), int(left))):
                points[team] = points.get(team, 0) + (3 if own > other else own == other)
                tally = goals.setdefault(team, [0, 0])
                tally[0] += own
                tally[1] += other
        rows = next(_sections(document.text, "Table"))
        written = [re.fullmatch(r"\d\. (.+) \d+ \d+ \d+ \d+ (\d+):(\d+) (\d+)", row).groups() for row in rows]  # type: ignore[union-attr]
        assert {team: int(total) for team, _, _, total in written} == points
        assert {team: [int(made), int(let)] for team, made, let, _ in written} == goals
        order = [(-int(total), int(let) - int(made)) for _, made, let, total in written]
        assert order == sorted(order)


@pytest.mark.parametrize("sport", sorted(SPORTS))
def test_questions_follow_from_the_facts(sport: str) -> None:
    asked = 0
    for document in documents(sport):
        facts = document.facts
        for question in questions(document, Random(document.id)):
            asked += 1
            assert len(set(question.choices)) == 4 and 0 <= question.answer < 4
            answer = question.choices[question.answer]
            if question.kind in (
                "final_score",
                "venue",
                "crowd",
                "league",
                "first_scorer",
                "last_scorer",
                "finish",
            ):
                assert answer in document.text, (question, document.text)
            if question.kind == "final_score":
                assert answer == f"{facts['teams'][0]} {facts['score'][0]}-{facts['score'][1]} {facts['teams'][1]}"
            if question.kind == "winner" and "teams" in facts:
                left, right = facts["score"]
                better = "Neither" if left == right else facts["teams"][left < right]
                assert answer.startswith(better)
            if question.kind == "minute":
                name = re.search(r"did (.+) score", question.question).group(1)  # type: ignore[union-attr]
                found = [item["minute"] for item in facts["scoring"] if item["player"] == name]
                assert int(answer) in found
            if question.kind == "count":
                name = re.search(r"How many goals did (.+) score", question.question).group(1)  # type: ignore[union-attr]
                found = [item for item in facts["scoring"] if item["player"] == name and item["kind"] != "own"]
                assert int(answer) == len(found)
    assert asked > 2 * PER_SPORT


def test_questions_depend_only_on_their_generator() -> None:
    document = simulate(1, 1)
    assert questions(document, Random(5)) == questions(document, Random(5))


def test_corpus_is_reproducible_split_and_of_the_size_asked(tmp_path: Path) -> None:
    contents = []
    reported: list[tuple[int, int]] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        counts = write_corpus(
            tmp_path / name, seed=3, megabytes=0.5, questions=20, progress=lambda *at: reported.append(at)
        )
        contents.append({path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())})
    assert contents[0] == contents[1]
    assert list(contents[0]) == ["questions.jsonl", "train.jsonl", "valid.jsonl"]
    records = {
        name: [json.loads(line) for line in contents[0][f"{name}.jsonl"].splitlines()]
        for name in ("train", "valid", "questions")
    }
    train, valid = records["train"], records["valid"]
    assert abs(sum(len(record["text"].encode()) for record in train) / 0.5e6 - 1) < 0.05
    assert not {record["id"] for record in train} & {record["id"] for record in valid}
    assert not {record["text"] for record in train} & {record["text"] for record in valid}
    assert all(is_valid(record["id"]) for record in valid) and not any(is_valid(r["id"]) for r in train)
    assert (counts["train_documents"], counts["valid_documents"]) == (len(train), len(valid))
    assert counts["questions"] == len(records["questions"]) == 20
    assert any("\nQuestion: " in record["text"] for record in train)
    texts = {record["text"] for record in valid}
    for record in records["questions"]:
        text, _, rest = record["question"].partition("\nQuestion: ")
        assert text in texts and rest.endswith(" Answer:")
        assert len(set(record["choices"])) == 4 and all(choice.startswith(" ") for choice in record["choices"])
    assert reported[-1] == (500_000, 500_000) and reported == sorted(reported[: len(reported) // 2]) * 2


def test_a_corpus_needs_an_empty_directory_and_sane_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="megabytes is 0"):
        write_corpus(tmp_path, seed=1, megabytes=0, questions=1)
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="not empty"):
        write_corpus(tmp_path, seed=1, megabytes=1, questions=1)


def test_names_are_distinct_within_a_sport() -> None:
    for leagues in world().leagues.values():
        last = [player.last for league in leagues for club in league.clubs for player in club.squad]
        assert len(last) == len(set(last))
        for league in leagues:
            assert len({club.short for club in league.clubs}) == len({club.nick for club in league.clubs})
            assert len({club.short for club in league.clubs}) == len(league.clubs)


@pytest.mark.parametrize("template", ["[a|b", "a|b", "a]", "<missing>"])
def test_bad_templates_are_refused(template: str) -> None:
    with pytest.raises(ArtifactError, match="template"):
        Grammar({"rule": [template]})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[slots]\n[rules]\nkickoff = '", "not valid TOML"),
        ("[rules]\nkickoff = 'We start'", "slots: is missing"),
        ("[slots]\n[rules]\nkickoff = ['We start']", "rules.kickoff: Input should be a valid string"),
        ("[slots]\n[rules]\nkickoff = ''", "rule 'kickoff' has no template; write one a line"),
        ("[slots]\n[rules]\nkickoff = 'We [start'", "rule 'kickoff', template 'We [start': a bracket is not closed"),
        (
            "[slots]\nhome = 'a club'\n[rules]\nkickoff = '{hme} start'",
            "rule 'kickoff', template '{hme} start': nothing fills the slot {hme}",
        ),
        ("[slots]\n[rules]\nkickoff = '<how_{kind}>'", "rule 'kickoff': no rule begins with 'how_'"),
    ],
)
def test_a_malformed_template_file_is_named_in_one_line(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "football.toml"
    path.write_text(text)
    with pytest.raises(ArtifactError) as raised:
        load_grammar(path)
    assert str(raised.value).startswith(f"{path}: {problem}") and "\n" not in str(raised.value)


def test_a_malformed_word_list_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "races.toml"
    path.write_text("names = ['Tour of']\nclimbs = 'Col de'\nclimb_endings = ['a']\nterrain = ['flat']")
    with pytest.raises(ArtifactError) as raised:
        read(path, Races)
    for key in ("climbs: ", "terrains: is missing", "terrain: unknown field"):
        assert key in str(raised.value)


def test_a_rule_or_a_slot_that_is_missing_while_writing_is_named() -> None:
    short = Grammar({"kickoff": ["{home} start"]}, "football.toml", slots=["home"])
    with pytest.raises(ArtifactError, match=r"football\.toml: rule 'kickoff': nothing fills the slot \{home\}"):
        short.say("kickoff", {}, [0] * TABLE_SIZE, Random(1).random)
    with pytest.raises(ArtifactError, match=r"football\.toml: there is no rule 'full'"):
        short.say("full", {}, [0] * TABLE_SIZE, Random(1).random)


def test_rules_of_a_family_are_written_out() -> None:
    family = Grammar({"goal": ["Goal! <how_{kind}>"], "how_head": ["A header."], "how_pen": ["A penalty."]})
    said = [family.say(f"goal_{kind}", {}, [0] * TABLE_SIZE, Random(1).random) for kind in ("head", "pen")]
    assert said == ["Goal! A header.", "Goal! A penalty."]


def _named(pick: Pick) -> set[str]:
    """All slots that any expansion of `pick` can name."""
    parts = [part for option in pick.options for part in option]
    slots = {str(part) for part in parts if isinstance(part, Slot)}
    return slots.union(*(_named(part) for part in parts if isinstance(part, Pick)))


def test_every_slot_is_filled_in_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in alternatives that are seldom drawn; and no file promises a slot that nothing fills."""
    declared, filled = set[str](), set[str]()
    say = Grammar.say

    def watch(self: Grammar, rule: str, slots: Mapping[str, str], *voice: Any) -> str:
        assert _named(self.rules[rule]) <= slots.keys(), (self.source, rule)
        declared.update(self.slots)
        filled.update(slots)
        return say(self, rule, slots, *voice)

    monkeypatch.setattr(Grammar, "say", watch)
    for sport, (play, _) in SPORTS.items():
        declared.clear()
        filled.clear()
        for index in range(PER_SPORT):
            play(Random(f"slots {sport} {index}"))
        assert declared - filled <= ({"feat"} if sport == "basketball" else set())  # only football has a best player
