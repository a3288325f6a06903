"""A clock for tests of long waits."""

from __future__ import annotations

import threading


class MinutesPass:
    """A clock by which each wait takes as long as it may."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.seconds += seconds
        return event.is_set()
