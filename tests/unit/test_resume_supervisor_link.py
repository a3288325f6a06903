"""The supervisor's link to sresctld sends all that is queued before it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import threading
from typing import Any

import msgspec
import pytest

from slurm_resilience.controller.registry import RETURN_SECONDS
from slurm_resilience.errors import UsageError
from slurm_resilience.model import Node
from slurm_resilience.resume import supervisor_link
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    RESIZE,
    AttemptEnded,
    AttemptStarted,
    Evidence,
    EvidenceRequest,
    Message,
    NodeRequest,
    NodeVerdict,
    ResizeOrder,
    ResizeTaken,
)


class Wire:
    """A connection on which several messages come at once."""

    def __init__(self, *messages: Message) -> None:
        self._here, self._there = socket.socketpair()
        self._messages = list(messages)
        self._there.send(b".")
        self.sent: list[Message] = []

    def fileno(self) -> int:
        return self._here.fileno()

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self, _: float) -> Message | None:
        self._here.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._here.recv(100)
        return self._messages.pop(0) if self._messages else None


def test_a_suspicion_is_news_once_and_no_verdict() -> None:
    link = SupervisorLink(("localhost",), 1, 7, "", frozenset({0}))
    link.attempt(AttemptStarted(1, ("n1", "n2")))
    silent = NodeVerdict("n2", "suspect", "no beat for 1.6 s", at=5.0)
    link._note(Evidence((silent, NodeVerdict("n9", "suspect", "of another job"))))
    assert link.news.is_set()
    assert link.take_suspects() == (silent,)
    assert link.take_suspects() == () and link.faulty() == {}


def test_what_is_queued_at_the_end_is_sent_and_nothing_is_left_unread(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(supervisor_link, "POLL_SECONDS", 3600.0)
    link = SupervisorLink(("localhost",), 1, 7, "", frozenset({0}))
    started, ended = AttemptStarted(1, ("n1", "n2")), AttemptEnded(1, 0, "done")
    dead = [Evidence((NodeVerdict(name, "dead", "no beat"),)) for name in ("n1", "n2")]
    wire: Any = Wire(*dead)
    link.attempt(started)
    thread = threading.Thread(target=link._talk, args=(wire,), daemon=True)
    thread.start()
    while set(link.faulty()) != {"n1", "n2"}:
        assert link.news.wait(30)
    link.send(ended)
    link.close()
    thread.join(30)
    assert not thread.is_alive()
    assert wire.sent == [started, EvidenceRequest(started.nodes), ended]


def test_a_machine_without_power_is_noticed_while_there_is_nothing_to_send(
    monkeypatch: Any,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
    wire: Any = Wire()
    monkeypatch.setattr(wire, "fileno", ours.fileno)
    opened = contextlib.nullcontext(wire)
    monkeypatch.setattr(Connection, "open", lambda *_, **__: opened)
    link = SupervisorLink(("localhost",), 1, 7, "", frozenset({0}))
    link.start()
    assert link.connected.wait(30)
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert 0 < ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < RETURN_SECONDS
    link.close()
    ours.close()


def test_a_person_s_order_is_answered() -> None:
    link = SupervisorLink(("localhost",), 1, 7, "", frozenset({0}))
    order = msgspec.Raw(msgspec.msgpack.encode(ResizeOrder(3, 0)))
    junk = msgspec.Raw(b"\xc0")
    asked = [(RESIZE, order), (RESIZE, order), ("sing", junk), (RESIZE, junk)]
    requests = [NodeRequest(n, kind, 5.0, body) for n, (kind, body) in enumerate(asked)]
    taken: list[ResizeOrder] = []

    def take(heard: ResizeOrder) -> ResizeTaken:
        taken.append(heard)
        if len(taken) > 1:
            raise UsageError("3 nodes: too many")
        return ResizeTaken(3, 4)

    link.on_resize(take)
    answers: list[Any] = []
    for request in requests:
        link._hear(request)
        answers.append(link._outbox.get_nowait())
    assert [answer.id for answer in answers] == [0, 1, 2, 3]
    assert msgspec.msgpack.decode(answers[0].body, type=ResizeTaken) == ResizeTaken(3, 4)
    assert answers[1].refused == "3 nodes: too many"
    assert answers[2].refused == "a supervisor does not know 'sing'"
    assert answers[3].refused and taken == [ResizeOrder(3, 0)] * 2


def test_a_user_may_leave_us_many_open_files(monkeypatch: Any) -> None:
    """A number above 1023 is one that select() does not know."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most[1], most[1]))
    link = SupervisorLink(("localhost",), 1, 7, "", frozenset({0}))
    wire: Any = Wire(Evidence((NodeVerdict("n1", "dead", "no beat"),)))
    high = fcntl.fcntl(wire.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)
    monkeypatch.setattr(wire, "fileno", lambda: high)
    link.attempt(AttemptStarted(1, ("n1",)))
    thread = threading.Thread(target=link._talk, args=(wire,), daemon=True)
    thread.start()
    assert link.news.wait(30)
    link.close()
    thread.join(30)
    assert not thread.is_alive()
    os.close(high)
    resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_a_doubt_is_answered_also_about_nodes_of_others(monkeypatch: Any) -> None:
    monkeypatch.setattr(supervisor_link, "POLL_SECONDS", 0.01)
    link = SupervisorLink(("localhost",), 1, 7, "", frozenset({0}))
    assert link.doubts(("n8",)) == {}, "sresctld is away"
    verdicts = (NodeVerdict("n8", "suspect", "no beat for 2 s"), NodeVerdict("n9", "healthy", ""))
    wire: Any = AnsweringWire(Evidence(verdicts, asked=True))
    link.attempt(AttemptStarted(1, ("n1", "n2")))
    link.connected.set()
    thread = threading.Thread(target=link._talk, args=(wire,), daemon=True)
    thread.start()
    assert link.doubts(("n8", "n9")) == {"n8": "no beat for 2 s"}
    assert link.take_suspects() == (), "it is not the attempt's node"
    link.close()
    thread.join(30)
    assert not thread.is_alive()


