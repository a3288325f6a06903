"""A signal that ended a step is the user's, unless Slurm has ended the job."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from worlds import FakeClock

from slurm_resilience.clock import SYSTEM_CLOCK, SystemClock
from slurm_resilience.config import ResumeSettings
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.model import Job
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.allocation import Allocation, Companion
from slurm_resilience.resume.decide.classify import Cause, Ending, classify
from slurm_resilience.resume.decide.signatures import Category
from slurm_resilience.resume.decide.task_ends import TaskEnd
from slurm_resilience.resume.evidence import NAME_SECONDS, gather_evidence, hear_cancels
from slurm_resilience.resume.live_step.live_steps import EndWord, StepEnd
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.stderr_reader import EndedTasks
from slurm_resilience.resume.srun.step import ToldEnd
from slurm_resilience.resume.srun.task_reports import StepReports
from slurm_resilience.slurm.companion_job import CompanionRequest
from slurm_resilience.slurm.slurmd_port import PortsSeen
from slurm_resilience.wire.messages import NodeVerdict


class CheckedNodes:
    """A link to a sresctld whose nodes check themselves when they are asked."""

    def __init__(self, takes: float, sick: str = "") -> None:
        """
        Args:
            takes: seconds until all have answered.
            sick: a node that finds a fault.
        """
        self.clock = FakeClock()
        self._ends = self.clock.monotonic() + takes
        self._sick = sick
        self.asked: list[tuple[tuple[str, ...], float]] = []

    def ask_checks(self, nodes: tuple[str, ...], seconds: float) -> None:
        self.asked.append((nodes, seconds))

    @property
    def checks_run(self) -> bool:
        return bool(self.asked) and self.clock.monotonic() < self._ends

    def faulty(self) -> dict[str, NodeVerdict]:
        if not self._sick or not self.asked or self.clock.monotonic() < self._ends:
            return {}
        return {self._sick: NodeVerdict(self._sick, "sick", "an EFA port is down")}


def cause(slurm: FakeSlurm, allocation: Allocation, signal: str) -> Cause:
    return ending(slurm, allocation, signal, 143)


def ending(
    slurm: FakeSlurm,
    allocation: Allocation,
    signal: str,
    code: int,
    *,
    ends: tuple[TaskEnd, ...] = (),
    cancelled: bool = False,
    aborted: bool = False,
    words: tuple[str, ...] = ("train",),
    **more: Any,
) -> Cause:
    return classify(
        gathered(slurm, allocation, signal, code, ends, cancelled, aborted, words, more)
    )


def gathered(
    slurm: FakeSlurm,
    allocation: Allocation,
    signal: str,
    code: int,
    ends: tuple[TaskEnd, ...],
    cancelled: bool,
    aborted: bool,
    words: tuple[str, ...],
    more: dict[str, Any],
    site: CheckedNodes | None = None,
) -> Ending:
    for part in more.get("parts", ()):
        vars(part).setdefault("failed_launches", {})
    ports = more.pop("ports", (frozenset(), frozenset()))
    reports = StepReports("")
    for end in ends:
        reports.take(end)
    step: Any = SimpleNamespace(
        job=0,
        ran_for=9.0,
        ended_at=SYSTEM_CLOCK.monotonic() - 100.0,
        told_end=ToldEnd(cancelled, aborted),
        failed_nodes=frozenset(more.pop("failed_nodes", ())),
        only_signalled=more.pop("only_signalled", False),
        timed_out=False,
        ended_tasks=[],
        was_answered=more.pop("was_answered", True),
        refused=more.pop("refused", ""),
        failed_launches=dict.fromkeys(more.pop("failed_launches", ()), "Connection failure"),
        had_threads=more.pop("had_threads", True),
        reports=reports,
        log=SimpleNamespace(explain=lambda: None),
    )
    context: Any = SimpleNamespace(
        allocation=allocation,
        client=slurm,
        host_calls=SimpleNamespace(look_at_ports=lambda nodes: PortsSeen(*ports)),
        link=site
        or SimpleNamespace(
            faulty=dict, ask=lambda nodes: None, checks_run=False, doubts=lambda nodes: {}
        ),
        user_ended=lambda step, stopped: signal,
        clock=site.clock if site else SYSTEM_CLOCK,
        wake=Event(),
        command=split(list(words), BUILTIN),
        environment={},
        limits=ResumeSettings() if site else ResumeSettings(diagnosis_wait=0.0, check_wait=0.0),
    )
    fence: Any = SimpleNamespace(progress=lambda: -1)
    ended_well = bool(more.pop("ended_well", False))
    step_end = StepEnd(code, step, **more)
    return gather_evidence(context, fence, step_end, allocation.nodes, -1, ended_well=ended_well)


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm(4)


def allocated(slurm: FakeSlurm) -> Allocation:
    job = slurm.job(slurm.submit(2))
    return Allocation(slurm, job, Event(), patience=0.0, permits_expansion=True)


def companion_of(slurm: FakeSlurm, job: Job) -> int:
    """Return the number of a second allocation beside a job."""
    return slurm.ask_companion(CompanionRequest(job, 1, supervisor=0))


def test_an_srun_that_got_no_step_tells_why(slurm: FakeSlurm) -> None:
    cause = ending(slurm, allocated(slurm), "", 1, refused="Requested nodes are busy")
    assert cause.reason == "srun got no step from Slurm: Requested nodes are busy"
    assert (cause.kind, cause.nodes) == ("program", ())


def test_an_srun_that_slurmctld_did_not_answer_has_not_failed(slurm: FakeSlurm) -> None:
    cause = ending(slurm, allocated(slurm), "", 1, was_answered=False)
    assert (cause.kind, cause.category) == ("program", Category.TRANSIENT)
    assert cause.reason == "slurmctld did not answer srun for 9 s, which began no task"
    assert ending(slurm, allocated(slurm), "SIGTERM", 1, was_answered=False).kind == "user"


@pytest.mark.parametrize(("nodes", "named"), [(("n2",), "n2"), (("n2", "n1"), "")])
def test_an_srun_that_could_not_reach_a_node_has_not_failed(
    slurm: FakeSlurm, nodes: tuple[str, ...], named: str
) -> None:
    """slurmd is away there, and sresd, if any, finds no fault."""
    others = TaskEnd(0, 0, 0, 137, by_signal=True, node="n1")
    more: dict[str, Any] = {"failed_launches": nodes}
    found = gathered(slurm, allocated(slurm), "", 233, (others,), False, False, ("train",), more)
    assert (found.first_failed, found.never_began, found.silent) == (named, True, {})
    cause = classify(found)
    assert (cause.kind, cause.category) == ("program", Category.TRANSIENT)
    listed = "n2" if named else "n[1-2]"
    assert cause.reason == f"srun could start no task on {listed}: Connection failure"


def test_a_node_of_a_failed_launch_that_does_not_answer_is_told_of(slurm: FakeSlurm) -> None:
    ports = frozenset({"n1"}), frozenset({"n2"})
    more: dict[str, Any] = {"failed_launches": ("n2",), "ports": ports}
    found = gathered(slurm, allocated(slurm), "", 233, (), False, False, ("train",), more)
    assert found.silent == {"n2": "its slurmd takes no connection"}
    assert classify(found).kind == "program"


def test_an_srun_that_got_no_thread_has_not_failed(slurm: FakeSlurm) -> None:
    """It was called a bug of the program: what an attempt left on the node was just being ended."""
    cause = ending(slurm, allocated(slurm), "", 1, had_threads=False)
    assert (cause.kind, cause.category) == ("program", Category.TRANSIENT)
    assert cause.reason == "srun could start no thread (ulimit -u, or memory), and began no task"


def test_a_users_sigterm_is_the_users(slurm: FakeSlurm) -> None:
    assert cause(slurm, allocated(slurm), "SIGTERM").kind == "user"


def test_a_job_in_its_grace_time_was_ended_by_no_person(slurm: FakeSlurm) -> None:
    """It looks like a step that a person has signalled; Slurm tells of the job."""
    job = allocated(slurm)
    signalled = ending(slurm, job, "", 143, cancelled=True, only_signalled=True)
    slurm.preempted.add(job.id)
    preempted = ending(slurm, job, "", 143, cancelled=True, only_signalled=True)
    ended = ending(slurm, job, "", 137, cancelled=True)
    assert signalled.kind == ended.kind == "user"
    assert (preempted.kind, preempted.category) == ("job_over", Category.TRANSIENT)
    assert "Slurm preempts the job" in preempted.reason


def test_tasks_that_fail_in_the_grace_time_have_not_failed(slurm: FakeSlurm) -> None:
    """Slurm's word on it was lost, or a program saved its work and ended with 0."""
    job = allocated(slurm)
    slurm.preempted.add(job.id)
    failed = gathered(slurm, job, "", 1, (EXIT,), False, False, ("train",), {})
    assert classify(failed).kind == "job_over" and failed.taken_by_slurm
    left = ending(slurm, job, "", 0, cancelled=True, only_signalled=True)
    assert left.kind == "job_over"
    assert ending(slurm, job, "", 0).kind == "done", "Slurm did not tell its tasks to end"


