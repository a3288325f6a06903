"""All that happens to the companions of a simulated elastic step: other jobs want their nodes,
people lay hands on them, and they fail."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.simulate.resume.resume_fault import (
    OF_LENT_JOBS,
    PlannedResumeFault,
    ResumeFault,
)
from slurm_resilience.simulate.resume.sim_nodes import LentMark, LentState, SimCompanion

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld
    from slurm_resilience.simulate.resume.sim_link import SimLink

OF_GROWTH = (
    *OF_LENT_JOBS,
    ResumeFault.LENT_NODE_SICK,
    ResumeFault.RESIZED,
    ResumeFault.SUPERVISOR_STOPPED,
)
FREE_SECONDS, TAKEN_SECONDS = (60.0, 900.0), (30.0, 600.0)
"""A node outside the job is free, or has another job, for so long."""
GRACE_SECONDS = (0.0, 5.0, 30.0, 120.0)
"""GraceTimes of a partition: Slurm ends a job so long after it has told its tasks to end."""


class OtherJobs:
    """The jobs that have the nodes outside this one, and take them back."""

    def __init__(self, world: ResumeWorld, names: list[str], random: Random) -> None:
        """
        Args:
            world: the run's.
            names: of the nodes that other jobs may have.
            random: decides when.
        """
        self._world, self._random = world, random
        self._names = names
        self.grace_seconds = random.choice(GRACE_SECONDS)

    def begin(self) -> None:
        """Give some nodes to other jobs, and others to none."""
        for name in self._names:
            if self._random.random() < 0.4:
                self._take(name)
            else:
                self._world.schedule.after(self._random.uniform(*FREE_SECONDS), self._want, name)

    def _want(self, name: str) -> None:
        """Have another job want a node, which may be lent."""
        world = self._world
        if world.schedule.now < world.books.slurmctld_back:
            world.schedule.at(world.books.slurmctld_back + 1.0, self._want, name)
            return
        lent = [c for c in world.companions.values() if name in c.nodes]
        if lent:
            preempt(world, lent[0], self.grace_seconds)
        if name in world.idle():
            self._take(name)
        else:
            # It gets it when its tasks have gone; until then it does not wait in line.
            world.schedule.after(self._random.uniform(1.0, 120.0), self._want, name)

    def _take(self, name: str) -> None:
        self._world.note(f"another job gets {name}")
        self._world.books.others.add(name)
        self._world.schedule.after(self._random.uniform(*TAKEN_SECONDS), self._free, name)

    def _free(self, name: str) -> None:
        self._world.note(f"another job on {name} has ended")
        self._world.books.others.discard(name)
        self._world.schedule.after(self._random.uniform(*FREE_SECONDS), self._want, name)


def preempt(world: ResumeWorld, companion: SimCompanion, grace_seconds: float) -> None:
    """Have Slurm preempt a companion that has nodes.

    Args:
        world: the run's.
        companion: of an elastic step.
        grace_seconds: its tasks have so long to end by themselves.
    """
    lent = companion.lent
    if lent is None or LentMark.PREEMPTED in lent.marks or not companion.nodes:
        return
    lent.marks |= LentMark.PREEMPTED
    world.note(f"Slurm preempts companion {companion.id}, in {grace_seconds:.0f} s")
    if grace_seconds:
        for step in list(world.steps.values()):
            if step.srun.allocation == companion.id:
                world.step_life.terminate(step)
    number = companion.id
    by = "preemption"
    world.schedule.after(grace_seconds, world.companions.end, number, by, "PREEMPTED")


class _Strike(msgspec.Struct):
    """One fault, and what it may hit."""

    world: ResumeWorld
    link: SimLink
    seconds: float

    def running(self) -> tuple[SimCompanion, LentState] | None:
        """Return a companion that has nodes; None: there is none."""
        chosen = [c for c in self.world.companions.values() if c.lent is not None and c.nodes]
        if not chosen:
            return None
        companion = chosen[int(self.seconds) % len(chosen)]
        assert companion.lent is not None
        return companion, companion.lent

    def waiting(self) -> tuple[SimCompanion, LentState] | None:
        """Return a companion that waits; None: none does."""
        chosen = [c for c in self.world.companions.values() if c.lent is not None and not c.nodes]
        if not chosen:
            return None
        companion = chosen[int(self.seconds) % len(chosen)]
        assert companion.lent is not None
        return companion, companion.lent

    def release(self, companion: SimCompanion, lent: LentState) -> None:
        """Have a person release a companion that is held."""
        lent.marks &= ~LentMark.HELD
        self.world.companions.grant_later(companion)


def _preempted(strike: _Strike) -> None:
    found = strike.running()
    if found is not None:
        preempt(strike.world, found[0], strike.seconds % 60.0)


def _at_limit(strike: _Strike) -> None:
    found = strike.running()
    if found is not None:
        strike.world.companions.end(found[0].id, "its time limit", "TIMEOUT")


def _requeued(strike: _Strike) -> None:
    found = strike.running()
    if found is not None:
        strike.world.companions.requeue(*found)
        strike.world.schedule.after(strike.seconds, strike.release, *found)


def _held(strike: _Strike) -> None:
    found = strike.waiting()
    if found is not None and LentMark.HELD not in found[1].marks:
        found[1].marks |= LentMark.HELD
        strike.world.schedule.after(strike.seconds, strike.release, *found)


def _suspended(strike: _Strike) -> None:
    found = strike.running()
    if found is None:
        return
    companion, lent = found
    lent.marks |= LentMark.SUSPENDED
    world = strike.world
    steps = [step for step in world.steps.values() if step.srun.allocation == companion.id]
    stopped = [task for step in steps for task in step.living() if not task.hangs]
    for task in stopped:
        task.hangs = True
        if world.progress.training is not None:
            world.progress.training.task_gone(task)  # its ranks answer no more

    def goes_on() -> None:
        lent.marks &= ~LentMark.SUSPENDED
        for task in stopped:
            task.hangs = False
        world.note(f"companion {companion.id} goes on")

    world.schedule.after(strike.seconds, goes_on)


def _resized(strike: _Strike) -> None:
    world = strike.world
    found = strike.waiting() if int(strike.seconds) % 2 else strike.running()
    if found is None:
        return
    companion, _ = found
    if not companion.nodes:
        companion.wants = companion.wants + 1 if int(strike.seconds) % 4 == 1 else 1
        return
    if len(companion.nodes) < 2:
        return
    gone = companion.nodes[-1]
    companion.nodes = companion.nodes[:-1]
    for step in list(world.steps.values()):
        if step.srun.allocation == companion.id and gone in step.nodes:
            world.step_life.kill(step, "***")


def _renamed(strike: _Strike) -> None:
    found = strike.running()
    if found is not None:
        found[1].marks |= LentMark.RENAMED


def _step_cancelled(strike: _Strike) -> None:
    found = strike.running()
    if found is None:
        return
    for step in list(strike.world.steps.values()):
        if step.srun.allocation == found[0].id:
            strike.world.step_life.kill(step, "***")
            return


def _node_sick(strike: _Strike) -> None:
    found = strike.running()
    if found is not None:
        name = found[0].nodes[0]
        strike.world.show(name, flags=frozenset({"FAIL"}), reason="Action:Replace")
        strike.link.judge(name)


def _target(strike: _Strike) -> None:
    growth = strike.world.books.growth
    if growth is None or strike.world.schedule.now < strike.world.supervisor.stopped_until:
        return
    reached = growth.size.reached
    nodes = reached[int(strike.seconds) % len(reached)]
    if strike.link.resize(nodes):
        growth.resized(nodes)


def _stopped(strike: _Strike) -> None:
    strike.world.stop_supervisor(strike.seconds)


_STRIKES: dict[ResumeFault, Callable[[_Strike], None]] = {
    ResumeFault.LENT_PREEMPTED: _preempted,
    ResumeFault.LENT_AT_LIMIT: _at_limit,
    ResumeFault.LENT_REQUEUED: _requeued,
    ResumeFault.LENT_HELD: _held,
    ResumeFault.LENT_SUSPENDED: _suspended,
    ResumeFault.LENT_RESIZED: _resized,
    ResumeFault.LENT_RENAMED: _renamed,
    ResumeFault.LENT_STEP_CANCELLED: _step_cancelled,
    ResumeFault.LENT_NODE_SICK: _node_sick,
    ResumeFault.RESIZED: _target,
    ResumeFault.SUPERVISOR_STOPPED: _stopped,
}


def strike_growth(world: ResumeWorld, link: SimLink, fault: PlannedResumeFault) -> None:
    """Carry one fault out, where there is anything that it can hit.

    Args:
        world: the run's.
        link: of the present supervisor to sresctld.
        fault: of a kind of `OF_GROWTH`.
    """
    if not world.seen.is_over:
        _STRIKES[fault.kind](_Strike(world, link, fault.seconds))
