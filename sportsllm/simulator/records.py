"""What the simulator hands out: documents with their facts, and questions about them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """One generated text and the facts that were used to write it.

    `facts` holds only JSON types. `facts["shown"]` names what the text states, so that a question is asked
    only about something a reader of the text can answer.
    """

    id: str
    sport: str
    text: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One multiple-choice question; `answer` is the index of the right one among four distinct choices."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    kind: str


@dataclass(frozen=True)
class Ask:
    """A question before its choices are drawn: the right answer and everything plausible that is wrong."""

    kind: str
    question: str
    answer: str
    wrong: tuple[str, ...]
