"""The simulated clock of sresctld's machine: its wall clock may step, its monotonic one never."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slurm_resilience.simulate.schedule import Schedule

EPOCH_SECONDS = 1_800_000_000.0
BOOTED_SECONDS = 5000.0
"""The monotonic clock at the start of a run."""
SLICE_SECONDS, LONG_SLEEP_SECONDS = 3.0, 25.0


class SimClock:
    """A `Clock` whose waits let the schedule go on."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.step = 0.0
        """Seconds by which the wall clock was stepped."""
        self.stride: Callable[[], float] = lambda: 0.0
        """Asked before a wait: at least so long it takes. Nothing to do: a longer sleep."""
        self.waited: Callable[[], None] = lambda: None
        """Called at least every `SLICE_SECONDS` of a wait: beats arrive. In a long sleep nothing
        comes of them, and they arrive when it ends."""
        self.behind = 0.0
        """Messages that are handed on now arrived so many seconds ago."""
        self.stirred = 0
        """Counts what may give sresctld work: a long sleep ends at once."""

    def now(self) -> float:
        return EPOCH_SECONDS + self._schedule.now + self.step

    def monotonic(self) -> float:
        return BOOTED_SECONDS + self._schedule.now - self.behind

    def wait(self, event: threading.Event, seconds: float) -> bool:
        schedule, stirred = self._schedule, self.stirred
        stride = self.stride()
        slice_seconds = stride if stride >= LONG_SLEEP_SECONDS else SLICE_SECONDS

        def is_over() -> bool:
            return event.is_set() or self.stirred != stirred

        least, until = schedule.now + seconds, schedule.now + max(seconds, stride)
        while schedule.now < until and not event.is_set():
            schedule.run(min(until, schedule.now + slice_seconds), is_over)
            self.waited()
            if self.stirred != stirred:
                until, slice_seconds = max(least, schedule.now), SLICE_SECONDS
        return event.is_set()
