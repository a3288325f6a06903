"""Run deep checks that are due on idle nodes, a few at a time, and give way to jobs.

Each run is a process of its own (`sres deepcheck run`), which gives its nodes back when it ends.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from slurm_resilience.clock import Clock
from slurm_resilience.deepcheck.deep_marks import CommentDoor, DeepMarks
from slurm_resilience.deepcheck.deep_results import FAILED_EXIT_CODE, DeepState
from slurm_resilience.deepcheck.node_choice import kept_nodes
from slurm_resilience.deepcheck.pacing.due_nodes import due_nodes, free_nodes, used_nodes
from slurm_resilience.deepcheck.pacing.left_behind import LeftBehind, is_ours
from slurm_resilience.errors import SresError
from slurm_resilience.model import Job
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.slurm.reservations import Reservation

TRIED_AGAIN_SECONDS = 3600.0
"""A node for which a run was begun is not taken again before, whatever came of it."""

MAX_FAILED_IN_A_ROW = 3
"""More failures are rather those of a check or a driver than of nodes."""


class WatchDoor(CommentDoor, Protocol):
    """The requests to Slurm that the watch makes."""

    def jobs(self) -> tuple[Job, ...]: ...

    def reservations(self) -> tuple[Reservation, ...]: ...

    def waiting_partitions(self) -> frozenset[str]: ...

    def busy_until(self) -> dict[str, float]: ...

    def release(self, name: str) -> None: ...


class DeepPace(NamedTuple):
    """The pace that the site has set."""

    every_seconds: float
    at_once: int
    limit_minutes: int
    nodes: frozenset[str] | None = None
    """Only these; None: all."""
    after_jobs_seconds: float = 0.0
    """A node that has run a job is checked again after this time; 0: its jobs do not count."""
    speed_seconds: float = 0.0
    """The speeds of all idle nodes are measured after this time; 0: never."""


class _Run(NamedTuple):
    process: subprocess.Popen[bytes]
    nodes: tuple[str, ...]


class DeepWatch:
    """Looks at the cluster again and again; `look` is one time."""

    def __init__(
        self,
        door: WatchDoor,
        clock: Clock,
        pace: DeepPace,
        begin: Callable[[str, Sequence[str]], subprocess.Popen[bytes]],
        changed: Callable[[], frozenset[str]],
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            door: Slurm.
            clock: the time.
            pace: how many nodes, and how often.
            begin: starts a run over some nodes: `run` or `speed` of `sres deepcheck`.
            changed: returns the nodes whose software has changed since their last deep check.
            tell: takes a line of progress.
        """
        self._door = door
        self._clock = clock
        self._pace = pace
        self._begin = begin
        self._changed = changed
        self._tell = tell
        self._marks = DeepMarks(door, clock.now, tell)
        self._left_behind = LeftBehind()
        self._run: _Run | None = None
        self._gives_way = False
        self._failed_in_a_row = 0
        self._tried: dict[str, float] = {}
        self._speeds_at: float | None = None

    @property
    def is_running(self) -> bool:
        """A run is under way."""
        return self._run is not None

    def look(self) -> None:
        """Look at the cluster once: clear up, give way, or begin what is due."""
        try:
            self.clear_up()
            if self._run is not None:
                self._follow(self._run)
            else:
                self._begin_due()
        except SresError as error:
            self._tell(f"nothing is done now: {error}")

    def end(self, seconds: float) -> None:
        """End the run that is under way, and wait for its end."""
        if self._run is not None:
            self._run.process.terminate()
            try:
                self._run.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._tell("the run does not end; it removes its reservation when it does")
            self._run = None

    def clear_up(self) -> None:
        """Remove what killed runs have left behind.

        Raises:
            SresError: Slurm does not answer, or refuses.
        """
        moment = self._clock.monotonic()
        shown = self._door.reservations()
        in_use = {job.reservation for job in self._door.jobs() if job.reservation}
        left_behind = self._left_behind.reservations(shown, in_use, moment)
        for left in left_behind:
            self._door.release(left.name)
            self._tell(f"{left.name} of {fold(left.nodes)} was left behind, and is removed")
        own = {
            node for one in shown if is_ours(one) and one not in left_behind for node in one.nodes
        }
        freed = {node for one in left_behind for node in one.nodes}
        stuck = self._left_behind.labels(self._door.nodes(), own, freed, moment)
        self._marks.mark((name, DeepState.UNJUDGED) for name in stuck)

    def _follow(self, run: _Run) -> None:
        code = run.process.poll()
        if code is not None:
            self._tell(f"the checks of {fold(run.nodes)} ended with {code}")
            self._run = None
            self._failed_in_a_row = self._failed_in_a_row + 1 if code == FAILED_EXIT_CODE else 0
            if self._failed_in_a_row >= MAX_FAILED_IN_A_ROW:
                text = (
                    f"{self._failed_in_a_row} runs in a row have failed: the checks may be at fault"
                )
                self._tell(f"{text}. No other one is begun until the watch is started anew")
            return
        own = {node.name: node for node in self._door.nodes() if node.name in run.nodes}
        partitions = {name for node in own.values() for name in node.partitions}
        if not self._gives_way and not partitions.isdisjoint(self._door.waiting_partitions()):
            self._gives_way = True
            self._tell(f"jobs wait for nodes: the checks of {fold(run.nodes)} are ended")
            run.process.terminate()

    def _begin_due(self) -> None:
        if self._failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            return
        now, moment = self._clock.now(), self._clock.monotonic()
        until = now + 60.0 * self._pace.limit_minutes
        recent = {n for n, at in self._tried.items() if moment - at < TRIED_AGAIN_SECONDS}
        own = [
            node
            for node in self._door.nodes()
            if self._pace.nodes is None or node.name in self._pace.nodes
        ]
        reserved = kept_nodes(self._door.reservations(), until)
        waiting = self._door.waiting_partitions()
        after_jobs = self._pace.after_jobs_seconds
        busy_until = self._door.busy_until() if after_jobs else {}
        due = due_nodes(
            [node for node in own if node.name not in recent],
            reserved,
            waiting,
            self._changed(),
            now,
            self._pace.every_seconds,
            used_nodes(own, busy_until, now, after_jobs),
        )[: self._pace.at_once]
        if not due:
            self._begin_speeds(free_nodes(own, reserved, waiting), moment)
            return
        names = tuple(one.node for one in due)
        for one in due:
            self._tell(f"{one.node}: {one.trigger}")
        self._tried = {n: at for n, at in self._tried.items() if n in recent}
        self._tried |= dict.fromkeys(names, moment)
        self._gives_way = False
        self._run = _Run(self._begin("run", names), names)

    def _begin_speeds(self, free: Sequence[str], moment: float) -> None:
        every, last = self._pace.speed_seconds, self._speeds_at
        if not every or not free or (last is not None and moment - last < every):
            return
        self._speeds_at = moment
        self._gives_way = False
        self._run = _Run(self._begin("speed", free), tuple(free))
