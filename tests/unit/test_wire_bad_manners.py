"""The wire: what a client that breaks the rules gets, and what it cannot take from others."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

import pytest
from wire_peers import (
    ALICE,
    KEY,
    NEEDS_MUNGE,
    NODES,
    Sresctld,
    as_user,
    exactly,
    hello,
    read,
    run_as,
    said_by,
    until,
)

from slurm_resilience.errors import (
    NotFound,
    NotPermitted,
    SresError,
    WireError,
)
from slurm_resilience.model import Job
from slurm_resilience.wire import limits, seal, served_connection, server
from slurm_resilience.wire.messages import (
    FRAMES,
    MAX_FRAME_BYTES,
    MAX_UNPROVEN_FRAME_BYTES,
    AttemptStarted,
    Beat,
    Evidence,
    NodeHello,
    Refused,
    RequeueRequest,
    Status,
    StatusRequest,
    Welcome,
)

pytestmark = NEEDS_MUNGE


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 5) + b"hello",
        struct.pack(">I", 0),
        struct.pack(">I", MAX_UNPROVEN_FRAME_BYTES + 1) + b"x" * 10,
        struct.pack(">I", 2**32 - 1),
        b"GET / HTTP/1.1\r\nHost: sresctld\r\n\r\n",
        FRAMES.pack(Beat(1)),
        FRAMES.pack(StatusRequest("status")),
        struct.pack(">I", 3) + b"\x93\xc1\xc1",
        struct.pack(">I", 8) + b"\x81\xa4type\xa1\xff",
        struct.pack(">I", 6_001) + b"\x81\xa1a" * 2_000 + b"\x01",
    ],
)
def test_garbage_before_the_hello_ends_the_connection(sresctld: Sresctld, data: bytes) -> None:
    sock, _ = sresctld.raw()
    sock.sendall(data)
    answer = read(sock)
    assert answer is None or isinstance(answer, Refused)
    assert read(sock) is None
    with sresctld.connect() as other:
        assert isinstance(other.ask(StatusRequest("status")), Status)


def test_garbage_after_the_hello_ends_the_connection(sresctld: Sresctld) -> None:
    """Announced too large, not sealed, sealed nonsense."""
    nonsense = seal.FrameSeal(KEY, seal.FROM_CLIENT).close(b"hello")
    for data in (
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        struct.pack(">I", 5) + b"hello",
        FRAMES.frame(nonsense),
    ):
        sock, challenge = sresctld.raw()
        sock.sendall(FRAMES.pack(hello(challenge.nonce, sresctld)))
        assert isinstance(read(sock), Welcome)
        sock.sendall(data)
        sealed = exactly(sock, FRAMES.unpack_length(exactly(sock, 4)))
        answer = FRAMES.unpack(seal.FrameSeal(KEY, seal.FROM_SERVER).open(sealed))
        assert isinstance(answer, Refused)
        assert read(sock) is None


@pytest.mark.parametrize(
    "message", [Beat(1), RequeueRequest("x"), AttemptStarted(1, ("n1",)), Evidence(())]
)
def test_a_role_says_what_is_its_own(sresctld: Sresctld, message: Any) -> None:
    with sresctld.connect() as connection:
        connection.send(message)
        answer = connection.receive(10)
        assert isinstance(answer, Refused) and "may not send" in answer.reason
    assert sresctld.inbox.take() == ()


def test_a_peer_that_never_finishes_the_handshake(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.3)
    for part in (b"", b"\x00\x00", struct.pack(">I", 100) + b"x"):
        sock, _ = sresctld.raw()
        sock.sendall(part)
        assert read(sock) is None
    until(lambda: not sresctld.server.connections, "nothing is left of them")


def test_a_peer_that_does_not_read_is_cut_off(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_connection, "MAX_BACKLOG_BYTES", 1 << 20)
    lazy = sresctld.connect("job", "7")
    (peer,) = until(lambda: sresctld.registry.supervisors(7), "it is known")
    large = Status({"x": "y" * (1 << 20)})
    for _ in range(30):
        peer.send(large)
    until(lambda: not sresctld.registry.supervisors(7), "it is cut off")
    peer.send(large)
    with sresctld.connect() as other:
        assert isinstance(other.ask(StatusRequest("status")), Status)
    lazy.close()


def test_two_hundred_connections(sresctld: Sresctld) -> None:
    connections = [sresctld.connect() for _ in range(200)]
    for connection in connections:
        connection.send(StatusRequest("status"))
    assert all(isinstance(c.receive(10), Status) for c in connections)
    for connection in connections:
        connection.close()
    until(lambda: not sresctld.server.connections, "all are gone")


def test_one_user_cannot_take_every_connection(sresctld: Sresctld) -> None:
    sresctld.server._limits.most_of_user = 0
    refused = as_user(ALICE, sresctld, "query", "")
    assert "uid 20001 has 0 connections, no more" in refused
    with sresctld.connect() as roots:
        assert isinstance(roots.ask(StatusRequest("status")), Status)


def test_half_messages_of_one_user_are_few(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty supervisors that begin the largest message and do not end it: seven may."""
    monkeypatch.setattr(limits, "MAX_CONNECTIONS_OF_JOB", 100)
    program = run_as(
        ALICE,
        sresctld,
        "begun = []\n"
        "for _ in range(40):\n"
        "    c = connect('job', '7'); begun.append(c)\n"
        "    c._sock.sendall(struct.pack('>I', 512 << 10) + b'x' * 5000)\n"
        "print('begun', flush=True); input()\n",
    )
    assert program.stdout is not None and program.stdout.readline() == "begun\n"
    until(lambda: len(sresctld.registry.supervisors(7)) <= 7, "the others are refused")
    assert sresctld.server._limits._unfinished[ALICE] <= limits.MAX_UNFINISHED_OF_USER_BYTES
    said_by(program)
    until(lambda: not sresctld.server._limits._unfinished, "nothing is counted for ever")


