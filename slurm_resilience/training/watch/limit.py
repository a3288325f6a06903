"""How long a step may stand still before it counts as a hang; learnt from the steps so far. Pure.

    limit = median + 10 · 1.4826 · MAD        normal spread: 10 standard deviations
    limit ≥ 3 · the second slowest step       what happened twice is normal
    floor ≤ limit ≤ ceiling

1.4826 · MAD estimates the standard deviation of a normal distribution and is not moved by outliers
(Rousseeuw and Croux 1993). The second slowest step, not the slowest: one hiccup teaches nothing,
two (a garbage collection, a checkpoint's staging) do. The first steps compile and allocate, so
until `ENOUGH` are known the limit is ``first``.

The first step of a later world may compile and allocate again, most of all in a newcomer, for which
the others wait. It has a multiple of the limit, and of what such first steps took so far; not less
than `AGAIN`, and not more than ``first``.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

ENOUGH = 5
"""Steps that must be known before the limit is learnt."""
WINDOW = 200
"""Steps that are remembered."""
SPREAD = 10 * 1.4826
TIMES = 3.0

FLOOR = 10.0
"""Seconds. A false alarm costs every rank a step and a new group; a late one only the seconds.
Pauses of a few seconds are daily bread on a shared file system."""
CEILING = 1800.0
"""Seconds; torch's own limit for gloo."""
FIRST = 600.0
"""Seconds for the first steps."""
AGAIN = 60.0
"""Seconds, at least, for the first step of a later world."""


def learn(
    seconds: Sequence[float],
    floor: float = FLOOR,
    ceiling: float = CEILING,
    first: float = FIRST,
) -> float:
    """The limit after these steps.

    Args:
        seconds: what the last steps took, without the first of a world; at most `WINDOW` matter.
        floor: seconds, never less.
        ceiling: seconds, never more.
        first: seconds, while too few steps are known.

    Returns:
        Seconds without a mark after which a process stands still.
    """
    known = sorted(seconds[-WINDOW:])
    if len(known) < ENOUGH:
        return min(max(first, floor), ceiling)
    middle = median(known)
    mad = median(abs(one - middle) for one in known)
    return min(max(middle + SPREAD * mad, TIMES * known[-2], floor), ceiling)


def learn_first(
    seconds: Sequence[float],
    firsts: Sequence[float],
    floor: float = FLOOR,
    ceiling: float = CEILING,
    first: float = FIRST,
) -> float:
    """The limit of the first step of a world.

    Args:
        seconds: what the last steps took, without the first of a world.
        firsts: what the first steps of worlds took.
        floor: seconds, never less.
        ceiling: seconds, never more.
        first: seconds, while too few steps are known; never more either.
    """
    most = min(max(first, floor), ceiling)
    if len(seconds) < ENOUGH or not firsts:
        return most
    again = max(AGAIN, TIMES * max(firsts), TIMES * learn(seconds, floor, ceiling, first))
    return min(again, most)
