"""One simulated srun under the real supervisor: made from its seed alone."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from signal import Signals
from typing import Any, NamedTuple

import msgspec

from slurm_resilience.config import Config, ResumeSettings
from slurm_resilience.errors import SresError
from slurm_resilience.mesh.rank_variables import CHECKPOINTLESS
from slurm_resilience.model import Job, Node
from slurm_resilience.resume import report
from slurm_resilience.resume.elastic.elastic_size import ElasticSize, elastic_size
from slurm_resilience.resume.progress.hang_evidence import NodeSigns
from slurm_resilience.resume.progress.stack_gathering import AskedNodes
from slurm_resilience.resume.progress.step_listener import StepListener
from slurm_resilience.resume.srun.host_calls import HostCalls
from slurm_resilience.resume.srun.srun_options import BUILTIN, SrunCommand, split
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.step_size import fewest_nodes, leave_spares
from slurm_resilience.resume.srun.task_reports import StepReports, TaskReports
from slurm_resilience.resume.supervisor import Supervisor
from slurm_resilience.simulate.resume.elastic.elastic_run import (
    ELASTIC_SEED,
    draw_elastic,
    is_elastic,
    make_elastic,
)
from slurm_resilience.simulate.resume.elastic.growth_faults import OtherJobs
from slurm_resilience.simulate.resume.elastic.growth_rules import GrowthRules
from slurm_resilience.simulate.resume.preemption.preemption_draw import (
    PREEMPTED_SEED,
    draw_preemption,
)
from slurm_resilience.simulate.resume.preemption.sim_preemption import SimPreemption
from slurm_resilience.simulate.resume.resume_fault import PlannedResumeFault, ResumeFault
from slurm_resilience.simulate.resume.resume_faults import (
    ALWAYS_POSSIBLE,
    COMPANION_FAULTS,
    FAULTS_SECONDS,
    OF_COMPANIONS,
    ResumeFaults,
)
from slurm_resilience.simulate.resume.resume_rules import (
    ResumeRule,
)
from slurm_resilience.simulate.resume.resume_state import SiteSettings, TrainedProgram
from slurm_resilience.simulate.resume.resume_world import ResumeWorld, SupervisorGone
from slurm_resilience.simulate.resume.shared_job import SharedOutcome, simulate_shared
from slurm_resilience.simulate.resume.sim_job_slurm import SimJobSlurm
from slurm_resilience.simulate.resume.sim_link import SimLink
from slurm_resilience.simulate.resume.sim_nodes import LentMark, NodeContact, SimNode
from slurm_resilience.simulate.resume.sim_srun import SimSrun
from slurm_resilience.simulate.resume.sim_steps import (
    SETTINGS,
    SimStepListener,
    SimSteps,
    draw_habits,
)
from slurm_resilience.simulate.resume.sim_thread import SimThread
from slurm_resilience.simulate.resume.sim_training import LivingProgram, SimObserver
from slurm_resilience.slurm.companion_job import UNUSED_SECONDS
from slurm_resilience.slurm.slurmd_port import PortsSeen

MOST_FAULTS = 5
JOB = 7
COMPANION_SEED = 1_000_000_000
"""Runs from this seed on are of a job that loses a node early, and can have a companion."""
PAIR_SEED = 2_000_000_000
"""Runs from this seed on are of such a job that loses two nodes at once."""
SHARED_SEED = 3_000_000_000
"""Runs from this seed on are of several supervised sruns in one job."""
AFTERWARDS_SECONDS = UNUSED_SECONDS + 100.0
"""For companions to end after the end of a run, and each one after it has got its nodes."""
ANSWER_SECONDS = 2.0
"""For nodes to tell where the processes of a hung step stand."""
BUG_IN_WORK_SHARE = 0.2
"""Programs without another bug that fail at one place of their work."""
OTHERS_WORDS_SHARE = 0.1
"""Runs with a task that runs an srun of its own, whose step is aborted."""
REPAIRED_SHARE, REPAIR_SECONDS = 0.5, (10.0, 300.0)
"""Runs in which lost nodes come back, and how long that takes."""
ABSENCE_SHARE, ABSENCE_SECONDS = 0.2, (20.0, 900.0)
"""Runs in which the supervisor stands still, and for how long."""
QUEUE_SECONDS, QUEUE_LOOK_SECONDS = 4000.0, 30.0
"""A job that was preempted waits for nodes for so long, and Slurm looks from time to time."""
LIVING_SHARE = 0.4
"""Runs with a program that re-forms its own world."""


class SimulatedResume(NamedTuple):
    """The outcome of one run."""

    attempts: int
    job_runs: int
    faults: list[str]
    events: int
    joins: int
    """Join steps of trainings that re-form their own world."""
    companions: int
    """Second allocations that got their nodes."""
    code: int | None
    """The supervisor's exit code; None: it was killed."""
    grown: int = 0
    """So often an elastic step has grown."""


