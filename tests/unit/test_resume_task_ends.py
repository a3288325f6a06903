"""Task ends: what slurmstepd's datagrams say, and which task's end explains the others."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.resume.decide.task_ends import (
    DATAGRAM_BYTES,
    NodeBegan,
    TaskEnd,
    first_failure,
    node_that_failed,
    parse,
)
from slurm_resilience.resume.srun.task_reports import StepReports, TaskReports

TOKEN = "0123abcd" * 4


def end(task: int, code: int = 0) -> TaskEnd:
    return TaskEnd(step=0, node_id=task, task=task, code=code)


def by_signal(task: int, number: int, out_of_memory: bool = False) -> TaskEnd:
    return TaskEnd(0, task, task, 128 + number, by_signal=True, out_of_memory=out_of_memory)


# -- datagrams --------------------------------------------------------------------------------


def test_a_node_that_began() -> None:
    told = NodeBegan(step=3, node_id=1, node="n2")
    assert parse(f"sres1 {TOKEN} began 3 1 n2".encode()) == (TOKEN, told)
    whole = NodeBegan(step=3, node_id=1, node="n2", nodes=2, tasks=8)
    assert parse(f"sres1 {TOKEN} began 3 1 n2 2 8".encode()) == (TOKEN, whole)


@pytest.mark.parametrize(
    ("status", "code", "by_signal"),
    [
        (0, 0, False),
        (5 << 8, 5, False),
        (9, 137, True),
        (11 | 0x80, 139, True),
        # A shell, or a program of its own mind, comes between.
        (137 << 8, 137, True),
        (143 << 8, 143, False),
        (255 << 8, 255, False),
    ],
)
def test_a_task_that_ended(status: int, code: int, by_signal: bool) -> None:
    told = parse(f"sres1 {TOKEN} ended 3 1 7 {status} 0 1790000000.250".encode())
    assert told == (TOKEN, TaskEnd(3, 1, 7, code, by_signal, False, 1790000000.25))


def test_want_of_memory_is_told() -> None:
    told = parse(f"sres1 {TOKEN} ended 3 1 7 9 1 1.0".encode())
    assert told is not None
    assert isinstance(told[1], TaskEnd)
    assert told[1].out_of_memory


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sres1",
        f"sres2 {TOKEN} began 3 1 n2",
        f"sres1 {TOKEN} began 3 1",
        f"sres1 {TOKEN} began -3 1 n2",
        f"sres1 {TOKEN} began 4294967296 1 n2",
        f"sres1 {TOKEN} began 3 1 n2 more",
        f"sres1 {TOKEN} began 3 1 n2 2 x",
        f"sres1 {TOKEN} ended 3 1 7 9 2 1.0",
        f"sres1 {TOKEN} ended 3 1 7 x 0 1.0",
        f"sres1 {TOKEN} ended 3 1 7 127 0 1.0",
        f"sres1 {TOKEN} began 3 1 " + "n" * DATAGRAM_BYTES,
    ],
)
def test_what_is_no_datagram_of_ours(text: str) -> None:
    assert parse(text.encode()) is None


@given(st.binary(max_size=2 * DATAGRAM_BYTES))
def test_garbage_is_passed_over(datagram: bytes) -> None:
    assert parse(datagram) is None
    assert parse(b"sres1 t ended " + datagram) is None or len(datagram) < DATAGRAM_BYTES


# -- which end explains the others ------------------------------------------------------------


def test_nothing_failed() -> None:
    assert first_failure([end(0), end(1)]) is None
    assert first_failure([]) is None


def test_the_first_one_that_failed() -> None:
    assert first_failure([end(2), end(1, 5), end(0, 6)]) == end(1, 5)


def test_a_task_that_was_ended_by_others_explains_nothing() -> None:
    """A datagram may be overtaken: SIGTERM is how the others are ended."""
    crashed = by_signal(3, signal.SIGSEGV)
    assert first_failure([by_signal(0, signal.SIGTERM), crashed, end(1, 1)]) == crashed


def test_a_killed_task_is_the_first_where_no_other_failed() -> None:
    killed = by_signal(1, signal.SIGKILL)
    assert first_failure([end(0), killed, by_signal(2, signal.SIGTERM)]) == killed


def test_a_task_that_lacked_memory_failed_by_itself() -> None:
    starved = by_signal(2, signal.SIGKILL, out_of_memory=True)
    assert first_failure([by_signal(0, signal.SIGTERM), starved]) == starved


# -- the node at which an attempt failed --------------------------------------------------------

SEGV, KILL, TERM = (128 + number for number in (signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM))


@pytest.mark.parametrize(
    ("told", "crashed_on", "node"),
    [
        ("n1:0 n2:0", "", ""),
        (f"n2:{SEGV} n1:{KILL} n3:{TERM}", "", "n2"),
        ("n2:1 n3:1", "", ""),
        # srun ended the others for it.
        (f"n2:{KILL} n1:{TERM} n3:{TERM}", "", "n2"),
        (f"n1:{TERM} n2:{KILL} n3:{TERM}", "", "n2"),
        # All were killed: at once by a person or Slurm, or by us for the first.
        (f"n2:{KILL} n1:{KILL} n3:{KILL}", "", ""),
        (f"n2:{KILL} n1:{KILL} n3:{KILL}", "n2", "n2"),
        (f"n1:{TERM} n2:{TERM}", "", ""),
        # Others failed for want of the one that was killed, or it was killed for them.
        (f"n2:{KILL} n1:1", "", ""),
        (f"n1:1 n2:{KILL}", "", "n1"),
        # The word that its tasks began was lost.
        (f":{KILL} n1:{TERM}", "", ""),
    ],
)
def test_the_node_that_failed(told: str, crashed_on: str, node: str) -> None:
    ends = []
    for number, word in enumerate(told.split()):
        name, _, code = word.partition(":")
        ends.append(TaskEnd(0, number, number, int(code), by_signal=int(code) > 128, node=name))
    assert node_that_failed(ends, crashed_on) == node


# -- the socket -------------------------------------------------------------------------------


def reports(address: str = "127.0.0.1") -> tuple[StepReports, Callable[[str], None]]:
    """One srun's reports, and a way to send in its name; each datagram waits until it is read."""
    told = threading.Event()
    step = TaskReports().expect(address, told.set)
    token, port, host = step.target.split(",")

    def send(text: str) -> None:
        told.clear()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.sendto(text.replace("TOKEN", token).encode(), (host, int(port)))
        if "TOKEN" in text:
            assert told.wait(10)

    return step, send


