"""Tell from the steps of an attempt whether it got further than those before it. Pure.

Tasks tell at most two steps a second, and the last ones of a run that crashes are not told. So an
attempt that fails at the same step as ever may tell a few steps more, or fewer. It got further only
if it still told new steps some seconds after the last one that was known already.

Some sources have no numbers (a file that changes, a line of the log), and some programs count anew
in each epoch. Of these it is known only how often they moved: where that is as often as in the
attempt before, both may have come to the same place.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_resilience.resume.decide.classify import ObservedSteps
from slurm_resilience.resume.progress.step_report import StepLine

FURTHER_SECONDS = 5.0
"""Between the last step that was known already and the last one that was not."""
ALIKE_SHARE, ALIKE_COUNT = 0.05, 2
"""Attempts that moved about as often are not told apart: a file is looked at once a second."""
LEAST_MOVES = 2
"""A file that is only opened anew has changed once."""


class FurthestStep:
    """The furthest step of one attempt."""

    def __init__(self, earlier: Sequence[ObservedSteps], now: float) -> None:
        """
        Args:
            earlier: of the attempts before, oldest first.
            now: when the attempt begins, on the clock of `hear`.
        """
        self._known = max((steps.furthest for steps in earlier), default=-1)
        self._moved_before = earlier[-1].moved if earlier else 0
        self._furthest = -1
        self._last: dict[int, int] = {}
        """The last step of each rank."""
        self._moved: dict[int, int] = {}
        """Changes of step that each rank told."""
        self._has_numbers, self._in_order = False, True
        self._known_until, self._new_until = now, now

    def hear(self, line: StepLine, at: float) -> None:
        """Take in a line, with its time."""
        step = line.step
        if step is None or self._last.get(line.rank) == step:
            return
        self._moved[line.rank] = self._moved.get(line.rank, 0) + 1
        before, self._last[line.rank] = self._last.get(line.rank, 0), step
        if not line.has_number:
            return
        self._has_numbers = True
        # A program that goes back by some steps has healed itself; one that begins anew counts in
        # epochs.
        self._in_order &= 2 * step >= before
        self._furthest = max(self._furthest, step)
        if step <= self._known:
            self._known_until = at
        else:
            self._new_until = at

    def told(self) -> ObservedSteps:
        """Return what was observed until now."""
        moved = max(self._moved.values(), default=0)
        if not moved:
            return ObservedSteps()
        if self._has_numbers and self._in_order:
            further = self._new_until - self._known_until >= FURTHER_SECONDS
            return ObservedSteps(self._furthest, moved, further)
        apart = abs(moved - self._moved_before)
        alike = apart <= max(ALIKE_COUNT, ALIKE_SHARE * max(moved, self._moved_before))
        return ObservedSteps(-1, moved, moved >= LEAST_MOVES and not alike)
