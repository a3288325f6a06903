"""Count how often tasks of a living step died on healthy nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_resilience.resume.decide.budgets import alike

MOST_UNFIT_NODES = 3
"""Nodes that are left one after the other since they take no task. Where the next one takes none
either, the fault lies elsewhere (slurmctld's date, munge), and the job would lose all nodes."""


class FailedLaunches:
    """Count how often in a row srun could start no task on a node."""

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: so many in a row are no matter of a moment.
        """
        self._limit = limit
        self._failed: dict[str, int] = {}

    def count(self, node: str) -> int:
        """Count one of a node; return how many it has in a row."""
        self._failed[node] = self._failed.get(node, 0) + 1
        return self._failed[node]

    def launched(self) -> None:
        """Note that tasks run on a node: what has failed before counts no more."""
        self._failed.clear()

    def is_unfit(self, node: str) -> bool:
        """Return whether a node takes no task, and not for a moment only."""
        return self._failed.get(node, 0) >= self._limit

    def blames_node(self, node: str) -> bool:
        """Return whether such a node is better left."""
        unfit = sum(failed >= self._limit for failed in self._failed.values())
        return self.is_unfit(node) and unfit <= MOST_UNFIT_NODES


@dataclass
class DeathRow:
    """The deaths of one seat's tasks."""

    in_row: int = 0
    in_all: int = 0
    step: int = -1
    """The training's newest step at the last one; -1: it tells none."""
    lived: float = 0.0
    """Seconds before the last one, since its join step was started; 0: it was none's."""


class TaskDeaths:
    """Count the deaths in a row of each seat's tasks.

    A long life ends a row only where the training has gone on since: it may die at the same place
    each time, however long it takes to come there.
    """

    def __init__(self, long_life: float) -> None:
        """
        Args:
            long_life: seconds; a death after so long begins a new row.
        """
        self._long_life = long_life
        self._rows: dict[int, DeathRow] = {}
        self._joined_at: dict[int, float] = {}

    def joined(self, seats: tuple[int, ...], now: float) -> None:
        """Note that a join step was started for these seats."""
        self._joined_at |= dict.fromkeys(seats, now)

    def died(self, seats: tuple[int, ...], now: float, step: int) -> DeathRow:
        """Count one death of these seats; return the longest row.

        Args:
            seats: that lost their tasks at the same time.
            now: monotonic seconds.
            step: the training's newest one; -1: it tells none.
        """
        for seat in seats:
            row = self._rows.setdefault(seat, DeathRow())
            lived = now - self._joined_at.get(seat, float("-inf"))
            known = 0.0 if lived == float("inf") else lived
            went_on = step > row.step if step >= 0 else not alike(lived, row.lived)
            before = 0 if lived > self._long_life and went_on else row.in_row
            self._rows[seat] = DeathRow(before + 1, row.in_all + 1, step, known)
        return max((self._rows[seat] for seat in seats), key=lambda row: row.in_row)
