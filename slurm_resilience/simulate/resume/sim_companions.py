"""Simulated companions: second allocations beside the job, as Slurm and their scripts have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from slurm_resilience.model import Job
from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.sim_nodes import (
    LentMark,
    LentState,
    NodeContact,
    SimCompanion,
    SimStep,
)
from slurm_resilience.slurm import companion_job
from slurm_resilience.slurm.companion_job import (
    LENT_UNUSED_SECONDS,
    LOOK_SECONDS,
    UNUSED_SECONDS,
    CompanionRequest,
)

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld

COMPANION_BASE = 5000
ORPHAN_SECONDS = 60.0
"""A companion is gone so long after the end of its run of the job, while Slurm answers."""
LATE_CHANCE, LATEST_SECONDS = 0.2, 300.0
"""Others are before it in the queue."""
TRY_SECONDS = 5.0
"""Between two tries of the scheduler."""
KILL_WAIT_SECONDS = 30.0
"""Between Slurm's SIGTERM and SIGKILL for the tasks of a job that is cancelled."""
REMEMBERED_SECONDS = 300.0
"""Slurm shows a job that is over for so long (MinJobAge)."""
DUE_TO = {"PREEMPTED": "DUE TO PREEMPTION ***", "TIMEOUT": "DUE TO TIME LIMIT ***"}
"""slurmstepd's words on a step, by the last state of its job."""


