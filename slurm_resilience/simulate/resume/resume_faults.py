"""Faults around a supervised srun: their kinds, their times, and people's words among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from signal import SIGINT, SIGKILL, SIGSEGV, SIGTERM

from slurm_resilience.simulate.resume.elastic.growth_faults import OF_GROWTH, strike_growth
from slurm_resilience.simulate.resume.resume_fault import (
    OF_LENT_JOBS,
    PlannedResumeFault,
    ResumeFault,
)
from slurm_resilience.simulate.resume.resume_world import ResumeWorld
from slurm_resilience.simulate.resume.sim_job_slurm import SimJobSlurm
from slurm_resilience.simulate.resume.sim_link import DEAD_SECONDS, SimLink
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimStep

FAULTS_SECONDS = 900.0
"""Faults happen in the beginning of a run."""
COMPANION_FAULT_CHANCE, COMPANION_SOON_SECONDS = 0.3, 6.0
"""Chance of a fault after each thing that happens to a companion, and how soon it comes."""
FIRST_SIGNAL_CODE = 129
SUSPECT_SECONDS = 1.5
WRONG_SECONDS = 100.0
"""A crash that would last for less than this is none, where nodes are suspected: a word of
sresctld on a node that lives."""
CANCEL_EARLY_SECONDS, CANCEL_SHARE = 60.0, 30.0
"""A fault's 5 to 400 s become a cancel from 2 s before a loss to 11 s after it."""
TRY_AGAIN_SECONDS = 20.0
"""scancel gives up after up to 18 s without slurmctld (seen on 22.05), and a person tries again."""


OF_COMPANIONS = (
    ResumeFault.SUPERVISOR_ALONE_DIES,
    ResumeFault.COMPANION_CANCELLED,
    ResumeFault.COMPANION_NODE_DIES,
)
OF_PREEMPTION = (ResumeFault.JOB_PREEMPTED, ResumeFault.JOB_HELD)
ALWAYS_POSSIBLE = tuple(
    kind
    for kind in ResumeFault
    if kind not in (*OF_COMPANIONS, *OF_GROWTH, *OF_PREEMPTION, ResumeFault.JOB_SHRUNK)
)
"""All that any job may meet. A person takes nodes out of few jobs, and with a lost node beside that
no rule tells which of the two the job may replace."""
COMPANION_FAULTS = (
    *OF_COMPANIONS,
    ResumeFault.SUPERVISOR_DIES,
    ResumeFault.CANCEL_JOB,
    ResumeFault.CANCEL_STEP,
    ResumeFault.REQUEUE_JOB,
    ResumeFault.NODE_DIES,
    ResumeFault.SLURM_AWAY,
    ResumeFault.SLURM_LOSES,
    ResumeFault.SLURM_REFUSES,
)
"""Kinds that strike while a companion is asked for, starts, or has just started."""
MAY_END = (
    ResumeFault.INTERRUPT,
    ResumeFault.INTERRUPT_TWICE,
    ResumeFault.TERMINATE,
    ResumeFault.CANCEL_STEP,
    ResumeFault.CANCEL_NEAR_LOSS,
    ResumeFault.CANCEL_JOB,
)
"""Deeds of a person by which the program may be over, whether or not a step runs."""
BY_SLURMCTLD = (
    ResumeFault.CANCEL_STEP,
    ResumeFault.CANCEL_JOB,
    ResumeFault.REQUEUE_JOB,
    ResumeFault.JOB_HELD,
    ResumeFault.JOB_SHRUNK,
    ResumeFault.COMPANION_CANCELLED,
    *OF_LENT_JOBS,
)
"""Words of a person that only slurmctld can carry out."""


