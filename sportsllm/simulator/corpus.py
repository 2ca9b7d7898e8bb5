"""From match to file: which document an index is, and the three JSON Lines files of a corpus."""

import hashlib
import json
from collections.abc import Callable
from itertools import chain, count, zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple

from sportsllm.simulator import football, tennis
from sportsllm.simulator.telling import Ask
from sportsllm.simulator.world import skewed, weighted

SPORTS = {"football": (football.play, 0.65), "tennis": (tennis.play, 0.35)}
"""How each sport is written, and its share of the documents."""
CHOICES = 4
VALID_SHARE = 0.05
_MOST_TURNS = 3  # of a conversation
ASKING_SHARE = 0.3  # of the training documents end with questions and their answers


class Document(NamedTuple):
    """One generated text, and what can be asked about it."""

    id: str
    sport: str
    text: str
    asks: list[Ask]


def simulate(seed: int, index: int) -> Document:
    """Document `index` of the corpus with this seed: a pure function of the two."""
    rng = Random(f"match {seed} {index}")
    sport = weighted(rng, {name: share for name, (_, share) in SPORTS.items()})
    return Document(f"{sport}-{seed}-{index:07d}", sport, *SPORTS[sport][0](rng))


def is_valid(name: str) -> bool:
    """Whether the document with this id is held out: 5% are, by the hash of the id."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < VALID_SHARE * 2**64


def write_corpus(
    out: Path,
    *,
    seed: int,
    megabytes: float,
    questions: int,
    chats: int = 0,
    progress: Callable[[int], object] | None = None,
) -> dict[str, int]:
    """Write train.jsonl, valid.jsonl and questions.jsonl into the empty directory `out`, and chats.jsonl if asked to.

    Args:
        seed: of the documents; the world of clubs and players is always the same.
        megabytes: UTF-8 size of the training text, in millions of bytes, reached to within one document.
        questions: how many questions to write. They are about held-out documents only, spread over as many as
            there are; a small corpus can run out of them, so the returned count is the one that holds.
        chats: how many conversations about training documents to write at most, a document each.
        progress: called with the bytes of each training document.

    Returns:
        Counts: train_documents, valid_documents, train_bytes, valid_bytes, questions, and chats if there are some.
    """
    target, asked, told = round(megabytes * 1e6), list[list[str]](), list[str]()
    documents, sizes = {"train": 0, "valid": 0}, {"train": 0, "valid": 0}
    files = {split: (out / f"{split}.jsonl").open("w", encoding="utf-8", newline="\n") for split in documents}
    with files["train"], files["valid"]:
        for index in count():
            if sizes["train"] >= target:
                break
            name, sport, text, asks = simulate(seed, index)
            split, rng = "valid" if is_valid(name) else "train", Random(f"questions {name}")
            rng.shuffle(asks)
            if split == "train" and len(told) < chats:
                told.append(_chat(text, asks[: 1 + len(told) % _MOST_TURNS]))
            if split == "valid":
                asked.append([_question(name, text, ask, rng) for ask in asks])
            elif rng.random() < ASKING_SHARE:
                text += "".join(f"{_prompt(ask)} {ask.right}" for ask in asks[: 1 + skewed(rng, 3, 1)])
            files[split].write(json.dumps({"id": name, "sport": sport, "text": text}, ensure_ascii=False) + "\n")
            documents[split] += 1
            sizes[split] += len(text.encode())
            if progress and split == "train":
                progress(len(text.encode()))
    # One question per document, then a second per document, until there are enough.
    lines = [line for line in chain(*zip_longest(*asked)) if line][:questions]
    (out / "questions.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
    if told:
        (out / "chats.jsonl").write_text("".join(told), encoding="utf-8", newline="\n")
    counts = {f"{split}_documents": number for split, number in documents.items()}
    counts |= {f"{split}_bytes": size for split, size in sizes.items()} | {"questions": len(lines)}
    return counts | ({"chats": len(told)} if told else {})


def _prompt(ask: Ask) -> str:
    """How a question stands under its text; a choice follows after one space."""
    return f"\nQuestion: {ask.question} Answer:"


def _chat(text: str, asks: list[Ask]) -> str:
    """A line of chats.jsonl: the report and a question, then an answer and further questions."""
    messages = []
    for number, ask in enumerate(asks):
        asked = ask.question if number else f"{text}\n\n{ask.question}"
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": ask.right}]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def _question(name: str, text: str, ask: Ask, rng: Random) -> str:
    """A line of questions.jsonl: question + choice has exactly the form of the training text."""
    wrong = [each for each in dict.fromkeys(ask.plausible) if each != ask.right]
    choices = [ask.right, *rng.sample(wrong, CHOICES - 1)]
    rng.shuffle(choices)
    question, shown = text + _prompt(ask), [f" {choice}" for choice in choices]
    record = {"id": f"{name}/{ask.kind}", "kind": ask.kind, "question": question, "choices": shown}
    return json.dumps({**record, "answer": choices.index(ask.right)}, ensure_ascii=False) + "\n"
