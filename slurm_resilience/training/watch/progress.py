"""Progress of this process's main thread, by marks that cost next to nothing.

One thread marks, any other may look: a mark is one tuple, put in place at once. The marks of one
step also give its *own time*: all of it but what was spent in phases that wait for others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from slurm_resilience.clock import SYSTEM_CLOCK

COLLECTIVE = "collective"
"""The phase in which a process waits for the others."""
PAUSED = "paused"
"""A phase that may take as long as it likes: evaluation, an export."""
BETWEEN = "between"
"""After a commit, before the next step: the next batch is fetched."""
RETURNED = "returned"
"""Out of the block by its end: this process comes to no collective of this world any more."""
UNTOLD_STEPS = 1000
"""So many of the committed steps that were not taken yet are kept: later ones tell enough."""
FIRST = "forward"
"""The phase that `begin` marks."""


class ProgressMark(NamedTuple):
    """The last mark."""

    step: int
    phase: str
    at: float
    """When, on the monotonic clock, seconds."""


class Progress:
    """Marks of one process."""

    def __init__(self, clock: Callable[[], float] = SYSTEM_CLOCK.monotonic) -> None:
        """
        Args:
            clock: seconds, never going back.
        """
        self._clock = clock
        # A bare tuple takes no call to make.
        self._mark = (-1, "", clock())
        self._begun = -1.0
        """When the step began; negative: none is under way."""
        self._waited = 0.0
        self.own_seconds = 0.0
        """From the last step's begin to its commit, without waiting for others."""
        self.committed: deque[tuple[int, float, float]] = deque(maxlen=UNTOLD_STEPS)
        """Steps that were committed, with their seconds, all (0 when none had begun) and own. The
        main thread only adds to it; what follows from them is worked out in the mesh's thread."""

    @property
    def last(self) -> ProgressMark:
        return ProgressMark(*self._mark)

    def begin(self, step: int) -> None:
        """Begin a step; or go on with it, if it is the one that is under way."""
        if self._begun >= 0 and self._mark[0] == step:
            self.mark(FIRST)
            return
        now = self._clock()
        self._begun, self._waited = now, 0.0
        self._mark = (step, FIRST, now)

    def abandon(self) -> None:
        """Give up the step that is under way: it will not be committed."""
        self._begun = -1.0
        self._mark = (self._mark[0], "", self._clock())

    def mark(self, phase: str) -> None:
        """Note that the main thread is in this phase from now on: `COLLECTIVE` while it waits for
        others."""
        now = self._clock()
        step, before, at = self._mark
        if before in (COLLECTIVE, PAUSED):
            self._waited += now - at
        self._mark = (step, phase, now)

    def wait_begins(self, _: object = None) -> None:
        """Mark `COLLECTIVE`. What torch gives to a hook is not needed."""
        self.mark(COLLECTIVE)

    def commit(self, step: int) -> None:
        """Note that a step is done."""
        now = self._clock()
        _, before, at = self._mark
        if before in (COLLECTIVE, PAUSED):
            self._waited += now - at
        self._mark = (step, BETWEEN, now)
        seconds = 0.0
        if self._begun >= 0:
            seconds = now - self._begun
            self.own_seconds = seconds - self._waited
            self._begun = -1.0
        self.committed.append((step, seconds, self.own_seconds))