class ResumeFaults:
    """Carries the faults of one run out."""

    def __init__(self, world: ResumeWorld, planned: list[PlannedResumeFault]) -> None:
        self._world = world
        self._planned = planned
        self.client: SimJobSlurm
        self.link: SimLink
        self.sresctld_is_there = True

    def follow_companions(self, random: Random, kinds: Sequence[ResumeFault]) -> None:
        """Have faults of these kinds strike soon after what happens to companions."""
        companions, schedule = self._world.companions, self._world.schedule

        def strike_soon() -> None:
            if random.random() < COMPANION_FAULT_CHANCE:
                kind, node = random.choice(kinds), random.randrange(100)
                soon = random.uniform(0.0, COMPANION_SOON_SECONDS)
                fault = PlannedResumeFault(0.0, kind, node, random.uniform(5.0, 400.0))
                schedule.after(soon, self._strike, fault)

        companions.on_event = strike_soon

    def begin(self) -> None:
        """Put all of them on the schedule."""
        for fault in self._planned:
            self._world.schedule.at(fault.at, self._strike, fault)

    def serve(self, client: SimJobSlurm, link: SimLink) -> None:
        """Take over what the supervisor of this run of the job uses."""
        old = getattr(self, "client", None)
        if old is not None:
            client.chance_lost, client.chance_refused = old.chance_lost, old.chance_refused
            client.slowest = old.slowest
        self.client, self.link = client, link

    def _strike(self, fault: PlannedResumeFault) -> None:
        world = self._world
        back = world.books.slurmctld_back
        if fault.kind in BY_SLURMCTLD and world.schedule.now < back:
            world.note("a person's word does not reach slurmctld")
            world.schedule.at(back + fault.seconds % TRY_AGAIN_SECONDS, self._strike, fault)
            return
        world.note(f"FAULT: {fault.kind.value}")
        if fault.kind in OF_GROWTH:
            strike_growth(world, self.link, fault)
            return
        world.seen.person_acted |= fault.kind.value.startswith("a person")
        if fault.kind in MAY_END and world.books.preemption is not None:
            world.books.preemption.person_acted_at = world.schedule.now
        if fault.kind is not ResumeFault.INTERRUPT:  # that only asks srun for its state
            world.seen.budget.disturb()
        names = list(world.nodes)
        name = names[fault.node % len(names)]
        _STRIKES[fault.kind](self, name, fault.seconds)

    def _lose(self, name: str, contact: NodeContact) -> None:
        self._world.lose_node(name, contact)
        if self._world.site.living is not None:
            self._suspect_later(name)
        self._world.schedule.after(
            DEAD_SECONDS + self._world.random.random(), lambda: self.link.judge(name)
        )

    def _suspect_later(self, name: str) -> None:
        later = SUSPECT_SECONDS + self._world.random.random()
        self._world.schedule.after(later, lambda: self.link.suspect(name))

    def dies(self, name: str, _: float) -> None:
        self._lose(name, NodeContact.DEAD)

    def is_cut(self, name: str, _: float) -> None:
        self._lose(name, NodeContact.CUT)

    def is_sick(self, name: str, _: float) -> None:
        world = self._world
        world.show(name, flags=frozenset({"FAIL"}), reason="Action:Replace")
        self.link.judge(name)

    def eats(self, name: str, seconds: float) -> None:
        # A guard of the node's memory ends tasks as Slurm and people do.
        self._world.nodes[name].eats_by = SIGSEGV if int(seconds) % 3 else SIGKILL

    def crashes(self, name: str, seconds: float) -> None:
        if self._world.site.living is not None and seconds < WRONG_SECONDS:
            self._suspect_later(name)  # wrongly
            return
        for step in self._world.steps.values():
            for task in step.living():
                if task.node == name:
                    self._world.step_life.end_task(
                        step, task, self._world.random.choice((139, 137, 1))
                    )
                    return

    def slurmd_away(self, name: str, seconds: float) -> None:
        node, site = self._world.nodes[name], self._world.site

        def is_back() -> None:
            node.slurmd_away = False

        node.slurmd_away = True
        # Slurm does not set it DOWN for that.
        self._world.schedule.after(min(seconds, 0.9 * site.slurmd_timeout), is_back)
        self.crashes(name, WRONG_SECONDS)

    def hangs(self, name: str, seconds: float) -> None:
        node = self._world.nodes[name]
        node.holds_tasks = True

        def goes_on() -> None:
            node.holds_tasks = False

        self._world.schedule.after(seconds, goes_on)

    def slurm_away(self, _: str, seconds: float) -> None:
        world = self._world
        world.books.slurmctld_back = max(world.books.slurmctld_back, world.schedule.now + seconds)

    def slurm_loses(self, _: str, seconds: float) -> None:
        self._answers_badly(seconds)
        self.client.chance_lost = 0.15
        self._world.schedule.after(seconds, lambda: setattr(self.client, "chance_lost", 0.0))

    def slurm_refuses(self, _: str, seconds: float) -> None:
        self._answers_badly(seconds)
        self.client.chance_refused = 0.5
        self._world.schedule.after(seconds, lambda: setattr(self.client, "chance_refused", 0.0))

    def slurm_slow(self, _: str, seconds: float) -> None:
        self._answers_badly(seconds)
        self.client.slowest = 5.0
        self._world.schedule.after(seconds, lambda: setattr(self.client, "slowest", 0.3))

    def _answers_badly(self, seconds: float) -> None:
        books = self._world.books
        books.answers_well = max(books.answers_well, self._world.schedule.now + seconds)

    def sresctld_away(self, _: str, seconds: float) -> None:
        self.sresctld_is_there = False
        self.link.connected.clear()

    def interrupt(self, _: str, seconds: float) -> None:
        self._world.signal(SIGINT, by_person=True)

    def interrupt_twice(self, _: str, seconds: float) -> None:
        self._world.signal(SIGINT, by_person=True)
        incarnation = self._world.supervisor.incarnation
        self._world.schedule.after(0.5, self._second_interrupt, incarnation)

    def _second_interrupt(self, incarnation: int) -> None:
        # Where the job was started again in between, each supervisor got one of the two.
        if self._world.supervisor.incarnation == incarnation:
            self._person_ended()
        self._world.signal(SIGINT, by_person=True)

    def terminate(self, _: str, seconds: float) -> None:
        self._person_ended()
        self._world.signal(SIGTERM, by_person=True)

    def cancel_step(self, _: str, seconds: float) -> None:
        world = self._world
        steps = [s for s in world.steps.values() if not (s.srun.is_companion and s.srun.is_join)]
        if world.site.living is not None and steps:
            steps = [world.random.choice(steps)]  # an end of any of them ends them all
        tokens = {step.srun.token for step in steps}
        failed = next((code for t, code in world.seen.failures.items() if t in tokens), 0)
        for step in steps:
            # Where the step is ending for another reason, or the supervisor's own order is on its
            # way, Slurm's words are not a person's. After SIGTERM srun's still are.
            counts = step.srun.running and step.killed_at is None and len(step.tasks) == step.size
            counts = counts and step.ordered != "KILL"
            # A failure counts for all parts of an attempt, as it does within one step.
            first_failure = step.first_failure if step.srun.keeps_running else failed
            told_before = step.end_is_told
            world.step_life.kill(step, "***")
            told = step.end_is_told and not told_before and not step.ordered
            believed = self._is_believed(step, first_failure, told)
            is_heard = told or not step.first_failure
            if counts and is_heard and believed:
                world.seen.cancelled_step = step
                self._person_ended()

    def _is_believed(self, step: SimStep, first_failure: int, told: bool) -> bool:
        """Return whether Slurm's words on a cancelled step are taken for a person's.

        After a task that failed by itself only Slurm's own line is believed, and it is not where
        that task crashed: what tasks print may look the same.

        Args:
            step: the step.
            first_failure: code of the task that had failed by itself; 0: none had.
            told: slurmstepd has told of this very cancel.
        """
        if step.srun.keeps_running:
            # srun's line does not count after a cause of its own, such as a lost node, and
            # slurmstepd says nothing where it has told of the supervisor's own order before.
            return told or not step.lost_nodes
        return first_failure < FIRST_SIGNAL_CODE

    def cancel_near_loss(self, name: str, seconds: float) -> None:
        """Cancel the step up to some seconds before or after one of its nodes is lost."""
        contact = NodeContact.DEAD if int(seconds) % 2 else NodeContact.CUT
        steps = list(self._world.steps.values())
        names = steps[0].nodes if steps else (name,)
        lost = names[int(seconds) % len(names)]
        later = (seconds - CANCEL_EARLY_SECONDS) / CANCEL_SHARE
        schedule = self._world.schedule
        schedule.after(max(0.0, -later), self._lose, lost, contact)
        cancel = PlannedResumeFault(0.0, ResumeFault.CANCEL_STEP, 0, seconds)
        schedule.after(max(0.0, later), self._strike, cancel)

    def cancel_job(self, _: str, seconds: float) -> None:
        if self._world.job.state == "RUNNING":
            self._person_ended()
            self._world.end_job("CANCELLED", requeue=False, word="")

    def requeue_job(self, _: str, seconds: float) -> None:
        job = self._world.job
        if job.is_batch and job.requeue:
            self._world.end_job("REQUEUED", requeue=True, word="DUE TO JOB REQUEUE")
            # Without a fault the supervisor does not count on after it.
            self._world.seen.budget.clear()
            if self._world.books.growth is not None:
                self._world.books.growth.requeued_by_person()

    def hold_job(self, _: str, seconds: float) -> None:
        # It runs on, and waits for its release when it is requeued.
        if self._world.books.preemption is not None:
            self._world.books.preemption.held_until = self._world.schedule.now + seconds

    def preempt_job(self, _: str, seconds: float) -> None:
        if self._world.books.preemption is not None:
            self._world.books.preemption.begin(seconds)

    def job_shrunk(self, name: str, seconds: float) -> None:
        """Take a node out of the job, by scontrol update: Slurm kills its tasks."""
        world = self._world
        host = world.job.batch_host or world.job.nodes[0]
        fine = [n for n in world.job.nodes if world.nodes[n].contact is NodeContact.FINE]
        free = [n for n in fine if n != host]
        if world.job.state != "RUNNING" or not free:
            return
        gone = name if name in free else free[-1]
        world.books.most_nodes = len(world.job.nodes) - 1
        world.books.shrunk_at = world.schedule.now
        if any(gone in attempt.nodes for attempt in world.seen.budget.attempts[-1:]):
            world.seen.budget.take()
        world.shrink(tuple(n for n in world.job.nodes if n != gone))

    def srun_dies(self, _: str, seconds: float) -> None:
        for srun in self._world.sruns:
            srun.send_signal(SIGKILL)

    def supervisor_dies(self, _: str, seconds: float) -> None:
        world = self._world
        world.supervisor.gone_at = min(world.supervisor.gone_at, world.schedule.now)
        world.end_job("FAILED", requeue=False)

    def supervisor_alone_dies(self, _: str, seconds: float) -> None:
        world = self._world
        world.supervisor.gone_at = min(world.supervisor.gone_at, world.schedule.now)

    def companion_cancelled(self, _: str, seconds: float) -> None:
        companions = list(self._world.companions.values())
        if companions:
            chosen = companions[int(seconds) % len(companions) if companions[0].lent else 0]
            self._world.companions.end(chosen.id, "a person")

    def companion_node_dies(self, _: str, seconds: float) -> None:
        nodes = [name for c in self._world.companions.values() for name in c.nodes]
        if nodes:
            self._lose(nodes[0], NodeContact.DEAD if int(seconds) % 2 else NodeContact.CUT)

    def _person_ended(self) -> None:
        world = self._world
        if world.seen.person_ended_at is None and not world.is_gone:
            world.seen.person_ended_at = world.schedule.now


