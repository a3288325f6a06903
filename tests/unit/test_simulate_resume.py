"""Simulated sruns under the real supervisor: no rule is broken, a broken supervisor is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slurm_resilience.cli.simulate import simulate as command
from slurm_resilience.errors import UsageError
from slurm_resilience.resume import evidence, fence, recovery, report, supervisor
from slurm_resilience.resume.allocation import taken_nodes
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.allocation.claims import NodeClaims
from slurm_resilience.resume.decide import plan
from slurm_resilience.resume.decide.budgets import ends_without_cause
from slurm_resilience.resume.decide.classify import NO_STEPS, Ending
from slurm_resilience.resume.decide.plan import Plan
from slurm_resilience.resume.elastic.companion_requests import CompanionRequests
from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.resume.elastic.growth import Growth
from slurm_resilience.resume.elastic.node_group import NodeGroup
from slurm_resilience.resume.elastic.size_events import SizeAction
from slurm_resilience.resume.elastic.size_plan import SizePlan
from slurm_resilience.resume.live_step import live_plan
from slurm_resilience.resume.live_step.live_events import Action, StartJoin
from slurm_resilience.resume.live_step.live_plan import LivePlan
from slurm_resilience.resume.live_step.live_step import LiveStep, LooksBeside
from slurm_resilience.resume.live_step.live_steps import LiveSteps
from slurm_resilience.resume.live_step.stall_watch import StallWatch
from slurm_resilience.resume.progress import hang_rule
from slurm_resilience.resume.progress.furthest_step import FurthestStep
from slurm_resilience.resume.progress.hang_rule import StepRecord
from slurm_resilience.resume.recovery import NextAttempt, Recovery
from slurm_resilience.resume.srun import stderr_reader
from slurm_resilience.resume.srun.stderr_reader import StderrReader
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.user_signals import UserSignals
from slurm_resilience.resume.supervisor import Supervisor
from slurm_resilience.simulate.resume.elastic.elastic_run import ELASTIC_SEED
from slurm_resilience.simulate.resume.preemption.preemption_draw import PREEMPTED_SEED
from slurm_resilience.simulate.resume.resume_campaign import RESUME_CAMPAIGN
from slurm_resilience.simulate.resume.resume_fault import ResumeFault
from slurm_resilience.simulate.resume.resume_faults import ALWAYS_POSSIBLE
from slurm_resilience.simulate.resume.resume_rules import (
    AttemptBudget,
    BrokenResumeRule,
    ResumeRule,
)
from slurm_resilience.simulate.resume.resume_simulation import (
    COMPANION_SEED,
    PAIR_SEED,
    SHARED_SEED,
    simulate_resume,
)
from slurm_resilience.simulate.resume.sim_companions import SimCompanions
from slurm_resilience.simulate.resume.sim_job_slurm import SimJobSlurm
from slurm_resilience.slurm import companion_job

RUNS = 200
SHARED_RUNS, ELASTIC_RUNS, PREEMPTED_RUNS = 60, 25, 150
MOST_RUNS = 1000
"""In which a broken rule must be found."""
Kind = ResumeFault
ONCE_BROKEN = (
    # An srun of the program's own was aborted, 10 s before a task crashed: the others waited.
    900029321,
    # A launch that failed on one node, while another one died: the former was used again.
    *(960012293, 970012297),
    # The supervisor had not seen a training's last world, or its lost task, when it ended well.
    *(777039, 805286, 807446),
    # The supervisor's own SIGTERM for a companion's step, taken for the companion's preemption.
    2099001605,
    # A process on a lost node that still looked as if it stepped, beside the one in its place.
    806547,
    # A person's cancel that met the supervisor's own order, or followed by others' failures.
    *(5008110, 5010825, 5017535, 5026742, 5029497, 5029552, 5054171),
    # A node that was left on suspicion came back in exchange.
    5036769,
    # A person's cancel of a living step, whose srun waited for a lost node, or long after a crash.
    *(285, 614, 902, 999, 1021, 1368, 6347, 14150, 20456, 38836, 7002734, 7007417),
    # Tasks of a living step's other sruns that were killed.
    *(5290, 6130),
    # A task or a node that was lost before the training had begun.
    *(1321, 1862),
    # A connection that closed late was taken for a living process.
    2294,
    # Nothing was said while no seat stepped.
    *(103, 412, 13984, 22075),
    # An end of a program that was its own, or a person's word that could not be heard: the rules
    # did not know it.
    *(8006712, 8009645, 8012793, 8016435, 8020778, 8021547, 9000534, 37),
    # A task of a training died before Slurm showed its step, and was never started again.
    9007270,
    # A node died after a training that went on without a seat: Slurm ended the job.
    *(9000753, 9008384),
    # A newcomer waited for others that had died unseen, and nothing was said.
    9015985,
    # A person's cancel of a living step, one srun of which was killed a moment later.
    9009614,
    *(9008234, 9017922),
    # An srun that had lost a task or a node was killed while its program had more to do.
    *(9023509, 9027257),
    # A job was requeued that a person had cancelled a moment before.
    9023621,
    # A connection that closed late after a training was taken for a process that hangs in it.
    9025288,
    9035331,
    # A node that eats attempts, and was left long ago, made the next relaunch come at once.
    9013962,
    # A person's cancel of one part of an attempt, while the other one was being ended.
    762,
    *(1_000_000_630, 1_000_001_295, 1_000_005_216, 1_000_005_442),
    # Only srun's own words told of a person's cancel of one part, after a failure in another one.
    809959,
    # A task's own word on its end was lost, and slurmctld was away at the end.
    812238,
    # A step ended well while it was asked whether its node could be left, and was run again.
    1_000_009_835,
    # Tasks that outlived their srun told steps, which counted as the next attempt's.
    1010458,
    # A program that still had its results to save, after the last step, was ended for a hang.
    1010779,
    # A supervisor that got no answer forgot the attempts of a job that was being requeued.
    2001022370,
    # Slurm requeued the job in the pause between two attempts, which were forgotten with it.
    1060453,
    # A node that had died unseen looked as if it stepped, alone in a world that was over.
    1041708,
    # A companion got its nodes long after its supervisor was killed, and the job went on: the rule
    # did not know that its script counts from then.
    1001058285,
    # A person's cancel of the part that waited for a lost node, after a failure in another one.
    2001030875,
    # A person's cancel of a companion's step; Slurm ended the companion for its lost node after it.
    *(1_001_028_380, 1_001_031_755),
    # A task crashed after a training, and its srun was killed before it could tell: success.
    3024771,
    # A node that sresctld knew to be dead was taken again while sresctld was away.
    1064306,
    # A person's cancel of a living step: one task had just crashed, the other's node died unseen.
    4012591,
    # A node died when all of its tasks had ended well.
    4024476,
    # A rank that died before it was shown was shown for ever: the simulated training's own fault.
    30089488,
    # A living step was not watched over while slurmctld, which was asked for its tasks, was away.
    30045983,
    # The rules took an end while Slurm was ending the program, or its nodes were cut off, for the
    # program's own, and Slurm's signal for a person's while its answers were lost.
    *(30066891, 2030058395, 30080177),
    # The word of an srun that a task had run, made new by slurmstepd's line on our own order.
    5100601,
    # The job's time limit came as slurmctld was away, and then its signal was a person's.
    *(1007000615, 1007001225),
    # slurmctld went away as it ended a companion for its lost node: a person's cancel, it seemed.
    2007003020,
    # A person did not wait for what came after a training, whose tasks a lost node had: success.
    7010828,
    # A companion ended itself, since its part had failed long before the others: its node's fault.
    *(7008009, 1007012190, 1007020070),
    # Words of a task's own srun, minutes before a companion lost its node.
    1007015730,
    # Slurm's answers were lost as it ended a companion for its lost node: a person's cancel.
    1007000580,
    # A task's own srun told of its step's end, and the supervised one was taken to be cancelled.
    7500306,
    # A companion that had ended unused, and the queue had no other nodes: the rule heard a bug.
    1007501285,
    # A training ended well after its supervisor had given it up, and slurmctld was away.
    7508007,
    # A companion was given up for one of its nodes, and the other one came back in the next.
    2008028540,
    # Words of a task's own srun, a hang, and an end that waited for slurmctld: the rule had lapsed.
    1008211415,
    # A node that was lost and came back was counted by the rule as one whose tasks had died.
    7016732,
    # A person's scancel reached a slurmctld that was away: the simulated Slurm's own fault.
    1099120365,
    # A training ended well; one task's end was not told, and its node was marked, and worked still.
    99128811,
    # The rule counted an attempt that Slurm had ended with the job as one without progress.
    201007398,
    # The rule counted a bug whose task's own end was lost on its way to the supervisor.
    1201047420,
    # A training ended well; one task's end was not told, after a word on a task's own srun.
    *(201050493, 201056622),
    # A training stood still while slurmctld was away, and was never watched: the log went silent.
    301040667,
    # A node died after a training, and had left the job before srun was told of it: success.
    701006846,
    # A companion was given back for one of its nodes, and the other came back: the rule's fault.
    2000930765,
    # Words of a task's own srun, in a step that a node was left of, just before it ended well.
    301051319,
    # The supervisor stood still for minutes: a checkpoint that it found then taught it that steps
    # take as long, and a hang was not noticed for an hour.
    *(102737, 103298),
    # A supervisor that had stood still for minutes took ranks for late.
    1582,
    # Two sruns of a job took the node that one of them had just got in exchange.
    *(SHARED_SEED + 16, SHARED_SEED + 31),
    # A living step claimed no node, and took those of an srun between two attempts.
    *(SHARED_SEED + 2, SHARED_SEED + 5),
    # A job's nodes were given back as they had been, without another srun's new one.
    *(SHARED_SEED + 22, SHARED_SEED + 71),
    # A lost node came back as another srun's, and was given back, or taken by a living step.
    *(SHARED_SEED + 275, SHARED_SEED + 277),
    # Nodes were lent to a program that went on after its training, and none of its ranks did.
    *(ELASTIC_SEED + 5, ELASTIC_SEED + 9),
    # A person had given a companion in the queue another number of nodes, which were never used.
    ELASTIC_SEED + 148,
    # A lost answer, and a companion that a person had put back into the queue was forgotten.
    ELASTIC_SEED + 356,
    # Such a one got nodes when nothing asked for them any more.
    ELASTIC_SEED + 1688,
    # A rank lived on a lent node that was cut off, and might write beside the one in its place.
    ELASTIC_SEED + 378,
    # Ranks that Slurm had killed without a word were taken for ones that had failed.
    *(ELASTIC_SEED + 18, ELASTIC_SEED + 50),
    # The rules did not know that a pause does not count an absence, or that a node which a person
    # takes while answers are lost is taken for a lost one; and a program that needed more ranks
    # than the sizes allow never began.
    *(ELASTIC_SEED + 4151, ELASTIC_SEED + 5106, ELASTIC_SEED + 4746),
    # A further attempt began within the GraceTime of a preemption, or a companion was waited for.
    *(PREEMPTED_SEED + 2, PREEMPTED_SEED + 46, PREEMPTED_SEED + 71),
    # Words of a task's own srun, an old crash, a hang, a node whose slurmd was away, or an answer
    # that came as Slurm took the nodes: a preemption was taken for a person's cancel.
    *(PREEMPTED_SEED + n for n in (146, 224, 359, 398, 500, 875, 905, 2450, 2479)),
    # A program that went on in the GraceTime, and ended well, or had its last results to save.
    *(PREEMPTED_SEED + 2480, PREEMPTED_SEED + 33258),
)
"""Seeds that broke a rule."""


def broken(seed: int, kinds: tuple[ResumeFault, ...] = ALWAYS_POSSIBLE) -> ResumeRule | str:
    """Return the rule that a run breaks; empty: none."""
    try:
        simulate_resume(seed, kinds=kinds)
    except BrokenResumeRule as error:
        return error.rule
    return ""


def test_no_rule_is_broken() -> None:
    for seed in range(RUNS):
        assert (seed, broken(seed)) == (seed, "")


@pytest.mark.parametrize("seed", ONCE_BROKEN)
def test_what_was_broken_once_holds(seed: int) -> None:
    assert broken(seed) == ""


def test_living_steps_are_among_the_runs() -> None:
    runs = [simulate_resume(seed) for seed in range(100)]
    assert sum(run.joins > 0 for run in runs) >= 5


def test_a_seed_is_replayed_exactly() -> None:
    def told(seed: int) -> list[str]:
        trace: list[str] = []
        simulate_resume(seed, trace)
        # The supervisor's own lines have the machine's time of day in them.
        return [line for line in trace if "log:" not in line]

    for seed in range(10):
        assert told(seed) == told(seed)


_prepare = Supervisor._next


def start_after_a_requeue(self: Supervisor, *words: Any) -> NextAttempt | None:
    following = _prepare(self, *words)
    if following is None and self._recovery.requeued:
        block: Any = None
        return NextAttempt(self._step_nodes, block)
    return following


_vacate = SizePlan._vacate


def ask_again_at_once(
    self: SizePlan, group: NodeGroup, now: float, **words: str
) -> Iterator[SizeAction]:
    yield from _vacate(self, group, now, **words)
    group.again_at = now


def ranks_of_the_core(self: ElasticSize, group: int) -> range:
    return range(self.groups[group])


_join = LivePlan._join


def join_twice(self: LivePlan, *words: Any) -> Iterator[Action]:
    actions = list(_join(self, *words))
    yield from actions
    yield from (action for action in actions if isinstance(action, StartJoin))


def nothing(*_: Any, **__: Any) -> None:
    return None


def no_text(*_: Any, **__: Any) -> str:
    return ""


def nothing_untold(*_: Any) -> tuple[dict[str, str], int]:
    return {}, 0


Patch = tuple[Any, str, Any]
ENDLESS: tuple[Patch, ...] = (
    (plan, "spent", no_text),
    (plan, "fault_of_program", no_text),
    (AttemptBudget, "start", no_text),
)
MUTATIONS: dict[str, tuple[ResumeRule, tuple[ResumeFault, ...], tuple[Patch, ...]]] = {
    "tasks of a killed srun are left alone": (
        ResumeRule.TWO_WRITERS,
        (Kind.SRUN_DIES, Kind.SLURM_AWAY),
        ((Supervisor, "_end_tasks_left", nothing),),
    ),
    "each end is a success": (
        ResumeRule.FALSE_SUCCESS,
        (Kind.TASK_CRASHES,),
        ((Supervisor, "_last_code", lambda *_: 0),),
    ),
    "each end is a failure": (
        ResumeRule.FALSE_FAILURE,
        (Kind.TASK_CRASHES,),
        ((Supervisor, "_last_code", lambda *_: 1),),
    ),
    "what comes after a training does not count": (
        ResumeRule.FALSE_SUCCESS,
        (Kind.TASK_CRASHES,),
        ((LiveSteps, "failed_since", lambda _: (0, 0)),),
    ),
    "a node that dies after a training is not noticed": (
        ResumeRule.FALSE_SUCCESS,
        (Kind.NODE_DIES,),
        ((LiveSteps, "work_on", lambda *_: False), (LiveStep, "_look_for_untold", nothing_untold)),
    ),
    "what comes after a training is ended": (
        ResumeRule.FALSE_FAILURE,
        (Kind.TASK_CRASHES,),
        ((LiveSteps, "end_stuck", lambda self, _: self.end(at_once=False)),),
    ),
    "a wait is not told": (
        ResumeRule.SILENCE,
        (Kind.SLURM_AWAY, Kind.NODE_DIES),
        ((report, "say", nothing),),
    ),
    "no limit on attempts": (
        ResumeRule.BUDGETS,
        (Kind.TASK_CRASHES, Kind.SRUN_DIES),
        ((plan, "spent", no_text),),
    ),
    "a program with a bug does not wait": (
        ResumeRule.BUDGETS,
        (Kind.INTERRUPT,),
        ((plan, "pause_before_next", lambda *_: 0.0),),
    ),
    "an attempt follows a requeue": (
        ResumeRule.ONE_RECOVERY,
        (Kind.NODE_DIES, Kind.NODE_SICK),
        ((Supervisor, "_next", start_after_a_requeue),),
    ),
    "a person is not heard": (
        ResumeRule.PERSON,
        (Kind.TERMINATE, Kind.INTERRUPT_TWICE),
        ((UserSignals, "ended", no_text), (evidence, "_is_cancelled", lambda *_: False)),
    ),
    "words on another step are believed for ever": (
        ResumeRule.STRANGER,
        (Kind.NODE_DIES, Kind.TASK_CRASHES),
        ((StderrReader, "is_recent", lambda *_: True),),
    ),
    "words on another step are believed for minutes": (
        ResumeRule.STRANGER,
        (Kind.NODE_DIES, Kind.NODE_SICK),
        ((StderrReader, "is_recent", lambda _, at, now: now - at <= 200.0),),
    ),
    "a cancelled step is a crash": (
        ResumeRule.PERSON,
        (Kind.CANCEL_STEP,),
        ((evidence, "_is_cancelled", lambda *_: False),),
    ),
    "a node that was left is used again": (
        ResumeRule.SPARES,
        (Kind.NODE_SICK, Kind.NODE_DIES),
        ((Allocation, "_is_left", lambda *_: False),),
    ),
    "a node that a living step left may write": (
        ResumeRule.TWO_WRITERS,
        (Kind.NODE_CUT,),
        ((fence, "exclude_node", nothing),),
    ),
    "a person who cancels a living step is not heard": (
        ResumeRule.PERSON,
        (Kind.CANCEL_STEP, Kind.NODE_DIES, Kind.TERMINATE),
        ((LiveSteps, "ended_by_user", nothing),),
    ),
    "tasks of a living step are started again for ever": (
        ResumeRule.BUDGETS,
        (Kind.NODE_EATS, Kind.TASK_CRASHES),
        ((live_plan, "after_task", lambda *_: Plan("join", "")),),
    ),
    "a lost seat is filled twice": (
        ResumeRule.SEAT,
        (Kind.NODE_DIES, Kind.TASK_CRASHES),
        ((LivePlan, "_join", join_twice),),
    ),
    "a training that does not step is not told of": (
        ResumeRule.SILENCE,
        (Kind.NODE_DIES, Kind.SRESCTLD_AWAY),
        ((StallWatch, "look", nothing),),
    ),
    "a helper is not given back": (
        ResumeRule.HELPERS,
        (Kind.NODE_DIES, Kind.SLURM_REFUSES, Kind.SLURM_LOSES),
        ((SimJobSlurm, "cancel_job", nothing),),
    ),
    "a companion has no script that ends it": (
        ResumeRule.COMPANION,
        ALWAYS_POSSIBLE,
        ((SimCompanions, "_script_looks", nothing),),
    ),
    "a companion goes on without the node of its script": (
        ResumeRule.COMPANION,
        (Kind.COMPANION_NODE_DIES, Kind.SUPERVISOR_ALONE_DIES),
        ((companion_job, "companion_words", lambda _: ["--no-kill"]),),
    ),
    "observed steps are no progress": (
        ResumeRule.PROGRESS,
        (Kind.INTERRUPT,),
        ((FurthestStep, "told", lambda _: NO_STEPS),),
    ),
    "an srun without an answer is the program's failure": (
        ResumeRule.UNANSWERED,
        (Kind.SLURM_AWAY, Kind.TASK_CRASHES),
        ((evidence, "_is_unanswered", lambda _: False),),
    ),
    "srun's own end of a step is a person's": (
        ResumeRule.STRANGER,
        (Kind.NODE_CUT, Kind.NODE_DIES),
        ((stderr_reader, "_launches", lambda _: frozenset()),),
    ),
    "a node is named before the program goes on": (
        ResumeRule.NAMED,
        (Kind.NODE_EATS,),
        ((recovery, "nodes_to_name", lambda history, *_: ends_without_cause(history)),),
    ),
    "a hang is not found": (
        ResumeRule.HANG,
        (Kind.INTERRUPT,),
        ((StepRecord, "stall", nothing),),
    ),
    "a wait is a hang that was as long before": (
        ResumeRule.HANG,
        (Kind.INTERRUPT,),
        ((hang_rule, "learn_limit", lambda _, floor: floor),),
    ),
    "nodes are claimed when the job has them": (
        ResumeRule.CLAIM,
        (),
        ((NodeClaims, "add", nothing),),
    ),
    "a claim is not written": (ResumeRule.CLAIM, (), ((NodeClaims, "_take", nothing),)),
    "claims of others are not read": (
        ResumeRule.CLAIM,
        (),
        ((NodeClaims, "others", lambda _: frozenset()),),
    ),
    "nodes are given back of a job as it was": (
        ResumeRule.CLAIM,
        (),
        ((Allocation, "look", lambda self: self.job.state),),
    ),
    "a node whose slurmd is away is tried again": (
        ResumeRule.LAUNCH,
        (Kind.SLURMD_AWAY,),
        ((evidence, "_silent", lambda *_: {}),),
    ),
    "a node that a person took is replaced": (
        ResumeRule.TAKEN_OUT,
        (Kind.JOB_SHRUNK,),
        ((taken_nodes, "_taken", lambda *_: ()),),
    ),
    "an srun that ends its own step is taken for a person": (
        ResumeRule.STRANGER,
        (Kind.NODE_DIES,),
        ((stderr_reader, "_SRUN_ENDS", rb"srun: (?:[^\n]*Terminating StepId=|error: Aborting, )"),),
    ),
    "a program with a bug is started for ever": (
        ResumeRule.ENDS,
        (Kind.TASK_CRASHES,),
        ENDLESS,
    ),
    "absences count": (
        ResumeRule.ABSENCE,
        ALWAYS_POSSIBLE,
        ((LooksBeside, "absence", lambda *_: 0.0),),
    ),
    "a companion that was requeued is forgotten": (
        ResumeRule.ASKED_TWICE,
        ALWAYS_POSSIBLE,
        ((CompanionRequests, "_is_own", lambda *_: False),),
    ),
    "nodes are asked for again at once": (
        ResumeRule.SNOOZE,
        ALWAYS_POSSIBLE,
        ((SizePlan, "_vacate", ask_again_at_once),),
    ),
    "a person's word for fewer nodes is not heard": (
        ResumeRule.MOST,
        ALWAYS_POSSIBLE,
        ((SizePlan, "_is_wanted", lambda *_: True),),
    ),
    "nodes stay lent after the training": (
        ResumeRule.UNUSED,
        ALWAYS_POSSIBLE,
        ((Growth, "let_end", nothing),),
    ),
    "a companion has seats of the job's own nodes": (
        ResumeRule.CORE,
        ALWAYS_POSSIBLE,
        ((ElasticSize, "ranks", ranks_of_the_core),),
    ),
    "a preempted job ends before Slurm takes it": (
        ResumeRule.PREEMPTED,
        ALWAYS_POSSIBLE,
        ((Recovery, "_wait_to_be_taken", nothing),),
    ),
    "a preempted job is waited for in vain": (
        ResumeRule.PREEMPTED,
        ALWAYS_POSSIBLE,
        ((Allocation, "ends_for_good", lambda _: False),),
    ),
    "a preemption is a person's cancel": (
        ResumeRule.STRANGER,
        ALWAYS_POSSIBLE,
        ((Allocation, "is_preempted", lambda _: False),),
    ),
    "a preemption counts as the program's failure": (
        ResumeRule.PREEMPTED,
        ALWAYS_POSSIBLE,
        ((Ending, "taken_by_slurm", False),),
    ),
    "a person's cancel within the grace time is a preemption": (
        ResumeRule.PERSON,
        (Kind.CANCEL_STEP,),
        ((SrunStep, "only_signalled", True),),
    ),
    "an attempt begins within the grace time": (
        ResumeRule.TAKEN,
        ALWAYS_POSSIBLE,
        ((Allocation, "is_preempted", lambda _: False),),
    ),
    "only one group is asked for": (
        ResumeRule.GROWS,
        ALWAYS_POSSIBLE,
        ((SizePlan, "_may_ask_for", lambda _, group: group.number == 0),),
    ),
}


FIRST_RUNS = {
    "a node that dies after a training is not noticed": 74,
    "a program with a bug does not wait": 35,
    "an srun that ends its own step is taken for a person": 964,
    "words on another step are believed for ever": 79,
    "a node that was left is used again": 44,
    "a person who cancels a living step is not heard": 85,
    "a helper is not given back": 131,
    "observed steps are no progress": 279,
    "an srun without an answer is the program's failure": 462,
    "srun's own end of a step is a person's": 59,
    "a node is named before the program goes on": 476,
    "a program with a bug is started for ever": 6,
    "nodes are claimed when the job has them": 16,
    "a claim is not written": 16,
    "nodes are given back of a job as it was": 6,
    "absences count": 1582,
    "a companion that was requeued is forgotten": 12,
    "a person's word for fewer nodes is not heard": 62,
    "a preemption is a person's cancel": PREEMPTED_SEED,
    "a preemption counts as the program's failure": 442,
    "a person's cancel within the grace time is a preemption": PREEMPTED_SEED + 59,
}
"""The first run that showed a mutation, for those that few runs show."""
FIRST_SEEDS = {
    ResumeRule.COMPANION: PAIR_SEED,
    ResumeRule.CLAIM: SHARED_SEED,
    ResumeRule.ASKED_TWICE: ELASTIC_SEED,
    ResumeRule.SNOOZE: ELASTIC_SEED,
    ResumeRule.MOST: ELASTIC_SEED,
    ResumeRule.UNUSED: ELASTIC_SEED,
    ResumeRule.CORE: ELASTIC_SEED,
    ResumeRule.GROWS: ELASTIC_SEED,
    ResumeRule.PREEMPTED: PREEMPTED_SEED,
    ResumeRule.TAKEN: PREEMPTED_SEED,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_supervisor_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, kinds, patches = MUTATIONS[name]
    for owner, attribute, mutant in patches:
        monkeypatch.setattr(owner, attribute, mutant)
    first = FIRST_SEEDS.get(rule, 0)
    first += FIRST_RUNS.get(name, 0)
    assert rule in (broken(first + seed, kinds) for seed in range(MOST_RUNS))


def test_elastic_steps_grow_and_shrink() -> None:
    runs = [simulate_resume(ELASTIC_SEED + seed) for seed in range(ELASTIC_RUNS)]
    assert sum(run.grown for run in runs) > 5 * ELASTIC_RUNS


def test_preempted_jobs_run_again() -> None:
    runs = [simulate_resume(PREEMPTED_SEED + seed) for seed in range(PREEMPTED_RUNS)]
    assert sum(run.job_runs for run in runs) > 1.2 * PREEMPTED_RUNS


def test_companions_are_among_the_runs() -> None:
    runs = [simulate_resume(COMPANION_SEED + seed) for seed in range(20)]
    assert sum(run.companions for run in runs) > 5


def test_sruns_that_share_a_job_take_no_node_twice() -> None:
    runs = [simulate_resume(SHARED_SEED + seed) for seed in range(SHARED_RUNS)]
    assert sum(run.attempts for run in runs) > 3 * SHARED_RUNS
    assert sum(run.joins for run in runs) > SHARED_RUNS // 3


def test_every_rule_can_be_broken() -> None:
    assert {rule for rule, _, _ in MUTATIONS.values()} == set(ResumeRule)
    assert FIRST_RUNS.keys() <= MUTATIONS.keys()


def test_figures_go_on_where_they_stopped(tmp_path: Path) -> None:
    file, ticks = tmp_path / "figures.json", iter(range(100))
    run = RESUME_CAMPAIGN.go_on
    assert run(7, 3, file=file, clock=lambda: next(ticks)).resume_runs == 3
    both = run(7, 5, file=file, clock=lambda: next(ticks))
    at_once = run(7, 5, clock=lambda: next(ticks))
    assert (both.resume_runs, both.resume_violations) == (5, 0)
    assert both.resume_kinds == at_once.resume_kinds
    assert both.resume_attempts == at_once.resume_attempts
    with pytest.raises(UsageError, match="--seed 7"):
        RESUME_CAMPAIGN.load(file, 8)
    file.write_text("{")
    with pytest.raises(UsageError, match="no figures"):
        RESUME_CAMPAIGN.load(file, 7)


def test_a_violation_is_counted_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor.Supervisor, "_last_code", lambda *_: 0)
    words = ["--only", "resume"]
    found = CliRunner().invoke(command, [*words, "--runs", "60"], standalone_mode=False)
    assert "runs broke a rule" in str(found.exception)
    seed = str(found.exception).split("--seed ")[1].split()[0]
    replayed = CliRunner().invoke(command, [*words, "--seed", seed, "--trace"])
    assert "a rule was broken" in replayed.output


SHRUNK_RUNS = 60


def test_no_node_is_got_in_place_of_one_that_a_person_took_out_of_the_job() -> None:
    for seed in range(SHRUNK_RUNS):
        simulate_resume(seed, kinds=(Kind.JOB_SHRUNK,))


SHRUNK_EARLY, SHRUNK_SOON = (501162, 510513, 512624, 540483), (501182, 550768)
"""Seeds in which a person took a node out before its tasks began; and several within seconds."""


@pytest.mark.parametrize("seed", [*SHRUNK_EARLY, *SHRUNK_SOON])
def test_a_node_that_a_person_takes_at_a_bad_moment_stays_out(seed: int) -> None:
    assert broken(seed, (Kind.JOB_SHRUNK,)) == ""
