"""Pair all nodes, round after round, so that each meets every other one in turn. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def rounds_of_pairs(nodes: Sequence[str], rounds: int) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the pairs of each round.

    It is the circle method of tournaments: one node stays in its place, the others move on by one.
    After all rounds of a tournament it begins anew. By chance alone, a node of four would often
    have the same partner in five of six rounds, and that one may be the slow one.

    Args:
        nodes: their names; of an odd number one is left out of each round, in turn.
        rounds: how many.
    """
    circle = [*nodes, *[""] * (len(nodes) % 2)]
    half, found = len(circle) // 2, []
    for _ in range(rounds):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append(tuple(pair for pair in pairs if all(pair)))
        circle[1:] = [*circle[-1:], *circle[1:-1]]
    return tuple(found)
