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

    # As it is, without a call around it: a training asks several times a step.
    monotonic = staticmethod(time.monotonic)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)


class SteadyClock:
    """A clock whose time of day does not jump: it goes on from its start (or from `adopt`) at the
    pace of the monotonic one, whatever is done to the machine's date meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = 0.0
        self.adopt()

    def now(self) -> float:
        return self._offset + self._clock.monotonic()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return self._clock.wait(event, seconds)

    def machines(self) -> float:
        """Return the machine's own date, in seconds since the epoch."""
        return self._clock.now()

    def adopt(self) -> None:
        """Take over the machine's date. Only while nothing is timed by it."""
        self._offset = self._clock.now() - self._clock.monotonic()

    def go_on_from(self, moment: float) -> None:
        """Show this moment (epoch) or a later one from now on."""
        self._offset = max(self._offset, moment - self._clock.monotonic())


SYSTEM_CLOCK: Clock = SystemClock()
"""The machine's clock, for borders that talk to real sockets, files and programs.

What decides takes a `Clock` as an argument, or `now`, so that tests and the simulator own its time.
"""


# Slurm's commands print times in UTC for us (`slurm.cli.environment`). A node's reason, a boot and
# a reservation are known by them, also in the journal: in local time they would be others once an
# administrator sets the zone, or for the other of two controllers, and a mark of our own would read
# like a person's.


def seconds_of(stamp: str) -> float:
    """Return a time that Slurm's commands have printed, in seconds since the epoch.

    Raises:
        ValueError: it is none.
    """
    from datetime import UTC, datetime  # late: no step waits for it to start

    return datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()


def stamp_of(seconds: float) -> str:
    """Return a time as Slurm's commands print it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
