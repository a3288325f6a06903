"""Permissions on the wire, as pure functions."""

from __future__ import annotations

import pytest

from slurm_resilience.controller import authorize
from slurm_resilience.controller.authorize import NodePlace
from slurm_resilience.errors import NotPermitted, UsageError
from slurm_resilience.model import Job
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    Beat,
    EvidenceRequest,
    LeftNode,
    Message,
    PauseRequest,
    Report,
    RequeueRequest,
    Role,
    StatusRequest,
    WrongResults,
)

ALICE, BOB, SLURM = 1000, 1001, 64030
TRUSTED = frozenset({0, SLURM})
ADDRESSES = {f"n{i}": NodePlace(f"192.0.2.{i}", 6818) for i in range(1, 101)}


@pytest.mark.parametrize("uid", [ALICE, 0, SLURM])
def test_a_jobs_owner_and_root_speak_for_it(uid: int) -> None:
    authorize.check_job(Job(7, ALICE, "RUNNING"), uid, TRUSTED)


def test_another_user_does_not_speak_for_a_job() -> None:
    with pytest.raises(NotPermitted, match="job 7 is not yours"):
        authorize.check_job(Job(7, ALICE, "RUNNING"), BOB, TRUSTED)


@pytest.mark.parametrize("subject", ["", "x", "-7", "²", "7x", "9" * 11])
def test_a_subject_that_is_no_job_id(subject: str) -> None:
    with pytest.raises(UsageError, match="is not a job id"):
        authorize.job_of(subject)


@pytest.mark.parametrize(("name", "uid"), [("n1", ALICE), ("n999", 0)])
def test_a_node_is_spoken_for_by_root_and_known_to_slurm(name: str, uid: int) -> None:
    with pytest.raises(NotPermitted):
        authorize.check_node(name, uid, TRUSTED, ADDRESSES)
    authorize.check_node("n1", SLURM, TRUSTED, ADDRESSES)


@pytest.mark.parametrize(
    ("address", "configured", "resolved", "permitted"),
    [
        ("192.0.2.1", "192.0.2.1", set(), True),
        ("192.0.2.1", "n1", {"192.0.2.1", "198.51.100.1"}, True),
        ("192.0.2.2", "n1", {"192.0.2.1"}, False),
        ("127.0.0.1", "n1", {"127.0.1.1"}, True),
        ("127.0.0.1", "n1", {"192.0.2.1"}, False),
        ("2001:db8::1", "n1", {"192.0.2.1", "2001:db8::1"}, True),
        ("2001:db8::1", "2001:db8::1", set(), True),
        ("2001:db8::2", "n1", {"192.0.2.1", "2001:db8::1"}, False),
        ("::1", "n1", {"127.0.0.1"}, True),
        ("::1", "n1", {"2001:db8::1"}, False),
    ],
)
def test_a_node_speaks_from_its_own_address(
    address: str, configured: str, resolved: set[str], permitted: bool
) -> None:
    place = NodePlace(configured, 6818, "n1.cluster")
    if permitted:
        authorize.check_address("n1", address, place, resolved)
        return
    with pytest.raises(NotPermitted, match=rf"node n1 \({configured} or n1.cluster\)"):
        authorize.check_address("n1", address, place, resolved)


def test_a_nodes_neighbours_are_spread_over_the_cluster() -> None:
    neighbours = authorize.neighbours_of("n1", ADDRESSES)
    assert len(neighbours) == authorize.NEIGHBOURS
    assert "192.0.2.1:6818" not in neighbours
    assert neighbours[0] == "192.0.2.2:6818" and neighbours[-1] > "192.0.2.8"
    assert authorize.neighbours_of("n1", {"n1": NodePlace("192.0.2.1", 6818)}) == ()
    ipv6 = {"n1": NodePlace("n1", 1), "n2": NodePlace("2001:db8::2", 6818)}
    assert authorize.neighbours_of("n1", ipv6) == ("[2001:db8::2]:6818",)


OF_JOBS = (
    AttemptStarted(1, ("n1",)),
    AttemptEnded(1, 0, "stop"),
    RequeueRequest("why"),
    EvidenceRequest(("n1",)),
    WrongResults("n1", "step 7"),
    LeftNode("n1", "3 attempts ended on it"),
)


@pytest.mark.parametrize("message", OF_JOBS, ids=lambda message: type(message).__name__)
def test_only_supervisors_send_what_is_theirs(message: Message) -> None:
    authorize.check_message("job", message)
    with pytest.raises(NotPermitted, match="a query may not send"):
        authorize.check_message("query", message)


@pytest.mark.parametrize("role", ["job", "query"])
def test_only_nodes_report(role: Role) -> None:
    for message in (Beat(1), Report()):
        with pytest.raises(NotPermitted):
            authorize.check_message(role, message)
    for message in (StatusRequest("status"), PauseRequest("why")):
        authorize.check_message(role, message)


def test_root_and_slurm_user_pause() -> None:
    for uid in TRUSTED:
        authorize.check_administrator(uid, TRUSTED, "pause sresctld")
    with pytest.raises(NotPermitted, match="only root and SlurmUser may pause sresctld"):
        authorize.check_administrator(ALICE, TRUSTED, "pause sresctld")