def test_slurm_may_take_a_job_while_it_is_asked(slurm: FakeSlurm) -> None:
    job = allocated(slurm)
    slurm.before["is_preempted"] = lambda: slurm.requeue(job.id)
    assert ending(slurm, job, "", 143, cancelled=True, only_signalled=True).kind == "job_over"


def test_a_slurm_that_preempts_no_job_is_not_asked(slurm: FakeSlurm) -> None:
    job = slurm.job(slurm.submit(2))
    kept = Allocation(slurm, job, Event(), patience=0.0, permits_expansion=True, preempts=False)
    slurm.before["is_preempted"] = lambda: pytest.fail("Slurm was asked")
    assert ending(slurm, kept, "", 3, ends=(EXIT,)).kind == "program"


@pytest.mark.parametrize(
    ("word", "kind"), [(EndWord.SIGNALLED, "job_over"), (EndWord.PERSON, "user")]
)
def test_a_living_step_in_its_grace_time(slurm: FakeSlurm, word: EndWord, kind: str) -> None:
    job = allocated(slurm)
    slurm.preempted.add(job.id)
    words: dict[str, Any] = {"ends": (SEGFAULT,), "cancelled": True, "only_signalled": True}
    assert ending(slurm, job, "", 143, word=word, **words).kind == kind


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGHUP"])
def test_a_requeued_job_was_not_ended_by_its_user(slurm: FakeSlurm, signal: str) -> None:
    allocation = allocated(slurm)
    slurm.requeue(allocation.id)
    seen = cause(slurm, allocation, signal)
    assert (seen.kind, "user" in seen.reason) == ("job_over", False)


