"""Tell from the steps that ranks report when a step of Slurm stands still. Pure.

    limit = max(floor, min(5 · longest, longest + 1 h))

*longest* is the longest time between two steps of any ranks in this attempt, so it has the slowest
checkpoint, evaluation and garbage collection so far in it. A false alarm costs all work since the
last checkpoint, a late one only the idle time, so a single long wait counts in full (unlike in the
library's own limit, which costs one step). Five times, since a shared file system that is busy
makes the same checkpoint that much slower; no more than an hour on top, since the wait is paid for.
The first steps compile: they teach nothing. The floor covers what has not come yet, such as the
first evaluation: PyTorch's own limit for a collective is ten minutes too.

Whatever was never told does not count: an attempt in which no rank has told `enough` steps has no
limit, nor has one in which a rank has said that it takes a pause.
"""

from __future__ import annotations

import msgspec

from slurm_resilience.resume.progress.step_report import StepLine

LONGEST_FACTOR = 5.0
LONGEST_MORE_SECONDS = 3600.0
COMPILING_STEPS = 3
"""Steps of the first rank that teach nothing."""
ANY_RANK = -1
"""Tells steps that are no rank's own: a watched file, a line in the log, a checkpoint."""


class Stall(msgspec.Struct, frozen=True):
    """No rank has reported another step for longer than the limit."""

    seconds: float
    """Since the last step of any rank."""
    limit: float
    longest: float
    """The longest wait between two steps so far, seconds."""
    steps: dict[int, int]
    """The last step of each rank that has reported any."""

    @property
    def last_step(self) -> int:
        """Return the last step that any rank reported."""
        return max(self.steps.values(), default=0)


def learn_limit(longest: float, floor: float) -> float:
    """Return the seconds without a step after which there is a hang.

    Args:
        longest: seconds, the longest wait between two steps so far.
        floor: seconds, never less.
    """
    return max(floor, min(LONGEST_FACTOR * longest, longest + LONGEST_MORE_SECONDS))


class StepRecord:
    """The steps of one attempt: lines in, a stall out. Times are on one monotonic clock."""

    def __init__(self, floor: float, enough: int) -> None:
        """
        Args:
            floor: seconds; a shorter wait is never a hang.
            enough: steps that some rank must have told before any wait is one.
        """
        self._floor, self._enough = floor, enough
        self.steps: dict[int, int] = {}
        """The last step of each rank."""
        self._told: dict[int, int] = {}
        """The number of steps that each rank has told."""
        self._most_told = 0
        self._paused: set[int] = set()
        self._last: float | None = None
        """When a rank told another step; None: none has, or the wait does not count."""
        self.longest = 0.0

    def hear(self, line: StepLine, now: float) -> bool:
        """Take in a line; tell whether it is progress.

        A step that is told again is none. Any other one is, a lower one too: programs count anew in
        each epoch.
        """
        if line.step is None:
            self._paused.add(line.rank)
            return False
        if self.steps.get(line.rank) == line.step:
            return False
        self.steps[line.rank] = line.step
        self._told[line.rank] = told = self._told.get(line.rank, 0) + line.count
        self._most_told = max(self._most_told, told)
        waited = self._last is not None and not self._paused
        if waited and self._most_told > COMPILING_STEPS:
            self.longest = max(self.longest, now - (self._last or 0.0))
        # A rank that takes part again has ended its pause; others tell the end of theirs.
        self._paused.discard(line.rank)
        self._last = now
        return True

    @property
    def limit(self) -> float | None:
        """Return the seconds that a wait may last; None: as long as it likes."""
        if self._last is None or self._paused or self._most_told < self._enough:
            return None
        return learn_limit(self.longest, self._floor)

    def due(self, now: float) -> float | None:
        """Return the seconds until there is a hang, if nothing more comes; None: there is none."""
        limit = self.limit
        return None if limit is None else max(0.0, (self._last or 0.0) + limit - now)

    def stall(self, now: float) -> Stall | None:
        """Return the stall; None: there is none."""
        limit = self.limit
        if limit is None or self._last is None or now - self._last <= limit:
            return None
        return Stall(now - self._last, limit, self.longest, dict(self.steps))

    def forgive(self, now: float) -> None:
        """Let the present wait begin now: the tasks were suspended, or nothing could be heard."""
        if self._last is not None:
            self._last = now


def ranks_behind(steps: dict[int, int]) -> tuple[int, ...]:
    """Return the ranks that have told an earlier step than most of the others, if they are few.

    All ranks of a synchronous training tell the same step, or one that is one away. Where no step
    has a majority, they do not step together, and none is behind.
    """
    told = {rank: step for rank, step in steps.items() if rank != ANY_RANK}
    if len(told) < 2:
        return ()
    front = max(told.values())
    behind = tuple(sorted(rank for rank, step in told.items() if step < front))
    return behind if 2 * len(behind) < len(told) or len(behind) == 1 else ()
