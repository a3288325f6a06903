"""One generation's life, as one of its members sees it. Pure.

```
          adopt            enter             leave (done)
   NONE ────────► FORMED ────────► ENTERED ───────────────► RETURNED
                  ▲   │ end           │ end                    │ end
            adopt │   ▼     leave     ▼                        ▼
                  └─ OVER ◄───────── ENDING                   OVER
```
"""

from __future__ import annotations

from enum import Enum

from slurm_resilience.mesh.model import GenerationEnd, View


class Stage(Enum):
    """Where this process is in its newest generation."""

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


class Move(Enum):
    """Changes of stage."""

    ADOPT = "adopt"
    ENTER = "enter"
    LEAVE = "leave"
    END = "end"


STAGES: dict[tuple[Stage, Move], Stage] = {
    (Stage.NONE, Move.ADOPT): Stage.FORMED,
    (Stage.NONE, Move.LEAVE): Stage.NONE,
    (Stage.FORMED, Move.ADOPT): Stage.FORMED,
    (Stage.FORMED, Move.ENTER): Stage.ENTERED,
    (Stage.FORMED, Move.LEAVE): Stage.FORMED,
    (Stage.FORMED, Move.END): Stage.OVER,
    (Stage.ENTERED, Move.ENTER): Stage.ENTERED,
    (Stage.ENTERED, Move.LEAVE): Stage.RETURNED,
    (Stage.ENTERED, Move.END): Stage.ENDING,
    (Stage.RETURNED, Move.ENTER): Stage.ENTERED,
    (Stage.RETURNED, Move.LEAVE): Stage.RETURNED,
    (Stage.RETURNED, Move.END): Stage.OVER,
    (Stage.ENDING, Move.ENTER): Stage.ENDING,
    (Stage.ENDING, Move.LEAVE): Stage.OVER,
    (Stage.OVER, Move.ADOPT): Stage.FORMED,
    # The end came between the invitation and the first word of the main thread.
    (Stage.OVER, Move.ENTER): Stage.ENDING,
    (Stage.OVER, Move.LEAVE): Stage.OVER,
}
"""Every move that there is; a pair that is missing cannot happen."""


class GenerationState:
    """The newest generation, the newest that worked, and how the newest ended."""

    def __init__(self) -> None:
        self.stage = Stage.NONE
        self.view: View | None = None
        self.worked: View | None = None
        self.highest = 0
        """Number of the newest generation that was heard of, with this process or without."""
        self.end: GenerationEnd | None = None
        self.ended_at = 0.0
        self.adopted_at = 0.0

    @property
    def number(self) -> int:
        """Of the newest generation with this process; 0: none."""
        return self.view.generation if self.view else 0

    @property
    def goes_on(self) -> bool:
        """There is one, and it has not ended."""
        return self.view is not None and self.end is None

    def holds(self, peer_id: str) -> bool:
        """Is a peer a member of it?"""
        return self.view is not None and self.view.rank_of(peer_id) >= 0

    def adopt(self, view: View, now: float) -> None:
        """Be a member of a newer one."""
        self._move(Move.ADOPT)
        self.view, self.end, self.adopted_at = view, None, now
        self.highest = max(self.highest, view.generation)

    def finish(self, end: GenerationEnd, now: float) -> bool:
        """Note its end; False when that is of another one, or known."""
        if self.view is None or end.generation != self.view.generation or self.end is not None:
            return False
        self._move(Move.END)
        self.end, self.ended_at = end, now
        return True

    def say(self, running: bool) -> None:
        """The main thread enters its block, or is out of it."""
        self._move(Move.ENTER if running else Move.LEAVE)

    def shift(self, seconds: float) -> None:
        """Do not count a time in which this process did not run."""
        self.ended_at += seconds if self.ended_at else 0.0
        self.adopted_at += seconds

    def _move(self, move: Move) -> None:
        self.stage = STAGES[self.stage, move]
