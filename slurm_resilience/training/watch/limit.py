"""Learn from the steps so far when a step that stands still counts as a hang. Pure.

    limit = median + 10 · 1.4826 · MAD        normal spread: 10 standard deviations
    limit ≥ 3 · the second slowest step       what happened twice is normal
    floor ≤ limit ≤ ceiling

1.4826 · MAD estimates the standard deviation of a normal distribution and is not moved by outliers
(Rousseeuw and Croux 1993). The second slowest step, not the slowest: one hiccup teaches nothing,
two (a garbage collection, a checkpoint's staging) do. The first steps compile and allocate, so
until `ENOUGH` are known the limit is ``first``.

The first step of a later world may compile and allocate again, most of all in a newcomer, for which
the others wait. It has a multiple of the limit, and of what such first steps took so far; not less
than `AGAIN_SECONDS`, and not more than ``first``.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

ENOUGH = 5
"""Steps that must be known before the limit is learnt."""
WINDOW = 200
"""Steps that are remembered."""
SPREAD_FACTOR = 10 * 1.4826
SLOWEST_FACTOR = 3.0

FLOOR_SECONDS = 10.0
"""Seconds. A false alarm costs every rank a step and a new group; a late one only the seconds.
Pauses of a few seconds are daily bread on a shared file system."""
CEILING_SECONDS = 1800.0
"""Seconds; torch's own limit for gloo."""
FIRST_SECONDS = 600.0
"""Seconds for the first steps."""
AGAIN_SECONDS = 60.0
"""Seconds, at least, for the first step of a later world."""


def learn(
    seconds: Sequence[float],
    floor: float = FLOOR_SECONDS,
    ceiling: float = CEILING_SECONDS,
    first: float = FIRST_SECONDS,
) -> float:
    """Return the limit after these steps.

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
    return min(max(middle + SPREAD_FACTOR * mad, SLOWEST_FACTOR * known[-2], floor), ceiling)


def learn_first(
    seconds: Sequence[float],
    firsts: Sequence[float],
    floor: float = FLOOR_SECONDS,
    ceiling: float = CEILING_SECONDS,
    first: float = FIRST_SECONDS,
) -> float:
    """Return the limit of the first step of a world.

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
    again = max(
        AGAIN_SECONDS,
        SLOWEST_FACTOR * max(firsts),
        SLOWEST_FACTOR * learn(seconds, floor, ceiling, first),
    )
    return min(again, most)
