"""Numbers and lists as words, and the layout of paragraphs."""

from collections.abc import Sequence

from sportsllm.simulator.vocabulary import SHARED


def number(count: int) -> str:
    """2 -> two, 14 -> 14."""
    words = SHARED.numbers
    return words[count] if 0 <= count < len(words) else str(count)


def counted(count: int, noun: str, plural: str = "") -> str:
    """1, goal -> one goal; 3, goal -> three goals."""
    return f"{number(count)} {noun if count == 1 else plural or noun + 's'}"


def nth(count: int) -> str:
    """2 -> second, 21 -> 21st."""
    words = SHARED.ordinals
    if 0 < count < len(words):
        return words[count]
    suffix = "th" if 10 < count % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{suffix}"


def summed(terms: Sequence[int]) -> str:
    """[21, 16] -> 21 + 16 = 37."""
    return f"{' + '.join(map(str, terms))} = {sum(terms)}"


def paragraphs(parts: Sequence[str | Sequence[str]]) -> str:
    """Blocks of text with a blank line between; a block given as a list is one paragraph of sentences."""
    return "\n\n".join(part if isinstance(part, str) else " ".join(part) for part in parts if part)
