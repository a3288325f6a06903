"""Find a rank that left out an update: its loop caught an error and went on with the next batch.

The others made that update. From then on this rank's replica is another one, or its gradients are
added to those of another batch; and the ranks' collectives come apart at the next one that belongs
to a step. Seen where two ranks began the same batch at different steps. Batches are counted anew in
each world. Pure, but for what it keeps.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KEPT = 4096
"""Batches whose step is kept: more than are begun between a peer's beat and its arrival."""


class BatchBegun(NamedTuple):
    """The step at which a batch was begun."""

    batch: int
    """Its number in this world, from 1; 0: none was begun."""
    step: int
    world: int


class Lockstep:
    """The batches that this process began. One thread begins them, another compares."""

    def __init__(self) -> None:
        self._world = 0
        self._begun: deque[BatchBegun] = deque(maxlen=KEPT)

    def enter(self, world: int) -> None:
        """Begin a new world.

        Args:
            world: its number, the same on all ranks.
        """
        self._world, self._begun = world, deque(maxlen=KEPT)

    def begin(self, step: int) -> None:
        """Begin the next batch, at this step."""
        begun = self._begun
        begun.append(BatchBegun(begun[-1].batch + 1 if begun else 1, step, self._world))

    @property
    def last(self) -> BatchBegun:
        """The batch that was begun last."""
        begun = self._begun
        return begun[-1] if begun else BatchBegun(0, -1, self._world)

    def behind(self, other: BatchBegun) -> bool:
        """Tell whether this process began the same batch at an earlier step than another one.

        Args:
            other: what the other one began last.
        """
        begun = self._begun
        if not begun or not 0 < other.batch <= begun[-1].batch or other.world != begun[-1].world:
            return False
        back = begun[-1].batch - other.batch
        mine = begun[-1 - back] if back < len(begun) else other
        # Another batch may have been begun meanwhile.
        return mine.batch == other.batch and mine.step < other.step


def told(begun: BatchBegun) -> str:
    """Return it as it is sent to others."""
    return f"{begun.batch}.{begun.step}.{begun.world}" if begun.batch else ""


def heard(text: str) -> BatchBegun:
    """Return what `told` was given; no batch, where that cannot be read."""
    numbers = [int(part) for part in text.split(".") if part.isdecimal()]
    is_whole = len(numbers) == text.count(".") + 1 == 3
    return BatchBegun(*numbers) if is_whole else BatchBegun(0, -1, 0)