def test_a_job_that_slurm_requeued_for_a_node_has_lost_it(slurm: FakeSlurm) -> None:
    """No mark of sresctld tells of a node that a person has set DOWN, but srun does."""
    allocation = allocated(slurm)
    slurm.requeue(allocation.id)
    seen = ending(slurm, allocation, "SIGTERM", 143, failed_nodes=("n2",))
    assert (seen.kind, seen.category) == ("job_over", Category.HARDWARE)
    assert seen.reason.endswith("; n2: Slurm gave the node up")


def test_ctrl_c_does_not_wait_for_slurm(slurm: FakeSlurm) -> None:
    allocation = allocated(slurm)
    slurm.before["job"] = lambda: pytest.fail("Slurm was asked")
    assert cause(slurm, allocation, "SIGINT twice").kind == "user"


def test_while_slurm_does_not_answer_the_signal_counts(slurm: FakeSlurm) -> None:
    allocation = allocated(slurm)
    slurm.refusals["job"] = SlurmUnreachable("no answer")
    assert cause(slurm, allocation, "SIGTERM").kind == "user"


EXIT = TaskEnd(0, 0, 3, 5)
SEGFAULT = TaskEnd(0, 0, 3, 139, by_signal=True)
TERMINATED = TaskEnd(0, 0, 3, 143, by_signal=True)


