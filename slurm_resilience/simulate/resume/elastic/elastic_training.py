"""A simulated training that grows by the ranks of companions, and shrinks without them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimStep
from slurm_resilience.simulate.resume.sim_training import (
    LivingProgram,
    MeshStage,
    RankStage,
    SimRank,
    SimTraining,
)

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld
    from slurm_resilience.simulate.resume.sim_srun import SimSrun

STEP_SECONDS = 8.0
"""The longest step of the training: a rank that is asked to leave goes after the one it is in."""
STOPPED_SECONDS = 15.0
"""A rank that is asked to leave while no world steps goes within this time."""
KILLED_BY_TERM = 143


class GrowingTraining(SimTraining):
    """The training of one attempt of an elastic step."""

    def __init__(
        self, world: ResumeWorld, srun: SimSrun, program: LivingProgram, size: ElasticSize
    ) -> None:
        if size.sizes and len(srun.wanted) not in size.sizes:
            # A person has left the job nodes of which not all may step.
            fewest = min(size.sizes) * world.site.tasks_per_node * program.ranks_per_task
            program = dataclasses.replace(program, min_world=min(program.min_world, fewest))
        super().__init__(world, srun, program)
        self._size = size
        self.per_node = self.seats // len(srun.wanted)
        self.whole = size.most * self.per_node

    def check_join(self, srun: SimSrun) -> None:
        """Check that lost seats may be filled now, or ranks be started on a companion's node."""
        if not srun.is_companion:
            super().check_join(srun)
            return
        world, seats = self.world, self.seats_of(srun)
        if srun.token != self.token:
            world.broken(ResumeRule.TWO_WRITERS, f"ranks of {srun.token} are late")
        if min(seats) < self.seats:
            world.broken(ResumeRule.CORE, f"seats {sorted(seats)} are given to a companion")
        for rank in self.ranks:
            if rank.seat in seats and self._works(rank) and rank.task.killed_at is None:
                world.broken(ResumeRule.SEAT, f"{rank.peer.id} lives, and its seat is filled again")

    def _chosen(self, present: list[SimRank]) -> list[SimRank]:
        """Return the ranks of the largest world that is allowed: those on the highest seats wait,
        where only some sizes are."""
        ordered = sorted(present, key=lambda rank: rank.seat)
        sizes = [size * self.per_node for size in self._size.sizes]
        if not sizes or len(ordered) < min(sizes):
            return ordered
        stand_ins = sum(rank.seat >= self.whole for rank in ordered)
        possible = (size + more for size in sizes for more in (0, stand_ins))
        return ordered[: max(size for size in possible if size <= len(ordered))]

    def asked_to_leave(self, step: SimStep) -> bool:
        """Have the ranks of a step leave that were started on lent nodes; False: there are none."""
        if not (step.srun.is_companion and step.srun.is_join):
            return False
        random, schedule = self.world.random, self.world.schedule
        for task in step.living():
            if self.world.nodes[task.node].contact is not NodeContact.FINE or task.hangs:
                continue
            ranks = [rank for rank in self.ranks if rank.task is task]
            starts = any(rank.stage is RankStage.STARTS for rank in ranks) or not ranks
            steps = self.mesh.stage is MeshStage.STEPPING
            latest = STEP_SECONDS if steps else STOPPED_SECONDS
            later = random.uniform(0.1, 2.0 if starts else latest)
            code = KILLED_BY_TERM if starts else 0
            schedule.after(later, self.world.step_life.end_task, step, task, code)
        return True
