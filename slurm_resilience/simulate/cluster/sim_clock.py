"""The simulated clock of sresctld's machine: its wall clock may step, its monotonic one never."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slurm_resilience.simulate.schedule import Schedule

EPOCH_SECONDS = 1_800_000_000.0
BOOTED_SECONDS = 5000.0
"""The monotonic clock at the start of a run."""


class SimClock:
    """A `Clock` whose waits let the schedule go on."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.step = 0.0
        """Seconds by which the wall clock was stepped."""
        self.stride: Callable[[], float] = lambda: 0.0
        """Asked before a wait: at least so long it takes. Nothing to do: a longer sleep."""

    def now(self) -> float:
        return EPOCH_SECONDS + self._schedule.now + self.step

    def monotonic(self) -> float:
        return BOOTED_SECONDS + self._schedule.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            until = self._schedule.now + max(seconds, self.stride())
            self._schedule.run(until, event.is_set)
        return event.is_set()