@pytest.mark.parametrize(
    ("end", "seen", "kind"),
    [
        # Slurm names the step; a task may well end with a code of its own at its SIGTERM.
        (TERMINATED, "cancelled", "user"),
        (EXIT, "cancelled", "user"),
        (SEGFAULT, "cancelled", "program"),
        # These words do not name a step: any program may print them.
        (TERMINATED, "aborted", "user"),
        (EXIT, "aborted", "program"),
        (SEGFAULT, "aborted", "program"),
    ],
)
def test_what_is_printed_does_not_beat_how_tasks_ended(
    slurm: FakeSlurm, end: TaskEnd, seen: str, kind: str
) -> None:
    words: dict[str, Any] = {"cancelled": seen == "cancelled", "aborted": seen == "aborted"}
    assert ending(slurm, allocated(slurm), "", 1, ends=(end,), **words).kind == kind


def test_a_task_that_failed_is_named(slurm: FakeSlurm) -> None:
    ends = (TaskEnd(0, 0, 0, 143, by_signal=True), EXIT)
    cause = ending(slurm, allocated(slurm), "", 143, ends=ends)
    assert cause.reason == "task 3 ended with exit code 5 after 9 s"


def test_a_crash_on_the_way_out_of_a_cancelled_step_is_no_fault(slurm: FakeSlurm) -> None:
    killed = TaskEnd(0, 0, 0, 137, by_signal=True)
    job = allocated(slurm)
    assert ending(slurm, job, "", 139, ends=(killed, SEGFAULT), cancelled=True).kind == "user"
    assert ending(slurm, job, "", 139, ends=(SEGFAULT, killed), cancelled=True).kind == "program"


def test_a_task_that_fails_for_want_of_the_cancelled_ones_is_no_fault(slurm: FakeSlurm) -> None:
    """slurmstepd's own line is sometimes lost; srun's comes."""
    killed = TaskEnd(0, 0, 0, 137, by_signal=True)
    job = allocated(slurm)
    assert ending(slurm, job, "", 137, ends=(killed, EXIT), aborted=True).kind == "user"
    assert ending(slurm, job, "", 137, ends=(EXIT, killed), aborted=True).kind == "program"


def test_srun_s_word_counts_once_others_are_killed_after_it(slurm: FakeSlurm) -> None:
    """A task failed long ago, and the others waited for it until a person cancelled them."""
    for told, kind in ((ToldEnd(False, True, 1), "user"), (ToldEnd(False, True), "program")):
        words: Any = {"told_end": told, "timed_out": False, "only_signalled": False}
        step: Any = SimpleNamespace(job=0, failed_nodes={}, **words)
        found = ending(slurm, allocated(slurm), "", 137, ends=(EXIT,), parts=(step,))
        assert found.kind == kind


KILLED, EXITED = "Killed", "Exited with exit code 5"


