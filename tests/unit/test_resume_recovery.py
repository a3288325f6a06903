"""A recovery waits where its plan says so, and asks for nothing once the job is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.config import ResumeSettings
from slurm_resilience.errors import SlurmError, SlurmUnreachable
from slurm_resilience.resume import recovery as recovery_module
from slurm_resilience.resume.allocation.claims import NodeClaims
from slurm_resilience.resume.allocation.requeue import requeue
from slurm_resilience.resume.decide.classify import Cause, Ending
from slurm_resilience.resume.decide.plan import Plan
from slurm_resilience.resume.recovery import Recovery
from slurm_resilience.slurm.client import ClusterInfo

PAUSED = Plan("relaunch", "again", pause=20.0, avoid=("n2",))


class Job:
    """A job whose state changes when the supervisor waits."""

    own_nodes = ("n1", "n2")

    def __init__(self, state: str = "RUNNING") -> None:
        self.id, self.state, self.waited = 7, state, 0.0
        self.job = SimpleNamespace(is_batch=True, requeue=True, state=state)
        self.user_stop = threading.Event()
        self.claims = NodeClaims((7, 0), SYSTEM_CLOCK, self.user_stop)
        self.suspects: set[str] = set()
        self.left_nodes: set[str] = set()
        self.patience = 60.0
        self.version, self.preempted = "22.05.8", False
        self.asked: list[str] = []
        self.while_waiting: Callable[[], None] = lambda: None
        self.clock = self
        self.client: Any = SimpleNamespace(requeue=lambda job: self.asked.append("slurm"))

    def refresh(self) -> str:
        self.job.state = self.state
        return self.state

    def state_now(self) -> str:
        return self.state

    def is_preempted(self) -> bool:
        return self.preempted

    def ends_for_good(self) -> bool:
        info = ClusterInfo("c", self.version, ("ctl",), 6817, 0, "", "", "", {})
        return not info.requeues_after_grace

    def monotonic(self) -> float:
        return self.waited

    now = monotonic

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.waited += seconds
        self.while_waiting()
        return event.is_set()


def recovery_of(job: Job) -> Recovery:
    context: Any = SimpleNamespace(allocation=job, clock=job)
    return Recovery(context, 2)


def pauses_in_vain(job: Job, chosen: Plan = PAUSED) -> bool:
    return recovery_of(job)._pauses_in_vain(chosen)


def test_a_pause_is_told_and_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job()
    assert not pauses_in_vain(job)
    assert (job.waited, job.suspects) == (20.0, {"n2"})
    assert "waiting for 20 s before the next attempt" in capfd.readouterr().err
    assert not pauses_in_vain(job, Plan("relaunch", "again"))
    assert job.waited == 20.0


def test_a_job_that_is_suspended_meanwhile_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job()
    job.while_waiting = lambda: setattr(job, "state", "SUSPENDED")
    assert not pauses_in_vain(job)


@pytest.mark.parametrize("by_user", [True, False])
def test_nothing_follows_a_pause_in_which_it_ended(
    by_user: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job()
    job.while_waiting = job.user_stop.set if by_user else lambda: setattr(job, "state", "TIMEOUT")
    assert pauses_in_vain(job)
    assert ("the job is over" in capfd.readouterr().err) is not by_user


@pytest.mark.parametrize(
    ("state", "stopped", "requeue", "taken_back"),
    [
        ("COMPLETING", False, True, True),
        ("COMPLETING", True, True, True),
        ("", True, True, True),
        ("COMPLETING", True, False, False),
        ("RUNNING", True, True, False),
        ("RUNNING", False, True, False),
    ],
)
def test_a_job_that_ends_in_a_pause_may_come_back(
    state: str,
    stopped: bool,
    requeue: bool,
    taken_back: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Slurm's own SIGTERM may be heard before the pause is over; so may a person's."""
    job = Job(state)
    job.job.requeue = requeue
    if stopped:
        job.user_stop.set()
    recovery = recovery_of(job)
    recovery._pauses_in_vain(PAUSED)
    assert recovery.is_taken_back() is taken_back