def test_a_step_is_told_of_its_nodes_and_ends() -> None:
    step, send = reports()
    send("sres1 TOKEN began 4 1 n7")
    assert step.nodes() == ()
    send("sres1 TOKEN began 4 0 n9")
    assert (step.step, step.nodes()) == (4, ("n9", "n7"))
    send("sres1 TOKEN ended 4 1 3 11 0 5.0")
    assert step.ends() == (TaskEnd(4, 1, 3, 139, True, False, 5.0, "n7"),)
    assert step.crash() == step.ends()[0]


def test_an_end_counts_once() -> None:
    step, send = reports()
    send("sres1 TOKEN ended 4 1 3 256 0 5.0")
    send("sres1 TOKEN ended 4 1 3 0 0 6.0")
    assert [told.code for told in step.ends()] == [1]
    assert step.crash() is None, "an exit code of its own is no crash"


def test_an_end_is_answered_each_time_and_only_to_who_has_the_token() -> None:
    """slurmstepd tells it again, where the answer was lost."""
    step, _ = reports()
    token, port, host = step.target.split(",")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((host, int(port)))
        sender.settimeout(10)
        sender.send(f"sres1 {TOKEN} ended 4 1 3 11 0 5.0".encode())
        sender.send(f"sres1 {token} began 4 0 n9".encode())
        for _ in range(2):
            sender.send(f"sres1 {token} ended 4 1 3 11 0 5.0".encode())
            assert sender.recv(1000) == f"sres1 {token} heard 4 3".encode()
        assert step.crash() == TaskEnd(4, 1, 3, 139, True, False, 5.0)


def test_without_the_token_nothing_is_taken() -> None:
    step, send = reports()
    send(f"sres1 {TOKEN} ended 4 1 3 11 0 5.0")
    send("sres1 TOKEN began 4 0 n9")
    assert step.ends() == ()


def test_two_sruns_of_one_supervisor_are_kept_apart() -> None:
    supervisor = TaskReports()
    told = threading.Event()
    one, other = (supervisor.expect("127.0.0.1", told.set) for _ in range(2))
    token, port, host = other.target.split(",")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(f"sres1 {token} ended 0 0 0 256 0 1.0".encode(), (host, int(port)))
    assert told.wait(10)
    assert (len(one.ends()), len(other.ends())) == (0, 1)


def test_a_site_names_the_ports() -> None:
    allowed = range(42100, 42200)
    _, port, _ = TaskReports(allowed).expect("127.0.0.1", lambda: None).target.split(",")
    assert int(port) in allowed


def test_a_node_that_cannot_be_found_costs_detail_only() -> None:
    step = TaskReports().expect("no-such-node.invalid", lambda: None)
    assert (step.target, step.nodes(), step.ends(), step.crash()) == ("", (), (), None)
