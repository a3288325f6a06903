"""Count the collectives of this process that all ranks make alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


class CollectiveCount:
    """The collectives of one world, from the beginning of its first step.

    Until then ranks differ in the calls that they make: some heal others.
    """

    def __init__(self, entered: Callable[[], int] | None = None) -> None:
        """
        Args:
            entered: how many this process has entered in this world; None: that is not known.
        """
        self._entered = entered
        self._before = -1
        """So many when the first step began; negative: none has."""

    def begin(self) -> None:
        """Note that a step begins."""
        if self._before < 0:
            self._before = self._now()

    @property
    def since_first_step(self) -> int:
        """Return how many this process has entered; -1: unknown. From any thread."""
        before = self._before
        now = self._now() if before >= 0 else -1
        return now - before if now >= before >= 0 else -1

    def _now(self) -> int:
        if self._entered is not None:
            with contextlib.suppress(Exception):  # the group is being left
                return self._entered()
        return -1