@pytest.mark.parametrize("may", [True, False])
def test_a_preempted_job_is_kept_until_slurm_takes_it(
    may: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ended within its GraceTime, and Slurm did not start it again."""
    released: list[Any] = []
    monkeypatch.setattr("slurm_resilience.resume.recovery.companion.release_all", released.append)
    job = Job()
    job.job = SimpleNamespace(may_be_requeued=may, state="RUNNING")

    def wait() -> None:
        job.state = "RUNNING" if job.waited < 100.0 else "COMPLETING"

    job.while_waiting = wait
    preempted: Any = SimpleNamespace(preempted=True)
    recovery_of(job)._wait_to_be_taken(preempted)
    assert job.waited == (100.0 if may else 0.0) and bool(released) is may
    said = capfd.readouterr().err
    assert ("stays until it takes the nodes" in said) is may
    assert said.count("Slurm has not taken the nodes yet") == int(may)
    if may:
        job.job.is_batch = job.job.requeue = True
        recovery = recovery_of(job)
        recovery._wait_to_be_taken(preempted)
        assert recovery.is_taken_back()
        job.waited, job.version = 0.0, "24.11.5"
        recovery_of(job)._wait_to_be_taken(preempted)
        assert not job.waited, "this Slurm requeues it in any case"


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5"])
def test_no_attempt_begins_on_nodes_that_slurm_is_about_to_take(
    release: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A node had died, and Slurm began to preempt the job while another one was waited for."""
    monkeypatch.setattr("slurm_resilience.resume.recovery.companion.release_all", lambda _: None)
    job = Job()
    job.version, job.job.may_be_requeued = release, True

    def obtained() -> None:
        job.waited += 60.0
        job.preempted = True

    def wait() -> None:
        job.state = "RUNNING" if job.waited < 90.0 else "COMPLETING"

    job.while_waiting = wait
    tried, following = planned_again(job, monkeypatch, obtained)
    assert (len(tried), following) == (1, None)
    assert job.waited == (60.0 if release == "24.11.5" else 90.0), "it stays, or Slurm requeues it"
    assert "not resumed here: Slurm preempts the job" in capfd.readouterr().err


@pytest.mark.parametrize(("state", "asked"), [("RUNNING", ["slurm"]), ("CANCELLED", []), ("", [])])
def test_a_job_that_was_just_cancelled_is_not_requeued(
    state: str, asked: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm would take the order, and run it again."""
    job: Any = Job(state)
    link: Any = SimpleNamespace(connected=threading.Event(), refusal="")
    requeue(job, link, threading.Event(), "n2: dead", 60.0)
    assert job.asked == asked
    told = "scontrol update jobid=7 StartTime=now starts it at once, given by its owner when"
    assert (told in capfd.readouterr().err) is bool(asked)


class AwaySlurm:
    """slurmctld is away for so many orders; it carries the last of them out all the same."""

    def __init__(self, job: Job, away: int, *, takes_order: bool = False) -> None:
        self._job, self._away, self._takes_order = job, away, takes_order

    def requeue(self, number: int) -> None:
        self._job.asked.append("slurm")
        if self._away:
            self._away -= 1
            if self._takes_order and not self._away:
                self._job.state = "COMPLETING"
            raise SlurmUnreachable("scontrol requeue gave no answer within 20 s")


def requeue_by(job: Any, slurm: AwaySlurm) -> None:
    job.client = slurm
    link: Any = SimpleNamespace(connected=threading.Event(), refusal="")
    requeue(job, link, threading.Event(), "n2: dead", 60.0)


@pytest.mark.parametrize("takes_order", [False, True])
def test_a_requeue_waits_for_slurmctld(
    takes_order: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """One order is carried out: an answer that is lost says nothing of its order."""
    job = Job()
    requeue_by(job, AwaySlurm(job, 3, takes_order=takes_order))
    assert job.asked == ["slurm"] * (3 if takes_order else 4)
    assert "waiting for slurmctld: scontrol requeue" in capfd.readouterr().err


def test_a_requeue_is_given_up_after_the_patience() -> None:
    job = Job()
    with pytest.raises(SlurmUnreachable):
        requeue_by(job, AwaySlurm(job, 10**6))
    assert job.waited == pytest.approx(60.0, abs=5)


def test_who_ends_it_meanwhile_has_nothing_requeued() -> None:
    """So does Slurm, where it was the order that it took."""
    job = Job()
    job.while_waiting = job.user_stop.set
    requeue_by(job, AwaySlurm(job, 10**6))
    assert job.asked == ["slurm"]


def planned_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, obtained: Callable[[], None] | None = None
) -> tuple[list[str], Any]:
    """Return the states in which an exchange was tried, and what followed. Slurm refuses to change
    a suspended job."""
    tried: list[str] = []

    def obtain(*_: object) -> tuple[tuple[str, ...], str] | None:
        tried.append(job.state)
        if obtained is not None:
            obtained()
        elif len(tried) == 1 or job.state == "SUSPENDED":
            job.state = "SUSPENDED"
            raise SlurmError("Job is current suspended, requested operation disabled")
        return ("n1", "n3"), "n2 exchanged for n3"

    quiet = SimpleNamespace(send=lambda _: None, write=lambda *_, **__: None)
    context: Any = SimpleNamespace(
        allocation=job,
        clock=job,
        limits=ResumeSettings(),
        link=quiet,
        events=quiet,
    )
    recovery = Recovery(context, 2)
    monkeypatch.setattr(recovery_module, "plan", lambda *_: Plan("swap", "an exchange", take=1))
    monkeypatch.setattr(recovery, "_facts", lambda *_: None)
    monkeypatch.setattr(recovery, "_obtain", obtain)
    lost = Ending(137, 60.0, False, "RUNNING", faulty={"n2": "dead"})
    cause = Cause("node", "n2: dead", ("n2",))
    return tried, recovery.prepare(cause, (lost,), ("n1", "n2"), attempt=1, noticed=0.0)


def test_a_job_that_is_suspended_in_an_exchange_is_not_given_up(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    job.while_waiting = lambda: setattr(job, "state", "RUNNING" if job.waited > 60 else job.state)
    tried, following = planned_again(job, monkeypatch)
    assert tried == ["RUNNING", "RUNNING"] and job.waited > 60
    assert following.nodes == ("n1", "n3")
    assert capfd.readouterr().err.count("is suspended: the next attempt waits") == 1


@pytest.mark.parametrize("by_user", [True, False])
def test_a_job_that_ends_while_it_is_suspended_is_over(
    by_user: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    job.while_waiting = job.user_stop.set if by_user else lambda: setattr(job, "state", "CANCELLED")
    tried, following = planned_again(job, monkeypatch)
    assert (tried, following) == (["RUNNING"], None)
