"""Which nodes measure their connection at the same time: each has one partner in a turn. Pure."""

from __future__ import annotations


def turns(count: int) -> list[list[tuple[int, int]]]:
    """Turns in which every node meets every other one once (a round-robin tournament, by the circle method).

    The lower one of a pair is first.
    """
    circle: list[int | None] = [*range(count), *([None] * (count % 2))]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
