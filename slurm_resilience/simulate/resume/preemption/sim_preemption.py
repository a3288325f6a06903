"""Slurm's preemption of the simulated job: a job of higher priority takes its nodes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from signal import SIGTERM
from typing import TYPE_CHECKING

from slurm_resilience.simulate.resume.preemption.preemption_draw import (
    NEWER,
    LastDeed,
    PreemptionDraw,
    PreemptMode,
)
from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimStep

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld
    from slurm_resilience.simulate.resume.sim_srun import SimSrun

SAVE_SECONDS, FAIL_SECONDS = (0.2, 40.0), (0.1, 4.0)
"""Until a program has saved its work, and until one ends that does not."""
TOGETHER_SECONDS = 1.0
"""Tasks that have saved their work together end within this time."""
TRY_AGAIN_SECONDS = 20.0
"""Between two tries to preempt a job that does not run, or while slurmctld is away."""
KNOWN_SECONDS = 5.0
"""A supervisor that asks can know of a preemption that began so long ago."""
ANSWERS_SECONDS = 40.0
"""And so long after slurmctld answers well again."""
PERSON_SECONDS = 45.0
"""A supervisor that a person has ended is over after this time, where Slurm answers."""


class SimPreemption:
    """The preemptions of one run."""

    def __init__(self, world: ResumeWorld, draw: PreemptionDraw, random: Random) -> None:
        """
        Args:
            world: the run's.
            draw: what the run is about.
            random: decides the rest.
        """
        self._world, self.draw, self._random = world, draw, random
        self.begun_at: float | None = None
        """When Slurm began to preempt the job; None: it does not."""
        self.taken_at = float("-inf")
        """When the job had last to leave its nodes, and other jobs got them."""
        self.person_acted_at = float("-inf")
        """When a person last did what may have ended the program."""
        self.held_until = 0.0
        """A person releases the job then."""
        self.left_well = False
        """Tasks of a program that was not done have ended with 0."""
        self._is_told = False
        """slurmstepd has said that the tasks are told to end."""
        self._count = 0
        self._others_seconds = 0.0

    @property
    def is_under_way(self) -> bool:
        """Return whether Slurm takes the job's nodes when the GraceTime is over."""
        return self.begun_at is not None and self._world.job.state == "RUNNING"

    @property
    def _requeues(self) -> bool:
        return self.draw.mode is PreemptMode.REQUEUE and self._world.job.may_be_requeued

    @property
    def _requeues_after_grace(self) -> bool:
        return self._requeues and self.draw.release == NEWER

    # -- what Slurm does --------------------------------------------------------------------------

    def begin(self, others_seconds: float) -> None:
        """Have Slurm preempt the job, as soon as it runs and slurmctld is there.

        Args:
            others_seconds: for so long another job has its nodes then.
        """
        world = self._world
        if world.seen.is_over:
            return
        away = world.schedule.now < world.books.slurmctld_back
        if away or world.job.state != "RUNNING" or self.begun_at is not None:
            world.schedule.after(TRY_AGAIN_SECONDS, self.begin, others_seconds)
            return
        grace = self.draw.grace_seconds
        world.note(f"Slurm preempts the job, in {grace:.0f} s")
        self.begun_at, self._others_seconds = world.schedule.now, others_seconds
        self._count += 1
        self._is_told = False
        if not grace:
            self._take(self._count)
            return
        for step in [s for s in world.steps.values() if s.srun.allocation == world.job.id]:
            self._tell(step)
        world.schedule.after(grace, self._take, self._count)

    def _tell(self, step: SimStep) -> None:
        """Tell a step's tasks to end."""
        world, random, deed = self._world, self._random, self.draw.deed
        world.step_life.tell_end(step, "***")
        self._is_told = step.end_is_told
        if deed is LastDeed.STAYS:
            return
        saves = deed is not LastDeed.FAILS
        later = random.uniform(*(SAVE_SECONDS if saves else FAIL_SECONDS))
        if saves:
            world.schedule.after(later, self._save, step)
        # Ranks that re-form their own world end by the signal.
        leaves = deed is LastDeed.LEAVES and not step.srun.keeps_running
        code = (0 if leaves else 128 + SIGTERM) if saves else 1
        self.left_well |= leaves
        for task in step.living():
            if world.nodes[task.node].contact is NodeContact.FINE:
                at = later + random.uniform(0.0, TOGETHER_SECONDS)
                world.schedule.after(at, world.step_life.end_task, step, task, code)

    def _save(self, step: SimStep) -> None:
        """Keep the work so far, where all tasks are there; a training of ranks has kept its own."""
        world, program = self._world, self._world.program
        directory = step.srun.variables.get("SRES_DIR", "")
        if program.is_at_work(step) and world.may_write(step.srun) and not step.srun.keeps_running:
            program.checkpoint(world.progress.done_seconds, Path(directory) if directory else None)

    def _take(self, number: int) -> None:
        world = self._world
        if number != self._count or not self.is_under_way:
            return
        if world.schedule.now < world.books.slurmctld_back:
            world.schedule.at(world.books.slurmctld_back + 1.0, self._take, number)
            return
        if self._requeues:
            self._check_person()
        world.end_job("PREEMPTED", requeue=self._requeues, word="DUE TO PREEMPTION")

    def job_ends(self) -> None:
        """Have another job get the nodes of one that ends, for this reason or for any other."""
        world = self._world
        if self.begun_at is None:
            return
        self.begun_at, self.taken_at = None, world.schedule.now
        names = set(world.job.nodes)
        world.books.others |= names
        world.schedule.after(self._others_seconds, world.books.others.difference_update, names)

    def script_ends(self) -> None:
        """Have a newer Slurm requeue the job when its script has ended within the GraceTime; for an
        older one it is over."""
        if not self.is_under_way:
            return
        if self._requeues_after_grace:
            self._world.end_job("PREEMPTED", requeue=True)
        else:
            self.job_ends()

    # -- what must hold ---------------------------------------------------------------------------

    def _is_known(self) -> bool:
        """Return whether a supervisor that asks knows of the present preemption."""
        world, now = self._world, self._world.schedule.now
        books, began = world.books, self.begun_at
        if began is None or not world.is_clear:
            return False
        answers = max(books.slurmctld_back, books.answers_well)
        return now - began > KNOWN_SECONDS and (answers < began or now - answers > ANSWERS_SECONDS)

    def check_start(self, srun: SimSrun) -> None:
        """Check that no further attempt begins on nodes that Slurm is about to take.

        A training that goes on in the GraceTime may need a lost rank to save its work.
        """
        is_first = not self._world.sruns
        if not (is_first or srun.is_join) and self._is_known():
            nodes = ",".join(srun.wanted)
            self._world.broken(ResumeRule.TAKEN, f"an attempt begins on {nodes}")

    def check_end(self, code: int | None) -> None:
        """Check that no supervisor ends within the GraceTime where its job would be over by that.

        Args:
            code: its exit code; None: it was killed.
        """
        world, began = self._world, self.begun_at
        if began is None or code is None or not self.is_under_way:
            return
        by_itself = world.seen.person_ended_at is not None or world.progress.all_done
        # After an end with 0 only Slurm's own word, which may be lost, makes a difference.
        by_itself |= code == 0 and not self._is_told
        # Ctrl-C ends a supervisor that waits. And what a task's own srun says sounds like a person.
        by_itself |= self.person_acted_at >= began or world.is_fooled
        if by_itself or self._requeues_after_grace or not self._requeues:
            return
        last = world.sruns[-1].gone_at if world.sruns else float("-inf")
        # One that had ended before, for a reason of its own, is not Slurm's doing.
        if last >= began:
            world.broken(ResumeRule.PREEMPTED, f"it ends with {code} before Slurm takes the job")

    def check_requeue(self, asked_at: float) -> None:
        """Check that a job is not requeued once more that Slurm has taken.

        Args:
            asked_at: when the supervisor asked for it.
        """
        taken = self.taken_at < asked_at - ANSWERS_SECONDS
        if self._world.job.state == "COMPLETING" and taken:
            self._world.broken(ResumeRule.PREEMPTED, "it is requeued once more")

    def _check_person(self) -> None:
        """Check that no supervisor waits to be requeued when a person has ended it."""
        world, ended = self._world, self._world.seen.person_ended_at
        waited = ended is not None and world.schedule.now - ended > PERSON_SECONDS
        if waited and self._is_known() and not any(srun.running for srun in world.sruns):
            world.broken(ResumeRule.PERSON, f"it was ended at {ended:.1f} s, and is requeued")