class SimCompanions:
    """All companions of the job, whichever run of it has asked for them."""

    def __init__(self, world: ResumeWorld) -> None:
        self._world = world
        self._held: dict[int, SimCompanion] = {}
        self._over: dict[int, SimCompanion] = {}
        """Those of an elastic step that have ended."""
        self.on_event: Callable[[], None] = lambda: None
        """Called when one is asked for, and when one gets its nodes: faults follow it."""
        self.granted = 0
        """So many have got their nodes."""
        self.unused: set[str] = set()
        """Sound nodes of those that ended themselves, since their part had failed before the
        others, or that were given up for another node of theirs."""

    def get(self, number: int) -> SimCompanion | None:
        return self._held.get(number)

    def values(self) -> Iterable[SimCompanion]:
        """Return those that wait or run."""
        return tuple(self._held.values())

    def add(self, request: CompanionRequest) -> int:
        """Queue a request; return its number."""
        world, job = self._world, request.job
        number = COMPANION_BASE + world.next_pid()
        no_kill = "--no-kill" in companion_job.companion_words(request)
        self._held[number] = SimCompanion(
            number, request.nodes, job.excluded_nodes, job.restarts, request.supervisor, no_kill
        )
        self._held[number].lent = LentState(request.nodes) if request.lent else None
        late = world.random.random() < LATE_CHANCE
        most = LATEST_SECONDS if late else 1.0
        world.schedule.after(world.random.uniform(0.05, most), self._grant, number)
        self.on_event()
        return number

    def _grant(self, number: int) -> None:
        companion, world = self._held.get(number), self._world
        if companion is None or companion.nodes:
            return
        idle = [name for name in world.idle() if name not in companion.excluded]
        is_held = companion.lent is not None and LentMark.HELD in companion.lent.marks
        away = world.schedule.now < world.books.slurmctld_back
        if is_held or away or len(idle) < companion.wants:
            world.schedule.after(TRY_SECONDS, self._grant, number)
            return
        companion.nodes = companion.granted = tuple(idle[: companion.wants])
        companion.granted_at = companion.used_at = world.schedule.now
        self.granted += 1
        world.note(f"companion {number} gets {','.join(companion.nodes)}")
        world.schedule.after(LOOK_SECONDS, self._script_looks, number)
        self.on_event()

    def _script_looks(self, number: int) -> None:
        """Do what the companion's batch script does."""
        companion, world = self._held.get(number), self._world
        if companion is None or not companion.nodes:
            return
        now = world.schedule.now
        first = world.nodes[companion.granted[0]]
        most = UNUSED_SECONDS if companion.lent is None else LENT_UNUSED_SECONDS
        if companion.lent is not None and LentMark.SUSPENDED in companion.lent.marks:
            world.schedule.after(LOOK_SECONDS, self._script_looks, number)
            return
        used = any(step.srun.allocation == number for step in world.steps.values())
        if used or now < world.books.slurmctld_back:
            companion.used_at = now
        # Cut off from Slurm it knows nothing.
        if first.contact is NodeContact.FINE and now >= world.books.slurmctld_back:
            if not self._has_its_job(companion):
                self.end(number, "its script: the job has ended", "COMPLETED")
                return
            if now - companion.used_at > most:
                self.unused.update(companion.nodes)
                self.end(number, "its script: it is not used", "COMPLETED")
                return
        world.schedule.after(LOOK_SECONDS, self._script_looks, number)

    def _has_its_job(self, companion: SimCompanion) -> bool:
        job = self._world.job
        return job.state == "RUNNING" and job.restarts == companion.restarts

    def end(self, number: int, by: str, state: str = "CANCELLED") -> None:
        """End one: Slurm kills what runs there.

        Args:
            number: of its job.
            by: for the trace.
            state: in which Slurm shows it then.
        """
        companion, world = self._held.pop(number, None), self._world
        if companion is None:
            return
        world.note(f"companion {number} on {','.join(companion.nodes)} is ended by {by}")
        if companion.lent is not None:
            self._end_lent(companion, companion.lent, state)
            return
        nodes = {name: world.nodes[name] for name in companion.granted}
        bad = {n for n, node in nodes.items() if node.shown.is_fail or node.shown.is_down}
        # Given back whole for one on which no task could be started, too.
        bad |= {world.step_life.failed_launch[1]} & nodes.keys()
        if bad:
            self.unused.update(nodes.keys() - bad)
        for step in list(world.steps.values()):
            if step.srun.allocation == number:
                lost = {n for n in step.nodes if world.nodes[n].contact is not NodeContact.FINE}
                step.lost_nodes.update(lost)
                world.step_life.kill(step, "***")

    def _end_lent(self, companion: SimCompanion, lent: LentState, state: str) -> None:
        world = self._world
        now = world.schedule.now
        lent.ended_as, lent.ended_at = state, now
        lent.shown_until = now + world.random.uniform(0.3, 4.0)
        self._over[companion.id] = companion
        if world.books.growth is not None:
            world.books.growth.ended(companion)
        self.clear_nodes(companion, state)

    def clear_nodes(self, companion: SimCompanion, state: str) -> None:
        """End all that runs in a companion of an elastic step, which holds no nodes any more."""
        world = self._world
        for step in list(world.steps.values()):
            if step.srun.allocation != companion.id:
                continue
            step.lost_nodes.update(
                name for name in step.nodes if world.nodes[name].contact is not NodeContact.FINE
            )
            if state in ("CANCELLED", "COMPLETED"):
                # Slurm asks first, and kills after KillWait.
                world.step_life.terminate(step)
                world.schedule.after(KILL_WAIT_SECONDS, self._kill_left, step)
            else:
                world.step_life.kill(step, DUE_TO.get(state, "***"))

    def _kill_left(self, step: SimStep) -> None:
        if step.living():
            self._world.step_life.kill(step, "***")

    def is_completing(self, companion: SimCompanion) -> bool:
        """Return whether Slurm waits for tasks of a companion that has ended."""
        world = self._world
        if companion.lent is None or world.schedule.now < companion.lent.shown_until:
            return True
        return any(
            world.nodes[task.node].contact is NodeContact.FINE
            for step in world.steps.values()
            if step.srun.allocation == companion.id
            for task in step.living()
        )

    def job(self, number: int, *, over: bool = False) -> Job | None:
        """Return one as squeue shows it; None: it does not.

        Args:
            number: of its job.
            over: those that are over are shown too, for a while.
        """
        companion = self._held.get(number)
        if companion is not None:
            state = "RUNNING" if companion.nodes else "PENDING"
        elif (companion := self._over.get(number)) is not None and companion.lent is not None:
            age = self._world.schedule.now - companion.lent.ended_at
            if self.is_completing(companion):
                state = "COMPLETING"
            elif over and age < REMEMBERED_SECONDS:
                state = companion.lent.ended_as
            else:
                return None
        else:
            return None
        lent = companion.lent
        if lent is not None and LentMark.SUSPENDED in lent.marks and not lent.ended_as:
            state = "SUSPENDED"
        has_other_name = lent is not None and LentMark.RENAMED in lent.marks
        return Job(
            number,
            self._world.job.uid,
            state,
            nodes=companion.granted if lent is not None and lent.ended_as else companion.nodes,
            restarts=lent.requeues if lent is not None else 0,
            companion_of=None if has_other_name else (self._world.job.id, companion.restarts),
            companion_supervisor=companion.supervisor,
            is_lent=lent is not None,
        )

    def is_preempted(self, number: int) -> bool:
        """Return whether Slurm shows that it has begun to preempt one."""
        found = self._held.get(number) or self._over.get(number)
        lent = found.lent if found is not None else None
        return lent is not None and LentMark.PREEMPTED in lent.marks

    def requeue(self, companion: SimCompanion, lent: LentState) -> None:
        """Put one back into the queue, where a person holds it."""
        world = self._world
        world.note(f"companion {companion.id} is requeued by a person")
        lent.requeues += 1
        lent.marks |= LentMark.HELD
        self.clear_nodes(companion, "CANCELLED")
        companion.nodes = companion.granted = ()

    def grant_later(self, companion: SimCompanion) -> None:
        """Have the scheduler try again to start one."""
        self._world.schedule.after(TRY_SECONDS, self._grant, companion.id)

    def lost_node(self, name: str) -> None:
        """End the companion of a node that Slurm has set DOWN, unless it is to go on without it."""
        world = self._world
        for companion in self.values():
            if name not in companion.nodes:
                continue
            left = tuple(other for other in companion.nodes if other != name)
            if not (companion.no_kill and left):
                self.end(companion.id, f"Slurm: {name} is DOWN", "NODE_FAIL")
                continue
            companion.nodes = left
            for step in list(world.steps.values()):
                if step.srun.allocation == companion.id and name in step.nodes:
                    step.srun.says(f"srun: error: Node failure on {name}")
                    step.lost_nodes.add(name)
                    world.step_life.kill(step, "")

    def look(self) -> None:
        """Check that each one ends with the run of the job that has asked for it."""
        world = self._world
        for companion in self.values():
            now = world.schedule.now
            # Until Slurm knows that the node of its script is lost, nothing can end it.
            is_unseen = self._is_lost_unseen(companion)
            is_stopped = companion.lent is not None and LentMark.SUSPENDED in companion.lent.marks
            is_unseen |= is_stopped  # so is its script
            if self._has_its_job(companion) or is_unseen or not companion.nodes:
                companion.orphan_since = None
                continue
            if companion.orphan_since is None:
                companion.orphan_since = now
            since = max(companion.orphan_since, world.books.slurmctld_back)
            if now - since > ORPHAN_SECONDS:
                world.broken(ResumeRule.COMPANION, f"job {companion.id} is there still")

    def _is_lost_unseen(self, companion: SimCompanion) -> bool:
        if not companion.granted:
            return False
        first = self._world.nodes[companion.granted[0]]
        return first.contact is not NodeContact.FINE and not first.shown.is_down
