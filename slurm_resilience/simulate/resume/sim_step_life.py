"""The life of a simulated job's steps: they are made, begin, settle, and are ended."""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING

from slurm_resilience.resume.decide.task_ends import NodeBegan, TaskEnd
from slurm_resilience.simulate.cluster.sim_clock import BOOTED_SECONDS
from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimStep, SimTask
from slurm_resilience.simulate.resume.sim_program import SICK_CRASH_SECONDS
from slurm_resilience.simulate.resume.sim_srun import SimSrun, words_of_end

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld

INTERRUPT_SECONDS = 1.0
"""Two Ctrl-C within this time end the step."""
LAUNCH_SECONDS = 15.0
"""An srun that cannot reach a node gives its launch up after this time."""
ANSWER_SECONDS = 9.0
"""An srun that slurmctld does not answer ends after this time (seen on 22.05 and 26.05)."""
ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
RESETS = (
    "srun: error: Aborting, io error and missing step on node 1",
    "srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 1",
)
"""srun's words where a node misses the step, and its connection is reset (seen on 22.05)."""
ABORTED_SECONDS = 31.0
"""From that line to srun's end, where a node of the step is silent (seen on 22.05)."""
KILLED_SECONDS = 0.5
"""Two ends within this time are not told apart."""


class StepLife:
    """All that Slurm and the nodes do with the steps of one job."""

    def __init__(self, world: ResumeWorld) -> None:
        self._world = world
        self.failed_launch = ("", "", 0.0)
        """The last one, of no join step: its attempt, its node, and when it was told."""

    def make(self, srun: SimSrun) -> None:
        """Make the step of an srun, as soon as slurmctld answers and the nodes are free."""
        if not srun.running:
            return
        now, back = self._world.schedule.now, self._world.books.slurmctld_back
        if now < back:
            begin = self.make if back - now < ANSWER_SECONDS else self._give_up
            self._world.schedule.at(min(back + 0.1, now + ANSWER_SECONDS), begin, srun)
            return
        error = self._step_error(srun)
        if error:
            srun.says(f"srun: error: Unable to create step for job {srun.allocation}: {error}")
            srun.ends(1)
            return
        if not srun.overlaps and any(
            set(step.nodes) & set(srun.wanted) for step in self._world.steps.values()
        ):
            srun.says(
                f"srun: Job {self._world.job.id} step creation temporarily disabled, retrying"
            )
            self._world.schedule.after(1.0, self.make, srun)
            return
        per_node = srun.ntasks // len(srun.wanted) or self._world.site.tasks_per_node
        step = SimStep(str(self._world.next_pid()), srun.wanted, srun, tasks_per_node=per_node)
        self._world.steps[step.name] = step
        for node_id, name in enumerate(step.nodes):
            self._world.schedule.after(
                self._world.random.uniform(0.01, 0.2), self._begin, step, node_id, name
            )

    def _give_up(self, srun: SimSrun) -> None:
        """Have an srun end that slurmctld has not answered."""
        if srun.running:
            srun.gave_up = True
            srun.says(
                f"srun: error: Unable to confirm allocation for job {srun.allocation}: "
                "Unable to contact slurm controller (connect failure)"
            )
            srun.ends(1)

    def _step_error(self, srun: SimSrun) -> str:
        held, state = set(self._world.job.nodes), self._world.job.state
        if srun.is_companion:
            companion = self._world.companions.get(srun.allocation)
            held = set(companion.nodes) if companion is not None else set()
            state = "RUNNING" if held else "COMPLETED"
        if state != "RUNNING":
            return "Job/step already completing or completed"
        if not set(srun.wanted) <= held:
            return "Requested nodes are not in this job"
        if any(self._world.nodes[name].shown.is_down for name in srun.wanted):
            return "Required node not available (down, drained or reserved)"
        return ""

    def _begin(self, step: SimStep, node_id: int, name: str) -> None:
        srun, node = step.srun, self._world.nodes[name]
        if not srun.running or step.killed_at is not None or step.name not in self._world.steps:
            return
        if node.contact is not NodeContact.FINE or node.slurmd_away:
            self._world.schedule.after(LAUNCH_SECONDS, self._launch_failed, step, name)
            return
        ended, started = self._world.seen.person_ended_at, srun.started - BOOTED_SECONDS
        forgiven = srun.is_join and self._world.is_just_cancelled(started)
        # The end of its attempt, cancelled a moment before, is on its way.
        forgiven |= srun.is_companion
        if ended is not None and ended < started and not forgiven:
            self._world.check_person()
        self._check_writers(step, name)
        first = node_id * step.tasks_per_node
        tasks = [SimTask(n, name) for n in range(first, first + step.tasks_per_node)]
        step.tasks += tasks
        if not srun.is_companion and name not in self._world.job.nodes:
            for task in tasks:
                self.kill_task(step, task)  # the node has left the job in this moment
        if srun.reports.target and self._world.random.random() > 0.05:
            size = len(step.nodes)
            told = NodeBegan(int(step.name), node_id, name, size, size * step.tasks_per_node)
            srun.reports.take(told)
        if srun.keeps_running and self._world.progress.training is not None:
            self._world.progress.training.begin(step, name, tasks)
            if node.eats_by:
                later = SICK_CRASH_SECONDS
                self._world.schedule.after(later, self.end_task, step, tasks[0], 128 + node.eats_by)
        elif self._world.program.is_whole(step):
            self._world.program.run(step)

    def _launch_failed(self, step: SimStep, name: str) -> None:
        if step.srun.running:
            step.srun.says(
                f"srun: error: Task launch for StepId={step.srun.allocation}.{step.name} failed "
                f"on node {name}: Communication connection failure"
            )
            step.srun.says(
                "srun: error: Application launch failed: Communication connection failure"
            )
            tried = f"{step.srun.token} {step.srun.allocation}.{step.name}"
            self._world.seen.failed_on.setdefault(tried, set()).add(name)
            if step.srun.is_join and self._world.progress.training is not None:
                training = self._world.progress.training
                training.joins.not_launched(training.seats_of(step.srun))
            if not step.srun.is_join:
                self.failed_launch = step.srun.token, name, self._world.schedule.now
            self.kill(step, "***")  # slurmstepd words srun's own order as a person's
            self._world.schedule.after(1.0, step.srun.ends, 1)

    def _check_writers(self, new: SimStep, name: str) -> None:
        """Two attempts may not run at once where the older one can be reached, nor anywhere with
        a token that still holds."""
        for step in self._world.steps.values():
            for task in step.living() if step.srun.token != new.srun.token else ():
                node = self._world.nodes[task.node]
                if self._world.may_write(step.srun):
                    self._world.broken(
                        ResumeRule.TWO_WRITERS, f"{step.srun.token} may write on {name}"
                    )
                # Slurm ends what is lent in its own time, and it may not write any more.
                is_lent = step.srun.is_companion and step.srun.is_join
                if node.contact is NodeContact.FINE and not (task.hangs or is_lent):
                    self._world.broken(
                        ResumeRule.TWO_WRITERS,
                        f"task {task.number} of {step.srun.token} runs on {task.node} while "
                        f"{new.srun.token} begins on {name}",
                    )

    def end_task(self, step: SimStep, task: SimTask, code: int) -> None:
        """End one task by itself, or by a signal."""
        if not task.alive or (task.hangs and code != 128 + SIGKILL):
            return  # one that hangs in the kernel with a SIGKILL pending does nothing of its own
        if (
            code
            and step.killed_at is not None
            and self._world.schedule.now - step.killed_at < KILLED_SECONDS
        ):
            code = 128 + SIGKILL  # which of the two came first cannot be told
        self.lose_task(task, code)
        reachable = self._world.nodes[task.node].contact is NodeContact.FINE
        if reachable:
            step.first_failure = step.first_failure or code
            if code:
                self._world.seen.failures.setdefault(step.srun.token, code)
                self._world.seen.failed_on.setdefault(step.srun.token, set()).add(task.node)
        self._world.note(f"task {task.number} of step {step.name} on {task.node} ends with {code}")
        if reachable:
            step.untold.add(task.number)
            self._world.schedule.after(
                self._world.random.uniform(0.0, 0.2), self._told_end, step, task
            )
        if code and step.killed_at is None:
            self.lose_collective(step)

    def lose_task(self, task: SimTask, code: int) -> None:
        """Note that a task lives no more."""
        task.alive, task.code = False, code
        if self._world.progress.training is not None:
            self._world.progress.training.task_gone(task)

    def lose_collective(self, step: SimStep) -> None:
        """Have the other tasks of a step notice that one is gone."""
        if step.srun.keeps_running:
            return
        # They wait in a collective; some libraries notice at once, others by a time-out.
        longest = self._world.site.program.collective_seconds
        for part, other in self._world.program.all_living(step):
            delay = self._world.random.uniform(0.02 * longest, longest)
            self._world.schedule.after(delay, self.end_task, part, other, 1)

    def _told_end(self, step: SimStep, task: SimTask) -> None:
        """Tell srun and the supervisor of a task's end."""
        srun = step.srun
        step.untold.discard(task.number)
        if srun.reports.target and (
            step.killed_at is not None or self._world.random.random() > 0.05
        ):
            node_id = step.nodes.index(task.node)
            end = TaskEnd(
                int(step.name),
                node_id,
                task.number,
                task.code,
                task.code > 128,
                at=self._world.clock.now(),
            )
            srun.reports.take(end)
        elif task is step.bug_task:
            # Then the end of one that waited for it counts, which is another failure.
            self._world.seen.budget.disturb()
        if task.code:
            srun.says(f"srun: error: {task.node}: task {task.number}: {words_of_end(task.code)}")
            ends_others = self._world.site.kill_on_bad_exit and not srun.keeps_running
            if ends_others and step.killed_at is None:
                srun.says(f"srun: Terminating StepId={step.srun.allocation}.{step.name}")
                self.kill(step, "")
        self.settle(step)

    def settle(self, step: SimStep) -> None:
        """End the srun of a step, and take the step off the books, when all tasks are known to
        have ended."""
        silent = {n for n in step.nodes if self._world.nodes[n].contact is not NodeContact.FINE}
        if step.srun.keeps_running:
            silent &= step.silent_nodes  # tasks that ended long before are not waited for
        unknown = {task.node for task in step.tasks if task.alive or task.number in step.untold}
        unknown |= silent - step.lost_nodes
        missing = len(step.tasks) < step.size
        waited_for = unknown - step.lost_nodes
        if waited_for and step.srun.keeps_running and self._is_lost(step, waited_for):
            # srun waits for a lost node by itself; Slurm's books do so for a while.
            self._world.schedule.after(
                self._world.random.uniform(1.0, 60.0), self._take_off_books, step
            )
        if waited_for or (missing and step.killed_at is None):
            return
        code = max((task.code for task in step.tasks), default=1)
        if step.lost_nodes or missing:
            code = max(code, 137)
        self._world.schedule.after(self._world.random.uniform(0.02, 0.2), step.srun.ends, code)
        self._world.schedule.after(
            self._world.random.uniform(0.05, 1.5), self._take_off_books, step
        )

    def _is_lost(self, step: SimStep, nodes: set[str]) -> bool:
        """Return whether Slurm knows that these nodes are lost, and no task lives on others."""
        held = self._world.job.nodes
        if step.srun.is_companion:
            companion = self._world.companions.get(step.srun.allocation)
            held = companion.nodes if companion is not None else step.nodes
        known = all(self._world.nodes[n].shown.is_down or n not in held for n in nodes)
        return known and not {task.node for task in step.living()} - nodes

    def _take_off_books(self, step: SimStep) -> None:
        self._world.steps.pop(step.name, None)

    # -- how steps are ended ------------------------------------------------------------------

    def kill(self, step: SimStep, word: str) -> None:
        """Have Slurm kill a step's tasks.

        Args:
            step: the step.
            word: slurmstepd says that it was cancelled, and this; empty: it says nothing.
        """
        if step.killed_at is None:
            step.killed_at = self._world.schedule.now
        if word:
            self.tell_end(step, word)
        if word:
            step.srun.says(ABORTED)
            self._world.schedule.after(ABORTED_SECONDS, self._time_out, step)
        for task in step.living():
            self.kill_task(step, task)
        self.settle(step)
        # Slurm gives dead nodes up after a while.
        self._world.schedule.after(60.0, self._forget_step, step)

    def reset(self, step: SimStep) -> None:
        """Have an srun end its step: a new machine has reset the connection to a node's tasks, of
        whose loss nothing had told srun."""
        srun = step.srun
        if not (srun.running and srun.keeps_running) or step.killed_at is not None:
            return
        self._world.note(f"a new machine resets the connection of step {step.name}")
        srun.says(self._world.random.choice(RESETS))
        self.kill(step, "***")

    def _time_out(self, step: SimStep) -> None:
        """Have srun wait no longer for a step that was aborted: one of its nodes is silent."""
        if step.srun.running:
            step.srun.says("srun: error: Timed out waiting for job step to complete")
            code = max((task.code for task in step.tasks), default=0)
            self._world.schedule.after(
                self._world.random.uniform(0.02, 0.2), step.srun.ends, code or 137
            )

    def tell_end(self, step: SimStep, word: str) -> None:
        """Have slurmstepd say that a step is cancelled."""
        # The step's first node says it; where that is lost, nothing does.
        first_is_there = self._world.nodes[step.nodes[0]].contact is NodeContact.FINE
        if step.end_is_told or not first_is_there or self._world.random.random() < 0.2:
            return
        step.end_is_told = True
        step.srun.says(
            f"slurmstepd: error: *** STEP {step.srun.allocation}.{step.name} ON {step.nodes[0]} "
            f"CANCELLED AT 2026-11-22T10:00:00 {word}"
        )

    def kill_task(self, step: SimStep, task: SimTask) -> None:
        """Have Slurm kill one task, if its node can be reached."""
        node = self._world.nodes[task.node]
        if node.contact is not NodeContact.FINE:
            return
        if task.killed_at is None:
            task.killed_at = self._world.schedule.now
        delay = self._world.random.uniform(0.02, 0.6)
        if node.holds_tasks:
            task.hangs = True
            delay += self._world.random.uniform(20.0, 60.0)
        self._world.schedule.after(delay, self.end_task, step, task, 128 + SIGKILL)

    def _forget_step(self, step: SimStep) -> None:
        waits = [
            task
            for task in step.living()
            if self._world.nodes[task.node].contact is NodeContact.FINE
        ]
        if waits:
            self._world.schedule.after(10.0, self._forget_step, step)
            return
        self._world.steps.pop(step.name, None)
        step.srun.ends(137)

    def terminate(self, step: SimStep) -> None:
        """Have Slurm send SIGTERM to a step's tasks."""
        self.tell_end(step, "***")
        training = self._world.progress.training
        if training is not None and training.asked_to_leave(step):
            return
        for task in step.living() if not self._world.site.program.ignores_term else ():
            if self._world.nodes[task.node].contact is NodeContact.FINE:
                delay = self._world.random.uniform(0.1, 4.0)
                self._world.schedule.after(delay, self.end_task, step, task, 128 + SIGTERM)

    def srun_signalled(self, srun: SimSrun, number: int) -> None:
        """Take a signal of an srun."""
        if not srun.running:
            return
        self._world.note(f"srun gets signal {number}")
        if number == SIGKILL:
            srun.ends(-SIGKILL)
            step = self._step_of(srun)
            if step is not None:
                if srun.killed_by_supervisor:
                    self._world.program.check_order(step)
                else:
                    # Of what comes after a training it cannot tell any more.
                    self._world.progress.srun_saw_it = False
                # A child of srun has Slurm end the step; where that fails, Slurm notices late.
                away = (
                    self._world.schedule.now < self._world.books.slurmctld_back
                    or self._world.random.random() < 0.1
                )
                delay = (
                    self._world.random.uniform(30.0, 90.0)
                    if away
                    else self._world.random.uniform(0.05, 0.3)
                )
                self._world.schedule.after(delay, self.kill, step, "")
            return
        if number == SIGINT:
            twice = self._world.schedule.now - srun.interrupted_at <= INTERRUPT_SECONDS
            srun.interrupted_at = self._world.schedule.now
            if not twice:
                srun.says("srun: interrupt (one more within 1 sec to abort)")
                return
        step = self._step_of(srun)
        if step is None:
            srun.says("srun: forcing job termination")
            srun.ends(1)
            return
        srun.says("srun: forcing job termination")
        self.kill(step, "***")

    def _step_of(self, srun: SimSrun) -> SimStep | None:
        return next((step for step in self._world.steps.values() if step.srun is srun), None)
