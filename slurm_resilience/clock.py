"""Time as a collaborator, so that tests and the simulator can own it."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time, and a way to wait."""

    def now(self) -> float:
        """Seconds since the epoch. Written to journals; compared between machines."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back. Used for durations."""
        ...

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until ``event`` is set or ``seconds`` have passed; True when it was set."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)


SYSTEM_CLOCK: Clock = SystemClock()
"""The machine's clock, for borders that talk to real sockets, files and programs.

What decides takes a `Clock` as an argument, or `now`, so that tests and the simulator own its time.
"""
