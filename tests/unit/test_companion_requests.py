"""An elastic step's companions are asked for, watched and given back by its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.model import Job
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.elastic import companion_requests
from slurm_resilience.resume.elastic import size_events as ev
from slurm_resilience.resume.elastic.companion_requests import CompanionRequests
from slurm_resilience.resume.srun.host_calls import HostCalls
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.user_signals import UserSignals
from slurm_resilience.slurm.companion_job import CompanionRequest, FoundCompanion

SUPERVISOR = 4711


class Requests:
    """The requests of a job of two nodes in a cluster of four."""

    def __init__(self) -> None:
        self.slurm = FakeSlurm(4)
        self.told: list[ev.SizeEvent] = []
        self.job = self.slurm.job(self.slurm.submit(2))
        allocation = Allocation(
            self.slurm, self.job, threading.Event(), patience=1.0, permits_expansion=True
        )
        allocation.companions.supervisor = SUPERVISOR
        context: Any = SimpleNamespace(
            clock=SystemClock(),
            client=self.slurm,
            allocation=allocation,
            environment={},
            host_calls=HostCalls(),
            link=SimpleNamespace(doubts=lambda nodes: {}),
            wake=threading.Event(),
        )
        self.requests = CompanionRequests(context, "", "", lambda number: None)

    def answer(self, kind: type[ev.SizeEvent]) -> Any:
        """Wait for the next event of a kind."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            self.told += self.requests.take()
            while self.told:
                if isinstance(event := self.told.pop(0), kind):
                    return event
            time.sleep(0.01)
        raise AssertionError(f"no {kind.__name__}")

    def look(self) -> None:
        """Have it look at all companions once: between two requests it does."""
        for group in (8, 9):
            self.requests.order(ev.AskForGroup(group, 1))
            self.answer(ev.GroupAsked)

    def take_unheard(self) -> None:
        """Have Slurm take a request whose answer is lost."""
        self.slurm.ask_companion(CompanionRequest(self.job, 1, SUPERVISOR, lent=True))

    def found(self) -> list[int]:
        """Return the companions that were not given back."""
        given_back = {call[1] for call in self.slurm.calls if call[0] == "cancel_job"}
        known = [companion.id for companion in self.slurm.companions(self.job)]
        return [number for number in known if number not in given_back]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    monkeypatch.setattr(companion_requests, "LOOK_SECONDS", 0.05)
    made = Requests()
    yield made
    made.requests.stop()


def test_all_that_was_asked_for_is_given_back(asked: Requests) -> None:
    asked.requests.order(ev.AskForGroup(0, 1))
    first = asked.answer(ev.GroupAsked)
    assert asked.answer(ev.CompanionSeen).state == "RUNNING"
    asked.requests.order(ev.AskForGroup(1, 1))
    second = asked.answer(ev.GroupAsked)
    assert asked.found() == [first.companion, second.companion]
    asked.requests.stop()
    assert asked.found() == []


def _by_another_request(asked: Requests) -> None:
    asked.requests.order(ev.AskForGroup(0, 1))
    told = asked.answer(ev.GroupAsked)
    assert asked.found() == [told.companion]


def _by_the_end(asked: Requests) -> None:
    asked.requests.stop()
    assert asked.found() == []


@pytest.mark.parametrize("is_ended", [_by_another_request, _by_the_end])
def test_a_request_that_slurm_took_late_is_ended(
    asked: Requests, is_ended: Callable[[Requests], None]
) -> None:
    """Slurm answered nothing, neither to the request nor to the look for it right after."""
    asked.slurm.refusals["ask_companion"] = SlurmUnreachable("Socket timed out")
    asked.requests.order(ev.AskForGroup(0, 1))
    asked.answer(ev.GroupFailed)
    del asked.slurm.refusals["ask_companion"]
    asked.take_unheard()
    assert len(asked.found()) == 1
    is_ended(asked)


def test_a_number_that_slurm_gives_anew_is_not_taken_for_the_companion(asked: Requests) -> None:
    """slurmctld was killed, and has forgotten the request; the user submits a job of his own."""
    asked.slurm.submit(2)  # no node is free
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    slurm = asked.slurm
    slurm.before["job"] = lambda: (slurm.forget(number), slurm.submit(1))
    gone = asked.answer(ev.CompanionSeen)
    assert (gone.companion, gone.state) == (number, "")
    asked.requests.order(ev.GiveBack(0, number, ()))
    asked.requests.stop()
    assert slurm.job(number).state == "PENDING", "the user's own job"


