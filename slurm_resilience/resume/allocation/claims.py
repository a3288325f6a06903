"""The nodes of a job that its supervised sruns have claimed from each other.

Slurm lists no step on a node between the decision to use it and the start of the step there. A
claim is a line of the srun's own file (`history`), which the others read. It is written before the
others' are read once more: of two that claim one node in the same moment, at least one sees the
other, and chooses again. Turns on one machine make that rare. A claim ends with its supervisor, and
with the next one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from slurm_resilience.clock import Clock
from slurm_resilience.resume import report
from slurm_resilience.resume.history import AttemptHistory, OtherSrun, other_sruns
from slurm_resilience.slurm.hostlists import fold

if TYPE_CHECKING:
    from slurm_resilience.resume.srun.host_calls import HostCalls

Choice = TypeVar("Choice")
TURN_SECONDS = 30.0
"""Until the job is changed though another supervised srun of it has the turn: it may hang."""
TURN_LOOK_SECONDS = 0.02
YIELD_SECONDS = 0.25
"""Until nodes are chosen again that another one has claimed too; the younger ones wait longer."""
MOST_CHOICES = 20


class NodeClaims:
    """The claims of one supervised srun, and its view of the others'."""

    def __init__(self, run: tuple[int, int], clock: Clock, stop: threading.Event) -> None:
        """
        Args:
            run: the job, and how often Slurm has requeued it.
            clock: the time.
            stop: set when the user ends this; nothing is waited for any more.
        """
        self._run = run
        self._clock = clock
        self._stop = stop
        self._kept: tuple[AttemptHistory, HostCalls] | None = None
        """This srun's attempts, whose file has its claims, and the machine that the supervisors run
        on. None: it is alone."""

    def share(self, history: AttemptHistory, machine: HostCalls) -> None:
        """Claim nodes in the file of this history from now on, and heed the others'."""
        self._kept = history, machine

    def _sruns(self) -> tuple[OtherSrun, ...]:
        if self._kept is None:
            return ()
        machine = self._kept[1]
        base = machine.working_directory()
        return other_sruns(base, machine.uid, machine.pid, self._run, machine.lives)

    @property
    def are_shared(self) -> bool:
        """Return whether the job has another supervised srun now."""
        return bool(self._sruns())

    def others(self) -> frozenset[str]:
        """Return the nodes that the job's other supervised sruns have, or go on with."""
        return frozenset(name for srun in self._sruns() for name in srun.nodes)

    def taken_anew(self) -> frozenset[str]:
        """Return those that another one has taken since the end of this srun's last attempt, or
        claims: a node that was lost may be back, in place of another one's."""
        if self._kept is None:
            return frozenset()
        ending = self._kept[0].last_ending
        since = ending.ended_at if ending is not None else float("inf")
        return frozenset(
            name
            for srun in self._sruns()
            for name in (srun.nodes if srun.started > since else srun.next_nodes)
        )

    def turn(self) -> AbstractContextManager[object]:
        """Return what is entered to choose nodes, or to change those of the job: no other
        supervised srun on this machine does so meanwhile, unless it takes too long."""
        if self._kept is None:
            return contextlib.nullcontext()
        machine, until = self._kept[1], self._clock.monotonic() + TURN_SECONDS
        while True:
            turn = machine.take_turn(self._run[0])
            if turn is not None:
                return turn
            stopped = self._clock.wait(self._stop, TURN_LOOK_SECONDS)
            if stopped or self._clock.monotonic() > until:
                return contextlib.nullcontext()

    def choose(
        self, decide: Callable[[], tuple[Choice, Collection[str]]], own: Collection[str]
    ) -> Choice:
        """Decide, and claim the nodes that this is about; again where another one claims them.

        Args:
            decide: returns the choice, and all nodes with which this srun then goes on.
            own: nodes that it has so far; those that others use as well are shared on purpose.
        """
        left = MOST_CHOICES
        while True:
            left -= 1
            with self.turn():
                choice, nodes = decide()
                self._take(nodes)
                clash = self.others() & set(nodes) - set(own)
                if not clash or not left or self._stop.is_set():
                    return choice
                self._take([name for name in nodes if name not in clash])
            report.say(f"{fold(clash)} is taken by another srun of this job: choosing again")
            older = sum(srun.supervisor < self._own for srun in self._sruns())
            self._clock.wait(self._stop, YIELD_SECONDS * (1 + older))

    def add(self, nodes: Collection[str]) -> None:
        """Claim nodes that the job is about to get for this srun."""
        if self._kept is not None and self._kept[0].attempts:
            claimed = self._kept[0].attempts[-1].next_nodes
            self._take((*claimed, *(name for name in nodes if name not in claimed)))

    @property
    def _own(self) -> int:
        return self._kept[1].pid if self._kept is not None else 0

    def _take(self, nodes: Collection[str]) -> None:
        if self._kept is not None:
            self._kept[0].takes(tuple(nodes))
