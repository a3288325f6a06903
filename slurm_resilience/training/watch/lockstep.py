"""Find a rank that left out an update: its loop caught an error and went on with the next batch.
And find one that calls a collective alone, a barrier say.

The others made that update. From then on this rank's replica is another one, or its gradients are
added to those of another batch; and the ranks' collectives come apart at the next one that belongs
to a step. Seen where two ranks began the same batch at different steps. A rank that waits for
others in its update, before it has begun the next batch, says already at which step that will be.
Batches are counted anew in each world. Pure, but for what it keeps.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple

KEPT = 4096
"""Batches whose step is kept: more than are begun between a peer's beat and its arrival."""
COUNTED = 64
"""First batches of a world at which collectives are counted: in those, nothing else tells soon."""


class Made(enum.Enum):
    """The answer to who has made more collectives than the other, in as many batches."""

    NEITHER = "neither, as far as is known"
    HERE = "this process"
    THERE = "the other one"


class BatchBegun(NamedTuple):
    """The step at which a batch was begun."""

    batch: int
    """Its number in this world, from 1; 0: none was begun."""
    step: int
    world: int
    collectives: int = -1
    """Those that were entered before it; negative: not known."""
    in_update: bool = False
    """It was not begun yet: the process was in the update before it, or just after it, and its
    `collectives` are those from before that update."""


class Lockstep:
    """The batches that this process began. One thread begins them, another compares."""

    def __init__(self) -> None:
        self._world = 0
        self._begun: deque[BatchBegun] = deque(maxlen=KEPT)
        self._expected: BatchBegun | None = None
        """The next batch, where this process is in the update before it."""

    def enter(self, world: int) -> None:
        """Begin a new world.

        Args:
            world: its number, the same on all ranks.
        """
        self._world, self._begun, self._expected = world, deque(maxlen=KEPT), None

    def begin(self, step: int, collectives: int = -1) -> None:
        """Begin the next batch.

        Args:
            step: committed steps.
            collectives: those that this process has entered; negative: not known.
        """
        begun = self._begun
        batch = begun[-1].batch + 1 if begun else 1
        begun.append(BatchBegun(batch, step, self._world, collectives))
        self._expected = None

    def waits_in_update(self, collectives: int = -1) -> None:
        """Note that this process is about to wait for the others in the update of its last batch.

        Args:
            collectives: those that it has entered before.
        """
        last = self.last
        if last.batch and self._expected is None:  # an update may wait twice
            self._expected = BatchBegun(
                last.batch + 1, last.step + 1, self._world, collectives, in_update=True
            )

    @property
    def counts(self) -> bool:
        """True where collectives are counted at the next batch."""
        return len(self._begun) < COUNTED

    @property
    def last(self) -> BatchBegun:
        """The batch that was begun last."""
        begun = self._begun
        return begun[-1] if begun else BatchBegun(0, -1, self._world)

    @property
    def next(self) -> BatchBegun:
        """The one to tell: the last batch, or the next one where its step is known already."""
        return self._expected or self.last

    def behind(self, other: BatchBegun) -> bool:
        """Tell whether this process began the same batch at an earlier step than another one.

        Args:
            other: what the other one began last.
        """
        mine = self._same(other.batch, other.world)
        return mine is not None and mine.step < other.step

    def more_collectives(self, own: int, other: BatchBegun, theirs: int) -> Made:
        """Tell which of two ranks has made collectives that the other has not, nor can make in the
        batches that it has done: it calls them alone, or the other has left them out.

        Args:
            own: those that this process has entered.
            other: the batch that the other one told last.
            theirs: those that it had entered then.
        """
        if not other.batch or other.world != self._world:
            return Made.NEITHER
        if other.batch > self.last.batch:
            if other.in_update and self._expected is not None:
                # Those of the update itself may be made here already, and not there.
                own = self._expected.collectives
            return Made.HERE if own > other.collectives >= 0 else Made.NEITHER
        mine, after = self._same(other.batch, other.world), self._after(other.batch)
        if mine is not None and other.collectives > mine.collectives >= 0:
            return Made.THERE
        if after is not None and theirs > after.collectives >= 0:
            return Made.THERE
        return Made.NEITHER

    def _after(self, batch: int) -> BatchBegun | None:
        expected = self._expected
        if expected is not None and expected.batch == batch + 1:
            return expected
        return self._same(batch + 1, self._world)

    def _same(self, batch: int, world: int) -> BatchBegun | None:
        """Return the batch of this number that this process has begun; None: it is not known."""
        begun = self._begun
        if not begun or not 0 < batch <= begun[-1].batch or world != begun[-1].world:
            return None
        back = begun[-1].batch - batch
        mine = begun[-1 - back] if back < len(begun) else None
        # Another batch may have been begun meanwhile.
        return mine if mine is not None and mine.batch == batch else None


def told(begun: BatchBegun) -> str:
    """Return it as it is sent to others."""
    if not begun.batch:
        return ""
    more = f".{begun.collectives}" if begun.collectives >= 0 else ""
    more += ".1" if more and begun.in_update else ""
    return f"{begun.batch}.{begun.step}.{begun.world}{more}"


def heard(text: str) -> BatchBegun:
    """Return what `told` was given; no batch, where that cannot be read."""
    numbers = [int(part) for part in text.split(".") if part.isdecimal()]
    is_whole = len(numbers) == text.count(".") + 1 in (3, 4, 5)
    if not is_whole:
        return BatchBegun(0, -1, 0)
    batch, step, world, *more = numbers
    return BatchBegun(batch, step, world, more[0] if more else -1, in_update=len(more) == 2)
