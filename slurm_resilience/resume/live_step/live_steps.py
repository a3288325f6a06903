"""The steps of a living attempt: the first one, and those that joined it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.resume.context import Context
from slurm_resilience.resume.srun.close_sockets import close_sockets, connections
from slurm_resilience.resume.srun.step import EndedTasks, SrunStep, end_step

SLOW_LOOK = 10.0
"""Seconds between two questions whether a step is over whose srun has not noticed."""


@dataclass(eq=False)
class RunningStep:
    """A running step of the attempt."""

    step: SrunStep
    number: int
    seats: tuple[int, ...]
    """In the order of its tasks."""
    heard: int = 0
    """Ended tasks that were read already."""
    buried: bool = False
    """Its end was read already."""
    lost_node: bool = False
    """srun may wait for a node that is gone."""
    was_connected: bool = False
    """srun had connections to its tasks when it lost the node."""
    dismissed: bool = False
    """Its srun was ended by us: Slurm says that the step is over."""


class StepEnd(msgspec.Struct, frozen=True):
    """How the attempt ended."""

    code: int
    """As a shell shows it."""
    step: SrunStep
    """The one whose end it was."""
    stopped_by_us: bool = False
    faulty: dict[str, str] = {}
    """Nodes that were lost and not replaced."""
    noticed: float = 0.0
    own_word: bool = False
    """The training itself said how it ended."""


class LiveSteps:
    """All of an attempt's steps, in the order in which they were started."""

    def __init__(self, context: Context, step: SrunStep, seats: tuple[int, ...]) -> None:
        """
        Args:
            step: the first one.
            seats: of its tasks, in their order.
        """
        self._context = context
        self._all = [RunningStep(step, 0, seats)]
        self._looked = 0.0

    def __iter__(self) -> Iterator[RunningStep]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def first(self) -> RunningStep:
        return self._all[0]

    @property
    def running(self) -> bool:
        return any(carrier.step.running for carrier in self._all)

    def add(self, step: SrunStep, seats: tuple[int, ...]) -> None:
        self._all.append(RunningStep(step, len(self._all), seats))

    def carried(self, carrier: RunningStep) -> set[int]:
        """Seats that no later step has taken over."""
        later = {seat for other in self._all[carrier.number + 1 :] for seat in other.seats}
        return set(carrier.seats) - later

    def without_node(self, seats: Sequence[int]) -> None:
        """The node of these seats is gone: their sruns may wait for it for minutes."""
        for carrier in self._all:
            if carrier.step.running and self.carried(carrier) & set(seats):
                carrier.lost_node = True
                carrier.was_connected |= connections(carrier.step.pid) > 0

    def sever(self, seats: Sequence[int], address: str) -> None:
        """End the connections of these seats' sruns to a node that is gone.

        Args:
            address: the node's.
        """
        for carrier in self._all:
            if carrier.lost_node and carrier.step.running and self.carried(carrier) & set(seats):
                close_sockets(carrier.step.pid, address)

    def news(self) -> Iterator[tuple[RunningStep, EndedTasks]]:
        """Tasks that ended badly since this was asked last."""
        for carrier in self._all:
            fresh = carrier.step.ended_tasks[carrier.heard :]
            carrier.heard += len(fresh)
            yield from ((carrier, ended) for ended in fresh)
            over = not carrier.step.running and not carrier.dismissed and not carrier.buried
            if over and carrier.step.code and not carrier.heard:
                # srun could not even start them.
                carrier.buried = True
                tasks = tuple(range(len(carrier.seats)))
                yield carrier, EndedTasks((), tasks, f"its srun ended with {carrier.step.code}")

    def ended_by_person(self) -> RunningStep | None:
        """The step that somebody ended, if there is one: then all have to end."""
        for carrier in self._all:
            step = carrier.step
            if step.running or carrier.dismissed:
                continue
            aborted = step.aborted and not carrier.lost_node
            if (
                step.cancelled
                or aborted
                or step.killed_by
                or self._context.interrupted(step, False)
            ):
                return carrier
        return None

    def dismiss(self, alive: set[int]) -> None:
        """End each srun that has not noticed that its step is over, since it lost a node.

        Args:
            alive: seats with a living process.
        """
        silent = [
            carrier
            for carrier in self._all
            if carrier.step.running and carrier.lost_node and not alive & self.carried(carrier)
        ]
        wait = SLOW_LOOK if alive else 1.0
        if silent and time.monotonic() - self._looked >= wait:
            self._looked = time.monotonic()
            self._dismiss(silent)

    def _dismiss(self, carriers: list[RunningStep]) -> None:
        context = self._context
        try:
            running = {step.srun_pid for step in context.client.steps(context.allocation.id)}
        except SresError:
            return
        for carrier in carriers:
            if not carrier.step.running:
                continue
            # Slurm may wait for the lost node as well, if a new machine has its name.
            silent = carrier.was_connected and connections(carrier.step.pid) == 0
            if carrier.step.pid in running and not silent:
                continue
            # Its tasks are gone: a moment for their last words, which srun still prints.
            if not carrier.step.wait(0.1):
                carrier.dismissed = True
                carrier.step.put_to_death()
                carrier.step.wait(5.0)

    def let_end(self) -> None:
        """The training said its last word: its tasks end by themselves, or are ended."""
        deadline = time.monotonic() + self._context.limits.grace
        while self.running and (left := deadline - time.monotonic()) > 0:
            self._context.wake.wait(min(left, 0.2))
            self._context.wake.clear()
            self._dismiss([carrier for carrier in self._all if carrier.lost_node])
        self.end(at_once=False)

    def end(self, *, at_once: bool) -> None:
        """End them all.

        Args:
            at_once: without a grace.
        """
        context = self._context
        for carrier in reversed(self._all):
            if carrier.step.running:
                end_step(
                    carrier.step,
                    context.client,
                    context.allocation.id,
                    context.host,
                    grace=context.limits.grace,
                    at_once=at_once or carrier.number > 0,
                )