def test_a_companion_that_slurm_took_at_once_is_told_of_as_it_ended(asked: Requests) -> None:
    """Between two looks it got its nodes, and was preempted."""
    slurm = asked.slurm
    slurm.submit(2)  # no node is free
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    slurm.before["job"] = lambda: slurm.end(number, "PREEMPTED", ("n3",))
    assert asked.answer(ev.CompanionSeen) == ev.CompanionSeen(0, number, "PREEMPTED", ("n3",))


@pytest.mark.parametrize(
    ("ended_as", "told"),
    [
        ("CANCELLED", "was cancelled by a person"),
        ("TIMEOUT", "had reached its time limit"),
        ("PREEMPTED", ""),
        ("NODE_FAIL", ""),
    ],
)
def test_what_ended_a_companion_is_told_where_a_person_can_change_it(
    asked: Requests, capfd: pytest.CaptureFixture[str], ended_as: str, told: str
) -> None:
    """Slurm shows it as COMPLETING at first."""
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    assert asked.answer(ev.CompanionSeen).state == "RUNNING"
    asked.slurm.end(number, "COMPLETING", ("n3",))
    assert asked.answer(ev.CompanionSeen).state == "COMPLETING"
    asked.requests.order(ev.GiveBack(0, number, ()))
    asked.requests.order(ev.AskForGroup(1, 1))
    asked.answer(ev.GroupAsked)
    asked.slurm.end(number, ended_as, ("n3",))
    asked.look()
    asked.requests.stop()
    said = capfd.readouterr().err
    assert f"job {number} {told}" in said if told else f"job {number}" not in said


def test_one_that_is_given_back_is_no_persons_cancel(
    asked: Requests, capfd: pytest.CaptureFixture[str]
) -> None:
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    assert asked.answer(ev.CompanionSeen).state == "RUNNING"
    asked.requests.order(ev.GiveBack(0, number, ()))
    asked.requests.order(ev.AskForGroup(1, 1))
    asked.answer(ev.GroupAsked)
    asked.slurm.end(number, "CANCELLED", ("n3",))
    asked.look()
    assert "by a person" not in capfd.readouterr().err


