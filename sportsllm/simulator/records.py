"""Documents with their facts, and questions about them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """One generated text and the facts that were used to write it; `facts` holds only JSON types."""

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
