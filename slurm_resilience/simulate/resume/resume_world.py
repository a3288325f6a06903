"""A simulated job: its nodes, its steps and their tasks, as they are and as Slurm sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from signal import SIGINT, SIGKILL, SIGTERM
from threading import Event
from typing import Any

import msgspec

from slurm_resilience.config import ResumeSettings
from slurm_resilience.model import Job
from slurm_resilience.resume.attempt import FENCE
from slurm_resilience.resume.decide.budgets import ENDS_FOR_NAME
from slurm_resilience.resume.decide.task_ends import NodeBegan, TaskEnd
from slurm_resilience.simulate.cluster.sim_clock import BOOTED_SECONDS, SimClock
from slurm_resilience.simulate.resume.resume_rules import (
    GIVEN_UP,
    SILENCE_SECONDS,
    AttemptBudget,
    BrokenResumeRule,
    ResumeRule,
    StartedAttempt,
)
from slurm_resilience.simulate.resume.resume_state import (
    JobBooks,
    SeenByRules,
    SiteSettings,
    SupervisorProcess,
    TrainedWork,
)
from slurm_resilience.simulate.resume.sim_companions import SimCompanions
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimNode, SimStep, SimTask
from slurm_resilience.simulate.resume.sim_program import SICK_CRASH_SECONDS, SimProgram
from slurm_resilience.simulate.resume.sim_srun import SimSrun, words_of_end
from slurm_resilience.simulate.resume.sim_thread import SimThread
from slurm_resilience.simulate.resume.sim_training import (
    SimTraining,
)
from slurm_resilience.simulate.schedule import Schedule

INTERRUPT_SECONDS = 1.0
"""Two Ctrl-C within this time end the step."""
KILL_WAIT_SECONDS = 30.0
"""Between Slurm's SIGTERM and SIGKILL for a batch script whose job it ends."""
LAUNCH_SECONDS = 15.0
"""An srun that cannot reach a node gives its launch up after this time."""
ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
ABORTED_SECONDS = 31.0
"""From that line to srun's end, where a node of the step is silent (seen on 22.05)."""
KILLED_SECONDS = 0.5
"""Two ends within this time are not told apart."""
KILLED_TASKS_SECONDS = 1.0
"""Tasks that are killed have ended, and their ends are told, after this time."""
NOT_RESPONDING = "Not responding"
"""Slurm's own Reason."""
FOOLED_SECONDS = 90.0
"""Words on the end of another step may be taken for those on this one's, if its end begins so soon:
the end itself may have to wait for slurmctld."""
GIVEN_UP_FOR_PERSON = ("stop: the step was cancelled", "stop: the user ")
STEP_ENDS = ": the step is ended"
"""Ends the line of a supervisor that gives up a living step."""
LOOK_SECONDS = 5.0
PERSON_SECONDS = 1500.0
"""A supervisor that a person has ended is over after this time: Slurm may be away meanwhile."""
EPOCH_SECONDS = 1_700_000_000.0
"""The time of day at the start of a run: before the one of the files that it makes."""
SHORTEST_WAIT_SECONDS = 0.001
"""Time goes on in every wait, as it does in the world."""
RUN_SECONDS = 60_000.0
"""Enough for all attempts that the limits allow."""


class SupervisorGone(BaseException):
    """The supervisor was killed: nothing of it runs any more, not even its clean-up."""


class SupervisorClock(SimClock):
    """The supervisor's clock: it may be killed while it waits."""

    def __init__(self, world: ResumeWorld) -> None:
        super().__init__(world.schedule)
        self._world = world

    def now(self) -> float:
        return EPOCH_SECONDS + self._world.schedule.now

    def wait(self, event: Event, seconds: float) -> bool:
        self._world.pass_time(seconds, event.is_set)
        return event.is_set()


