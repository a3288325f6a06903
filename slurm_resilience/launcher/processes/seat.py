"""One of the node's seats, and who sits on it."""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from pathlib import Path

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.launcher.processes.process import Process
from slurm_resilience.launcher.restart_policy import ProcessEnd, RestartRules


class TrainingStage(Enum):
    """The stage of a seat's process: BEFORE → INSIDE → LEFT, as it tells."""

    BEFORE = "not in the training yet"
    INSIDE = "in the training"
    LEFT = "not in the training any more"


class Seat:
    """Remembers how those before ended.

    Args:
        local: 0 … of the node.
        number: the rank in the full world.
        rules: bound how many ends matter.
        incarnation: of the first process that will sit here.
    """

    def __init__(self, local: int, number: int, rules: RestartRules, incarnation: int = 0) -> None:
        self.local = local
        self.number = number
        self.process: Process | None = None
        self.incarnation = incarnation - 1
        self.done = False
        self.ends: deque[ProcessEnd] = deque(maxlen=rules.replacements + 2)
        self.since = 0.0
        self.refused_since: float | None = None
        """Since when the system refuses the seat a process; None: it does not."""
        self.place = self.error = self.evicted = ""
        self.told_at = math.inf
        """When its process said that it fails; infinite: it did not."""
        self.follows = False
        """A rank of another node had failed before its process said that it fails."""
        self.stage = TrainingStage.BEFORE
        self.logs: Path | None = None

    def sit(self, process: Process, incarnation: int) -> None:
        self.process, self.incarnation = process, incarnation
        self.since = SYSTEM_CLOCK.monotonic()
        self.refused_since = None
        self.place = self.error = self.evicted = ""
        self.told_at = math.inf
        self.follows = False
        self.stage = TrainingStage.BEFORE

    def fails(self, place: str, error: str) -> None:
        """Note what its process says before it ends.

        Args:
            place: the line at which it raised.
            error: the first line of its message.
        """
        self.place, self.error, self.told_at = place, error, SYSTEM_CLOCK.monotonic()

    def blame(self, other: Seat) -> ProcessEnd:
        """Note that its last process has failed for what another seat's told of first."""
        end = self.ends[-1]
        # The other one's end is not known yet; Python ends with 1 after an error.
        code = 1 if end.by_signal else end.code
        self.ends[-1] = msgspec.structs.replace(
            end, code=code, place=other.place, error=other.error
        )
        return self.ends[-1]

    @property
    def is_first(self) -> bool:
        """True until a process has sat here."""
        return not self.since

    def leave(self) -> None:
        """Note that the process was ended together with all others: that is no failure of it."""
        self.process = None

    def refused(self, error: str) -> float:
        """Note that no process could take the seat.

        Returns:
            Seconds for which that is so.
        """
        now = SYSTEM_CLOCK.monotonic()
        if self.refused_since is None:
            self.since = self.refused_since = now
        self.place, self.error, self.evicted = "", error, ""
        self.stage = TrainingStage.BEFORE
        return now - self.refused_since

    def end(self, code: int, *, is_complete: bool = False) -> ProcessEnd:
        """Note how its process ended.

        Args:
            code: of its exit.
            is_complete: the training that the ranks meet for is.
        """
        now = SYSTEM_CLOCK.monotonic()
        end = ProcessEnd(
            code,
            now,
            now - self.since,
            self.place,
            self.error,
            self.evicted,
            self.stage is TrainingStage.INSIDE,
            complete=is_complete and self.stage is TrainingStage.LEFT,
            by="exit" if self.process is not None and self.process.exited else "signal",
        )
        self.ends.append(end)
        self.process = self.refused_since = None
        return end