_STRIKES: dict[ResumeFault, Callable[[ResumeFaults, str, float], None]] = {
    ResumeFault.NODE_DIES: ResumeFaults.dies,
    ResumeFault.NODE_CUT: ResumeFaults.is_cut,
    ResumeFault.NODE_SICK: ResumeFaults.is_sick,
    ResumeFault.NODE_EATS: ResumeFaults.eats,
    ResumeFault.SLURMD_AWAY: ResumeFaults.slurmd_away,
    ResumeFault.TASK_CRASHES: ResumeFaults.crashes,
    ResumeFault.TASKS_HANG: ResumeFaults.hangs,
    ResumeFault.SLURM_AWAY: ResumeFaults.slurm_away,
    ResumeFault.SLURM_LOSES: ResumeFaults.slurm_loses,
    ResumeFault.SLURM_REFUSES: ResumeFaults.slurm_refuses,
    ResumeFault.SLURM_SLOW: ResumeFaults.slurm_slow,
    ResumeFault.SRESCTLD_AWAY: ResumeFaults.sresctld_away,
    ResumeFault.INTERRUPT: ResumeFaults.interrupt,
    ResumeFault.INTERRUPT_TWICE: ResumeFaults.interrupt_twice,
    ResumeFault.TERMINATE: ResumeFaults.terminate,
    ResumeFault.CANCEL_STEP: ResumeFaults.cancel_step,
    ResumeFault.CANCEL_NEAR_LOSS: ResumeFaults.cancel_near_loss,
    ResumeFault.CANCEL_JOB: ResumeFaults.cancel_job,
    ResumeFault.REQUEUE_JOB: ResumeFaults.requeue_job,
    ResumeFault.JOB_HELD: ResumeFaults.hold_job,
    ResumeFault.JOB_PREEMPTED: ResumeFaults.preempt_job,
    ResumeFault.JOB_SHRUNK: ResumeFaults.job_shrunk,
    ResumeFault.SRUN_DIES: ResumeFaults.srun_dies,
    ResumeFault.SUPERVISOR_DIES: ResumeFaults.supervisor_dies,
    ResumeFault.SUPERVISOR_ALONE_DIES: ResumeFaults.supervisor_alone_dies,
    ResumeFault.COMPANION_CANCELLED: ResumeFaults.companion_cancelled,
    ResumeFault.COMPANION_NODE_DIES: ResumeFaults.companion_node_dies,
}
