"""The time by which an elastic step's limits are counted. Pure."""

from __future__ import annotations

LATE_SECONDS = 5.0
"""A look that comes so long after the one before was kept from coming: the supervisor was stopped,
or its machine slept."""


class AwakeTime:
    """Monotonic seconds, without those in which the supervisor stood still.

    What it has asked for may not have been done meanwhile, and what was done is seen a moment
    later: no limit is over because of them.
    """

    def __init__(self) -> None:
        self._looked: float | None = None
        self.away = 0.0
        """Seconds of all absences so far."""

    def at(self, now: float) -> float:
        """Return this moment in this time. It is asked for with each look at what is new, and these
        follow each other within a second or two.

        Args:
            now: monotonic seconds.
        """
        since = 0.0 if self._looked is None else now - self._looked
        if since > LATE_SECONDS:
            self.away += since
        self._looked = now
        return now - self.away
