"""Remember how long steps took, for the limit that is learnt from them."""

from __future__ import annotations

from collections import deque

from slurm_resilience.training.watch import limit
from slurm_resilience.training.watch.slow_between import SlowBetween

FIRSTS = 20
"""First steps of worlds whose times are kept."""


class StepTimes:
    """Times of one process, over all worlds.

    Args:
        floor: seconds; a step that stands still for less is never a hang.
        ceiling: seconds; a step that stands still for more always is one.
        first: seconds for the first steps of a training.
    """

    def __init__(self, floor: float, ceiling: float, first: float) -> None:
        self.floor, self.ceiling, self.first = floor, ceiling, first
        self._steps: deque[float] = deque(maxlen=limit.WINDOW)
        self._firsts: deque[float] = deque(maxlen=FIRSTS)
        self._hung: int | None = None
        self._new_world = True
        self.slow = SlowBetween(first, ceiling)

    def enter(self) -> None:
        """Begin a new world: its first step is kept apart."""
        self._new_world = True

    def hung(self, step: int) -> None:
        """Give this step all the time of a first one when it is tried again."""
        self._hung = step

    def committed(self, seconds: float) -> bool:
        """Keep the time of a step; tell whether it was not the first of its world."""
        first, self._new_world = self._new_world, False
        if seconds > 0:
            (self._firsts if first else self._steps).append(seconds)
        return seconds > 0 and not first

    def limit(self, step: int) -> float:
        """Return the seconds that a step may stand still."""
        if not self._new_world:
            return self.learnt
        # A step may have been finished by some before all left it.
        again = self._hung is not None and 0 <= step - self._hung <= 1
        firsts = () if again else tuple(self._firsts)
        return limit.learn_first(tuple(self._steps), firsts, self.floor, self.ceiling, self.first)

    @property
    def learnt(self) -> float:
        """The limit of a step that is not the first of its world."""
        return limit.learn(tuple(self._steps), self.floor, self.ceiling, self.first)

    @property
    def without_a_first(self) -> float:
        """The limit where no step compiles, however few steps are known."""
        return min(self.learnt, max(self.floor, limit.AGAIN_SECONDS))