class SimReports(TaskReports):
    """Receives without a socket."""

    def expect(self, node_address: str, on_news: Callable[[], None]) -> StepReports:
        """Return the reports of an srun that is about to be started."""
        return StepReports("simulated", on_news)


class DiedOfSignal(BaseException):
    """The supervisor ended by a signal of its own will."""


class SimThreadHandle:
    """The part of `threading.Thread` that a supervisor uses."""

    def __init__(self, world: ResumeWorld, thread: SimThread) -> None:
        self._world, self._thread = world, thread

    def join(self, timeout: float | None = None) -> None:
        """Let time pass until it has ended."""
        self._world.pass_time(timeout or 0.0, lambda: self._thread.over)


class SimHostCalls(HostCalls):
    """The batch host of the simulation."""

    def __init__(self, world: ResumeWorld) -> None:
        self._world = world
        self.pid, self.uid = world.next_pid(), world.job.uid
        self.name = world.job.batch_host or "login"
        self.start_srun: Callable[..., SrunStep] = lambda *words, **options: SimSrun(
            world, *words, **options
        )

    @contextlib.contextmanager
    def watched(self, seconds: float, tell: Callable[[], None]) -> Iterator[None]:
        yield  # its file systems answer

    def reports(self, ports: Sequence[int]) -> TaskReports:
        return SimReports(ports)

    def steps(self, ports: Sequence[int]) -> StepListener:
        return SimStepListener(self._world.progress.steps)

    def node_signs(
        self,
        srun: str,
        environment: Mapping[str, str],
        asked: Sequence[AskedNodes],
        token: str,
        directory: str,
        seconds: float,
    ) -> tuple[NodeSigns, ...]:
        self._world.pass_time(ANSWER_SECONDS, lambda: False)
        return self._world.progress.steps.node_signs(self._world, asked, token)

    def look_at_ports(self, nodes: Iterable[Node]) -> PortsSeen:
        seen = {node.name: self._world.nodes[node.name] for node in nodes}
        self._world.pass_time(ANSWER_SECONDS, lambda: False)
        silent = {
            name
            for name, node in seen.items()
            if node.slurmd_away or node.contact is not NodeContact.FINE
        }
        return PortsSeen(frozenset(seen.keys() - silent), frozenset(silent))

    def working_directory(self) -> Path:
        return self._world.site.base

    def home_directory(self) -> Path | None:
        return None

    def receive_signals(self, on_signal: Callable[[Signals, bool], None]) -> None:
        self._world.supervisor.on_signal = on_signal

    def show_bug(self) -> None:
        raise

    def end_by(self, number: int) -> None:
        raise DiedOfSignal(number)

    def take_turn(self, job: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()  # there is one supervised srun

    def lives(self, pid: int) -> bool:
        return any(srun.pid == pid and srun.running for srun in self._world.sruns)

    def connections(self, step: SrunStep) -> int:
        steps = [s for s in self._world.steps.values() if s.srun is step]
        if self._world.site.living is None:
            return sum(len({task.node for task in s.tasks}) for s in steps)
        nodes = self._world.nodes
        open_to = {
            task.node
            for s in steps
            for task in s.tasks
            if task.alive or nodes[task.node].contact is not NodeContact.FINE
        }
        closed: set[str] = getattr(step, "closed", set())
        return sum(nodes[name].shown.address not in closed for name in open_to)

    def close_connections(self, step: SrunStep, address: str) -> None:
        if isinstance(step, SimSrun):
            step.closed.add(address)

    def observe(self, rendezvous: Path, on_news: Callable[[], None]) -> AbstractContextManager[Any]:
        training = self._world.progress.training
        assert training is not None
        return contextlib.nullcontext(SimObserver(training, on_news))

    def start_thread(self, run: Callable[[], None], name: str) -> Any:
        return SimThreadHandle(self._world, self._world.start_thread(run))


def plan_faults(random: Random, kinds: Collection[ResumeFault]) -> list[PlannedResumeFault]:
    """Return the faults of a run."""
    chosen = sorted(kinds)
    return [
        PlannedResumeFault(
            random.uniform(0.0, FAULTS_SECONDS) * random.random(),
            random.choice(chosen),
            random.randrange(100),
            random.uniform(5.0, 400.0),
        )
        for _ in range(random.randint(0, MOST_FAULTS))
    ]


def _early_loss(random: Random, size: int) -> PlannedResumeFault:
    """Return the loss of a node of the job that does not run its script."""
    kind = random.choice((ResumeFault.NODE_DIES, ResumeFault.NODE_CUT, ResumeFault.NODE_SICK))
    return PlannedResumeFault(random.uniform(5.0, 60.0), kind, random.randint(1, size - 1), 9.0)


def _site(random: Random, base: Path, seed: int, size: int) -> SiteSettings:
    program, tasks_per_node = _program(random), random.randint(1, 2)
    of_bugs = Random(f"bug {seed}")  # drawn apart, so that the others are the same as ever
    if program.fails_at is None and of_bugs.random() < BUG_IN_WORK_SHARE:
        where = of_bugs.uniform(0.1, 0.9) * program.work_seconds
        program = dataclasses.replace(program, fails_in_work=where)
    of_repairs = Random(f"repairs {seed}")
    are_repaired = of_repairs.random() < REPAIRED_SHARE
    share = 1.0 if is_elastic(seed) else LIVING_SHARE
    for_companions = COMPANION_SEED <= seed < ELASTIC_SEED
    site = SiteSettings(
        base,
        program,
        tasks_per_node=tasks_per_node,
        slurmd_timeout=random.choice((30.0, 300.0)),
        no_kill=random.random() < 0.5 or COMPANION_SEED <= seed < PREEMPTED_SEED,
        kill_on_bad_exit=random.random() < 0.5,
        # Drawn apart, so that a seed without such a program is the same run as ever.
        living=_living(Random(f"living {seed}"), size, tasks_per_node, share)
        if not for_companions
        else None,
        repair_seconds=of_repairs.uniform(*REPAIR_SECONDS) if are_repaired else None,
    )
    return make_elastic(site, seed) if is_elastic(seed) else site


def _living(random: Random, size: int, tasks_per_node: int, share: float) -> LivingProgram | None:
    """Return what a training asks for that re-forms its own world; None: the program does not.

    Args:
        random: decides.
        size: nodes of the step.
        tasks_per_node: of the step.
        share: of the programs that do.
    """
    if random.random() >= share:
        return None
    # A launcher counts on being the only one on its node.
    ranks_per_task = random.choice((1, 1, 2)) if tasks_per_node == 1 else 1
    min_world = random.randint(1, max(1, size))
    late_seconds = random.choice((0.0, 0.0, random.uniform(0.0, 5.0), random.uniform(5.0, 300.0)))
    late_code = random.choice((0, 0, 0, 0, 3, 139)) if late_seconds else 0
    late_loss = random.uniform(0.0, late_seconds) if random.random() < 0.1 else None
    return LivingProgram(ranks_per_task, min_world, late_seconds, late_code, late_loss)


def _job(random: Random, nodes: list[str], gres: str) -> Job:
    is_batch = random.random() < 0.8
    return Job(
        JOB,
        1000,
        "RUNNING",
        nodes=tuple(nodes),
        num_nodes=len(nodes),
        batch_host=nodes[0] if is_batch else "",
        is_batch=is_batch,
        requeue=is_batch and random.random() < 0.8,
        exclusive=True,
        gres=gres,
    )


def _program(random: Random) -> TrainedProgram:
    has_bug = random.random() < 0.2
    return TrainedProgram(
        work_seconds=random.uniform(30.0, 1500.0),
        reports=random.random() < 0.6,
        # At once, or after some progress.
        fails_at=random.uniform(*random.choice(((1.0, 15.0), (60.0, 400.0)))) if has_bug else None,
        fails_with=random.choice((1, 3, 139)),
        crashes=random.choice((0.0, 0.0, 0.3)),
        ignores_term=random.random() < 0.2,
        collective_seconds=random.choice((5.0, 1800.0)),
    )


BOOTED = "2023-01-01T00:00:00"


def _node(name: str, gres: str) -> Node:
    return Node(
        name, "IDLE", address=f"10.0.0.{name[1:]}", gres=gres, cpus=4, memory=1000, boot_time=BOOTED
    )


class ResumeRun:
    """One run."""

    def __init__(
        self, seed: int, base: Path, trace: list[str] | None, kinds: Collection[ResumeFault]
    ) -> None:
        random = Random(seed)
        self.faults = plan_faults(random, kinds)
        self.size = random.randint(1, 4)
        inside, spare = random.choice((0, 0, 1, 2)), random.choice((0, 1, 1, 3))
        fewest = random.choice((0, 0, max(1, self.size - 1)))
        self.elastic = draw_elastic(seed) if is_elastic(seed) else None
        self.for_companions = COMPANION_SEED <= seed < ELASTIC_SEED
        if self.elastic is not None:
            self.size, inside, spare = self.elastic.core, 0, self.elastic.free
            fewest, self.faults = self.elastic.fewest, list(self.elastic.faults)
        of_preemption = draw_preemption(seed, kinds) if seed >= PREEMPTED_SEED else None
        if of_preemption is not None:
            self.faults = [*of_preemption.faults, *(() if of_preemption.is_calm else self.faults)]
        if self.for_companions:
            self.size, inside, spare, fewest = max(2, self.size), 0, max(1, spare), 0
            self.faults.append(_early_loss(Random(f"loss {seed}"), self.size))
        if self.for_companions and seed >= PAIR_SEED:
            self.size, spare = max(3, self.size), max(3, spare)
            first = self.faults[-1]
            self.faults[-1:] = [first._replace(node=1), first._replace(node=2)]
        self.words = [
            random.choice((f"-N{self.size}", f"--auto-resume-spares={inside}")),
            f"--auto-resume-min-nodes={fewest}",
        ]
        if self.elastic is not None:
            self.words = [f"-N{self.size}", self.words[1], *self.elastic.words]
        has_gres = random.random() < 0.25 and self.elastic is None
        gres = "gpu:4" if has_gres or self.for_companions else ""
        names = [f"n{number}" for number in range(1, self.size + inside + spare + 1)]
        self.limits = ResumeSettings(
            swap_wait=random.choice((60.0, 600.0)),
            max_per_hour=random.choice((3, 10)),
            max_attempts=random.choice((4, 1000)),
        )
        self.world = world = ResumeWorld(
            random,
            trace,
            _site(random, base, seed, self.size),
            _job(random, names[: self.size + inside], gres),
            {name: SimNode(_node(name, gres)) for name in names},
            self.limits,
        )
        if random.random() < 0.2:
            world.books.deadline = random.uniform(200.0, 4000.0)
            world.schedule.at(world.books.deadline, self._time_limit)
        self.permits_expansion = random.random() < 0.8
        self.with_sresctld = random.random() < 0.75
        self.plan = ResumeFaults(world, self.faults)
        following: tuple[ResumeFault, ...] = COMPANION_FAULTS
        if not set(ALWAYS_POSSIBLE) <= set(kinds):
            following = tuple(kind for kind in OF_COMPANIONS if kind in kinds)
        if following and self.elastic is None and of_preemption is None:
            # Drawn apart, so that a seed without a companion is the same run as ever.
            self.plan.follow_companions(Random(f"companion {seed}"), following)
        of_words = Random(f"words {seed}")
        if of_words.random() < OTHERS_WORDS_SHARE:
            world.schedule.at(of_words.uniform(5.0, 300.0), world.print_others_words)
        of_absence = Random(f"absence {seed}")
        if of_absence.random() < ABSENCE_SHARE:
            at, seconds = (
                of_absence.uniform(0.0, FAULTS_SECONDS),
                of_absence.uniform(*ABSENCE_SECONDS),
            )
            world.schedule.at(at, world.stand_still, seconds)
        # Drawn apart, so that a seed without reported steps is the same run as ever.
        of_steps = Random(f"steps {seed}")
        world.progress.steps = SimSteps(draw_habits(of_steps), of_steps)
        world.progress.strike_node = lambda name: self.plan.dies(name, 0.0)
        if of_preemption is not None:
            of_slurm = Random(f"preempting {seed}")
            world.books.preemption = SimPreemption(world, of_preemption, of_slurm)
        if self.elastic is not None:
            others = OtherJobs(world, names[self.size :], Random(f"other jobs {seed}"))
            others.begin()

    def run(self) -> SimulatedResume:
        """Run until the program has ended for good."""
        world = self.world
        self.plan.sresctld_is_there = self.with_sresctld
        world.note(f"nodes {','.join(world.nodes)}; {world.site.program}; {world.job}")
        code: int | None = None
        with report.written_to(world.line):
            while True:
                supervisor, client, link = self._supervisor()
                self.plan.serve(client, link)
                if not world.supervisor.incarnation:
                    self.plan.begin()
                    world.look()
                code = self._run_supervisor(supervisor)
                self._check_code(code)
                if world.books.preemption is not None:
                    world.books.preemption.check_end(code)
                if not self._comes_back():
                    break
        self._check_end(code is not None)
        return SimulatedResume(
            len(world.seen.budget.attempts),
            world.supervisor.incarnation + 1,
            [fault.kind.value for fault in self.faults],
            world.schedule.count,
            world.seen.joins,
            world.companions.granted,
            code,
            world.books.growth.grown if world.books.growth is not None else 0,
        )

    def _supervisor(self) -> tuple[Supervisor, SimJobSlurm, SimLink]:
        world = self.world
        host_calls = SimHostCalls(world)
        client = SimJobSlurm(world, host_calls.name, host_calls.pid)
        environment = {"SLURM_RESTART_COUNT": str(world.job.restarts)}
        living = world.site.living
        if living is not None:
            environment[CHECKPOINTLESS] = "1"
        words = [*self.words, "--input=none", "train"]
        user_command = split(words, BUILTIN)
        command, environment = leave_spares(user_command, world.job, environment)
        min_nodes = fewest_nodes(user_command, command, world.job, environment)
        world.seen.fewest_nodes = min_nodes
        size = self._elastic_size(user_command, command, environment, min_nodes)
        link = SimLink(world, is_there=self.plan.sresctld_is_there)
        supervisor = Supervisor(
            Config(resume=self.limits),
            client,
            link,
            "/usr/bin/srun",
            command,
            world.shown_job(),
            has_plugin=True,
            permits_expansion=self.permits_expansion,
            environment=environment,
            clock=world.clock,
            nodes=[node.shown for node in world.nodes.values()],
            host_calls=host_calls,
            min_nodes=min_nodes,
            size=size,
            hangs=SETTINGS,
        )
        # A process that was killed cleans nothing up.
        world.supervisor.on_gone = lambda: setattr(supervisor, "_clean_up", lambda: None)
        return supervisor, client, link

    def _elastic_size(
        self,
        user_command: SrunCommand,
        command: SrunCommand,
        environment: Mapping[str, str],
        min_nodes: int,
    ) -> ElasticSize | None:
        """Return the sizes of this run's step, and have the rules on them hold; None: it keeps its
        size."""
        if self.elastic is None:
            return None
        world = self.world
        size = elastic_size(
            user_command, command, world.job, environment, min_nodes, self.elastic.settings
        )
        if size is not None and world.books.growth is None:
            world.site = dataclasses.replace(world.site, size=size)
            world.books.growth = GrowthRules(world, size, is_calm=self.elastic.is_calm)
        return size

    def _run_supervisor(self, supervisor: Supervisor) -> int | None:
        try:
            return supervisor.run()
        except SupervisorGone:
            self.world.note("the supervisor was killed")
            return None
        except DiedOfSignal as died:
            self.world.note(f"the supervisor ends by signal {died}")
            return 128 + int(died.args[0])
        except SresError as error:
            self.world.note(f"the supervisor gives up: {error}")
            return error.exit_code
        finally:
            self.world.end_threads()
            for srun in self.world.sruns:
                srun.ends(-9)  # they die with the supervisor
            self.world.progress.training = None

    def _check_code(self, code: int | None) -> None:
        world = self.world
        world.note(f"the supervisor ends with {code}")
        progress = world.progress
        preemption = world.books.preemption
        left_well = preemption is not None and preemption.left_well
        if code == 0 and not (progress.all_done or left_well):
            world.broken(ResumeRule.FALSE_SUCCESS, "the program has not ended well")
        ended = world.seen.person_ended_at is not None or world.job.state != "RUNNING"
        known = progress.srun_saw_it and world.program.end_was_told()
        if world.site.living is not None and world.supervisor.stands_until:
            # It may not have seen what was lost before the training ended, and what after.
            known = False
        # Where Slurm has said that a step's tasks are to end, a task may have ended untold.
        known = known and not (preemption is not None and preemption.is_under_way)
        # What a task's own srun says of its step is taken for a person's cancel of this one.
        if code and known and progress.all_done and not (ended or world.is_fooled):
            world.broken(ResumeRule.FALSE_FAILURE, f"exit code {code}")

    def _comes_back(self) -> bool:
        """Start the job again where it was requeued."""
        world = self.world
        if world.books.preemption is not None:
            world.books.preemption.script_ends()
        if world.books.job_ended or world.progress.all_done or world.job.state != "COMPLETING":
            return False
        world.supervisor.gone_at = float("inf")
        world.supervisor.on_signal = lambda *_: None
        world.schedule.run(world.books.starts_again_at)
        for step in list(world.steps.values()):
            if world.companions.get(step.srun.allocation) is not None:
                continue  # the next supervisor has to end them
            for task in step.living():
                task.alive = False
            del world.steps[step.name]
        world.helpers.clear()
        world.seen.left_nodes.clear()
        world.sruns.clear()
        world.job = msgspec.structs.replace(world.job, nodes=())
        count = world.job.num_nodes
        good = self._free_nodes(count)
        if len(good) < count or world.seen.person_ended_at is not None:
            return False
        world.supervisor.incarnation += 1
        if len(world.seen.budget.attempts) == 1:
            # After its first attempt a job that Slurm ends leaves no history: nothing was lost yet.
            world.seen.budget.clear()
        world.seen.budget.furthest.forget()
        world.seen.requeue_asked_at = None
        world.supervisor.gone_at = float("inf")
        world.books.starts_again_at = float("inf")
        nodes = tuple(good[:count])
        world.note(f"the job starts again on {','.join(nodes)}")
        world.seen.spoke_at = world.schedule.now
        world.job = msgspec.structs.replace(
            world.job,
            state="RUNNING",
            nodes=nodes,
            batch_host=nodes[0],
            restarts=world.job.restarts + 1,
        )
        return True

    def _free_nodes(self, count: int) -> list[str]:
        """Return the nodes that the job may start on; where other jobs have them, or a person holds
        it, it waits for a while."""
        world, preemption = self.world, self.world.books.preemption
        until = world.schedule.now + QUEUE_SECONDS
        if preemption is not None:
            world.supervisor.gone_at = world.schedule.now  # until then there is none
        while True:
            good = [n for n in world.idle() if world.nodes[n].contact is NodeContact.FINE]
            waits = world.seen.person_ended_at is None and world.schedule.now < until
            if preemption is None or not waits:
                return good
            if len(good) >= count and world.schedule.now >= preemption.held_until:
                return good
            world.schedule.run(world.schedule.now + QUEUE_LOOK_SECONDS)
            world.seen.busy_at = world.schedule.now  # of a job in the queue no log tells

    def _check_end(self, ended_by_itself: bool) -> None:
        world = self.world
        world.seen.is_over = True
        for step in list(world.steps.values()):
            world.step_life.kill(step, "")  # Slurm does that to a step whose srun is gone
        world.schedule.run(max(world.schedule.now, FAULTS_SECONDS))
        world.schedule.run(max(world.schedule.now, world.books.slurmctld_back) + 1.0)
        self._let_companions_end()
        for companion in world.companions.values():
            if companion.lent is not None and LentMark.RENAMED in companion.lent.marks:
                continue  # it is a person's now
            first = world.nodes[companion.granted[0]] if companion.granted else None
            if first is not None and (first.contact is NodeContact.FINE or first.shown.is_down):
                world.broken(ResumeRule.COMPANION, f"job {companion.id} is left behind")
        left = set(world.helpers) - world.seen.given_back
        if ended_by_itself and left:
            world.broken(ResumeRule.HELPERS, f"{len(left)} are left")

    def _let_companions_end(self) -> None:
        """Let time pass in which the scripts of companions end them.

        One that is in the queue when its supervisor is killed, and the job goes on without it, gets
        its nodes later: its script alone can end it, and counts from then, or from when Slurm
        answers again.
        """
        world = self.world
        until = world.schedule.now + AFTERWARDS_SECONDS
        while world.schedule.now < until:
            world.schedule.run(until)
            for companion in world.companions.values():
                if companion.granted:
                    begins = max(companion.granted_at, world.books.slurmctld_back)
                    until = max(until, begins + AFTERWARDS_SECONDS)

    def _time_limit(self) -> None:
        world = self.world
        if world.schedule.now < world.books.slurmctld_back:  # it is slurmctld that looks at limits
            world.schedule.at(world.books.slurmctld_back + 1.0, self._time_limit)
            return
        world.end_job("TIMEOUT", requeue=False, word="DUE TO TIME LIMIT")


def _outcome_of_shared(run: SharedOutcome) -> SimulatedResume:
    faults = [ResumeFault.NODE_DIES.value] * run.lost_nodes
    code = 0 if run.all_done else None
    return SimulatedResume(run.attempts, 1, faults, run.events, run.joins, 0, code)


def simulate_resume(
    seed: int,
    trace: list[str] | None = None,
    kinds: Collection[ResumeFault] = ALWAYS_POSSIBLE,
) -> SimulatedResume:
    """Run one supervised srun, or several in one job.

    Args:
        seed: decides everything.
        trace: filled with one line for every thing that happened.
        kinds: faults that may happen.

    Raises:
        BrokenResumeRule: something happened that must never happen.
    """
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    base = Path(tempfile.mkdtemp(prefix="sres-simulate-", dir=memory))
    try:
        if SHARED_SEED <= seed < ELASTIC_SEED:
            return _outcome_of_shared(simulate_shared(seed, base, trace))
        return ResumeRun(seed, base, trace, kinds).run()
    finally:
        shutil.rmtree(base, ignore_errors=True)