def test_a_companion_that_a_person_requeues_stays_in_the_queue(
    asked: Requests, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may be held there (scontrol requeuehold), and comes when the person releases it."""
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    assert asked.answer(ev.CompanionSeen).state == "RUNNING"
    asked.slurm.requeue_for_a_person(number)
    # Its srun may have ended before that was seen.
    asked.requests.order(ev.GiveBack(0, number, ()))
    asked.requests.order(ev.AskForGroup(1, 1))
    other = asked.answer(ev.GroupAsked).companion
    assert asked.found() == [number, other]
    asked.requests.order(ev.AskForGroup(0, 1))
    assert asked.answer(ev.GroupAsked) == ev.GroupAsked(0, number)
    asked.requests.order(ev.GiveBack(0, number, ()))
    asked.requests.stop()
    assert asked.found() == []
    assert f"job {number} was requeued by a person, and keeps its place" in capfd.readouterr().err


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_requeued_companion_is_not_left_behind(asked: Requests, is_cancelled: bool) -> None:
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    assert asked.answer(ev.CompanionSeen).state == "RUNNING"
    asked.slurm.requeue_for_a_person(number)
    asked.requests.order(ev.GiveBack(0, number, ()))
    if is_cancelled:
        asked.requests.order(ev.AskForGroup(1, 1))
        asked.answer(ev.GroupAsked)
        asked.slurm.end(number, "CANCELLED", ())
        asked.requests.order(ev.AskForGroup(0, 1))
        assert asked.answer(ev.GroupAsked).companion != number
    asked.requests.stop()
    assert asked.found() == []


def test_another_users_job_is_not_taken_for_the_companion(asked: Requests) -> None:
    """Any user may give a job its name."""
    asked.slurm.submit(2)
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    slurm = asked.slurm
    slurm.before["job"] = lambda: slurm.hand_over(number, uid=1001)
    assert asked.answer(ev.CompanionSeen) == ev.CompanionSeen(0, number, "", ())


def test_nodes_that_are_of_no_use_are_told_of_with_the_reason(asked: Requests) -> None:
    asked.requests._context.link.doubts = lambda nodes: {"n3": "it is hot"}  # type: ignore
    asked.requests.order(ev.AskForGroup(0, 1))
    asked.answer(ev.GroupAsked)
    assert asked.answer(ev.CompanionSeen).doubt == "n3 is not taken: it is hot"


def test_the_jobs_own_nodes_are_not_taken(asked: Requests) -> None:
    """While the job is suspended, Slurm gives them to its own companions."""
    slurm = asked.slurm
    slurm.submit(2)
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    slurm.before["job"] = lambda: slurm.share(number, ("n1",))
    assert asked.answer(ev.CompanionSeen).doubt == "n1 is not taken: job 1 has it itself"


@pytest.mark.parametrize("told", [ev.GroupLeftUnasked, None])
def test_ranks_that_leave_unasked_are_told_apart_from_those_that_slurm_preempts(
    asked: Requests, told: type[ev.SizeEvent] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its GraceTime a job that Slurm preempts runs on."""
    monkeypatch.setattr(asked.slurm, "is_preempted", lambda number: told is None)
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    assert asked.answer(ev.CompanionSeen).state == "RUNNING"
    asked.requests.order(ev.GiveBack(0, number, (), ("n3",), is_unasked=True))
    asked.requests.order(ev.AskForGroup(0, 1))
    asked.answer(told or ev.GroupAsked)
    assert not [event for event in asked.told if isinstance(event, ev.GroupLeftUnasked)]


def test_a_number_that_two_groups_have_got_is_the_later_ones(asked: Requests) -> None:
    asked.slurm.submit(2)
    asked.requests.order(ev.AskForGroup(0, 1))
    number = asked.answer(ev.GroupAsked).companion
    slurm = asked.slurm
    slurm.before["ask_companion"] = lambda: slurm.forget(number)
    asked.requests.order(ev.AskForGroup(1, 1))
    assert asked.answer(ev.CompanionSeen) == ev.CompanionSeen(0, number, "", ())
    assert asked.answer(ev.GroupAsked) == ev.GroupAsked(1, number)
    asked.requests.order(ev.GiveBack(0, number, ()))
    asked.requests.order(ev.AskForGroup(0, 1))
    asked.answer(ev.GroupAsked)
    assert number in asked.found(), "it is the other group's"


def test_a_request_that_waits_for_a_person_is_told_of_once(
    asked: Requests, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No node is free: that comes by itself."""
    monkeypatch.setattr(companion_requests, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(companion_requests, "WAITS_ON_SECONDS", 0.0)
    asked.slurm.submit(2)
    reasons = iter(["Resources", "ReqNodeNotAvail, UnavailableNodes:n3", "ReqNodeNotAvail"])
    known, all_told = asked.slurm.companions, threading.Event()

    def companions(job: Job) -> tuple[FoundCompanion, ...]:
        reason = next(reasons, "PartitionTimeLimit")
        if reason == "PartitionTimeLimit":
            all_told.set()
        return tuple(found._replace(waits_for=reason) for found in known(job))

    monkeypatch.setattr(asked.slurm, "companions", companions)
    asked.requests.order(ev.AskForGroup(0, 1))
    job = asked.answer(ev.GroupAsked).companion
    assert all_told.wait(10.0)
    asked.requests.stop()
    told = [line.partition("not grown: ")[2] for line in capfd.readouterr().err.splitlines()]
    assert told[0] == f"job {job} waits, for ReqNodeNotAvail (squeue shows it)"
    assert told[1].startswith(f"job {job} waits, for PartitionTimeLimit: ") and len(told) == 2


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("PartitionTimeLimit", ": this job may run for longer"),
        ("JobHeldAdmin", ": a person holds it"),
        ("JobHeldUser", ": a person holds it"),
        ("job requeued in held state", ": a person holds it"),
        ("PartitionInactive", ": an administrator has closed that partition"),
        ("PartitionDown", ": an administrator has closed that partition"),
        ("InvalidQOS", ": an administrator has removed that QOS"),
        ("QOSMaxJobsPerUserLimit", ": a limit of its QOS"),
        ("AssocGrpNodeLimit", ": a limit of your account"),
        ("ReqNodeNotAvail", " (squeue shows it)"),
    ],
)
def test_the_log_says_who_can_let_a_request_start(reason: str, told: str) -> None:
    assert companion_requests.hint(reason).startswith(told)


def test_sruns_that_are_over_are_forgotten_as_a_step_grows() -> None:
    clock = SystemClock()
    signals = UserSignals(threading.Event(), threading.Event(), clock)
    core, left = _srun("sleep 30"), _srun("kill -9 $$")
    assert left.wait(5.0) and left.may_leave_tasks
    signals.steps = [core, left]
    for _ in range(3):
        over = _srun("exit 1")
        with signals.starting:
            signals.add(over)
        assert signals.steps == [core, left, over], "those that run, or have left tasks, stay"
        assert over.wait(5.0)
    core.kill()
    assert core.wait(5.0)


def _srun(line: str) -> SrunStep:
    return SrunStep(["/bin/sh", "-c", line], {}, lambda: None)