@pytest.mark.parametrize(
    ("role", "subject", "size"), [("query", "", 16 << 10), ("job", "7", 512 << 10)]
)
def test_a_users_messages_are_small(sresctld: Sresctld, role: str, subject: str, size: int) -> None:
    sock = sresctld.connect(role, subject)
    sock._sock.sendall(struct.pack(">I", size + 1))
    answer = sock.receive(10)
    assert isinstance(answer, Refused) and f"(limit {size})" in answer.reason


def test_a_message_that_is_not_ended_is_not_waited_for(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sresctld.server.connections
    program = run_as(
        ALICE,
        sresctld,
        "c = connect(); c._sock.sendall(b'\\0\\0'); print('begun', flush=True)\n"
        "print(c.receive(30).reason, flush=True)\n",
    )
    assert program.stdout is not None and program.stdout.readline() == "begun\n"
    # Two looks with the same half message.
    for _ in range(2):
        seen = threading.Event()
        sresctld.server._loop.call_soon_threadsafe(lambda seen=seen: (sresctld.sweep(), seen.set()))
        assert seen.wait(10)
    assert "begun and not ended in time" in said_by(program)
    until(lambda: sresctld.server.connections == before, "it is gone")


def test_answers_that_a_user_does_not_read_are_few(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He asks on many connections, and reads none of the answers."""
    monkeypatch.setattr(limits, "MAX_UNREAD_OF_USER_BYTES", 1 << 20)
    nodes = {f"n{i}": {"findings": "x" * 1000} for i in range(1000)}
    sresctld.inbox.publish({}, {"nodes": nodes})
    program = run_as(
        ALICE,
        sresctld,
        "asked = [connect() for _ in range(40)]\n"
        "for c in asked:\n"
        "    try:\n"
        "        for _ in range(4): c.send(StatusRequest('status'))\n"
        "    except SresError: pass\n"
        "print('asked', flush=True); input()\n",
    )
    assert program.stdout is not None and program.stdout.readline() == "asked\n"
    until(lambda: 0 < sresctld.server.connections < 20, "most of them are cut off")
    with sresctld.connect() as roots:
        assert isinstance(roots.ask(StatusRequest("status")), Status)
    said_by(program)


def test_new_connections_of_a_machines_users_make_room_for_each_other(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle ones that prove nothing keep no user out, and root has other places."""
    monkeypatch.setattr(server, "MAX_UNPROVEN_OF_ADDRESS", 10)
    idle = [socket.create_connection(("127.0.0.1", sresctld.server.port)) for _ in range(50)]
    until(lambda: sresctld.server.connections <= 10, "the oldest make room")
    assert "welcome" in as_user(ALICE, sresctld, "query", "")
    with sresctld.connect() as roots:
        assert isinstance(roots.ask(StatusRequest("status")), Status)
    for sock in idle:
        sock.close()


def test_a_machines_users_open_so_many_connections_a_second(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sresctld.server._gate, "rate", limits.Rate(0.001, 3))
    socks = [socket.create_connection(("127.0.0.1", sresctld.server.port)) for _ in range(5)]
    assert [read(sock) is not None for sock in socks] == [True, True, True, False, False]
    with sresctld.connect() as roots:
        assert isinstance(roots.ask(StatusRequest("status")), Status)


def test_jobs_that_nobody_knows_are_looked_up_seldom(sresctld: Sresctld) -> None:
    said = said_by(
        run_as(
            ALICE,
            sresctld,
            "for number in range(1000, 1030):\n"
            "    try: connect('job', str(number))\n"
            "    except SresError as error: print(error)\n",
        )
    ).splitlines()
    assert len(said) == 30
    asked = [line for line in said if "does not exist" in line]
    assert len(sresctld.asked) == len(asked) < 10
    assert "try again in a few seconds" in said[-1]


def test_a_job_that_is_not_there_is_looked_up_once(sresctld: Sresctld) -> None:
    for _ in range(5):
        with pytest.raises(NotPermitted, match="does not exist"):
            sresctld.connect("job", "99")
    assert sresctld.asked == [99]


def test_a_slow_slurm_keeps_no_known_job_waiting(sresctld: Sresctld) -> None:
    waits, go_on = threading.Event(), threading.Event()

    def slow(job_id: int) -> Job:
        waits.set()
        go_on.wait(20)
        raise NotFound("it is not there")

    sresctld.inbox.know(NODES, {7: sresctld.jobs[7]})
    sresctld.find = slow

    def ask() -> None:
        with contextlib.suppress(SresError):
            sresctld.connect("job", "98")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert waits.wait(10)
    for role, subject in (("job", "7"), ("query", ""), ("node", "n1")):
        sresctld.connect(role, subject).close()
    go_on.set()
    asking.join(20)


@pytest.mark.parametrize("what", ["history", "events"])
def test_a_program_of_a_user_reads_no_command_line(sresctld: Sresctld, what: str) -> None:
    ask = f"print(connect().ask(StatusRequest('{what}', 'n1', 5)).data)\n"
    assert "s3cret" in said_by(run_as(0, sresctld, ask))
    said = said_by(run_as(ALICE, sresctld, ask))
    assert "root and SlurmUser can read it" in said and "s3cret" not in said


def test_a_flood_does_not_keep_a_node_waiting(sresctld: Sresctld) -> None:
    code = (
        "import sys\n"
        "from slurm_resilience.wire.client import Connection\n"
        "from slurm_resilience.wire.messages import StatusRequest\n"
        "c = Connection.open('127.0.0.1', int(sys.argv[1]), 'query', munge_socket=sys.argv[2])\n"
        "for _ in range(20000): c.send(StatusRequest('history', 'n1', -1))\n"
    )
    user = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups"]
    where = [str(sresctld.server.port), sresctld.munge_socket]
    flood = subprocess.Popen([*user, sys.executable, "-c", code, *where])
    until(lambda: sresctld.server._limits._next_turn, "the flood has begun")
    with sresctld.connect("node", "n1") as node:
        node.send(NodeHello("boot"))
        # The welcome comes a moment before the registry knows the node.
        until(lambda: "n1" in sresctld.registry.agents(), "it is known")
        until(lambda: sresctld.registry.agents()["n1"].boot_id, "it is heard")
    assert flood.poll() is None, "the node was heard while the flood went on"
    flood.kill()
    flood.wait()


def test_a_strangers_words_make_one_line_of_the_log(
    sresctld: Sresctld, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        with pytest.raises(SresError, match="not a job id"):
            sresctld.connect("job", "1\n2026 I sresctld: all is well \x1b[2J")
    lines = [record.message for record in caplog.records if record.name == "sresctld.wire"]
    assert lines == ["127.0.0.1: '1?2026 I sresctld: all is well ?[2J' is not a job id"]


def test_a_node_that_comes_back_replaces_its_old_connection(sresctld: Sresctld) -> None:
    old = sresctld.connect("node", "n1")
    old.send(Beat(1))
    until(lambda: "n1" in sresctld.registry.agents(), "the first one is there")
    new = sresctld.connect("node", "n1")
    with pytest.raises(WireError):
        while True:
            old.receive(10)
    new.send(Beat(1))
    until(lambda: sresctld.registry.agents()["n1"].is_connected, "the new one counts")
    new.close()
    until(lambda: not sresctld.registry.agents()["n1"].is_connected, "it is gone")
