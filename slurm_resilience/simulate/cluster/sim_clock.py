"""The simulated clock of sresctld's machine: its wall clock may step, its monotonic one never."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slurm_resilience.simulate.schedule import Schedule

EPOCH_SECONDS = 1_800_000_000.0
BOOTED_SECONDS = 5000.0
"""The monotonic clock at the start of a run."""
SLICE_SECONDS = 3.0


class SimClock:
    """A `Clock` whose waits let the schedule go on."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.step = 0.0
        """Seconds by which the wall clock was stepped."""
        self.stride: Callable[[], float] = lambda: 0.0
        """Asked before a wait: at least so long it takes. Nothing to do: a longer sleep."""
        self.waited: Callable[[], None] = lambda: None
        """Called at least every `SLICE_SECONDS` of a wait: beats arrive."""

    def now(self) -> float:
        return EPOCH_SECONDS + self._schedule.now + self.step

    def monotonic(self) -> float:
        return BOOTED_SECONDS + self._schedule.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        schedule = self._schedule
        until = schedule.now + max(seconds, self.stride())
        while schedule.now < until and not event.is_set():
            schedule.run(min(until, schedule.now + SLICE_SECONDS), event.is_set)
            self.waited()
        return event.is_set()
