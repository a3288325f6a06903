"""Simulated companions: second allocations beside the job, as Slurm and their scripts have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimCompanion
from slurm_resilience.slurm import companion_job
from slurm_resilience.slurm.companion_job import LOOK_SECONDS, UNUSED_SECONDS, CompanionRequest

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld

COMPANION_BASE = 5000
ORPHAN_SECONDS = 60.0
"""A companion is gone so long after the end of its run of the job, while Slurm answers."""
LATE_CHANCE, LATEST_SECONDS = 0.2, 300.0
"""Others are before it in the queue."""
TRY_SECONDS = 5.0
"""Between two tries of the scheduler."""


class SimCompanions:
    """All companions of the job, whichever run of it has asked for them."""

    def __init__(self, world: ResumeWorld) -> None:
        self._world = world
        self._held: dict[int, SimCompanion] = {}
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
        late = world.random.random() < LATE_CHANCE
        most = LATEST_SECONDS if late else 1.0
        world.schedule.after(world.random.uniform(0.05, most), self._grant, number)
        self.on_event()
        return number

    def _grant(self, number: int) -> None:
        companion, world = self._held.get(number), self._world
        if companion is None:
            return
        idle = [name for name in world.idle() if name not in companion.excluded]
        if world.schedule.now < world.books.slurmctld_back or len(idle) < companion.wants:
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
        if companion is None:
            return
        now = world.schedule.now
        first = world.nodes[companion.granted[0]]
        used = any(step.srun.allocation == number for step in world.steps.values())
        if used or now < world.books.slurmctld_back:
            companion.used_at = now
        # Cut off from Slurm it knows nothing.
        if first.contact is NodeContact.FINE and now >= world.books.slurmctld_back:
            if not self._has_its_job(companion):
                self.end(number, "its script: the job has ended")
                return
            if now - companion.used_at > UNUSED_SECONDS:
                self.unused.update(companion.nodes)
                self.end(number, "its script: it is not used")
                return
        world.schedule.after(LOOK_SECONDS, self._script_looks, number)

    def _has_its_job(self, companion: SimCompanion) -> bool:
        job = self._world.job
        return job.state == "RUNNING" and job.restarts == companion.restarts

    def end(self, number: int, by: str) -> None:
        """End one: Slurm kills what runs there."""
        companion, world = self._held.pop(number, None), self._world
        if companion is None:
            return
        world.note(f"companion {number} on {','.join(companion.nodes)} is ended by {by}")
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

    def lost_node(self, name: str) -> None:
        """End the companion of a node that Slurm has set DOWN, unless it is to go on without it."""
        world = self._world
        for companion in self.values():
            if name not in companion.nodes:
                continue
            left = tuple(other for other in companion.nodes if other != name)
            if not (companion.no_kill and left):
                self.end(companion.id, f"Slurm: {name} is DOWN")
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