@pytest.mark.parametrize(
    ("code", "told", "kind"),
    [
        # It waited for a lost node: no task was there to be killed.
        (137, (), "user"),
        (137, (KILLED,), "user"),
        # A program's own words: its task failed, or ended well after them.
        (5, (KILLED, EXITED), "program"),
        (0, (), "program"),
    ],
)
def test_a_failure_in_one_part_hides_no_cancel_of_another(
    slurm: FakeSlurm, code: int, told: tuple[str, ...], kind: str
) -> None:
    """slurmstepd's own line is lost with the first node of the part."""
    job, silent = allocated(slurm), ToldEnd(False, False)
    ended = [EndedTasks(("n1",), (0,), how) for how in told]
    words: dict[str, Any] = {"job": 0, "timed_out": False, "only_signalled": False}
    words["failed_nodes"] = {}
    main: Any = SimpleNamespace(
        told_end=ToldEnd(False, True), code=code, ended_tasks=ended, **words
    )
    other: Any = SimpleNamespace(told_end=silent, code=5, ended_tasks=[], **words)
    assert ending(slurm, job, "", 5, ends=(EXIT,), parts=(main, other)).kind == kind


def test_a_living_step_s_old_crash_says_nothing_of_its_cancel(slurm: FakeSlurm) -> None:
    """Its seat was filled again long before."""
    killed = TaskEnd(0, 0, 0, 137, by_signal=True)
    words: dict[str, Any] = {"ends": (SEGFAULT, killed), "cancelled": True}
    assert ending(slurm, allocated(slurm), "", 139, word=EndWord.PERSON, **words).kind == "user"


@pytest.mark.parametrize("stopped_by_us", [False, True])
@pytest.mark.parametrize("word", ["cancelled", "aborted"])
def test_a_person_who_cancels_as_a_node_dies_wins(
    slurm: FakeSlurm, word: str, stopped_by_us: bool
) -> None:
    told: dict[str, Any] = {word: True}
    by_node: dict[str, Any] = {"faulty": {"n2": "no beat"}, "stopped_by_us": stopped_by_us}
    job = allocated(slurm)
    assert ending(slurm, job, "", 137, **told, **by_node).kind == "user"
    assert ending(slurm, job, "", 137, **by_node).kind == "node"


def test_the_end_of_a_companion_hides_no_word_on_another_part(slurm: FakeSlurm) -> None:
    """Slurm words it as a person's cancel, and its own line on the main step may be lost."""
    job = allocated(slurm)
    companion = companion_of(slurm, job.job)
    main: Any = SimpleNamespace(
        job=0, told_end=ToldEnd(False, True), timed_out=False, only_signalled=False
    )
    other: Any = SimpleNamespace(
        job=companion,
        told_end=ToldEnd(True, False),
        timed_out=False,
        job_outlives_it=False,
        only_signalled=False,
    )
    by_node: dict[str, Any] = {"faulty": {"n4": "no beat"}}
    assert ending(slurm, job, "", 137, parts=(other,), **by_node).kind == "user"
    slurm.cancel_job(companion)
    assert ending(slurm, job, "", 137, parts=(other,), **by_node).kind == "node"
    assert ending(slurm, job, "", 137, parts=(other, main), **by_node).kind == "user"


def test_the_end_of_a_companion_is_asked_for_when_slurm_answers_again(slurm: FakeSlurm) -> None:
    class Back(SystemClock):
        """slurmctld is back after the first wait for it."""

        def wait(self, event: Event, seconds: float) -> bool:
            slurm.refusals.clear()
            return False

    job = slurm.job(slurm.submit(2))
    companion = companion_of(slurm, job)
    slurm.cancel_job(companion)
    slurm.refusals["job"] = SlurmUnreachable("no answer")
    part: Any = SimpleNamespace(
        job=companion,
        told_end=ToldEnd(True, False),
        timed_out=False,
        job_outlives_it=False,
        only_signalled=False,
    )
    patient = Allocation(slurm, job, Event(), patience=9.0, permits_expansion=True, clock=Back())
    assert ending(slurm, patient, "", 137, parts=(part,), faulty={"n4": "x"}).kind == "node"


