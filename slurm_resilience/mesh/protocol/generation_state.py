"""One generation's life, as one of its members sees it. Pure.

```
        adopt           enter            leave (done)
  NONE ───────► FORMED ───────► ENTERED ──────────────► RETURNED
                 ▲  │ end          │ end                   │ end
           adopt │  ▼    leave     ▼        adopt          ▼
                OVER ◄────────── ENDING ──────────► LATE  OVER
                                   ▲      end        │
                                   └─────────────────┤ leave
                                          FORMED ◄───┘
```
LATE: a newer generation was formed while the main thread was still in the block of an older one, or
the main thread entered the older one because it had not heard yet. It is got out of there.
"""

from __future__ import annotations

from enum import Enum

from slurm_resilience.mesh.model import GenerationEnd, View
from slurm_resilience.mesh.protocol.ballot import PossibleWorlds


class Stage(Enum):
    """The place of this process in its newest generation."""

    NONE = "none"
    """There was no generation yet."""
    FORMED = "formed"
    """The main thread has not entered it."""
    ENTERED = "entered"
    """The main thread is in its block."""
    RETURNED = "returned"
    """The main thread has left its block, and the generation goes on."""
    ENDING = "ending"
    """It is over, and the main thread is still in its block."""
    OVER = "over"
    """It is over, and the main thread is out of it."""
    LATE = "late"
    """It goes on, and the main thread is still in the block of an older one."""


class Move(Enum):
    """Changes of stage."""

    ADOPT = "adopt"
    ENTER = "enter"
    ENTER_OLDER = "enter older"
    LEAVE = "leave"
    END = "end"


STAGES: dict[tuple[Stage, Move], Stage] = {
    (Stage.NONE, Move.ADOPT): Stage.FORMED,
    (Stage.NONE, Move.LEAVE): Stage.NONE,
    (Stage.FORMED, Move.ADOPT): Stage.FORMED,
    (Stage.FORMED, Move.ENTER): Stage.ENTERED,
    (Stage.FORMED, Move.ENTER_OLDER): Stage.LATE,
    (Stage.FORMED, Move.LEAVE): Stage.FORMED,
    (Stage.FORMED, Move.END): Stage.OVER,
    (Stage.ENTERED, Move.ENTER): Stage.ENTERED,
    (Stage.ENTERED, Move.LEAVE): Stage.RETURNED,
    (Stage.ENTERED, Move.END): Stage.ENDING,
    (Stage.RETURNED, Move.ENTER): Stage.ENTERED,
    (Stage.RETURNED, Move.LEAVE): Stage.RETURNED,
    (Stage.RETURNED, Move.END): Stage.OVER,
    (Stage.LATE, Move.ENTER_OLDER): Stage.LATE,
    (Stage.LATE, Move.ADOPT): Stage.LATE,
    (Stage.LATE, Move.END): Stage.ENDING,
    (Stage.LATE, Move.LEAVE): Stage.FORMED,
    (Stage.ENDING, Move.ENTER): Stage.ENDING,
    (Stage.ENDING, Move.ENTER_OLDER): Stage.ENDING,
    (Stage.ENDING, Move.ADOPT): Stage.LATE,
    (Stage.ENDING, Move.LEAVE): Stage.OVER,
    (Stage.OVER, Move.ADOPT): Stage.FORMED,
    # The end came between the invitation and the first word of the main thread.
    (Stage.OVER, Move.ENTER): Stage.ENDING,
    (Stage.OVER, Move.ENTER_OLDER): Stage.ENDING,
    (Stage.OVER, Move.LEAVE): Stage.OVER,
}
"""Every move that there is; a pair that is missing cannot happen."""


class GenerationState:
    """The newest generation, those that may go on, and how the newest ended."""

    def __init__(self) -> None:
        self.stage = Stage.NONE
        self.view: View | None = None
        self.worlds = PossibleWorlds()
        self.highest = 0
        """Number of the newest generation that was heard of, with this process or without."""
        self.end: GenerationEnd | None = None
        self._older_end: GenerationEnd | None = None
        """The end of the one before."""
        self._early_ends: dict[int, GenerationEnd] = {}
        """Ends that were heard of before the beginning: they came on another connection."""
        self.ended_at = 0.0
        self.left_at = 0.0
        """When another member said last that it is out of its block."""
        self.adopted_at = 0.0

    @property
    def worked(self) -> View | None:
        """Return the newest that worked, with this process or without; None: there was none."""
        return self.worlds.worked

    @property
    def number(self) -> int:
        """Return the number of the newest generation with this process; 0: none."""
        return self.view.generation if self.view else 0

    @property
    def goes_on(self) -> bool:
        """There is one, and it has not ended."""
        return self.view is not None and self.end is None

    @property
    def block_end(self) -> GenerationEnd | None:
        """Return the end of the generation whose block the main thread is in, or was in last; None:
        it goes on."""
        return self._older_end if self.stage is Stage.LATE else self.end

    def holds(self, peer_id: str) -> bool:
        """Tell whether a peer is a member of it."""
        return self.view is not None and self.view.rank_of(peer_id) >= 0

    def adopt(self, view: View, now: float) -> GenerationEnd | None:
        """Be a member of a newer one; its end, if that was heard of before."""
        self._move(Move.ADOPT)
        self._older_end = self.end
        self.view, self.end, self.adopted_at = view, None, now
        self.highest = max(self.highest, view.generation)
        self.worlds.add(view)
        early = self._early_ends.pop(view.generation, None)
        self._early_ends = {n: end for n, end in self._early_ends.items() if n > view.generation}
        return early

    def finish(self, end: GenerationEnd, now: float) -> bool:
        """Note its end; False when that is of another one, or known."""
        if end.generation > self.highest:
            self._early_ends[end.generation] = end
        if self.view is None or end.generation != self.view.generation or self.end is not None:
            return False
        self._move(Move.END)
        self.end, self.ended_at = end, now
        return True

    def say(self, inside: int | None) -> None:
        """Note the generation whose block the main thread is in; None: it is out of any."""
        if inside is None:
            self._move(Move.LEAVE)
        else:
            self._move(Move.ENTER_OLDER if inside < self.number else Move.ENTER)

    def shift(self, seconds: float) -> None:
        """Do not count a time in which this process did not run."""
        self.ended_at += seconds if self.ended_at else 0.0
        self.left_at += seconds
        self.adopted_at += seconds

    def _move(self, move: Move) -> None:
        self.stage = STAGES[self.stage, move]