class ResumeWorld:
    """All around one supervised srun."""

    def __init__(
        self,
        random: Random,
        trace: list[str] | None,
        site: SiteSettings,
        job: Job,
        nodes: dict[str, SimNode],
        limits: ResumeSettings,
    ) -> None:
        self.random = random
        self.schedule = Schedule()
        self.clock = SupervisorClock(self)
        self._trace = trace
        self.site, self.job, self.nodes = site, job, nodes
        self.progress, self.supervisor, self.books = TrainedWork(), SupervisorProcess(), JobBooks()
        self.seen = SeenByRules(AttemptBudget(limits))
        self.steps: dict[str, SimStep] = {}
        self.books.companions = SimCompanions(self)
        self.progress.program = SimProgram(self)
        self.helpers: dict[int, tuple[str, ...]] = {}
        self.sruns: list[SimSrun] = []
        self._numbers = itertools.count(100)

    # -- time ---------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """For the trace."""
        if self._trace is not None:
            self._trace.append(f"{self.schedule.now:9.2f} {text}")

    def pass_time(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Let things happen while the supervisor waits.

        Raises:
            SupervisorGone: it was killed meanwhile.
        """
        seconds = max(SHORTEST_WAIT_SECONDS, seconds)
        if self.supervisor.running is not None:
            self.supervisor.running.pass_time(seconds, enough)
            return
        until = self.schedule.now + seconds
        if not enough():
            self.schedule.run(until, lambda: enough() or self.is_gone)
        if self.is_gone:
            self.supervisor.on_gone()
            raise SupervisorGone

    def start_thread(self, run: Callable[[], None]) -> SimThread:
        """Run something of the supervisor beside its own loop."""

        def set_running(thread: Any) -> None:
            self.supervisor.running = thread

        thread = SimThread(self.schedule, run, set_running)
        self.supervisor.threads.append(thread)
        return thread

    def end_threads(self) -> None:
        """End the supervisor's threads, with it."""
        for thread in self.supervisor.threads:
            thread.end()
        self.supervisor.threads.clear()

    @property
    def is_gone(self) -> bool:
        return self.schedule.now >= self.supervisor.gone_at

    def broken(self, rule: ResumeRule, text: str) -> None:
        """Complain."""
        raise BrokenResumeRule(rule, self.schedule.now, text)

    def line(self, text: str) -> None:
        """Take a line that the supervisor has written."""
        self.note(f"log: {text}")
        self.seen.spoke_at = self.schedule.now
        self.progress.steps.heard_line(self, text)
        if text.endswith(STEP_ENDS):  # the order itself may not reach Slurm
            for srun in self.sruns:
                srun.order_to_end()
        if GIVEN_UP in text and self.seen.budget.furthest.got_clearly_further:
            self.broken(ResumeRule.PROGRESS, text)

    def look(self) -> None:
        """Look from time to time for an srun that runs, and else for a line in the log."""
        if self.seen.is_over:
            return
        now = self.schedule.now
        # A node that died unseen is for Slurm and sresctld to notice: srun goes on meanwhile.
        training = self.progress.training
        stalls = training is not None and training.stalls
        if any(srun.running for srun in self.sruns) and not stalls:
            self.seen.busy_at = now
        if now - max(self.seen.busy_at, self.seen.spoke_at) > SILENCE_SECONDS:
            self.broken(ResumeRule.SILENCE, "nothing runs, and the log says nothing of it")
        if now > RUN_SECONDS:
            self.broken(ResumeRule.ENDS, "it still goes on")
        ended = self.seen.person_ended_at
        if ended is not None and now - ended > PERSON_SECONDS:
            self.broken(ResumeRule.PERSON, f"it was ended at {ended:.1f} s, and still goes on")
        self.companions.look()
        self.schedule.after(LOOK_SECONDS, self.look)

    def next_pid(self) -> int:
        return next(self._numbers)

    # -- sruns --------------------------------------------------------------------------------

    @property
    def program(self) -> SimProgram:
        return self.progress.program

    @property
    def companions(self) -> SimCompanions:
        return self.books.companions

    def srun_started(self, srun: SimSrun) -> None:
        """Check that an attempt may begin now, and begin it."""
        self.note(f"srun starts on {','.join(srun.wanted)}, attempt {srun.token}")
        if srun.is_join:
            self._join_started(srun)
            return
        others = [other for other in self.sruns if other.running]
        if srun.is_companion and [o for o in others if o.token == srun.token]:
            self._part_started(srun)
            return
        if others:
            self.broken(ResumeRule.ONE_RECOVERY, "two sruns of one supervisor run")
        if self.seen.requeue_asked_at is not None:
            self.broken(ResumeRule.ONE_RECOVERY, "an attempt begins after the job was requeued")
        # Of a job that is just cancelled Slurm starts no step.
        if self.job.state == "RUNNING":
            self._check_person()
        self._check_spares(srun)
        wrong = self.seen.budget.start(
            StartedAttempt(
                self.schedule.now,
                srun.token,
                self.progress.told_step,
                srun.world,
                self.seen.budget.furthest.got_further,
            )
        )
        if wrong:
            self.broken(ResumeRule.BUDGETS, wrong)
        # The ranks of one that does not outlive a node are those of any other program.
        living = self.site.living if srun.keeps_running else None
        self.progress.training = SimTraining(self, srun, living) if living is not None else None
        self.sruns.append(srun)
        self.schedule.after(self.random.uniform(0.02, 0.3), self._make_step, srun)

    def _part_started(self, srun: SimSrun) -> None:
        """Begin the part of an attempt that runs in a companion allocation."""
        if self.seen.requeue_asked_at is not None:
            self.broken(ResumeRule.ONE_RECOVERY, "a part begins after the job was requeued")
        again = self.seen.left_nodes & set(srun.wanted)
        if again:
            self.broken(ResumeRule.SPARES, f"{','.join(sorted(again))} is used again")
        self.sruns.append(srun)
        self.schedule.after(self.random.uniform(0.02, 0.3), self._make_step, srun)

    def _join_started(self, srun: SimSrun) -> None:
        """Check that lost seats may be filled now, and begin a join step."""
        training = self.progress.training
        assert training is not None
        if self.seen.requeue_asked_at is not None:
            self.broken(ResumeRule.ONE_RECOVERY, "seats are filled after the job was requeued")
        if self.job.state == "RUNNING" and not self._is_just_cancelled(self.schedule.now):
            self._check_person()
        again = self.seen.left_nodes & set(srun.wanted)
        if again:
            self.broken(ResumeRule.SPARES, f"{','.join(sorted(again))} is used again")
        training.check_join(srun)
        self.seen.joins += 1
        self.sruns.append(srun)
        self.schedule.after(self.random.uniform(0.02, 0.3), self._make_step, srun)

    def _is_just_cancelled(self, at: float) -> bool:
        """Return whether a person ended the program too short before for a living step's supervisor
        to know: srun's words are believed once its tasks end as they do when they are killed."""
        ended, step = self.seen.person_ended_at, self.seen.cancelled_step
        if ended is None:
            return False
        hangs = step is not None and any(task.hangs for task in step.living())
        return hangs or at - ended < KILLED_TASKS_SECONDS

    def requeue_asked(self, asked_at: float) -> None:
        """Check that a supervisor may have the job requeued now.

        Args:
            asked_at: when it began to ask. A person may have ended the job meanwhile.
        """
        ended = self.seen.person_ended_at
        if ended is not None and ended < asked_at:
            self._check_person()
        good = [name for name in self.job.nodes if self._is_good(name)]
        last = self._last_nodes()
        needed = self.seen.fewest_nodes or len(last)
        if self.job.state == "RUNNING" and len(good) >= needed > 0:
            self.broken(ResumeRule.SPARES, f"{','.join(good)} could be used, and it is requeued")
        self.seen.requeue_asked_at = self.schedule.now

    def _last_nodes(self) -> Sequence[str]:
        """Return the nodes of the last attempt, as it had them at its end."""
        if self.progress.training is not None:
            return self.progress.training.nodes
        return self.sruns[-1].world if self.sruns else ()

    def _is_good(self, name: str) -> bool:
        node = self.nodes[name]
        marked = node.shown.is_down or node.shown.is_fail or name in self.seen.left_nodes
        return node.contact is NodeContact.FINE and not marked

    def _check_spares(self, srun: SimSrun) -> None:
        """Check that no node comes back which an attempt of this run of the job has left."""
        again = self.seen.left_nodes & set(srun.world)
        if again:
            self.broken(ResumeRule.SPARES, f"{','.join(sorted(again))} is used again")
        last = self._last_nodes()
        for name in last:
            if name not in srun.world:
                self.leave(name)

    def node_named(self, name: str, goes_on: bool) -> None:
        """Check that the supervisor has a reason to name a node that it has left."""
        ended = [token for token, names in self.seen.failed_on.items() if name in names]
        if len(ended) < ENDS_FOR_NAME:
            self.broken(ResumeRule.NAMED, f"{len(ended)} attempts have failed on {name}")
        if not goes_on:
            return
        self.seen.named.add(name)
        attempts = self.seen.budget.attempts
        if not attempts:
            return  # they were forgotten with a requeue
        last = attempts[-1]
        if name in last.nodes:
            self.broken(ResumeRule.NAMED, f"{name} is used")
        further = (
            self.seen.budget.furthest.got_further or self.progress.told_step > last.step_before
        )
        if self.schedule.now - last.at < SICK_CRASH_SECONDS and not further:
            self.broken(ResumeRule.NAMED, f"the program may yet fail without {name} too")

    @property
    def is_fooled(self) -> bool:
        """Tell whether a task of the present attempt has just printed, or did shortly before its
        end began, what an srun of its own said of its step's end: word for word what the supervised
        one says when a person cancels."""
        heard_by, told_at = self.progress.others_told_to, self.progress.others_told_at
        if heard_by is None or heard_by.token != self.sruns[-1].token:
            return False
        end_began_at = heard_by.end_began_at
        # Words after the supervisor's order are its own doing: they deceive for a while at most.
        until = end_began_at if end_began_at >= told_at else self.schedule.now
        return min(until, self.schedule.now) - told_at <= FOOLED_SECONDS

    def attempt_ended(self, outcome: str) -> None:
        """Check that an end is taken for a person's only where a person has done something."""
        seen, now = self.seen, self.schedule.now
        # Slurm signals the script as it ends a job, and slurmctld does not answer why.
        unknown = self.books.job_ended and now < self.books.slurmctld_back
        if outcome.startswith(GIVEN_UP_FOR_PERSON) and not (
            seen.person_acted or self.is_fooled or unknown
        ):
            self.broken(ResumeRule.STRANGER, outcome)

    def print_others_words(self) -> None:
        """Have a task print what an srun of its own says, whose step was aborted."""
        for step in list(self.steps.values())[:1]:
            self.progress.others_told_at = self.schedule.now
            self.progress.others_told_to = step.srun
            self.note("a task's own srun tells that its step was aborted")
            step.srun.says(ABORTED)

    def _check_person(self) -> None:
        ended = self.seen.person_ended_at
        if ended is not None:
            self.broken(ResumeRule.PERSON, f"it was ended at {ended:.1f} s")

    def _make_step(self, srun: SimSrun) -> None:
        if not srun.running:
            return
        now = self.schedule.now
        if now < self.books.slurmctld_back:
            self.schedule.at(self.books.slurmctld_back + 0.1, self._make_step, srun)
            return
        error = self._step_error(srun)
        if error:
            srun.says(f"srun: error: Unable to create step for job {srun.allocation}: {error}")
            srun.ends(1)
            return
        if not srun.overlaps and any(
            set(step.nodes) & set(srun.wanted) for step in self.steps.values()
        ):
            srun.says(f"srun: Job {self.job.id} step creation temporarily disabled, retrying")
            self.schedule.after(1.0, self._make_step, srun)
            return
        per_node = srun.ntasks // len(srun.wanted) or self.site.tasks_per_node
        step = SimStep(str(next(self._numbers)), srun.wanted, srun, tasks_per_node=per_node)
        self.steps[step.name] = step
        for node_id, name in enumerate(step.nodes):
            self.schedule.after(self.random.uniform(0.01, 0.2), self._begin, step, node_id, name)

    def _step_error(self, srun: SimSrun) -> str:
        held, state = set(self.job.nodes), self.job.state
        if srun.is_companion:
            companion = self.companions.get(srun.allocation)
            held = set(companion.nodes) if companion is not None else set()
            state = "RUNNING" if held else "COMPLETED"
        if state != "RUNNING":
            return "Job/step already completing or completed"
        if not set(srun.wanted) <= held:
            return "Requested nodes are not in this job"
        if any(self.nodes[name].shown.is_down for name in srun.wanted):
            return "Required node not available (down, drained or reserved)"
        return ""

    def _begin(self, step: SimStep, node_id: int, name: str) -> None:
        srun, node = step.srun, self.nodes[name]
        if not srun.running or step.killed_at is not None or step.name not in self.steps:
            return
        if node.contact is not NodeContact.FINE:
            self.schedule.after(LAUNCH_SECONDS, self._launch_failed, step, name)
            return
        ended, started = self.seen.person_ended_at, srun.started - BOOTED_SECONDS
        forgiven = srun.is_join and self._is_just_cancelled(started)
        # The end of its attempt, cancelled a moment before, is on its way.
        forgiven |= srun.is_companion
        if ended is not None and ended < started and not forgiven:
            self._check_person()
        self._check_writers(step, name)
        first = node_id * step.tasks_per_node
        tasks = [SimTask(n, name) for n in range(first, first + step.tasks_per_node)]
        step.tasks += tasks
        if srun.reports.target and self.random.random() > 0.05:
            srun.reports.take(NodeBegan(int(step.name), node_id, name))
        if srun.keeps_running and self.progress.training is not None:
            self.progress.training.begin(step, name, tasks)
            if node.eats_by:
                later = SICK_CRASH_SECONDS
                self.schedule.after(later, self.end_task, step, tasks[0], 128 + node.eats_by)
        elif self.program.is_whole(step):
            self.program.run(step)

    def _launch_failed(self, step: SimStep, name: str) -> None:
        if step.srun.running:
            step.srun.says(
                f"srun: error: Task launch for StepId={step.srun.allocation}.{step.name} failed "
                f"on node {name}: Communication connection failure"
            )
            self.kill_step(step, "")
            self.schedule.after(1.0, step.srun.ends, 1)

    def _check_writers(self, new: SimStep, name: str) -> None:
        """Two attempts may not run at once where the older one can be reached, nor anywhere with
        a token that still holds."""
        for step in self.steps.values():
            for task in step.living() if step.srun.token != new.srun.token else ():
                node = self.nodes[task.node]
                if self.may_write(step.srun):
                    self.broken(ResumeRule.TWO_WRITERS, f"{step.srun.token} may write on {name}")
                if node.contact is NodeContact.FINE and not task.hangs:
                    self.broken(
                        ResumeRule.TWO_WRITERS,
                        f"task {task.number} of {step.srun.token} runs on {task.node} while "
                        f"{new.srun.token} begins on {name}",
                    )

    def may_write(self, srun: SimSrun) -> bool:
        """Return what `attempt.is_current` tells a task."""
        directory = srun.variables.get("SRES_DIR", "")
        if not directory:
            return True
        try:
            return (Path(directory) / FENCE).read_text().strip() == srun.token
        except OSError:
            return False

    # -- the program --------------------------------------------------------------------------

    @property
    def is_clear(self) -> bool:
        """Return whether the supervisor can ask for all that it wants to know."""
        books, now = self.books, self.schedule.now
        answers = now >= max(books.slurmctld_back, books.answers_well)
        return answers and self.job.state == "RUNNING" and not self.is_gone

    def end_task(self, step: SimStep, task: SimTask, code: int) -> None:
        """End one task by itself, or by a signal."""
        if not task.alive or (task.hangs and code != 128 + SIGKILL):
            return  # one that hangs in the kernel with a SIGKILL pending does nothing of its own
        if (
            code
            and step.killed_at is not None
            and self.schedule.now - step.killed_at < KILLED_SECONDS
        ):
            code = 128 + SIGKILL  # which of the two came first cannot be told
        self._lose_task(task, code)
        reachable = self.nodes[task.node].contact is NodeContact.FINE
        if reachable:
            step.first_failure = step.first_failure or code
            if code:
                self.seen.failures.setdefault(step.srun.token, code)
                self.seen.failed_on.setdefault(step.srun.token, set()).add(task.node)
        self.note(f"task {task.number} of step {step.name} on {task.node} ends with {code}")
        if reachable:
            step.untold.add(task.number)
            self.schedule.after(self.random.uniform(0.0, 0.2), self._told_end, step, task)
        if code and step.killed_at is None:
            self._lose_collective(step)

    def _lose_task(self, task: SimTask, code: int) -> None:
        task.alive, task.code = False, code
        if self.progress.training is not None:
            self.progress.training.task_gone(task)

    def _lose_collective(self, step: SimStep) -> None:
        """Have the other tasks of a step notice that one is gone."""
        if step.srun.keeps_running:
            return
        # They wait in a collective; some libraries notice at once, others by a time-out.
        longest = self.site.program.collective_seconds
        for part, other in self.program.all_living(step):
            delay = self.random.uniform(0.02 * longest, longest)
            self.schedule.after(delay, self.end_task, part, other, 1)

    def _told_end(self, step: SimStep, task: SimTask) -> None:
        """Tell srun and the supervisor of a task's end."""
        srun = step.srun
        step.untold.discard(task.number)
        if srun.reports.target and (step.killed_at is not None or self.random.random() > 0.05):
            node_id = step.nodes.index(task.node)
            end = TaskEnd(
                int(step.name),
                node_id,
                task.number,
                task.code,
                task.code > 128,
                at=self.clock.now(),
            )
            srun.reports.take(end)
        if task.code:
            srun.says(f"srun: error: {task.node}: task {task.number}: {words_of_end(task.code)}")
            ends_others = self.site.kill_on_bad_exit and not srun.keeps_running
            if ends_others and step.killed_at is None:
                srun.says(f"srun: Terminating StepId={step.srun.allocation}.{step.name}")
                self.kill_step(step, "")
        self._settle_step(step)

    def _settle_step(self, step: SimStep) -> None:
        """End the srun of a step, and take the step off the books, when all tasks are known to
        have ended."""
        silent = {n for n in step.nodes if self.nodes[n].contact is not NodeContact.FINE}
        if step.srun.keeps_running:
            silent &= step.silent_nodes  # tasks that ended long before are not waited for
        unknown = {task.node for task in step.tasks if task.alive or task.number in step.untold}
        unknown |= silent - step.lost_nodes
        missing = len(step.tasks) < step.size
        waited_for = unknown - step.lost_nodes
        if waited_for and step.srun.keeps_running and self._is_lost(step, waited_for):
            # srun waits for a lost node by itself; Slurm's books do so for a while.
            self.schedule.after(self.random.uniform(1.0, 60.0), self._take_off_books, step)
        if waited_for or (missing and step.killed_at is None):
            return
        code = max((task.code for task in step.tasks), default=1)
        if step.lost_nodes or missing:
            code = max(code, 137)
        self.schedule.after(self.random.uniform(0.02, 0.2), step.srun.ends, code)
        self.schedule.after(self.random.uniform(0.05, 1.5), self._take_off_books, step)

    def _is_lost(self, step: SimStep, nodes: set[str]) -> bool:
        """Return whether Slurm knows that these nodes are lost, and no task lives on others."""
        known = all(self.nodes[n].shown.is_down or n not in self.job.nodes for n in nodes)
        return known and not {task.node for task in step.living()} - nodes

    def _take_off_books(self, step: SimStep) -> None:
        self.steps.pop(step.name, None)

    # -- how steps are ended ------------------------------------------------------------------

    def kill_step(self, step: SimStep, word: str) -> None:
        """Have Slurm kill a step's tasks.

        Args:
            step: the step.
            word: slurmstepd says that it was cancelled, and this; empty: it says nothing.
        """
        if step.killed_at is None:
            step.killed_at = self.schedule.now
        if word:
            self._tell_end(step, word)
        if word:
            step.srun.says(ABORTED)
            self.schedule.after(ABORTED_SECONDS, self._time_out, step)
        for task in step.living():
            self._kill_task(step, task)
        self._settle_step(step)
        # Slurm gives dead nodes up after a while.
        self.schedule.after(60.0, self._forget_step, step)

    def _time_out(self, step: SimStep) -> None:
        """Have srun wait no longer for a step that was aborted: one of its nodes is silent."""
        if step.srun.running:
            step.srun.says("srun: error: Timed out waiting for job step to complete")
            code = max((task.code for task in step.tasks), default=0)
            self.schedule.after(self.random.uniform(0.02, 0.2), step.srun.ends, code or 137)

    def _tell_end(self, step: SimStep, word: str) -> None:
        """Have slurmstepd say that a step is cancelled."""
        # The step's first node says it; where that is lost, nothing does.
        first_is_there = self.nodes[step.nodes[0]].contact is NodeContact.FINE
        if step.end_is_told or not first_is_there or self.random.random() < 0.2:
            return
        step.end_is_told = True
        step.srun.says(
            f"slurmstepd: error: *** STEP {step.srun.allocation}.{step.name} ON {step.nodes[0]} "
            f"CANCELLED AT 2026-11-22T10:00:00 {word}"
        )

    def _kill_task(self, step: SimStep, task: SimTask) -> None:
        node = self.nodes[task.node]
        if node.contact is not NodeContact.FINE:
            return
        if task.killed_at is None:
            task.killed_at = self.schedule.now
        delay = self.random.uniform(0.02, 0.6)
        if node.holds_tasks:
            task.hangs = True
            delay += self.random.uniform(20.0, 60.0)
        self.schedule.after(delay, self.end_task, step, task, 128 + SIGKILL)

    def _forget_step(self, step: SimStep) -> None:
        waits = [
            task for task in step.living() if self.nodes[task.node].contact is NodeContact.FINE
        ]
        if waits:
            self.schedule.after(10.0, self._forget_step, step)
            return
        self.steps.pop(step.name, None)
        step.srun.ends(137)

    def terminate_step(self, step: SimStep) -> None:
        """Have Slurm send SIGTERM to a step's tasks."""
        self._tell_end(step, "***")
        for task in step.living() if not self.site.program.ignores_term else ():
            if self.nodes[task.node].contact is NodeContact.FINE:
                delay = self.random.uniform(0.1, 4.0)
                self.schedule.after(delay, self.end_task, step, task, 128 + SIGTERM)

    def srun_signalled(self, srun: SimSrun, number: int) -> None:
        """Take a signal of an srun."""
        if not srun.running:
            return
        self.note(f"srun gets signal {number}")
        if number == SIGKILL:
            srun.ends(-SIGKILL)
            step = self._step_of(srun)
            if step is not None:
                if srun.killed_by_supervisor:
                    self.program.check_order(step)
                else:
                    # Of what comes after a training it cannot tell any more.
                    self.progress.srun_saw_it = False
                # A child of srun has Slurm end the step; where that fails, Slurm notices late.
                away = self.schedule.now < self.books.slurmctld_back or self.random.random() < 0.1
                delay = self.random.uniform(30.0, 90.0) if away else self.random.uniform(0.05, 0.3)
                self.schedule.after(delay, self.kill_step, step, "")
            return
        if number == SIGINT:
            twice = self.schedule.now - srun.interrupted_at <= INTERRUPT_SECONDS
            srun.interrupted_at = self.schedule.now
            if not twice:
                srun.says("srun: interrupt (one more within 1 sec to abort)")
                return
        step = self._step_of(srun)
        if step is None:
            srun.says("srun: forcing job termination")
            srun.ends(1)
            return
        srun.says("srun: forcing job termination")
        self.kill_step(step, "***")

    def _step_of(self, srun: SimSrun) -> SimStep | None:
        return next((step for step in self.steps.values() if step.srun is srun), None)

    # -- nodes --------------------------------------------------------------------------------

    def lose_node(self, name: str, contact: NodeContact) -> None:
        """Take its power or its network from a node."""
        node = self.nodes[name]
        if node.contact is not NodeContact.FINE:
            return
        self.note(f"{name}: {contact.value}")
        self.seen.budget.disturb()
        node.contact = contact
        for step in self.steps.values():
            if any(task.node == name for task in step.living()):
                step.silent_nodes.add(name)
        if contact is NodeContact.DEAD:
            for step in self.steps.values():
                for task in step.living():
                    if task.node == name:
                        self._lose_task(task, 128 + SIGKILL)
        for step in list(self.steps.values()):
            if name in step.nodes and step.killed_at is None:
                self._lose_collective(step)
            if name in step.nodes and step.srun.keeps_running:
                self._settle_step(step)
        if self.progress.training is not None:
            self.progress.training.node_gone(name)
        if name == self.job.batch_host and self.job.state == "RUNNING":
            self.supervisor.gone_at = self.schedule.now
        self.schedule.after(self.site.slurmd_timeout, self._silent, name)
        if self.site.repair_seconds is not None:
            self.schedule.after(self.site.repair_seconds, self._come_back, name)

    def _come_back(self, name: str) -> None:
        """Have a node boot anew, or another machine in its place."""
        node = self.nodes[name]
        if self.seen.is_over:
            return
        if self.schedule.now < self.books.slurmctld_back:
            self.schedule.at(self.books.slurmctld_back + 1.0, self._come_back, name)
            return
        if not node.shown.is_down:
            self.set_down(name, "Node unexpectedly rebooted")
        for step in self.steps.values():
            for task in step.living():
                if task.node == name:
                    self._lose_task(task, 128 + SIGKILL)
        self.note(f"{name} is back")
        node.contact, node.back_at = NodeContact.FINE, self.schedule.now
        node.eats_by, node.holds_tasks = 0, False
        booted = datetime.fromtimestamp(self.clock.now(), UTC).replace(tzinfo=None)
        boot_time = booted.isoformat(timespec="seconds")
        self.show(name, base="IDLE", flags=frozenset(), reason="", boot_time=boot_time)
        self.seen.left_nodes.discard(name)
        for step in list(self.steps.values()):
            if name in step.nodes:
                step.lost_nodes.add(name)
                self._settle_step(step)

    def leave(self, name: str) -> None:
        """Note that an attempt has left a node for good, unless another machine is there since."""
        attempts = self.seen.budget.attempts
        if name in self.companions.unused:
            self.companions.unused.discard(name)  # no fault of it: it may be used again
        elif not attempts or self.nodes[name].back_at < attempts[-1].at:
            self.seen.left_nodes.add(name)

    def _silent(self, name: str) -> None:
        node = self.nodes[name]
        if self.schedule.now < self.books.slurmctld_back:
            self.schedule.at(self.books.slurmctld_back + 1.0, self._silent, name)
            return
        if node.contact is not NodeContact.FINE and not node.shown.is_down:
            self.set_down(name, NOT_RESPONDING)

    def show(self, name: str, **changes: Any) -> None:
        """Change what Slurm shows of a node."""
        node = self.nodes[name]
        node.shown = msgspec.structs.replace(node.shown, **changes)

    def set_down(self, name: str, reason: str) -> None:
        """Set a node DOWN: Slurm takes it out of its job, or ends the job."""
        self.note(f"Slurm shows {name} DOWN ({reason})")
        self.show(name, base="DOWN", reason=reason)
        if self.site.living is None or reason != NOT_RESPONDING:
            self.cut_off_tasks_end(name)  # where Slurm is alone, no sresd ends them
        self.companions.lost_node(name)
        job = self.job
        if name not in job.nodes or job.state != "RUNNING":
            return
        if self.site.no_kill and len(job.nodes) > 1 and name != job.batch_host:
            self.job = msgspec.structs.replace(job, nodes=tuple(n for n in job.nodes if n != name))
            for step in list(self.steps.values()):
                if name in step.nodes:
                    step.srun.says(f"srun: error: Node failure on {name}")
                    step.lost_nodes.add(name)
                    if step.srun.keeps_running:
                        self._settle_step(step)
                    else:
                        self.kill_step(step, "")
            return
        self.end_job("NODE_FAIL", requeue=job.requeue)

    def cut_off_tasks_end(self, name: str) -> None:
        """sresd on a node that is cut off ends the tasks there."""
        for step in self.steps.values():
            for task in step.living():
                if task.node == name and self.nodes[name].contact is NodeContact.CUT:
                    self._lose_task(task, 128 + SIGKILL)

    # -- the job ------------------------------------------------------------------------------

    def end_job(self, state: str, *, requeue: bool, word: str = "DUE TO NODE FAILURE") -> None:
        """Have Slurm end the job, or requeue it."""
        if self.job.state != "RUNNING":
            return
        self.note(f"Slurm ends the job: {state}, requeue {requeue}")
        again = requeue and self.job.is_batch
        self.job = msgspec.structs.replace(self.job, state="COMPLETING" if again else state)
        self.books.job_ended = not again
        for step in [s for s in self.steps.values() if not s.srun.is_companion]:
            step.srun.says(
                f"slurmstepd: error: *** STEP {self.job.id}.{step.name} ON {step.nodes[0]} "
                f"CANCELLED AT 2026-11-22T10:00:00 {word} ***"
            )
            # It waits for no node any more.
            step.lost_nodes.update(
                name for name in step.nodes if self.nodes[name].contact is not NodeContact.FINE
            )
            self.kill_step(step, "")
        in_books = {step.srun.pid for step in self.steps.values()}
        for srun in self.sruns:
            if srun.keeps_running and srun.running and srun.pid not in in_books:
                srun.says(ABORTED)
                self.schedule.after(self.random.uniform(0.02, 0.5), srun.ends, 137)
        if self.job.is_batch:
            self.schedule.after(self.random.uniform(0.0, 1.0), self.signal, SIGTERM, False)
            self.supervisor.gone_at = min(
                self.supervisor.gone_at, self.schedule.now + KILL_WAIT_SECONDS
            )
        if again:
            self.books.starts_again_at = self.schedule.now + KILL_WAIT_SECONDS + 5.0

    def signal(self, number: Any, by_person: bool) -> None:
        """Send the supervisor a signal."""
        if self.is_gone:
            return
        self.note(f"the supervisor gets signal {number}{' of a person' if by_person else ''}")
        self.supervisor.on_signal(number, False)

    def shown_job(self) -> Job:
        """Return the job as Slurm shows it."""
        if self.books.deadline is None:
            return self.job
        left = max(0, int(self.books.deadline - self.schedule.now))
        return msgspec.structs.replace(self.job, time_left=f"{left // 60}:{left % 60:02d}")

    def shrink(self, keep: tuple[str, ...]) -> None:
        """Take nodes out of the job; Slurm ends their tasks."""
        gone = set(self.job.nodes) - set(keep)
        self.note(f"the job leaves {','.join(sorted(gone))}")
        self.job = msgspec.structs.replace(self.job, nodes=keep)
        for step in list(self.steps.values()):
            if step.srun.keeps_running:
                self._settle_step(step)
        for step in self.steps.values():
            for task in step.living():
                if task.node in gone:
                    self._kill_task(step, task)

    def idle(self) -> list[str]:
        """Return the nodes that Slurm would give to a job now."""
        taken = {*self.job.nodes, *(name for names in self.helpers.values() for name in names)}
        taken |= {name for c in self.companions.values() for name in c.nodes}
        return [
            name
            for name, node in self.nodes.items()
            if name not in taken and not node.shown.is_down and not node.shown.is_fail
        ]
