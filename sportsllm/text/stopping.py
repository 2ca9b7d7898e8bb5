"""Text that ends at a stop."""

from collections.abc import Iterable, Iterator, Sequence


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield text as it comes, up to the one of `stops` that is complete first, however the pieces cut it.

    The end of what has come is held back as long as it may be the beginning of a stop. No piece is asked for after a
    stop.
    """
    held = ""
    for piece in pieces:
        held += piece
        complete = [(place + len(stop), place) for stop in stops if (place := held.find(stop)) >= 0]
        if complete:
            _, place = min(complete)
            if place:
                yield held[:place]
            return
        keep = max((n for stop in stops for n in range(len(stop)) if held.endswith(stop[:n])), default=0)
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    if held:
        yield held
