"""The simulated program of an attempt: it works, keeps its work, fails, and ends well."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_resilience.resume.attempt import PROGRESS
from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimStep, SimTask
from slurm_resilience.simulate.resume.sim_training import CHECKPOINT_SECONDS

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld

SICK_CRASH_SECONDS = 15.0
"""A node that eats attempts ends a task of each after this time."""


class SimProgram:
    """The program, in whichever attempt it runs."""

    def __init__(self, world: ResumeWorld) -> None:
        self._world = world

    def together(self, step: SimStep) -> list[SimStep]:
        """Return the steps of an attempt: it may be spread over several allocations."""
        if step.srun.keeps_running:
            return [step]
        steps = self._world.steps.values()
        others = [s for s in steps if s.srun.token == step.srun.token and s is not step]
        return [step, *others]

    def is_whole(self, step: SimStep) -> bool:
        """Return whether all tasks of an attempt have begun, and live."""
        steps = self.together(step)
        nodes = {name for s in steps for name in s.nodes}
        return nodes == set(step.srun.world) and all(len(s.living()) == s.size for s in steps)

    def all_living(self, step: SimStep) -> list[tuple[SimStep, SimTask]]:
        """Return the living tasks of an attempt, each with its step."""
        return [(s, task) for s in self.together(step) for task in s.living()]

    def run(self, step: SimStep) -> None:
        """Begin the work of an attempt whose tasks have all begun."""
        world = self._world
        program, random = world.site.program, world.random
        left = program.work_seconds - world.progress.done_seconds
        world.schedule.after(left, self._done, step)
        fails_at = program.fails_at
        if program.fails_in_work is not None:
            fails_at = program.fails_in_work - world.progress.done_seconds
        if fails_at is not None and fails_at < left:
            world.schedule.after(fails_at, self._fail_by_bug, step)
        elif random.random() < program.crashes:
            world.schedule.after(
                random.uniform(1.0, left), self._fail, step, random.choice((139, 137, 1))
            )
        bad = [(s, t) for s, t in self.all_living(step) if world.nodes[t.node].eats_by]
        if bad:
            world.seen.budget.disturb()
            code = 128 + world.nodes[bad[0][1].node].eats_by
            world.schedule.after(SICK_CRASH_SECONDS, world.step_life.end_task, *bad[0], code)
        self._checkpoint_later(step)
        world.progress.steps.begin(world, step)

    def is_at_work(self, step: SimStep) -> bool:
        """Return whether all tasks of an attempt live, and reach each other."""
        ending = any(s.killed_at is not None or s.ordered for s in self.together(step))
        return self.is_whole(step) and self._is_reached(step) and not ending

    def _is_reached(self, step: SimStep) -> bool:
        nodes = self._world.nodes
        return all(nodes[name].contact is NodeContact.FINE for name in step.srun.world)

    def _checkpoint_later(self, step: SimStep) -> None:
        world = self._world
        world.schedule.after(
            CHECKPOINT_SECONDS, self._checkpoint, step, world.progress.done_seconds
        )

    def _checkpoint(self, step: SimStep, before: float) -> None:
        world = self._world
        whole, reached = self.is_whole(step), self._is_reached(step)
        hung = world.progress.steps.is_hung(step)
        if hung or not (whole and reached and world.may_write(step.srun)):
            return
        directory = step.srun.variables.get("SRES_DIR", "")
        self.checkpoint(before + CHECKPOINT_SECONDS, Path(directory) if directory else None)
        self._checkpoint_later(step)

    def checkpoint(self, done_seconds: float, directory: Path | None) -> None:
        """Keep the work so far; report it, if the program does."""
        world = self._world
        world.progress.done_seconds = done_seconds
        world.progress.steps.checkpoint()
        if world.site.program.reports and directory is not None:
            world.progress.told_step += 1
            path = directory / PROGRESS
            path.write_text(json.dumps({"step": world.progress.told_step}))

    def _done(self, step: SimStep) -> None:
        """All tasks end well, if all of them are there to take part."""
        world = self._world
        hung = world.progress.steps.is_hung(step)
        if self.is_whole(step) and self._is_reached(step) and not hung:
            steps = self.together(step)
            # One that was told to end may have saved its work only: another attempt is right.
            self.program_ended_well(all(s.srun.running and not s.ordered for s in steps))
            world.progress.ended_steps = steps
            for part, task in self.all_living(step):
                world.step_life.end_task(part, task, 0)

    def program_ended_well(self, srun_saw_it: bool, late_tasks: Sequence[SimTask] = ()) -> None:
        """Note that the program has done all of its work, but for what comes after a training.

        Args:
            srun_saw_it: its srun lives, and can tell.
            late_tasks: those that have more to do.
        """
        world = self._world
        world.progress.ended_well = True
        world.progress.srun_saw_it |= srun_saw_it
        world.progress.late_tasks = list(late_tasks)
        world.note("the program ends well")

    def end_was_told(self) -> bool:
        """Return whether the good end of a program can be known.

        An srun waits for a node that is lost then: only slurmstepd's word on each task tells it.
        """
        steps, nodes = self._world.progress.ended_steps, self._world.nodes
        lost = any(nodes[n].contact is not NodeContact.FINE for s in steps for n in s.nodes)
        told = {end.task for s in steps for end in s.srun.reports.ends()}
        return not lost or len(told) == sum(step.size for step in steps)

    def check_order(self, step: SimStep) -> None:
        """Check that the supervisor has a reason to end a step now, where its training has ended
        well and its program has more to do."""
        world = self._world
        late = [task for task in world.progress.late_tasks if task.alive and not task.hangs]
        if not world.progress.srun_saw_it or not any(task in late for task in step.tasks):
            return
        nodes = [world.nodes[task.node] for task in world.progress.late_tasks]
        sound = all(n.contact is NodeContact.FINE and not n.shown.is_down for n in nodes)
        sound = sound and not world.is_fooled
        if sound and world.job.state == "RUNNING" and world.seen.person_ended_at is None:
            world.broken(ResumeRule.FALSE_FAILURE, f"step {step.name} has more to do, and is ended")

    def _fail_by_bug(self, step: SimStep) -> None:
        world = self._world
        ending = any(s.killed_at is not None for s in self.together(step))
        ending |= world.progress.steps.is_hung(step)
        if not ending and self.is_whole(step):
            # Nothing tells of what ends on a node that is cut off.
            if self._is_reached(step):
                world.seen.budget.failed_by_bug(world.schedule.now)
            chosen = world.random.choice(self.all_living(step))
            chosen[0].bug_task = chosen[1]
            world.step_life.end_task(*chosen, world.site.program.fails_with)

    def _fail(self, step: SimStep, code: int) -> None:
        world = self._world
        living = self.all_living(step)
        world.seen.budget.disturb()
        if living:
            world.step_life.end_task(*world.random.choice(living), code)
