"""A simulated clock: what is due happens in order, and no time passes in between. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

MOST_AT_ONCE = 100_000
"""Calls at one moment, after which time is taken to stand still."""


class StandsStill(Exception):
    """Calls ask for calls at the same moment, without end."""


class Schedule:
    """Calls that are due at simulated times."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start of the run."""
        self.count = 0
        """Calls made so far."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have something called later."""
        self.at(self.now + seconds, call, *arguments)

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have something called at a time; calls of one time are made in the order of asking."""
        self._order += 1
        heapq.heappush(self._heap, (max(time, self.now), self._order, call, arguments))

    @property
    def next_at(self) -> float:
        """The time of the next call; infinite: there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def run(self, until: float, enough: Callable[[], bool] | None = None) -> bool:
        """Make all calls that are due.

        Args:
            until: the time to stop at.
            enough: asked after each call; True stops at once.

        Returns:
            Did it stop because it was enough?
        """
        heap = self._heap
        begun = self.count
        while heap and heap[0][0] <= until:
            time, _, call, arguments = heapq.heappop(heap)
            if time > self.now:
                self.now, begun = time, self.count
            self.count += 1
            if self.count - begun > MOST_AT_ONCE:
                raise StandsStill(f"more than {MOST_AT_ONCE} calls at {time:.3f} s, last {call}")
            call(*arguments)
            if enough is not None and enough():
                return True
        self.now = until
        return enough is not None and enough()
