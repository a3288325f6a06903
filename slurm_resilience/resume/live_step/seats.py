"""The seats of a living attempt: on which nodes they are, and the steps that fill them."""

from __future__ import annotations

import time

import msgspec

from slurm_resilience.resume.context import Context
from slurm_resilience.resume.live_step.join_step import (
    EmptySeats,
    SeatMap,
    join_command,
    join_variables,
)
from slurm_resilience.resume.live_step.live_steps import LiveSteps
from slurm_resilience.resume.live_step.losses import SeatLoss
from slurm_resilience.resume.live_step.node_search import FoundNodes
from slurm_resilience.resume.srun.environment import Attempt, srun_environment, task_variables
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.wire.messages import AttemptStarted


class Seats:
    """Changes only by `fill`."""

    def __init__(self, context: Context, attempt: Attempt, world: SeatMap, step: SrunStep) -> None:
        """
        Args:
            attempt: what was started.
            world: who sits where.
            step: the attempt's first.
        """
        self._context = context
        self._attempt = attempt
        self._variables = task_variables(attempt)
        self._master = attempt.master_address
        self._deaths: dict[int, int] = {}
        """By seat: tasks that died in a row."""
        self._joined_at: dict[int, float] = {}
        self.world = world
        self.steps = LiveSteps(context, step, tuple(range(world.seats)))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where the training runs, by NODE_RANK."""
        return self.world.nodes

    def given_up(self, slot: EmptySeats) -> bool:
        """Did Slurm give the slot's node up, while a step of it still carried its seats?"""
        return any(
            slot.node in carrier.step.failed_nodes and self.steps.carried(carrier) & set(slot.seats)
            for carrier in self.steps
        )

    def died(self, seats: tuple[int, ...]) -> int:
        """Their tasks did; how often they have, in a row."""
        now = time.monotonic()
        for seat in seats:
            lived = now - self._joined_at.get(seat, float("-inf"))
            before = 0 if lived > self._context.limits.progress_after else self._deaths.get(seat, 0)
            self._deaths[seat] = before + 1
        return max(self._deaths[seat] for seat in seats)

    def fill(self, loss: SeatLoss, found: FoundNodes, incarnation: int) -> None:
        """Start the step that fills lost seats again.

        Args:
            loss: with the node that takes the seats over.
            found: what was hunted for them.
            incarnation: processes that sat on these seats before.
        """
        context = self._context
        slot = self._settle(loss)
        if slot.rank == 0:
            self._master = found.addresses[slot.node]
        variables = join_variables(
            self._variables,
            self.world,
            slot,
            job_nodes=found.job_nodes,
            master_address=self._master,
            incarnation=incarnation,
            step=len(self.steps),
        )
        argv, environment = context.launch.line(
            join_command(context.command, context.allocation.id, self.world, slot),
            variables,
            srun_environment(context.environment, found.job_nodes, context.allocation.changed),
        )
        context.events.write("joining", nodes=[loss.node], seats=list(loss.seats))
        with context.person.starting:
            step = SrunStep(argv, environment, context.wake.set, on_news=context.wake.set)
            context.person.steps.append(step)
        self.steps.add(step, loss.seats)
        loss.started = time.time()
        self._joined_at |= dict.fromkeys(loss.seats, time.monotonic())
        if loss.at_fault:
            context.link.forgive(loss.node)
        context.link.moved(AttemptStarted(self._attempt.number, self.nodes))

    def _settle(self, loss: SeatLoss) -> EmptySeats:
        """Write down that the lost seats are on another node now; the part to be started."""
        slots = list(self.world.slots)
        slots[loss.slot.rank] = msgspec.structs.replace(slots[loss.slot.rank], node=loss.node)
        self.world = msgspec.structs.replace(self.world, slots=tuple(slots))
        return msgspec.structs.replace(slots[loss.slot.rank], seats=loss.seats)
