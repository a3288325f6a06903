"""The state of a simulated job, its program and its supervisor, and what the rules remember."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.simulate.resume.elastic.growth_rules import GrowthRules
from slurm_resilience.simulate.resume.preemption.sim_preemption import SimPreemption
from slurm_resilience.simulate.resume.resume_rules import Absences, AttemptBudget
from slurm_resilience.simulate.resume.sim_companions import SimCompanions
from slurm_resilience.simulate.resume.sim_nodes import SimStep, SimTask
from slurm_resilience.simulate.resume.sim_program import SimProgram
from slurm_resilience.simulate.resume.sim_srun import SimSrun
from slurm_resilience.simulate.resume.sim_step_life import StepLife
from slurm_resilience.simulate.resume.sim_steps import SimSteps
from slurm_resilience.simulate.resume.sim_thread import SimThread
from slurm_resilience.simulate.resume.sim_training import LivingProgram, SimTraining


@dataclass(frozen=True)
class TrainedProgram:
    """The program that is trained."""

    work_seconds: float
    """All of its work, without what is done twice."""
    reports: bool
    """It reports its checkpoints."""
    fails_at: float | None = None
    """Its bug: seconds of each run."""
    fails_in_work: float | None = None
    """Its bug: seconds of all of its work, wherever a run begins."""
    fails_with: int = 1
    crashes: float = 0.0
    """Chance that a run crashes for no reason that lasts."""
    ignores_term: bool = False
    collective_seconds: float = 1800.0
    """A task that waits for others which are gone ends after this time."""


@dataclass(frozen=True)
class SiteSettings:
    """All that does not change in a run."""

    base: Path
    """The directory in which srun was started; every node sees it."""
    program: TrainedProgram
    tasks_per_node: int
    slurmd_timeout: float
    no_kill: bool
    kill_on_bad_exit: bool
    living: LivingProgram | None = None
    """The program re-forms its own world; None: it does not."""
    size: ElasticSize | None = None
    """The sizes of an elastic step; None: it keeps its size."""
    repair_seconds: float | None = None
    """Until a lost node is back, repaired or exchanged; None: none comes back."""


@dataclass
class TrainedWork:
    """The program's work so far."""

    done_seconds: float = 0.0
    """Work behind the last checkpoint."""
    told_step: int = -1
    """The last checkpoint that the program has reported."""
    ended_well: bool = False
    """Some attempt of the program has ended well."""
    srun_saw_it: bool = False
    """Its srun lived then, and could tell."""
    ended_steps: list[SimStep] = field(default_factory=list)
    """Those of the attempt that has ended well, unless its program re-forms its own world."""
    late_tasks: list[SimTask] = field(default_factory=list)
    """Those of a training that has ended well: what the program does after it is theirs."""
    strike_node: Callable[[str], None] = lambda _: None
    """Takes its power from a node, as a fault does."""
    others_told_at: float = float("-inf")
    """When a task last printed the words of an srun of its own, whose step was aborted."""
    others_told_to: SimSrun | None = None
    """The srun that passed these words on."""
    steps: SimSteps = field(default_factory=lambda: SimSteps(None, Random(0)))
    """Those that the program reports."""
    program: SimProgram = field(init=False)
    training: SimTraining | None = None
    """The present attempt's, where the program re-forms its own world."""

    @property
    def all_done(self) -> bool:
        """Return whether it has ended well, with all that comes after its training."""
        return self.ended_well and not any(task.alive or task.code for task in self.late_tasks)


@dataclass
class SupervisorProcess:
    """The supervisor of the present run of the job."""

    incarnation: int = 0
    """Runs of the job before this one."""
    on_signal: Callable[[Any, bool], None] = lambda *_: None
    gone_at: float = float("inf")
    """When it is killed."""
    stands_until: float = 0.0
    """Its own thread does nothing before: a file system that it asks does not answer."""
    stopped_until: float = 0.0
    """Neither does any other thread of it, and it hears nothing: its process is stopped, or its
    machine sleeps."""
    absences: Absences = field(default_factory=Absences)
    on_gone: Callable[[], None] = lambda: None
    threads: list[SimThread] = field(default_factory=list)
    running: SimThread | None = None
    """The thread that has its turn; None: the supervisor's own."""


GIVE_UP_SECONDS = 10.0
"""A command that gets no answer ends by itself after this time."""


@dataclass
class JobBooks:
    """Slurm's plans for the job."""

    deadline: float | None = None
    """The job's time limit."""
    job_ended: bool = False
    """Slurm has ended the job for good."""
    starts_again_at: float = float("inf")
    slurmctld_back: float = 0.0
    """When slurmctld answers again."""
    answers_well: float = 0.0
    """When it loses, refuses and delays nothing any more."""
    most_nodes: int | None = None
    """The job may have no more, since a person took one out of it; None: he has not."""
    shrunk_at: float = float("inf")
    """When he did."""
    companions: SimCompanions = field(init=False)
    step_life: StepLife = field(init=False)
    growth: GrowthRules | None = None
    """All that is asked of the growth of an elastic step; None: the step keeps its size."""
    others: set[str] = field(default_factory=set)
    """Nodes that Slurm has given to other jobs."""
    preemption: SimPreemption | None = None
    """None: Slurm does not preempt the job."""


@dataclass
class SeenByRules:
    """All that the rules remember."""

    budget: AttemptBudget
    person_ended_at: float | None = None
    """A person has ended the program, beyond doubt."""
    person_acted: bool = False
    """A person has done anything."""
    requeue_asked_at: float | None = None
    spoke_at: float = 0.0
    busy_at: float = 0.0
    """When an srun ran last."""
    left_nodes: set[str] = field(default_factory=set)
    """Nodes of the job that an attempt has left for good."""
    fewest_nodes: int = 0
    """The step may go on with so few; 0: with no fewer than it has."""
    cancelled_step: SimStep | None = None
    """The step that he has cancelled, if it was one."""
    joins: int = 0
    """Join steps that were started."""
    failures: dict[str, int] = field(default_factory=dict)
    """By attempt: the code of the first task that failed, of those that could be told of."""
    failed_on: dict[str, set[str]] = field(default_factory=dict)
    """By attempt: nodes with tasks that failed, of those that could be told of."""
    named: set[str] = field(default_factory=set)
    """Nodes that were named, without which the program goes on."""
    is_over: bool = False
    """The last supervisor has ended: only what it has left is looked at."""
    given_back: set[int] = field(default_factory=set)
    """Helpers that the supervisor has given back, or tried to."""
