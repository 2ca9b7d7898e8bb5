"""Windows over a document that is longer than the context."""

from collections.abc import Iterator


def windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Windows over `length` tokens as (start, stop, first scored token), every token but the first scored once."""
    start, scored = 0, 1
    while scored < length:
        stop = min(length, start + context)
        yield start, stop, scored
        scored, start = stop, start + context // 2
