"""From match to file: which document an index is, and the three JSON Lines files of a corpus."""

import hashlib
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from sportsllm.simulator import table
from sportsllm.simulator.asking import questions as ask
from sportsllm.simulator.draws import skewed, weighted
from sportsllm.simulator.records import Document, Question
from sportsllm.simulator.sports import basketball, cycling, football, tennis

Play = Callable[[Random], tuple[str, dict[str, Any]]]
SPORTS: dict[str, tuple[Play, float]] = {  # how each sport is written, and its share of the documents
    "football": (football.play, 0.40),
    "basketball": (basketball.play, 0.19),
    "tennis": (tennis.play, 0.18),
    "cycling": (cycling.play, 0.13),
    "table": (table.play, 0.10),
}
VALID_SHARE = 0.05
ASKING_SHARE = 0.3  # of the training documents end with questions and their answers
_REPORT_EVERY = 256


def simulate(seed: int, index: int) -> Document:
    """Document `index` of the corpus with this seed: a pure function of the two."""
    rng = Random(f"match {seed} {index}")
    sport = weighted(rng, {name: share for name, (_, share) in SPORTS.items()})
    text, facts = SPORTS[sport][0](rng)
    return Document(f"{sport}-{seed}-{index:07d}", sport, text, facts)


def is_valid(name: str) -> bool:
    """Whether the document with this id is held out: 5% are, by the hash of the id."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < VALID_SHARE * 2**64


def prompt(question: str) -> str:
    """How a question stands under its text; a choice follows after one space."""
    return f"\nQuestion: {question} Answer:"


def write_corpus(
    out: Path, *, seed: int, megabytes: float, questions: int, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Write train.jsonl, valid.jsonl and questions.jsonl into the empty directory `out`.

    Args:
        out: an existing directory with nothing in it.
        seed: of the documents; the world of clubs and players is always the same.
        megabytes: UTF-8 size of the training text, in millions of bytes, reached to within one document.
        questions: how many questions to write. They are about held-out documents only, spread over as many as
            there are; a small corpus can run out of them, so the returned count is the one that holds.
        progress: called with (bytes done, bytes in all) now and then.

    Returns:
        Counts: train_documents, valid_documents, train_bytes, valid_bytes, questions, and sports (documents
        of each).

    Raises:
        ValueError: `megabytes` is not above zero or `questions` is below zero.
        FileExistsError: `out` is not empty.
    """
    if not megabytes > 0 or questions < 0:
        raise ValueError(f"megabytes is {megabytes} and questions {questions}; give above 0 and at least 0")
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; name a new directory")
    target = round(megabytes * 1e6)
    documents, sizes, sports = {"train": 0, "valid": 0}, {"train": 0, "valid": 0}, dict.fromkeys(SPORTS, 0)
    asked: list[list[dict[str, Any]]] = []
    with (
        (out / "train.jsonl").open("w", encoding="utf-8", newline="\n") as train,
        (out / "valid.jsonl").open("w", encoding="utf-8", newline="\n") as valid,
    ):
        for index in count():
            if sizes["train"] >= target:
                break
            document = simulate(seed, index)
            held_out = is_valid(document.id)
            text, rng = document.text, Random(f"questions {document.id}")
            if held_out:
                asked.append([_record(document, question) for question in ask(document, rng)])
            elif rng.random() < ASKING_SHARE:
                for question in ask(document, rng)[: 1 + skewed(rng, 3, 1)]:
                    text += f"{prompt(question.question)} {question.choices[question.answer]}"
            split = "valid" if held_out else "train"
            line = json.dumps({"id": document.id, "sport": document.sport, "text": text}, ensure_ascii=False)
            (valid if held_out else train).write(line + "\n")
            documents[split] += 1
            sizes[split] += len(text.encode())
            sports[document.sport] += 1
            if progress and index % _REPORT_EVERY == 0:
                progress(min(sizes["train"], target), target)
    written = _write_questions(out / "questions.jsonl", asked, questions)
    if progress:
        progress(target, target)
    return {
        "train_documents": documents["train"],
        "valid_documents": documents["valid"],
        "train_bytes": sizes["train"],
        "valid_bytes": sizes["valid"],
        "questions": written,
        "sports": sports,
    }


def _record(document: Document, question: Question) -> dict[str, Any]:
    """A line of questions.jsonl: question + choice has exactly the form of the training text."""
    return {
        "id": question.id,
        "kind": question.kind,
        "question": document.text + prompt(question.question),
        "choices": [f" {choice}" for choice in question.choices],
        "answer": question.answer,
    }


def _write_questions(path: Path, asked: list[list[dict[str, Any]]], wanted: int) -> int:
    """One question per document, then a second per document, until there are enough."""
    written = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for turn in range(max(map(len, asked), default=0)):
            for records in asked:
                if turn < len(records) and written < wanted:
                    file.write(json.dumps(records[turn], ensure_ascii=False) + "\n")
                    written += 1
    return written