def test_a_wait_for_slurms_word_on_a_companion_is_told(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(report, "say", lines.append)
    job = slurm.job(slurm.submit(2))
    companion = companion_of(slurm, job)
    slurm.refusals["job"] = SlurmUnreachable("no answer")
    clock = FakeClock()
    patient = Allocation(slurm, job, Event(), patience=150.0, permits_expansion=True, clock=clock)
    assert not patient.is_over(companion)
    assert [line.partition(": ")[0] for line in lines] == ["waiting for slurmctld"] * 3


def test_a_companion_that_ended_unused_is_no_nodes_fault(slurm: FakeSlurm) -> None:
    job = allocated(slurm)
    number = companion_of(slurm, job.job)
    companion = Companion(number, slurm.job(number).nodes)
    own = EndedTasks(companion.nodes, (1,), "Exited with exit code 3")
    words: dict[str, Any] = {"job": number, "timed_out": False, "told_end": ToldEnd(False, False)}
    words |= {"job_outlives_it": False, "only_signalled": False, "code": 3, "ended_tasks": [own]}
    part: Any = SimpleNamespace(**words, failed_nodes=set(), ended_by_itself=True)
    job.companions.held = [companion]
    assert ending(slurm, job, "", 3, parts=(part,)).kind == "program"
    assert job.companions.held == [companion]  # it runs
    slurm.cancel_job(number)
    assert ending(slurm, job, "", 3, parts=(part,)).kind == "program"
    assert job.companions.held == []


def test_words_that_have_lapsed_do_not_hide_the_end_of_a_companion(slurm: FakeSlurm) -> None:
    """They were another step's: a task may print what its own srun says."""
    job = allocated(slurm)
    companion = companion_of(slurm, job.job)
    part: Any = SimpleNamespace(
        job=companion,
        told_end=ToldEnd(False, True),
        timed_out=False,
        job_outlives_it=False,
        only_signalled=False,
    )
    context: Any = SimpleNamespace(allocation=job)
    hear_cancels(context, [part])
    assert part.job_outlives_it
    part.told_end = ToldEnd(False, False)
    hear_cancels(context, [part])
    assert not part.job_outlives_it


@pytest.mark.parametrize("told", [ToldEnd(True, False), ToldEnd(False, True)])
def test_a_companion_that_ends_after_its_cancelled_step_hides_no_cancel(
    slurm: FakeSlurm, told: ToldEnd
) -> None:
    """The node for which its part waited is given up in the end."""
    job = allocated(slurm)
    companion = companion_of(slurm, job.job)
    step: Any = SimpleNamespace(
        job=companion,
        told_end=ToldEnd(False, False),
        timed_out=False,
        job_outlives_it=False,
        only_signalled=False,
    )
    context: Any = SimpleNamespace(allocation=job)
    hear_cancels(context, [step])
    assert not step.job_outlives_it
    step.told_end = told
    slurm.refusals["job"] = SlurmUnreachable("no answer")
    hear_cancels(context, [step])
    assert not step.job_outlives_it
    slurm.refusals.clear()
    hear_cancels(context, [step])
    slurm.cancel_job(companion)
    hear_cancels(context, [step])
    found = ending(slurm, job, "", 137, parts=(step,), faulty={"n4": "no beat"})
    assert found.kind == "user"


def test_a_companion_that_slurm_begins_to_preempt_is_no_persons_cancel(slurm: FakeSlurm) -> None:
    """Its step gets SIGTERM, and it runs until its GraceTime is over; no person ended the job."""
    job = allocated(slurm)
    companion = companion_of(slurm, job.job)
    words: dict[str, Any] = {"job": companion, "timed_out": False, "job_outlives_it": False}
    step: Any = SimpleNamespace(**words, told_end=ToldEnd(True, False), only_signalled=True)
    context: Any = SimpleNamespace(allocation=job)
    hear_cancels(context, [step])
    assert not step.job_outlives_it
    assert ending(slurm, job, "", 143, parts=(step,), faulty={"n4": "preempted"}).kind == "node"
    # It is ended after all, by a person.
    step.told_end, step.only_signalled = ToldEnd(True, True), False
    hear_cancels(context, [step])
    assert step.job_outlives_it
    assert ending(slurm, job, "", 143, parts=(step,), faulty={"n4": "preempted"}).kind == "user"


@pytest.mark.parametrize(
    ("words", "later", "after"),
    [
        ((), 4.0, 4.0),
        ((), -7200.0, 9.0),
        ((), 7200.0, 9.0),
        # The others went on without it.
        (("sres-run",), 4.0, 9.0),
    ],
)
def test_the_first_failure_tells_how_long_a_program_lasted(
    slurm: FakeSlurm, words: tuple[str, ...], later: float, after: float
) -> None:
    """By the clock of its node, which may be wrong; a diagnosis may have taken long since."""
    began = SYSTEM_CLOCK.now() - 109.0
    ends = (TaskEnd(0, 0, 1, 0, at=began + 1.0), TaskEnd(0, 0, 0, 3, at=began + later))
    found = gathered(slurm, allocated(slurm), "", 3, ends, False, False, (*words, "train"), {})
    assert found.lasted == pytest.approx(after, abs=2.0)


def checked(slurm: FakeSlurm, site: CheckedNodes) -> tuple[Ending, float]:
    """Return the end of a step that failed by itself, and the seconds until it was known."""
    began = site.clock.monotonic()
    found = gathered(slurm, allocated(slurm), "", 1, (), False, False, ("train",), {}, site)
    return found, site.clock.monotonic() - began


def test_a_fault_that_only_a_check_finds_is_the_cause(slurm: FakeSlurm) -> None:
    site = CheckedNodes(takes=3.0, sick="n2")
    found, took = checked(slurm, site)
    assert site.asked == [(("n1", "n2"), 5.0)]
    cause = classify(found)
    assert (cause.kind, cause.nodes) == ("node", ("n2",))
    assert cause.reason == "n2: an EFA port is down"
    assert took == 3.0


def test_a_marked_node_is_named_by_the_fault_that_it_was_marked_for(slurm: FakeSlurm) -> None:
    """Slurm shows it a moment before sresctld tells."""
    site = CheckedNodes(takes=0.4, sick="n2")
    job = allocated(slurm)
    slurm.set_node(["n2"], state="fail", reason="Action:Reboot")
    found = gathered(slurm, job, "", 1, (), False, False, ("train",), {}, site)
    assert classify(found).reason == "n2: an EFA port is down"
    # It is not waited for when it does not come.
    late, began = CheckedNodes(takes=3600.0, sick="n2"), FakeClock().monotonic()
    found = gathered(slurm, job, "", 1, (), False, False, ("train",), {}, late)
    assert "Action:Reboot" in classify(found).reason
    assert late.clock.monotonic() - began == NAME_SECONDS


@pytest.mark.parametrize(("takes", "waited"), [(0.2, 1.0), (3.0, 3.0), (3600.0, 5.0)])
def test_checks_delay_a_recovery_by_no_more_than_they_take_and_by_no_more_than_the_limit(
    slurm: FakeSlurm, takes: float, waited: float
) -> None:
    found, took = checked(slurm, CheckedNodes(takes))
    assert classify(found).kind == "program"
    assert took == waited


@pytest.mark.parametrize("stopped_by_us", [False, True], ids=["by Slurm", "by us"])
def test_a_node_that_is_lost_after_all_of_its_tasks_ended_well_is_no_failure(
    slurm: FakeSlurm, stopped_by_us: bool
) -> None:
    """srun waits for it, or is released with a code of its own."""
    lost: dict[str, Any] = {"faulty": {"n2": "no beat"}, "stopped_by_us": stopped_by_us}
    job = allocated(slurm)
    assert ending(slurm, job, "", 137, **lost, ended_well=True).kind == "done"
    assert ending(slurm, job, "", 137, **lost).kind == "node"
    assert ending(slurm, job, "", 1, ended_well=True).kind == "program", "srun's own failure"
