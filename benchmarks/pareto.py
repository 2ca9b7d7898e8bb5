"""The Pareto front: what no other point beats."""

from __future__ import annotations

from collections.abc import Iterable


def pareto_front(points: Iterable[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The points that no other is at least as good as in every coordinate, sorted; lower is better.

    Equal points count once. In order, a point can only be beaten by one before it, and by one of the front if by any.
    """
    front: list[tuple[float, ...]] = []
    for point in sorted(set(points)):
        if not any(all(a <= b for a, b in zip(best, point, strict=True)) for best in front):
            front.append(point)
    return front
