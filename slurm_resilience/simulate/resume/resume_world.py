"""A simulated job: its nodes, its steps and their tasks, as they are and as Slurm sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGTERM
from threading import Event
from typing import Any

import msgspec

from slurm_resilience.config import ResumeSettings
from slurm_resilience.model import Job
from slurm_resilience.resume.attempt import FENCE
from slurm_resilience.resume.decide.budgets import ENDS_FOR_NAME
from slurm_resilience.simulate.cluster.sim_clock import SimClock
from slurm_resilience.simulate.resume.elastic.elastic_training import GrowingTraining
from slurm_resilience.simulate.resume.resume_rules import (
    GIVEN_UP,
    PER_HOUR,
    SILENCE_SECONDS,
    AttemptBudget,
    BrokenResumeRule,
    ResumeRule,
    StartedAttempt,
)
from slurm_resilience.simulate.resume.resume_state import (
    GIVE_UP_SECONDS,
    JobBooks,
    SeenByRules,
    SiteSettings,
    SupervisorProcess,
    TrainedWork,
)
from slurm_resilience.simulate.resume.sim_companions import SimCompanions
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimNode, SimStep
from slurm_resilience.simulate.resume.sim_program import SICK_CRASH_SECONDS, SimProgram
from slurm_resilience.simulate.resume.sim_srun import SimSrun
from slurm_resilience.simulate.resume.sim_step_life import ABORTED, StepLife
from slurm_resilience.simulate.resume.sim_thread import SimThread
from slurm_resilience.simulate.resume.sim_training import (
    SimTraining,
)
from slurm_resilience.simulate.schedule import Schedule

KILL_WAIT_SECONDS = 30.0
"""Between Slurm's SIGTERM and SIGKILL for a batch script whose job it ends."""
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
        self.books.step_life = StepLife(self)
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
        if self.stands:
            self.note("the supervisor stands still")
            began = self.schedule.now
            self.schedule.run(self.supervisor.stands_until, lambda: self.is_gone)
            self.supervisor.absences.note(began, self.schedule.now)
            self.note("the supervisor goes on")
        if self.is_gone:
            self.supervisor.on_gone()
            raise SupervisorGone

    def start_thread(self, run: Callable[[], None]) -> SimThread:
        """Run something of the supervisor beside its own loop."""

        def set_running(thread: Any) -> None:
            self.supervisor.running = thread

        thread = SimThread(self.schedule, run, set_running, lambda: self.supervisor.stopped_until)
        self.supervisor.threads.append(thread)
        return thread

    def end_threads(self) -> None:
        """End the supervisor's threads, with it."""
        for thread in self.supervisor.threads:
            thread.end()
        self.supervisor.threads.clear()

    @property
    def stands(self) -> bool:
        """True while the supervisor does nothing, and cannot be asked to."""
        return self.schedule.now < self.supervisor.stands_until

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
        self.supervisor.absences.check_line(self, text)
        if self.books.growth is not None:
            self.books.growth.heard_line(text)
        if text.endswith(STEP_ENDS):  # the order itself may not reach Slurm
            for srun in self.sruns:
                srun.order_to_end()
        if GIVEN_UP in text and self.seen.budget.furthest.got_clearly_further:
            self.broken(ResumeRule.PROGRESS, text)
        # One that stood still until it was killed has kept nothing of how its attempt ended.
        is_known = self.books.preemption is not None and not self.supervisor.stands_until
        if PER_HOUR in text and is_known:
            wrong = self.seen.budget.check_given_up()
            if wrong:
                self.broken(ResumeRule.PREEMPTED, wrong)
        if GIVEN_UP in text and self.sruns[-1].gave_up:
            self.broken(ResumeRule.UNANSWERED, text)

    def look(self) -> None:
        """Look from time to time for an srun that runs, and else for a line in the log."""
        if self.seen.is_over:
            return
        now = self.schedule.now
        # A node that died unseen is for Slurm and sresctld to notice: srun goes on meanwhile.
        training = self.progress.training
        stalls = training is not None and training.stalls
        if self.stands or (any(srun.running for srun in self.sruns) and not stalls):
            self.seen.busy_at = now
        if now - max(self.seen.busy_at, self.seen.spoke_at) > SILENCE_SECONDS:
            self.broken(ResumeRule.SILENCE, "nothing runs, and the log says nothing of it")
        if now > RUN_SECONDS:
            self.broken(ResumeRule.ENDS, "it still goes on")
        ended = self.seen.person_ended_at
        if ended is not None and now - ended > PERSON_SECONDS and not self.stands:
            self.broken(ResumeRule.PERSON, f"it was ended at {ended:.1f} s, and still goes on")
        self.companions.look()
        if self.books.growth is not None:
            self.books.growth.look(LOOK_SECONDS)
        self.schedule.after(LOOK_SECONDS, self.look)

    def stand_still(self, seconds: float) -> None:
        """Have the supervisor's own thread do nothing for a while."""
        self.note(f"FAULT: a file system that the supervisor asks stands still for {seconds:.0f} s")
        until = self.schedule.now + seconds
        self.supervisor.stands_until = max(self.supervisor.stands_until, until)

    def stop_supervisor(self, seconds: float) -> None:
        """Have all of the supervisor do nothing for a while, and hear nothing."""
        self.note(f"FAULT: the supervisor is stopped for {seconds:.0f} s")
        until = self.schedule.now + seconds
        self.supervisor.stands_until = max(self.supervisor.stands_until, until)
        self.supervisor.stopped_until = max(self.supervisor.stopped_until, until)

    def next_pid(self) -> int:
        return next(self._numbers)

    # -- sruns --------------------------------------------------------------------------------

    @property
    def program(self) -> SimProgram:
        return self.progress.program

    @property
    def step_life(self) -> StepLife:
        return self.books.step_life

    @property
    def companions(self) -> SimCompanions:
        return self.books.companions

    def srun_started(self, srun: SimSrun) -> None:
        """Check that an attempt may begin now, and begin it."""
        self.note(f"srun starts on {','.join(srun.wanted)}, attempt {srun.token}")
        if self.books.preemption is not None:
            self.books.preemption.check_start(srun)
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
            self.check_person()
        self._check_spares(srun)
        lent = (name for companion in self.companions.values() for name in companion.nodes)
        gone = set(srun.world) - {*self.job.nodes, *lent}
        wrong = self.seen.budget.start(
            StartedAttempt(
                self.schedule.now,
                srun.token,
                self.progress.told_step,
                srun.world,
                self.seen.budget.furthest.got_further,
                # A person took a node out in the moment in which it is started.
                taken=self.books.most_nodes is not None and bool(gone),
            )
        )
        if wrong:
            self.broken(ResumeRule.BUDGETS, wrong)
        # The ranks of one that does not outlive a node are those of any other program.
        living = self.site.living if srun.keeps_running else None
        if living is None:
            self.progress.training = None
        elif self.site.size is None:
            self.progress.training = SimTraining(self, srun, living)
        else:
            self.progress.training = GrowingTraining(self, srun, living, self.site.size)
        if self.books.growth is not None:
            self.books.growth.attempt_begins()
        self.sruns.append(srun)
        self.schedule.after(self.random.uniform(0.02, 0.3), self.step_life.make, srun)

    def _part_started(self, srun: SimSrun) -> None:
        """Begin the part of an attempt that runs in a companion allocation."""
        if self.seen.requeue_asked_at is not None:
            self.broken(ResumeRule.ONE_RECOVERY, "a part begins after the job was requeued")
        again = self.seen.left_nodes & set(srun.wanted)
        if again:
            self.broken(ResumeRule.SPARES, f"{','.join(sorted(again))} is used again")
        self.sruns.append(srun)
        self.schedule.after(self.random.uniform(0.02, 0.3), self.step_life.make, srun)

    def _join_started(self, srun: SimSrun) -> None:
        """Check that lost seats may be filled now, and begin a join step."""
        training = self.progress.training
        assert training is not None
        if self.seen.requeue_asked_at is not None:
            self.broken(ResumeRule.ONE_RECOVERY, "seats are filled after the job was requeued")
        if self.job.state == "RUNNING" and not self.is_just_cancelled(self.schedule.now):
            self.check_person()
        again = self.seen.left_nodes & set(srun.wanted)
        if again:
            self.broken(ResumeRule.SPARES, f"{','.join(sorted(again))} is used again")
        training.check_join(srun)
        self.seen.joins += not srun.is_companion
        self.sruns.append(srun)
        self.schedule.after(self.random.uniform(0.02, 0.3), self.step_life.make, srun)

    def is_just_cancelled(self, at: float) -> bool:
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
            self.check_person()
        good = [name for name in self.job.nodes if self._is_good(name)]
        last = self._last_nodes()
        needed = self.seen.fewest_nodes or len(last)
        if self.job.state == "RUNNING" and len(good) >= needed > 0:
            self.broken(ResumeRule.SPARES, f"{','.join(good)} could be used, and it is requeued")
        self.check_taken("the job is requeued", len(last))
        self.seen.requeue_asked_at = self.schedule.now

    def check_taken(self, what: str, more: int = 0) -> None:
        """Check that what a person took out of the job is not got back.

        Args:
            what: is done.
            more: nodes that are about to come.
        """
        most, program, living = self.books.most_nodes, self.site.program, self.site.living
        # A node on which a program fails, or that is lost besides, is exchanged as ever.
        fails = program.fails_at is not None or program.fails_in_work is not None
        fails |= bool(program.crashes) or (living is not None and living.late_loss is not None)
        if self.site.size is not None:
            # Where no answer tells that a person has done it, the node is taken for a lost one, and
            # another one is waited for.
            fails |= self.books.answers_well + GIVE_UP_SECONDS > self.books.shrunk_at
        if most is not None and not fails and len(self.job.nodes) + more > most:
            self.broken(ResumeRule.TAKEN_OUT, what)

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
        self._check_launch(srun, last)
        for name in last:
            if name not in srun.world:
                self.leave(name)

    def _check_launch(self, srun: SimSrun, last: Sequence[str]) -> None:
        """Check that a node is left on which the last attempt could start no task, and which does
        not answer, where the job has another one and all could be asked."""
        token, name, told_at = self.step_life.failed_launch
        if not self.sruns or self.sruns[-1].token != token or name not in srun.world:
            return
        answered = told_at >= max(self.books.slurmctld_back, self.books.answers_well)
        if not (answered and self.is_clear and self.nodes[name].slurmd_away):
            return

        def answers(other: str) -> bool:
            return self._is_good(other) and not self.nodes[other].slurmd_away

        # One that takes the place of another node which must be left is to spare no more.
        used = {*last, *srun.world}
        spares = [other for other in self.job.nodes if other not in used and answers(other)]
        if spares and any(answers(other) for other in last):
            self.broken(ResumeRule.LAUNCH, f"{name} is used again, and {spares[0]} is there")

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
        # Slurm signals the script as it ends or requeues a job, and does not answer why. A question
        # that was lost is waited for.
        asked_well = self.books.answers_well + GIVE_UP_SECONDS
        away = now < max(self.books.slurmctld_back, asked_well)
        unknown = self.job.state != "RUNNING" and away
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

    def check_person(self) -> None:
        """Complain if a person has ended the program."""
        ended = self.seen.person_ended_at
        if ended is not None:
            self.broken(ResumeRule.PERSON, f"it was ended at {ended:.1f} s")

    def may_write(self, srun: SimSrun) -> bool:
        """Return what `attempt.is_current` tells a task."""
        directory = srun.variables.get("SRES_DIR", "")
        if not directory:
            return True
        try:
            return (Path(directory) / FENCE).read_text().strip() == srun.token
        except OSError:
            return False

    @property
    def is_clear(self) -> bool:
        """Return whether the supervisor can ask for all that it wants to know."""
        books, now = self.books, self.schedule.now
        answers = now >= max(books.slurmctld_back, books.answers_well)
        return answers and self.job.state == "RUNNING" and not (self.is_gone or self.stands)

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
                        self.step_life.lose_task(task, 128 + SIGKILL)
        for step in list(self.steps.values()):
            if name in step.nodes and step.killed_at is None:
                self.step_life.lose_collective(step)
            if name in step.nodes and step.srun.keeps_running:
                self.step_life.settle(step)
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
                    self.step_life.lose_task(task, 128 + SIGKILL)
        self.note(f"{name} is back")
        node.contact, node.back_at = NodeContact.FINE, self.schedule.now
        node.eats_by, node.holds_tasks, node.slurmd_away = 0, False, False
        booted = datetime.fromtimestamp(self.clock.now(), UTC).replace(tzinfo=None)
        boot_time = booted.isoformat(timespec="seconds")
        self.show(name, base="IDLE", flags=frozenset(), reason="", boot_time=boot_time)
        self.seen.left_nodes.discard(name)
        for step in list(self.steps.values()):
            if name in step.nodes:
                was_told = name in step.lost_nodes
                step.lost_nodes.add(name)
                self.step_life.settle(step)
                if not was_told and node.shown.address not in step.srun.closed:
                    self.step_life.reset(step)

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
                        self.step_life.settle(step)
                    else:
                        self.step_life.kill(step, "")
            return
        self.end_job("NODE_FAIL", requeue=job.requeue)

    def cut_off_tasks_end(self, name: str) -> None:
        """sresd on a node that is cut off ends the tasks there."""
        for step in self.steps.values():
            for task in step.living():
                if task.node == name and self.nodes[name].contact is NodeContact.CUT:
                    self.step_life.lose_task(task, 128 + SIGKILL)

    # -- the job ------------------------------------------------------------------------------

    def end_job(self, state: str, *, requeue: bool, word: str = "DUE TO NODE FAILURE") -> None:
        """Have Slurm end the job, or requeue it."""
        if self.job.state != "RUNNING":
            return
        self.note(f"Slurm ends the job: {state}, requeue {requeue}")
        if self.seen.requeue_asked_at is None:
            self.seen.budget.take()
        if self.books.preemption is not None:
            self.books.preemption.job_ends()
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
            self.step_life.kill(step, "")
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
        if self.schedule.now < self.supervisor.stopped_until:
            self.schedule.at(self.supervisor.stopped_until, self.signal, number, by_person)
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
                self.step_life.settle(step)
        for step in self.steps.values():
            for task in step.living():
                if task.node in gone:
                    self.step_life.kill_task(step, task)

    def idle(self) -> list[str]:
        """Return the nodes that Slurm would give to a job now."""
        taken = {*self.job.nodes, *(name for names in self.helpers.values() for name in names)}
        taken |= {name for c in self.companions.values() for name in c.nodes}
        if self.books.growth is not None or self.books.preemption is not None:
            # Slurm waits for the tasks of jobs that have ended.
            living = {task.node for step in self.steps.values() for task in step.living()}
            taken |= self.books.others | living
        return [
            name
            for name, node in self.nodes.items()
            if name not in taken and not node.shown.is_down and not node.shown.is_fail
        ]
