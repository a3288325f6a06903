"""With PrivateData=jobs a user reads of no other user's job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from worlds import FakeClock

from slurm_resilience.controller.inbox import Inbox
from slurm_resilience.controller.job_lookups import JobLookups
from slurm_resilience.controller.pages import StatusPages
from slurm_resilience.controller.query.private_jobs import PrivateJobs
from slurm_resilience.controller.registry import Registry
from slurm_resilience.errors import NotFound, SresError
from slurm_resilience.model import Job
from slurm_resilience.slurm.client import ClusterInfo
from slurm_resilience.wire.messages import (
    Hello,
    NodeAnswer,
    ResizeOrder,
    ResizeRequest,
    StatusRequest,
)
from slurm_resilience.wire.server import NotKnownYet

ALICE, BOB = 1001, 1002
MINE = PrivateJobs(ALICE, {7, 17})


def info(private_data: str) -> ClusterInfo:
    return ClusterInfo("c", "22.05", (), 6817, 0, "", "", "", {"PrivateData": private_data})


@pytest.mark.parametrize(
    ("setting", "hides"),
    [
        ("none", False),
        ("", False),
        ("usage,users", False),
        ("jobs", True),
        ("accounts,jobs,usage", True),
        ("Jobs", True),
        ("all", True),
    ],
)
def test_slurms_setting_is_read(setting: str, hides: bool) -> None:
    assert info(setting).hides_jobs is hides
    assert info(setting.lower().replace("jobs", "nodes")).hides_nodes is hides


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("requeue job 8", "requeue job (hidden)"),
        ("requeue job 7", "requeue job 7"),
        ("jobs 7, 8 and 17", "jobs 7, (hidden) and 17"),
        ("job 77; job 17", "job (hidden); job 17"),
        ("Job 8, set DOWN n8", "Job (hidden), set DOWN n8"),
        ("by 3 job(s) of 2 user(s)", "by 3 job(s) of 2 user(s)"),
        ("3 jobs 2 nodes", "3 jobs (hidden) nodes"),
        ("no beat for 8 s", "no beat for 8 s"),
    ],
)
def test_texts_name_own_jobs_alone(text: str, shown: str) -> None:
    assert MINE.of(text) == shown


def event(job: int, uid: int | None = None) -> dict[str, Any]:
    return {"job": job, "text": f"about {job}", "data": {} if uid is None else {"uid": uid}}


def test_an_event_remembers_whose_job_it_was() -> None:
    events = [event(0), event(7), event(8), event(3, ALICE), event(7, BOB)]
    kept = MINE.of({"events": events})["events"]
    assert kept == [event(0), event(7), event(3, ALICE)]


def test_a_users_status_has_own_jobs_alone() -> None:
    known = {
        "sentence": "requeue job 8",
        "alarms": [{"job": 8, "node": "", "text": "a"}, {"job": 0, "node": "n1", "text": "b"}],
        "spares": [{"given": [{"job": 8, "nodes": ["n9"]}], "kept": ["n9"]}],
        "nodes": {"n1": {"why": "newest: job 8", "jobs": [7, 8], "incident": None}},
        "jobs": {"7": {"nodes": ["n1"]}, "8": {"nodes": ["n1"]}, "9": {"nodes": ["n1"]}},
    }
    page, after = StatusPages(known).page(private=MINE)
    shown = msgspec.msgpack.decode(msgspec.msgpack.encode(page))
    assert not after
    assert shown == {
        "sentence": "requeue job (hidden)",
        "alarms": [{"job": 0, "node": "n1", "text": "b"}],
        "spares": [{"given": [], "kept": ["n9"]}],
        "nodes": {"n1": {"why": "newest: job (hidden)", "jobs": [7], "incident": None}},
        "jobs": {"7": {"nodes": ["n1"]}},
    }
    assert StatusPages(known).page()[0]["sentence"] == "requeue job 8"


@pytest.mark.parametrize("hides", [True, False])
def test_another_users_job_is_refused_like_one_that_does_not_exist(hides: bool) -> None:
    """On the same way, too: Slurm is asked for both, or one would still be known from the other
    when too much is asked."""
    clock, jobs = FakeClock(), {7: Job(7, ALICE, "RUNNING"), 8: Job(8, BOB, "RUNNING")}
    asked: list[int] = []

    def find(number: int) -> Job:
        asked.append(number)
        if number not in jobs:
            raise NotFound(f"job {number} does not exist")
        return jobs[number]

    inbox = Inbox(
        Registry(clock),
        trusted_uids=frozenset({0}),
        lookups=JobLookups(find, clock, lambda: hides),
        history=lambda _: ({}, ""),
        clock=clock,
    )
    inbox.know((), jobs)

    def answer(number: int, uid: int) -> str:
        hello = Hello(b"", "job", str(number))
        try:
            try:
                inbox.authorize(hello, uid, "192.0.2.1")
            except NotKnownYet:
                inbox.look_up(hello, uid)
                inbox.authorize(hello, uid, "192.0.2.1")
        except SresError as refusal:
            return str(refusal).replace(str(number), "J")
        return "welcome"

    assert (answer(7, ALICE), answer(8, 0)) == ("welcome", "welcome")
    assert asked == []
    assert (answer(8, ALICE) == answer(9, ALICE)) is hides
    assert asked == ([8, 9] if hides else [9])


@pytest.mark.parametrize(
    ("uid", "hides", "why"),
    [
        (ALICE, True, ""),
        (0, True, ""),
        (BOB, False, "job 7 is not yours"),
        (BOB, True, "job 7 does not exist or has ended"),
    ],
)
def test_a_jobs_owner_and_administrators_resize_it(uid: int, hides: bool, why: str) -> None:
    clock = FakeClock()
    registry = Registry(clock)
    job = Job(7, ALICE, "RUNNING")
    inbox = Inbox(
        registry,
        trusted_uids=frozenset({0}),
        lookups=JobLookups(lambda _: job, clock, lambda: hides),
        history=lambda _: ({}, ""),
        clock=clock,
    )
    inbox.know((), {7: job})

    class Asking:
        def __init__(self, role: str, subject: str, uid: int) -> None:
            self.role, self.subject, self.uid = role, subject, uid
            self.told: list[Any] = []

        def send(self, message: object) -> None:
            self.told.append(message)

        def call_later(self, *_: object) -> None:
            """The answer comes in time."""

    supervisor: Any = Asking("job", "7", ALICE)
    asker: Any = Asking("query", "", uid)
    inbox.opened(supervisor)
    inbox.received(asker, ResizeRequest(7, 3))
    if why:
        assert [refused.reason for refused in asker.told] == [why]
        assert supervisor.told == []
        return
    (order,) = supervisor.told
    assert msgspec.msgpack.decode(order.body, type=ResizeOrder) == ResizeOrder(3, uid)
    inbox.received(supervisor, NodeAnswer(order.id))
    assert asker.told == [NodeAnswer(order.id)]
    (noted,) = inbox.take()
    assert (noted.job, noted.message, noted.connection.uid) == (7, ResizeRequest(7, 3), uid)


def test_where_nodes_are_hidden_a_user_is_told_of_own_jobs_alone() -> None:
    clock = FakeClock()
    events = [event(0), event(7), event(8, BOB)]
    for one in events:
        one |= {"kind": "attempt-ended", "node": "n1"}
    inbox = Inbox(
        Registry(clock),
        trusted_uids=frozenset({0}),
        lookups=JobLookups(lambda _: Job(7, ALICE, "RUNNING"), clock, bool, lambda: True),
        history=lambda _: ({"events": [dict(one) for one in events]}, ""),
        clock=clock,
    )
    inbox.know((), {7: Job(7, ALICE, "RUNNING"), 8: Job(8, BOB, "RUNNING")})
    inbox.publish(
        {},
        {
            "at": 1.0,
            "sentence": "n1 dead",
            "alarms": [{"node": "n1"}],
            "nodes": {"n1": {}},
            "jobs": {"7": {"nodes": ["n1"]}, "8": {"nodes": ["n2"]}},
        },
    )
    told: list[Any] = []

    class Asking:
        role, subject, uid = "query", "", ALICE

        def send(self, message: Any) -> None:
            told.append(message)

    client: Any = Asking()
    for what in ("status", "events", "incidents", "review"):
        inbox.received(client, StatusRequest(what))
    shown, past, *refused = told
    assert shown.data == {
        "at": 1.0,
        "age": 0.0,
        "sentence": "",
        "nodes": {},
        "jobs": {"7": {"nodes": ["n1"]}},
    }
    assert [one["job"] for one in past.data["events"]] == [7]
    assert all("PrivateData=nodes" in one.reason for one in refused) and len(refused) == 2
    client.uid = 0
    inbox.received(client, StatusRequest("status"))
    assert told[-1].data["sentence"] == "n1 dead"