def a_link() -> SupervisorLink:
    link = SupervisorLink(("localhost",), 1, 7, "", frozenset({0}))
    link.attempt(AttemptStarted(1, ("n1", "n2")))
    link.see([Node("n2", "ALLOCATED", boot_time=BOOT)])
    link._hear(Evidence((NodeVerdict("n2", "dead", "no beat for 4 s", incident=3),)))
    return link


BOOT, LATER_BOOT = "2026-11-20T08:00:00", "2026-11-20T09:00:00"
HELD = {"n2": "no beat for 4 s, when sresctld last told of it"}


def test_the_last_word_on_a_node_holds_while_sresctld_is_away() -> None:
    """Until its own timeout Slurm gives out a node that is dead."""
    link = a_link()
    link._hear(Evidence((NodeVerdict("n3", "suspect", "no beat for 2 s"),)))
    link.attempt(AttemptStarted(2, ("n1", "n3")))
    assert link.doubts(("n2", "n3")) == HELD
    link._hear(Evidence((NodeVerdict("n2", "unknown", "nothing is known"),), asked=True))
    assert link.doubts(("n2",)) == HELD, "sresctld was started again, and knows nothing yet"
    link._hear(Evidence((NodeVerdict("n2", "healthy", ""),), asked=True))
    assert link.doubts(("n2",)) == {}


@pytest.mark.parametrize(
    ("shown", "held"),
    [
        (Node("n2", "IDLE", boot_time=BOOT), True),
        (Node("n2", "IDLE", boot_time="2026-11-20T08:00:01"), True),
        (Node("n2", "IDLE"), True),
        (Node("n2", "IDLE", boot_time=LATER_BOOT), False),
        (Node("n2", "DOWN", boot_time=BOOT), False),
        (Node("n2", "ALLOCATED", frozenset({"NOT_RESPONDING"}), boot_time=BOOT), False),
        (Node("n9", "DOWN"), True),
    ],
)
def test_slurm_knows_more_than_the_last_word(shown: Node, held: bool) -> None:
    link = a_link()
    link.see([shown])
    link.see([Node("n2", "IDLE", boot_time=shown.boot_time)])
    assert link.doubts(("n2",)) == (HELD if held else {})


def test_the_last_word_on_a_machine_ends_with_it() -> None:
    link = a_link()
    link.moved(AttemptStarted(1, ("n1", "n3")))
    assert link.doubts(("n2",)) == HELD, "it was left"
    link.forgive("n2")
    link._hear(Evidence((NodeVerdict("n2", "dead", "no beat for 4 s", incident=3),)))
    assert link.doubts(("n2",)) == {}, "an answer on the machine before comes late"


class AnsweringWire(Wire):
    """A connection that answers the question about nodes that are not the attempt's."""

    def __init__(self, answer: Message) -> None:
        super().__init__()
        self._answer = answer

    def send(self, message: Message) -> None:
        super().send(message)
        if isinstance(message, EvidenceRequest) and "n8" in message.nodes:
            self._messages.append(self._answer)
            self._there.send(b".")


def test_checks_run_until_the_verdicts_that_know_their_outcome_come() -> None:
    link = SupervisorLink(("localhost",), 1, 7, "", frozenset({0}))
    link.attempt(AttemptStarted(1, ("n1", "n2")))
    link.ask_checks(("n1", "n2"), 5.0)
    assert not link.checks_run, "sresctld may not have asked any node"
    link._hear(Evidence((NodeVerdict("n1", "healthy", ""),), asked=True, checks="running"))
    assert link.checks_run and link.faulty() == {}
    link._hear(Evidence((NodeVerdict("n9", "healthy", ""),), asked=True))
    assert link.checks_run, "an answer to another question"
    link.news.clear()
    sick = NodeVerdict("n2", "sick", "1 of 2 GPUs answers")
    link._hear(Evidence((sick,), asked=True, checks="over"))
    assert (link.checks_run, link.faulty(), link.news.is_set()) == (False, {"n2": sick}, True)
