"""Several supervised sruns in one simulated job, which lose nodes in the same moments.

All that chooses the nodes of the next attempt, and gets them, is the real code; each srun runs in
turns with the others. A step is no more than its nodes here: it runs until it loses one of them, or
until its time is over. Slurm lists it some time after it was decided on.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Event
from typing import NamedTuple

from slurm_resilience.config import ResumeSettings
from slurm_resilience.model import Job, Node
from slurm_resilience.resume import fence, report
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.classify import Ending, classify
from slurm_resilience.resume.history import AttemptHistory
from slurm_resilience.resume.live_step.live_events import FaultyNode, SearchKind, StartSearch
from slurm_resilience.resume.live_step.node_search import replace_nodes
from slurm_resilience.resume.recovery import Recovery
from slurm_resilience.resume.srun.command import AttemptCommand
from slurm_resilience.resume.srun.host_calls import HostCalls
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.standard_input import StandardInput
from slurm_resilience.resume.srun.user_signals import UserSignals
from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.resume_state import SiteSettings, TrainedProgram
from slurm_resilience.simulate.resume.resume_world import ResumeWorld
from slurm_resilience.simulate.resume.sim_job_slurm import SimJobSlurm
from slurm_resilience.simulate.resume.sim_link import SimLink
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimNode
from slurm_resilience.simulate.resume.sim_thread import SimThread
from slurm_resilience.slurm.client import StepInfo

JOB = 7
RUN_SECONDS = 4000.0
"""Enough for all attempts, and for each wait for a node."""
OTHERS_SECONDS = 300.0
"""The others of a living step go on for so long without a lost node."""
BUSY_SECONDS = 1.0
"""Between two tries of an srun whose nodes are busy."""
LOOK_SECONDS = 5.0
"""Between two looks whether a step whose time is over has all of its nodes."""
SETTLED_SECONDS = 60.0
"""A node that is free for so long could have been used."""
REPAIRED_SHARE, LIVING_SHARE, KILLED_SHARE = 0.6, 0.3, 0.3
UNWRITABLE_SHARE, SHARING_SHARE = 0.1, 0.15
"""Runs in which one srun cannot write what the others read, and in which all have the same nodes
on purpose (`--overlap`)."""


class SharedOutcome(NamedTuple):
    """The outcome of one run."""

    attempts: int
    joins: int
    lost_nodes: int
    events: int
    all_done: bool
    """The job was not requeued, and no supervisor was killed."""


@dataclass(eq=False)
class SharedStep:
    """A step of one of the sruns."""

    name: str
    nodes: tuple[str, ...]
    is_made: bool = False
    """Slurm lists it."""


@dataclass
class SharedPlan:
    """All that is drawn for a run."""

    size: int
    """Nodes of each srun."""
    parts: list[tuple[str, ...]]
    """The nodes with which each one begins."""
    faults: list[tuple[float, str]] = field(default_factory=list)
    """Nodes that die, and when."""
    killed: tuple[float, int] | None = None
    """A supervisor that is killed, and when."""
    unwritable: int | None = None
    """The srun that cannot write its file."""


class SharedHostCalls(HostCalls):
    """The machine on which all supervisors of the job run."""

    def __init__(self, job: SharedJob) -> None:
        self._job = job
        self.pid, self.uid = job.world.next_pid(), os.geteuid()
        self.name = job.world.job.batch_host

    def working_directory(self) -> Path:
        return self._job.world.site.base

    def lives(self, pid: int) -> bool:
        return any(srun.pid == pid and not srun.is_over for srun in self._job.sruns)

    def take_turn(self, job: int) -> AbstractContextManager[object] | None:
        if self._job.turn_of is not None:
            return None
        self._job.turn_of = self.pid
        return self._turn()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._job.turn_of = None


class SharedJobSlurm(SimJobSlurm):
    """Slurm as one of the supervisors asks it."""

    def __init__(self, job: SharedJob, srun: SharedSrun) -> None:
        super().__init__(job.world, srun.host_calls.name, srun.pid)
        self._job, self._srun = job, srun

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        host = self._srun.host_calls.name

        def answer() -> tuple[StepInfo, ...]:
            return tuple(
                StepInfo(job_id, step.name, step.nodes, srun_host=host, srun_pid=srun.pid)
                for srun in self._job.sruns
                for step in srun.steps
                if step.is_made
            )

        return self._ask(answer)

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        self._job.check_shrink(self._srun, keep)
        super().shrink(job_id, keep)

    def requeue(self, job_id: int) -> None:
        self._job.check_requeue(self._srun)
        super().requeue(job_id)


class SharedSrun:
    """One supervised srun: its recovery is the real one."""

    def __init__(self, job: SharedJob, number: int, nodes: tuple[str, ...], *, lives: bool) -> None:
        """
        Args:
            job: that it shares.
            number: its own.
            nodes: that it begins with.
            lives: its step outlives a node.
        """
        world = job.world
        self._job, self._lives = job, lives
        self.host_calls: SharedHostCalls = SharedHostCalls(job)
        self.pid: int = self.host_calls.pid
        client = SharedJobSlurm(job, self)
        client.slowest = job.slowest
        limits = world.seen.budget.limits
        user_stop, wake = Event(), Event()
        allocation = Allocation(
            client,
            world.job,
            user_stop,
            patience=limits.slurmctld_wait,
            permits_expansion=True,
            clock=world.clock,
            nodes=[node.shown for node in world.nodes.values()],
        )
        command = split(["train"], BUILTIN)
        self.context = SupervisorContext(
            clock=world.clock,
            limits=limits,
            client=client,
            allocation=allocation,
            link=SimLink(world, is_there=False),
            launch=AttemptCommand("srun", True, 0, lambda: True),
            command=command,
            environment={},
            user_signals=UserSignals(wake, user_stop, world.clock),
            wake=wake,
            events=report.EventLog("", world.clock),
            standard_input=StandardInput(0, is_read=False),
            host=self.host_calls.name,
            host_calls=self.host_calls,
        )
        folder = Path(fence.open_directory(world.site.base, JOB, self.pid)).parent
        if job.plan.unwritable == number:
            folder = folder / f"{number}.full" / "missing"
        self.history = AttemptHistory(folder, JOB, 0, [str(number)], self.pid)
        allocation.claims.share(self.history, self.host_calls)
        self._recovery = Recovery(self.context, len(nodes))
        self.nodes = nodes
        """Those that it has, or goes on with."""
        self.steps: list[SharedStep] = []
        self.lost: set[str] = set()
        """Those of whose loss it knows, and which it still has to do without."""
        self.is_done = self.is_over = False

    def run(self) -> None:
        """Run until the program has ended, or nothing follows."""
        try:
            self._live()
        finally:
            self.is_over = True
            self.steps.clear()
            self._job.free(self.nodes)

    def _live(self) -> None:
        world, number = self._job.world, 1
        while True:
            began = self.context.clock.now()
            self.history.start(number, self.nodes, began)
            self.context.allocation.own_nodes = self.nodes
            self._job.check_start(self, self.nodes)
            self._job.attempts += 1
            self._start_step(self.nodes)
            while True:
                self._pass_time(RUN_SECONDS, lambda: self.is_done or bool(self.lost))
                if not (self._lives and self.lost and self._joins()):
                    break
            if self.is_done:
                self.history.remove()
                return
            self._pass_time(world.random.uniform(0.0, 0.5))
            self.context.allocation.own_nodes = self.nodes
            self.steps.clear()
            ending = self._ending(began)
            cause = classify(ending)
            self.history.end(ending, cause.reason, number)
            following = self._recovery.prepare(
                cause, self.history.endings, self.nodes, attempt=number, noticed=ending.ended_at
            )
            if following is None:
                return
            world.note(f"srun {self.pid} has {','.join(following.nodes)}")
            self.nodes = following.nodes
            self.lost.clear()  # another machine of that name may be among them
            # What is left of the last attempt is ended, and the next one is prepared.
            self._pass_time(world.random.uniform(0.0, 2.0))
            number += 1

    def _pass_time(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        self._job.world.pass_time(seconds, enough)

    def _ending(self, began: float) -> Ending:
        now = self.context.clock.now()
        return Ending(
            code=143,
            ran_for=now - began,
            progressed=True,
            job_state=self._job.world.job.state,
            faulty=dict.fromkeys(sorted(self.lost), "no beat for 4 s"),
            stopped_by_us=True,
            ended_at=now,
            nodes=self.nodes,
        )

    def _joins(self) -> bool:
        """Fill the lost seats of a step that lives on; False: it cannot live on."""
        lost = sorted(self.lost)
        living = tuple(name for name in self.nodes if name not in self.lost)
        if not living:
            return False
        faulty = tuple(FaultyNode(name, "no beat for 4 s", True) for name in lost)
        wanted = StartSearch(SearchKind.NODES, faulty, living, len(self.nodes), 0)
        clock = self.context.clock
        until = clock.monotonic() + OTHERS_SECONDS
        found = replace_nodes(self.context, wanted, lambda: clock.monotonic() < until, Event())
        if found is None or len(found.nodes) < len(lost):
            return False
        self._job.world.note(f"srun {self.pid} joins {','.join(found.nodes)}")
        self._job.check_start(self, found.nodes)
        self.nodes = (*living, *found.nodes)
        self.lost -= set(lost)
        self._job.joins += 1
        self._start_step(found.nodes)
        return True

    def _start_step(self, nodes: tuple[str, ...]) -> None:
        step = SharedStep(self._job.next_name(), nodes)
        self.steps.append(step)
        self._job.world.note(f"srun {self.pid} starts step {step.name} on {','.join(nodes)}")
        self._job.make_later(self, step)

    def loses(self, name: str) -> None:
        """Let the supervisor know that a node is lost."""
        if self.is_over or self.is_done or name not in self.nodes:
            return
        self.lost.add(name)
        if self._lives:
            for step in self.steps:
                step.nodes = tuple(other for other in step.nodes if other != name)
            self.steps = [step for step in self.steps if step.nodes or step is self.steps[0]]


class SharedJob:
    """One run."""

    def __init__(self, seed: int, base: Path, trace: list[str] | None) -> None:
        self._random = random = Random(seed)
        self.slowest = random.choice((0.05, 0.3, 2.0, 6.0))
        """Seconds for an answer of Slurm: a choice may last longer than its turn."""
        self.plan, spares = _plan(random)
        inside = sorted({name for part in self.plan.parts for name in part})
        inside += [f"n{len(inside) + 1 + more}" for more in range(random.choice((0, 0, 1, 2)))]
        names = [f"n{number}" for number in range(1, len(inside) + spares + 1)]
        repair = random.uniform(10.0, 300.0) if random.random() < REPAIRED_SHARE else None
        limits = ResumeSettings(
            swap_wait=random.choice((60.0, 600.0)), max_attempts=1000, max_per_hour=1000
        )
        self.world = ResumeWorld(
            random,
            trace,
            SiteSettings(base, _PROGRAM, 1, 300.0, True, True, repair_seconds=repair),
            _job(tuple(inside)),
            {name: SimNode(_node(name)) for name in names},
            limits,
        )
        self.turn_of: int | None = None
        """The supervisor that chooses its nodes now."""
        self.attempts = self.joins = 0
        self._free_since = dict.fromkeys(inside, 0.0)
        self._numbers = itertools.count()
        lives = [random.random() < LIVING_SHARE for _ in self.plan.parts]
        self.sruns: list[SharedSrun] = []
        for number, (nodes, living) in enumerate(zip(self.plan.parts, lives, strict=True)):
            self.sruns.append(SharedSrun(self, number, nodes, lives=living))

    @property
    def _is_over(self) -> bool:
        return self.world.job.state != "RUNNING" or all(srun.is_over for srun in self.sruns)

    def run(self) -> SharedOutcome:
        """Run until each program has ended, or the job has."""
        world, plan = self.world, self.plan
        for at, name in plan.faults:
            world.schedule.at(at, self._lose, name)
        threads = {srun: world.start_thread(srun.run) for srun in self.sruns}
        if plan.killed is not None:
            at, number = plan.killed
            world.schedule.at(at, self._kill, self.sruns[number], threads[self.sruns[number]])
        with report.written_to(lambda text: world.note(f"log: {text}")):
            world.schedule.run(RUN_SECONDS, lambda: self._is_over)
            is_over = self._is_over
            world.end_threads()
        if not is_over:
            world.broken(ResumeRule.ENDS, "it still goes on")
        return SharedOutcome(
            self.attempts,
            self.joins,
            len(plan.faults),
            world.schedule.count,
            all(srun.is_done for srun in self.sruns),
        )

    def next_name(self) -> str:
        return str(next(self._numbers))

    # -- what happens -------------------------------------------------------------------------

    def _lose(self, name: str) -> None:
        world, random = self.world, self._random
        if name not in world.nodes or world.nodes[name].contact is not NodeContact.FINE:
            return
        world.lose_node(name, NodeContact.DEAD)
        world.schedule.after(random.uniform(0.0, 6.0), self._set_down, name)
        for srun in self.sruns:
            world.schedule.after(random.uniform(0.0, 6.0), srun.loses, name)

    def _set_down(self, name: str) -> None:
        if not self.world.nodes[name].shown.is_down:
            self.world.set_down(name, "Action:Replace")

    def _kill(self, srun: SharedSrun, thread: SimThread) -> None:
        """Kill a supervisor, and its srun with it: its file stays."""
        self.world.note(f"the supervisor {srun.pid} is killed")
        thread.end()

    def free(self, nodes: tuple[str, ...]) -> None:
        """Note that nodes are used no more."""
        self._free_since.update(dict.fromkeys(nodes, self.world.schedule.now))

    def make_later(self, srun: SharedSrun, step: SharedStep) -> None:
        """Have Slurm make a step, which it lists then."""
        self.world.schedule.after(self._random.uniform(0.02, 3.0), self._make, srun, step)

    def _make(self, srun: SharedSrun, step: SharedStep) -> None:
        if step not in srun.steps:
            return
        for name in step.nodes:
            if name not in self.world.job.nodes:
                srun.loses(name)  # Slurm refuses it: the node has left the job
                return
            if self.world.nodes[name].contact is not NodeContact.FINE:
                self.world.schedule.after(self._random.uniform(1.0, 6.0), srun.loses, name)
                return
        if any(self._holds(other, step.nodes, made=True) for other in self.sruns if other != srun):
            self.world.schedule.after(BUSY_SECONDS, self._make, srun, step)
            return
        step.is_made = True
        srun.context.allocation.own_steps.add(step.name)
        if step is srun.steps[0]:
            self.world.schedule.after(self._random.uniform(60.0, 300.0), self._finish, srun, step)

    def _finish(self, srun: SharedSrun, step: SharedStep) -> None:
        if step not in srun.steps:
            return
        nodes = [self.world.nodes[name] for name in srun.nodes]
        is_whole = all(node.contact is NodeContact.FINE for node in nodes)
        if is_whole and not srun.lost and all(other.is_made for other in srun.steps):
            srun.is_done = True
        else:
            self.world.schedule.after(LOOK_SECONDS, self._finish, srun, step)

    # -- what must hold -----------------------------------------------------------------------

    def _holds(self, srun: SharedSrun, nodes: tuple[str, ...], *, made: bool = False) -> set[str]:
        """Return those of some nodes that an srun has, and does not share on purpose.

        Args:
            srun: that has them, or does not.
            nodes: that another one is to have.
            made: only steps that Slurm has made count.
        """
        held = {name for step in srun.steps if step.is_made or not made for name in step.nodes}
        return held & set(nodes) - self._shared

    @property
    def _shared(self) -> set[str]:
        first, *others = (set(part) for part in self.plan.parts)
        return first.intersection(*others)

    def check_start(self, srun: SharedSrun, nodes: tuple[str, ...]) -> None:
        """Check that no other srun of the job has a node on which a step is to start."""
        if self.plan.unwritable is not None:
            return  # it cannot be told what others have; all else goes on
        for other in self.sruns:
            held = self._holds(other, nodes) if other != srun else set()
            if held:
                text = f"{','.join(sorted(held))} is {other.pid}'s, and {srun.pid} starts there"
                self.world.broken(ResumeRule.CLAIM, text)

    def check_shrink(self, srun: SharedSrun, keep: Sequence[str]) -> None:
        """Check that a supervisor gives back no node that another srun has."""
        fine = {name for name, node in self.world.nodes.items() if node.contact is NodeContact.FINE}
        gone = tuple(name for name in self.world.job.nodes if name in fine - set(keep))
        for other in self.sruns:
            held = self._holds(other, gone) if other != srun else set()
            if held:
                text = f"{','.join(sorted(held))} is {other.pid}'s, and {srun.pid} gives it back"
                self.world.broken(ResumeRule.CLAIM, text)

    def check_requeue(self, srun: SharedSrun) -> None:
        """Check that the job has no node, free for long, which would spare a requeue."""
        world, now = self.world, self.world.schedule.now
        if self.plan.unwritable is not None or world.job.state != "RUNNING":
            return
        others = {name for o in self.sruns if o != srun and not o.is_over for name in o.nodes}
        left = srun.context.allocation.left_nodes
        good = [
            name
            for name in world.job.nodes
            if world.nodes[name].contact is NodeContact.FINE
            and not world.nodes[name].shown.is_down
            and name not in {*left, *srun.lost}
        ]
        kept = [name for name in good if name in srun.nodes]
        free = [
            name
            for name in good
            if name not in {*others, *kept}
            and now - self._free_since.get(name, now) > SETTLED_SECONDS
        ]
        if len(kept) + len(free) >= self.plan.size:
            self.world.broken(ResumeRule.SPARES, f"{','.join(free)} is free, and it is requeued")


_PROGRAM = TrainedProgram(work_seconds=1.0, reports=True)


def _job(nodes: tuple[str, ...]) -> Job:
    return Job(
        JOB,
        1000,
        "RUNNING",
        nodes=nodes,
        num_nodes=len(nodes),
        batch_host=nodes[0],
        is_batch=True,
        requeue=True,
        exclusive=True,
    )


def _node(name: str) -> Node:
    return Node(name, "IDLE", address=f"10.0.0.{name[1:]}", cpus=4, memory=1000)


def _plan(random: Random) -> tuple[SharedPlan, int]:
    """Return what happens, and how many nodes are idle outside the job."""
    size, count = random.choice((2, 2, 3)), random.choice((2, 2, 2, 3))
    parts = [tuple(f"n{1 + part + count * at}" for at in range(size)) for part in range(count)]
    if random.random() < SHARING_SHARE:
        parts = [tuple(f"n{1 + at}" for at in range(size))] * count
    plan = SharedPlan(size, parts)
    first = random.uniform(5.0, 60.0)
    for part in parts:
        later = random.choice((0.0, random.uniform(0.0, 3.0), random.uniform(0.0, 30.0)))
        if random.random() < 0.9:
            plan.faults.append((first + later, random.choice(part[1:])))
    for _ in range(random.choice((0, 0, 1, 2))):
        # Not the first one, which runs the batch script.
        more = f"n{random.randint(2, size * count + 2)}"
        plan.faults.append((first + random.uniform(0.0, 200.0), more))
    if random.random() < KILLED_SHARE:
        plan.killed = first + random.uniform(0.0, 60.0), random.randrange(count)
    if random.random() < UNWRITABLE_SHARE:
        plan.unwritable = random.randrange(count)
    return plan, random.choice((0, 1, 1, 2, 3))


def simulate_shared(seed: int, base: Path, trace: list[str] | None) -> SharedOutcome:
    """Run several supervised sruns in one job.

    Args:
        seed: decides everything.
        base: an empty directory for what they write.
        trace: filled with one line for every thing that happened.

    Raises:
        BrokenResumeRule: something happened that must never happen.
    """
    return SharedJob(seed, base, trace).run()
