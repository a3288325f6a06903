"""Find slow ranks. Pure.

In synchronous training every step takes as long as its slowest rank, so the step times are all
alike; the *own* times (without waiting for others) tell who it is. A seat is a straggler when

    modified z-score  0.6745 · (x − median) / MAD  >  3.5     and     x / median  ≥  1.3

x: the median of its own times over the window; median and MAD: over all seats. The score and its
threshold are those of Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993). The second
condition keeps out differences that are clear but too small to act upon.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import msgspec

SCORE = 3.5
WINDOW = 50
"""Own times that are kept of each seat."""
SLOWDOWN_FACTOR = 1.3
SEATS = 3
"""With fewer seats there is no majority to differ from."""
STEPS = 5
"""Own times that a seat needs before it is judged."""


class Straggler(msgspec.Struct, frozen=True):
    """A seat that holds up the others."""

    seat: int
    seconds: float
    """Its own time for a step (median of the window)."""
    slowdown: float
    """Times the median of all seats."""
    score: float
    """Modified z-score; infinite where all others are alike."""


def stragglers(
    times: Mapping[int, Sequence[float]], slowdown: float = SLOWDOWN_FACTOR, score: float = SCORE
) -> list[Straggler]:
    """Name the slow seats, slowest first.

    Args:
        times: for each seat its own times of the last steps, seconds.
        slowdown: least ratio to the median seat.
        score: least modified z-score.
    """
    # Late: it loads decimal and fractions, and no step waits for what only its times need.
    from statistics import median

    own = {seat: median(seconds) for seat, seconds in times.items() if len(seconds) >= STEPS}
    if len(own) < SEATS:
        return []
    middle = median(own.values())
    if middle <= 0:
        return []
    mad = median(abs(one - middle) for one in own.values())
    found = []
    for seat, seconds in own.items():
        far = 0.6745 * (seconds - middle)
        value = far / mad if mad > 0 else float("inf") if far > 0 else 0.0
        if value > score and seconds >= slowdown * middle:
            found.append(Straggler(seat, seconds, seconds / middle, value))
    return sorted(found, key=lambda one: (-one.slowdown, one.seat))


class OwnTimes:
    """Seconds of each seat's own work in the last steps of this world."""

    def __init__(self) -> None:
        self._own: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._counted: dict[int, int] = {}
        """The step of each peer that was counted last."""

    def clear(self) -> None:
        """Begin a new world."""
        self._own.clear()
        self._counted.clear()

    def add(self, seat: int, seconds: float) -> None:
        """Count a step of this process."""
        self._own[seat].append(seconds)

    def heard(self, seat: int, step: int, seconds: float) -> None:
        """Count a step of a peer, the first time that it is told."""
        if seconds > 0 and self._counted.get(seat) != step:
            self._counted[seat] = step
            self._own[seat].append(seconds)

    def stragglers(self) -> list[Straggler]:
        """Return the seats that hold up the others, slowest first."""
        return stragglers({seat: tuple(own) for seat, own in self._own.copy().items()})
