"""The wire over real sockets and a real munged of the test's own."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_resilience.controller import inbox
from slurm_resilience.controller.inbox import Inbox
from slurm_resilience.controller.job_lookups import JobLookups
from slurm_resilience.controller.registry import Registry
from slurm_resilience.errors import (
    AuthError,
    NotFound,
    NotPermitted,
    SresError,
    WireError,
)
from slurm_resilience.model import CheckResult, Finding, Job, Node, Severity
from slurm_resilience.wire import limits, munge, seal, served_connection, server
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    FRAMES,
    MAX_FRAME_BYTES,
    MAX_UNPROVEN_FRAME_BYTES,
    AttemptStarted,
    Beat,
    Challenge,
    Evidence,
    EvidenceRequest,
    Goodbye,
    Hello,
    LogTail,
    NodeAnswer,
    NodeHello,
    NodeQuestion,
    NodeRequest,
    NodeVerdict,
    PauseRequest,
    Proof,
    Refused,
    Report,
    RequeueRequest,
    RunStepChecks,
    SendLog,
    Status,
    StatusRequest,
    StepChecksRun,
    Welcome,
)
from slurm_resilience.wire.server import Client, Server

ALICE, BOB = 20001, 20002
KEY = b"k" * seal.KEY_BYTES
EVENT = {"kind": "replacing", "text": "/opt/replace --token s3cret", "data": {}}
MUNGED = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
pytestmark = [
    pytest.mark.skipif(MUNGED is None, reason="needs munged (package munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it speaks for several users"),
]


def until(look: Callable[[], Any], what: str, seconds: float = 10) -> Any:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while True:
        if value := look():
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}; last seen: {value!r}")
        pause.wait(0.01)


def start_munged(directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    directory.mkdir()
    directory.chmod(0o755)
    key, path = directory / "key", directory / "socket"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    names = ("pid-file", "log-file", "seed-file")
    options = [f"--{name}={directory / name}" for name in names]
    daemon = subprocess.Popen(
        [str(MUNGED), "--foreground", "--force", f"--key-file={key}", f"--socket={path}", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(path.exists, "munged's socket")
    return daemon, str(path)


@pytest.fixture(scope="module")
def munged() -> Iterator[Callable[[str], str]]:
    """The socket of a munged with a key of its own, by name."""
    # Not below pytest's own directory, which only root may enter.
    base = Path(tempfile.mkdtemp(prefix="sres-munge-"))
    base.chmod(0o755)
    known: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def get(name: str) -> str:
        if name not in known:
            known[name] = start_munged(base / name)
        return known[name][1]

    yield get
    for daemon, _ in known.values():
        daemon.terminate()
        daemon.wait()
    shutil.rmtree(base)


NODES = (
    Node("n1", "IDLE", address="127.0.0.1"),
    Node("n2", "IDLE", address="127.0.0.1", port=6819),
    Node("far", "IDLE", address="192.0.2.1"),
)


class Clock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)


class Sresctld:
    """An inbox behind a server."""

    def __init__(self, munge_socket: str) -> None:
        self.munge_socket = munge_socket
        self._swept: dict[Any, int] = {}
        self.jobs = {7: Job(7, ALICE, "RUNNING"), 8: Job(8, 0, "RUNNING")}
        self.asked: list[int] = []
        self.find = self._job
        self.registry = Registry(Clock())
        self.inbox = Inbox(
            self.registry,
            trusted_uids=frozenset({0}),
            lookups=JobLookups(self._look_up, Clock()),
            history=lambda asked: (
                {"events": [{"node": asked.node, "limit": asked.limit} | EVENT]},
                "",
            ),
            clock=Clock(),
        )
        self.inbox.know(NODES, {})
        self.beaten: list[str] = []
        self.server = Server(self.inbox, 0, "127.0.0.1", munge_socket, beats=self._beats)
        self.server.start()

    def _beats(self, clients: Sequence[Client]) -> None:
        self.beaten += [client.subject for client in clients]
        self.registry.beaten(clients)

    def sweep(self) -> None:
        """Look for half messages, as it does from time to time; in the server's thread."""
        self._swept = self.server.sweep(self._swept)

    def _look_up(self, job_id: int) -> Job:
        self.asked.append(job_id)
        return self.find(job_id)

    def _job(self, job_id: int) -> Job:
        if job_id not in self.jobs:
            raise NotFound(f"job {job_id} does not exist")
        return self.jobs[job_id]

    def connect(self, role: Any = "query", subject: str = "", **more: Any) -> Connection:
        known = {"munge_socket": self.munge_socket} | more
        return Connection.open("127.0.0.1", self.server.port, role, subject, **known)

    def raw(self) -> tuple[socket.socket, Challenge]:
        """A connection that has only heard the challenge."""
        sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=10)
        challenge = read(sock)
        assert isinstance(challenge, Challenge)
        return sock, challenge


def read(sock: socket.socket) -> Any:
    """One message; None at the end of the connection."""
    head = exactly(sock, 4)
    return FRAMES.unpack(exactly(sock, FRAMES.unpack_length(head))) if head else None


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = sock.recv(size - len(data))
        except ConnectionError:
            return b""
        if not more:
            return b""
        data += more
    return data


@pytest.fixture
def sresctld(munged: Callable[[str], str]) -> Iterator[Sresctld]:
    running = Sresctld(munged("ours"))
    yield running
    running.server.stop()


def hello(nonce: bytes, sresctld: Sresctld, role: str = "query", subject: str = "") -> Hello:
    proof = msgspec.msgpack.encode(Proof(nonce, role, subject, KEY))
    return Hello(munge.encode(proof, sresctld.munge_socket), role, subject)  # type: ignore[arg-type]


def as_user(uid: int, sresctld: Sresctld, role: str, subject: str) -> str:
    """Return what `Connection.open` says to a process of that user."""
    code = (
        "import sys\n"
        "from slurm_resilience.wire.client import Connection\n"
        "from slurm_resilience.errors import SresError\n"
        "from slurm_resilience.wire.messages import PauseRequest\n"
        "host, port, role, subject, socket = sys.argv[1:]\n"
        "try:\n"
        "    c = Connection.open(host, int(port), role, subject, munge_socket=socket)\n"
        "    print('welcome')\n"
        "    if role == 'query': c.ask(PauseRequest('because'))\n"
        "except SresError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    where = ["127.0.0.1", str(sresctld.server.port), role, subject, sresctld.munge_socket]
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    done = subprocess.run(
        [*user, sys.executable, "-c", code, *where], capture_output=True, text=True, timeout=30
    )
    return done.stdout + done.stderr


# -- who may speak ----------------------------------------------------------------------------


def test_both_sides_prove_themselves(sresctld: Sresctld) -> None:
    with sresctld.connect() as connection:
        answer = connection.ask(StatusRequest("history", "n1", 5))
        assert answer == Status({"events": [{"node": "n1", "limit": 5} | EVENT]})


def test_what_is_not_there_is_no_silence_of_sresctld(sresctld: Sresctld) -> None:
    """The exit code tells them apart."""

    def none(asked: StatusRequest) -> tuple[dict[str, Any], str]:
        raise NotFound(f"the journal has no incident {asked.incident}")

    sresctld.inbox._history = none
    with sresctld.connect() as connection, pytest.raises(NotFound, match="no incident 999"):
        connection.ask(StatusRequest("incidents", incident=999))


def test_a_node_is_told_of_its_peers(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as connection:
        assert set(connection.welcome.peers) == {"127.0.0.1:6819", "192.0.2.1:6818"}
        connection.send(NodeHello("boot-1", "machine"))
        connection.send(Beat(1))
        until(lambda: sresctld.registry.agents().get("n1", None), "n1 is known")
        until(lambda: sresctld.registry.agents()["n1"].boot_id == "boot-1", "its boot is known")


@pytest.mark.parametrize("subject", ["far", "n9", "", "n1 "])
def test_a_node_speaks_for_itself_only(sresctld: Sresctld, subject: str) -> None:
    with pytest.raises(NotPermitted):
        sresctld.connect("node", subject)


@pytest.mark.parametrize("subject", ["", "x", "-7", "²", "7x", "9" * 30, "9" * 5000])
def test_what_is_no_job(sresctld: Sresctld, subject: str) -> None:
    with pytest.raises(WireError, match="is not a job id"):
        sresctld.connect("job", subject)


def test_a_job_that_is_not_there(sresctld: Sresctld) -> None:
    with pytest.raises(NotPermitted, match="does not exist"):
        sresctld.connect("job", "99")


@pytest.mark.parametrize(
    ("uid", "role", "subject", "says"),
    [
        (ALICE, "job", "7", "welcome"),
        (BOB, "job", "7", "NotPermitted"),
        (ALICE, "job", "8", "NotPermitted"),
        (ALICE, "node", "n1", "NotPermitted"),
        (ALICE, "query", "", "only root and SlurmUser may pause"),
    ],
)
def test_users(sresctld: Sresctld, uid: int, role: str, subject: str, says: str) -> None:
    said = as_user(uid, sresctld, role, subject)
    assert says in said
    assert "Traceback" not in said
    assert sresctld.registry.agents() == {} and sresctld.inbox.take() == ()


def test_a_credential_of_another_key_is_refused(
    sresctld: Sresctld, munged: Callable[[str], str]
) -> None:
    with pytest.raises(AuthError):
        sresctld.connect(munge_socket=munged("foreign"))


def test_a_credential_is_good_for_one_connection(sresctld: Sresctld) -> None:
    first, challenge = sresctld.raw()
    message = FRAMES.pack(hello(challenge.nonce, sresctld))
    first.sendall(message)
    assert isinstance(read(first), Welcome)
    second, _ = sresctld.raw()
    second.sendall(message)
    answer = read(second)
    assert isinstance(answer, Refused) and "Replayed" in answer.reason
    assert read(second) is None


@pytest.mark.parametrize(("role", "subject"), [("node", "n1"), ("query", "x"), ("job", "8")])
def test_a_credential_for_another_role_or_nonce(
    sresctld: Sresctld, role: str, subject: str
) -> None:
    """Stolen from the same user, made fresh, never used: still not for this."""
    sock, challenge = sresctld.raw()
    made = hello(challenge.nonce, sresctld, role, subject)
    sock.sendall(FRAMES.pack(msgspec.structs.replace(made, role="job", subject="7")))
    assert "another connection" in read(sock).reason
    sock, _ = sresctld.raw()
    sock.sendall(FRAMES.pack(hello(b"0" * 32, sresctld)))
    assert "another connection" in read(sock).reason


def test_a_credential_with_another_payload(sresctld: Sresctld) -> None:
    for payload in (b"", b"hello", b"\x90", os.urandom(100)):
        sock, _ = sresctld.raw()
        credential = munge.encode(payload, sresctld.munge_socket)
        sock.sendall(FRAMES.pack(Hello(credential, "node", "n1")))
        assert isinstance(read(sock), Refused)


def test_another_protocol_is_named(sresctld: Sresctld) -> None:
    sock, challenge = sresctld.raw()
    newer = msgspec.structs.replace(hello(challenge.nonce, sresctld), protocol=99)
    sock.sendall(FRAMES.pack(newer))
    assert "protocol 99 is spoken there" in read(sock).reason


def impostor(reply: Callable[[Hello], Welcome], uid: int = 0) -> tuple[int, threading.Thread]:
    """A program that poses as sresctld and answers the hello with what it can make."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            sock.settimeout(10)
            sock.sendall(FRAMES.pack(Challenge(b"c" * 32, uid)))
            if hello := read(sock):
                sock.sendall(FRAMES.pack(reply(hello)))
                exactly(sock, 1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return port, thread


def test_an_impostor_of_sresctld_is_found_out(munged: Callable[[str], str]) -> None:
    ours = munged("ours")
    for reply in (
        lambda hello: Welcome(hello.credential),
        lambda hello: Welcome(b""),
        lambda hello: seal.welcome(KEY, ("n9:1",)),
    ):
        port, thread = impostor(reply)
        with pytest.raises(AuthError, match="could not read our credential"):
            Connection.open("127.0.0.1", port, "query", munge_socket=ours)
        thread.join(timeout=10)


def test_an_impostor_under_its_own_name_is_told_nothing(munged: Callable[[str], str]) -> None:
    said: list[Hello] = []

    def listen(hello: Hello) -> Welcome:
        said.append(hello)
        return Welcome(b"")

    port, thread = impostor(listen, BOB)
    with pytest.raises(AuthError, match=f"is not sresctld: it runs as uid {BOB}"):
        Connection.open("127.0.0.1", port, "query", munge_socket=munged("ours"))
    thread.join(timeout=10)
    assert said == []


def test_a_credential_is_for_sresctlds_user_alone(munged: Callable[[str], str]) -> None:
    """Else a program between the two would have the key, and could speak for either."""
    code = "import sys; from slurm_resilience.wire import munge; munge.decode(*eval(sys.argv[1]))"
    made = munge.encode(b"key", munged("ours"), only_uid=0)
    user = ["setpriv", f"--reuid={BOB}", f"--regid={BOB}", "--clear-groups"]
    argv = [*user, sys.executable, "-c", code, repr((made, munged("ours")))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert "AuthError" in done.stderr and "Unauthorized" in done.stderr


def relay(sresctld: Sresctld, change: Callable[[bytes], bytes]) -> int:
    """A program between a client and sresctld that hands on what each says, but changes the
    client's frames after the hello."""
    listener = socket.create_server(("127.0.0.1", 0))

    def down(client: socket.socket, up: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := up.recv(65536):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with listener, listener.accept()[0] as client:
            up = socket.create_connection(("127.0.0.1", sresctld.server.port), timeout=10)
            threading.Thread(target=down, args=(client, up), daemon=True).start()
            with up, contextlib.suppress(OSError):
                frames = 0
                while head := exactly(client, 4):
                    body = exactly(client, FRAMES.unpack_length(head))
                    body = change(body) if frames else body
                    frames += 1
                    up.sendall(FRAMES.frame(body))

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_relay_cannot_speak_for_a_client(sresctld: Sresctld) -> None:
    """It may pass root's handshake on; a frame of its own ends the connection."""
    forged = FRAMES.encode(PauseRequest("by the relay"))
    for change in (
        lambda body: forged,
        lambda body: forged + body[-seal.TAG_BYTES :],
        lambda body: body[:-1] + bytes([body[-1] ^ 1]),
    ):
        port = relay(sresctld, change)
        with (
            Connection.open(
                "127.0.0.1", port, "query", munge_socket=sresctld.munge_socket
            ) as connection,
            pytest.raises(WireError, match=r"was changed on its way|is lost"),
        ):
            connection.ask(StatusRequest("status"))
    assert sresctld.inbox.take() == ()


def test_a_frame_is_good_once_and_in_its_place() -> None:
    sender, receiver = (seal.FrameSeal(KEY, seal.FROM_CLIENT) for _ in range(2))
    first, second = sender.close(b"one"), sender.close(b"two")
    assert receiver.open(first) == b"one"
    for wrong in (first, b"", b"two", second[:-1]):
        other = seal.FrameSeal(KEY, seal.FROM_CLIENT)
        other.open(first)
        with pytest.raises(WireError):
            other.open(wrong)
    with pytest.raises(WireError):
        seal.FrameSeal(KEY, seal.FROM_SERVER).open(first)
    assert receiver.open(second) == b"two"


def test_another_protocol_is_named_to_the_client_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(FRAMES.pack(Challenge(b"c" * 32, 0, 1)))
                exactly(sock, 1)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(WireError, match="protocol 1 is spoken there"):
            Connection.open("127.0.0.1", port, "query")


def test_no_munged_is_one_clear_line(sresctld: Sresctld, tmp_path: Path) -> None:
    with pytest.raises(AuthError, match="is munged running here"):
        sresctld.connect(munge_socket=str(tmp_path / "none"))


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(WireError, match="does not answer"):
        Connection.open("127.0.0.1", port, "query")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the kernel has no IPv6")
def test_nodes_of_both_families_are_let_in(sresctld: Sresctld) -> None:
    """sresctld listens on all addresses; a node is known by name or by number."""
    nodes = (
        Node("n6", "IDLE", address="::1"),
        Node("both", "IDLE", address="localhost"),
        Node("host", "IDLE", address="192.0.2.7", hostname="localhost"),
        Node("other", "IDLE", address="2001:db8::1"),
    )
    sresctld.inbox.know(nodes, {})
    every = Server(sresctld.inbox, 0, munge_socket=sresctld.munge_socket)
    every.start()
    try:
        for host in ("::1", "127.0.0.1"):
            for name in ("n6", "both", "host"):
                Connection.open(
                    host, every.port, "node", name, munge_socket=sresctld.munge_socket
                ).close()
            with pytest.raises(NotPermitted, match="is not the address of node other"):
                Connection.open(
                    host, every.port, "node", "other", munge_socket=sresctld.munge_socket
                )
    finally:
        every.stop()


def test_a_port_that_is_taken(sresctld: Sresctld) -> None:
    with pytest.raises(WireError, match="is another sresctld running"):
        Server(sresctld.inbox, sresctld.server.port, "127.0.0.1")


# -- bad manners ------------------------------------------------------------------------------


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


def run_as(uid: int, sresctld: Sresctld, body: str) -> subprocess.Popen[str]:
    """A user's program; ``PORT`` and ``SOCKET`` are sresctld's."""
    code = (
        "import socket, struct, sys, time\n"
        "from slurm_resilience.errors import SresError\n"
        "from slurm_resilience.wire.client import Connection\n"
        "from slurm_resilience.wire.messages import *\n"
        "PORT, SOCKET = int(sys.argv[1]), sys.argv[2]\n"
        "def connect(role='query', subject=''):\n"
        "    return Connection.open('127.0.0.1', PORT, role, subject, munge_socket=SOCKET)\n"
    )
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    argv = [sys.executable, "-c", code + body, str(sresctld.server.port), sresctld.munge_socket]
    return subprocess.Popen(
        [*user, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said_by(program: subprocess.Popen[str]) -> str:
    """The text that it printed, after it was told to end."""
    return program.communicate(timeout=30)[0]


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


def heard_since(sresctld: Sresctld, moment: float) -> bool:
    return sresctld.registry.agents()["n1"].heard_at > moment


def test_sealed_beats_are_messages_like_any_other(sresctld: Sresctld) -> None:
    """Those of an older release, which knows no light ones."""
    with sresctld.connect("node", "n1") as sresd:
        until(lambda: sresctld.registry.agent("n1"), "it is known")
        for number in (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32):
            before = sresctld.registry.agents()["n1"].heard_at
            sresd.send(Beat(number))
            until(functools.partial(heard_since, sresctld, before), "it has beaten")
        sresd.send(NodeHello("boot", "machine"))
        sresd.send(Beat(9))
        until(lambda: sresctld.registry.agents()["n1"].boot_id, "its hello was read")
        sresd.send(Report((), (), (), full=True))
        until(lambda: sresctld.registry.agents()["n1"].reported, "its report was read")


def test_a_beat_of_another_key_ends_the_connection(sresctld: Sresctld) -> None:
    sock, challenge = sresctld.raw()
    sock.sendall(FRAMES.pack(hello(challenge.nonce, sresctld, "node", "n1")))
    assert isinstance(read(sock), Welcome)
    wrong = seal.FrameSeal(b"x" * seal.KEY_BYTES, seal.FROM_CLIENT)
    sock.sendall(FRAMES.frame(wrong.close(FRAMES.encode(Beat(1)))))
    sealed = exactly(sock, FRAMES.unpack_length(exactly(sock, 4)))
    answer = FRAMES.unpack(seal.FrameSeal(KEY, seal.FROM_SERVER).open(sealed))
    assert isinstance(answer, Refused) and "changed on its way" in answer.reason
    assert read(sock) is None and sresctld.beaten == []


def test_a_light_beat_is_good_once_and_in_its_place() -> None:
    """A light beat has nothing to seal: it must be the mark that only its place has."""
    sender = seal.FrameSeal(KEY, seal.FROM_CLIENT)
    frames = [sender.beat() for _ in range(10)]
    assert len(set(frames)) == 10 and {len(frame) for frame in frames} == {seal.LIGHT_BEAT_BYTES}
    receiver = seal.FrameSeal(KEY, seal.FROM_CLIENT)
    for place, mark in enumerate(frames):
        for wrong in (*frames[:place], *frames[place + 1 :], b"", mark + b"x", mark[:-1]):
            assert not receiver.are_beats(wrong)
        assert receiver.are_beats(mark)
    for other in (
        seal.FrameSeal(KEY, seal.FROM_SERVER),
        seal.FrameSeal(b"x" * seal.KEY_BYTES, seal.FROM_CLIENT),
    ):
        assert not other.are_beats(frames[0])


def test_light_beats_are_taken_together_as_one_by_one() -> None:
    sender = seal.FrameSeal(KEY, seal.FROM_CLIENT)
    frames = [sender.beat() for _ in range(60)]
    for first in range(20):
        for size in range(1, 40):
            receiver = seal.FrameSeal(KEY, seal.FROM_CLIENT)
            assert not first or receiver.are_beats(b"".join(frames[:first]))
            run = frames[first : first + size]
            for wrong in (
                b"".join(run)[:-1],
                b"".join([*run, b"x"]),
                b"".join([*run[:-1], frames[-1]]),
                b"".join([*run, frames[first]]),
            ):
                assert not receiver.are_beats(wrong)
            assert receiver.are_beats(b"".join(run))
            assert receiver.are_beats(frames[first + size])


def test_a_frame_that_is_left_out_shows_at_the_next_beat_and_a_beat_at_the_next_frame() -> None:
    sender, receiver = (seal.FrameSeal(KEY, seal.FROM_CLIENT) for _ in range(2))
    assert receiver.are_beats(sender.beat())
    assert receiver.open(sender.close(b"report")) == b"report"
    sender.close(b"a fault")
    assert not receiver.are_beats(sender.beat())
    sender, receiver = (seal.FrameSeal(KEY, seal.FROM_CLIENT) for _ in range(2))
    sender.beat()
    with pytest.raises(WireError):
        receiver.open(sender.close(b"report"))


def test_light_beats_are_taken_alone_and_between_other_messages(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as sresd:
        assert sresd.welcome.light_beats
        before = until(lambda: sresctld.registry.agent("n1"), "it is known")
        for number in range(20):
            sresd.beat(number)
            until(lambda: sresctld.beaten, "it has beaten")
            assert sresctld.beaten == ["n1"]
            sresctld.beaten.clear()
        assert sresctld.registry.agents()["n1"].heard_at > before.heard_at
        sresd.beat(20)
        sresd.send(NodeHello("boot", "machine"))
        sresd.beat(21)
        sresd.send(Report((), (), (), full=True))
        sresd.beat(22)
        until(lambda: sresctld.registry.agents()["n1"].reported, "its report was read")
        before = sresctld.registry.agents()["n1"]
        sresd.send(Beat(23))  # of an older release, which knows no others
        until(lambda: heard_since(sresctld, before.heard_at), "it has beaten")
        sresctld.beaten.clear()
        sresd.beat(24)
        until(lambda: sresctld.beaten, "it has beaten")


@pytest.mark.parametrize("forge", ["another mark", "the last one again", "one that comes later"])
def test_a_forged_light_beat_ends_the_connection(sresctld: Sresctld, forge: str) -> None:
    sock, challenge = sresctld.raw()
    sock.sendall(FRAMES.pack(hello(challenge.nonce, sresctld, "node", "n1")))
    assert isinstance(read(sock), Welcome)
    sender = seal.FrameSeal(KEY, seal.FROM_CLIENT)
    first, _, third = (sender.beat() for _ in range(3))
    sock.sendall(first)
    until(lambda: sresctld.beaten, "it has beaten")
    known = {
        "another mark": first[:4] + b"x" * 8,
        "the last one again": first,
        "one that comes later": third,
    }
    sock.sendall(known[forge])
    sealed = exactly(sock, FRAMES.unpack_length(exactly(sock, 4)))
    answer = FRAMES.unpack(seal.FrameSeal(KEY, seal.FROM_SERVER).open(sealed))
    assert isinstance(answer, Refused) and "changed on its way" in answer.reason
    assert read(sock) is None and sresctld.beaten == ["n1"]


class OldWelcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """As it was before there were light beats, in the same protocol."""

    proof: bytes
    peers: tuple[str, ...] = ()


def test_an_older_sresctld_gets_sealed_beats(munged: Callable[[str], str]) -> None:
    """It says nothing of light ones in its welcome."""
    came: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as sock:
            sock.settimeout(10)
            sock.sendall(FRAMES.pack(Challenge(b"c" * 32, 0)))
            credential = munge.decode(read(sock).credential, munged("ours"))
            proof = msgspec.msgpack.decode(credential.payload, type=Proof)
            welcome = OldWelcome(seal.welcome(proof.key, ()).proof)
            sock.sendall(FRAMES.frame(msgspec.msgpack.encode(welcome)))
            sealed = exactly(sock, FRAMES.unpack_length(exactly(sock, 4)))
            came.append(seal.FrameSeal(proof.key, seal.FROM_CLIENT).open(sealed))

    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    thread = threading.Thread(target=serve, args=(listener,), daemon=True)
    thread.start()
    with Connection.open("127.0.0.1", port, "node", "n1", munge_socket=munged("ours")) as sresd:
        assert not sresd.welcome.light_beats
        sresd.beat(5)
        thread.join(timeout=10)
    assert [FRAMES.unpack(body) for body in came] == [Beat(5)]


def test_an_older_sresd_reads_the_welcome(munged: Callable[[str], str]) -> None:
    """It leaves out what it does not know, and finds the proof right."""
    body = FRAMES.encode(seal.welcome(KEY, ("192.0.2.1:6818",)))
    read_by_it = msgspec.msgpack.decode(body, type=OldWelcome)
    assert read_by_it.peers == ("192.0.2.1:6818",)
    assert seal.is_proof(Welcome(read_by_it.proof, read_by_it.peers), KEY)


def test_the_last_words_of_a_node_are_read_though_it_is_gone(sresctld: Sresctld) -> None:
    """They come together with the connection's end, and are no less true."""
    for number in range(20):
        sresd = sresctld.connect("node", "n1")
        sresd.send(NodeHello(f"boot-{number}", "machine"))
        sresd.beat(1)
        sresd.send(Goodbye("test"))
        sresd.close()
        known = until(lambda: sresctld.registry.agent("n1"), "it is known")
        until(lambda: sresctld.registry.agents()["n1"].was_stopped, "its goodbye was read")
        assert known.node == "n1"
        assert sresctld.registry.agents()["n1"].boot_id == f"boot-{number}"
        sresctld.registry.forget("n1")
        until(lambda: not sresctld.server.connections, "nothing is left of it")


def test_a_report_larger_than_a_read_is_taken_whole(sresctld: Sresctld) -> None:
    finding = Finding("disk", Severity.MONITOR, "x" * 300_000, 1.0)
    with sresctld.connect("node", "n1") as sresd:
        sresd.beat(0)
        sresd.send(Report(findings=(finding,), full=True))
        sresd.beat(1)
        until(lambda: sresctld.registry.agents().get("n1"), "it is known")
        until(lambda: sresctld.registry.agents()["n1"].findings == (finding,), "it was read")
        sent = time.monotonic()
        sresd.beat(2)
        # What comes with the rest of the report is read with it, and is a message like any other.
        until(lambda: sresctld.registry.agents()["n1"].heard_at > sent, "it beats on")


def test_a_node_that_goes_is_missed_at_once(sresctld: Sresctld) -> None:
    sresd = sresctld.connect("node", "n1")
    sresd.send(Beat(0))
    until(lambda: sresctld.registry.agent("n1"), "it is known")
    until(lambda: sresctld.registry.agents()["n1"].is_connected, "it is there")
    sresctld.registry.wake.clear()
    sresd.close()
    until(lambda: not sresctld.registry.agents()["n1"].is_connected, "it is gone")
    assert sresctld.registry.wake.is_set()
    until(lambda: not sresctld.server.connections, "nothing is left of it")


def test_a_supervisor_is_answered_and_heard(sresctld: Sresctld) -> None:
    with sresctld.connect("job", "7") as connection:
        answer = connection.ask(EvidenceRequest(("n1", "n9")))
        assert isinstance(answer, Evidence) and answer.asked
        assert [(v.node, v.verdict) for v in answer.verdicts] == [
            ("n1", "unknown"),
            ("n9", "unknown"),
        ]
        connection.send(AttemptStarted(1, ("n1",)))
        (heard,) = until(sresctld.inbox.take, "the attempt is known")
        assert (heard.job, heard.message) == (7, AttemptStarted(1, ("n1",)))


def test_a_verdict_from_before_a_job_was_there_is_not_told_to_it(sresctld: Sresctld) -> None:
    """A person resumes a node, and a job starts there before the next round: it is not kept out."""
    old = {"n1": NodeVerdict("n1", "dead", "kept out by root: memory")}
    job = Job(7, ALICE, "RUNNING", nodes=("n1",))
    sresctld.inbox.know((), {})
    sresctld.inbox.publish(old, {})
    sresctld.inbox.know((), {7: job})
    with sresctld.connect("job", "7") as connection:
        early = connection.ask(EvidenceRequest(("n1",)))
        sresctld.inbox.publish(old, {})
        later = connection.ask(EvidenceRequest(("n1",)))
    assert isinstance(early, Evidence) and isinstance(later, Evidence)
    assert [early.verdicts[0].verdict, later.verdicts[0].verdict] == ["unknown", "dead"]


@pytest.mark.parametrize("beside", [(), ("n1",)], ids=["one allocation", "a second one"])
def test_the_nodes_of_a_failed_step_check_themselves(
    sresctld: Sresctld, beside: tuple[str, ...]
) -> None:
    own = tuple(name for name in ("n1", "n2") if name not in beside)
    sresctld.jobs[7] = Job(7, ALICE, "RUNNING", nodes=own, companion_nodes=beside)
    finding = Finding("efa_devices", Severity.REBOOT, "1 EFA device is missing", 5.0)
    result = CheckResult("efa_devices", "fail", finding.text, (finding,))
    with sresctld.connect("node", "n1") as sresd, sresctld.connect("job", "7") as supervisor:
        until(lambda: sresctld.registry.agent_connection("n1"), "n1 is connected")
        answer = supervisor.ask(EvidenceRequest(("n1", "n2", "n3"), 20.0))
        assert isinstance(answer, Evidence) and answer.checks == "running"
        request = sresd.receive(10.0)
        assert isinstance(request, NodeRequest) and request.kind == RunStepChecks.kind
        sresd.send(Report((result,)))
        until(lambda: sresctld.registry.agents()["n1"].findings, "its finding is there")
        sresctld.registry.wake.clear()
        body = msgspec.msgpack.encode(StepChecksRun(1))
        sresd.send(NodeAnswer(request.id, msgspec.Raw(body)))
        until(sresctld.registry.wake.is_set, "a round begins")
        sresctld.inbox.take()
        sresctld.inbox.publish({"n1": NodeVerdict("n1", "sick", finding.text)}, {})
        told = supervisor.receive(10.0)
        assert isinstance(told, Evidence) and told.checks == "over"
        assert [(v.node, v.verdict) for v in told.verdicts] == [("n1", "sick"), ("n2", "unknown")]
        assert "at fault: n1; not checked: n2 (the sresd of n2 is not connected" in told.text


def test_checks_that_a_user_asks_for_again_and_again_begin_few_rounds(
    sresctld: Sresctld,
) -> None:
    wake, rounds = sresctld.registry.wake, 0
    for _ in range(50):
        wake.clear()
        sresctld.inbox._begin_round(ALICE)
        rounds += wake.is_set()
    assert inbox.WAKES_AT_ONCE_OF_USER <= rounds < 25
    wake.clear()
    sresctld.inbox._begin_round(0)
    assert wake.is_set(), "root's always do"


def test_a_user_who_talks_all_the_time_begins_few_rounds(sresctld: Sresctld) -> None:
    """Each round reads Slurm. What is said in between waits for the next one."""
    rounds = 0
    program = run_as(
        ALICE,
        sresctld,
        "c = connect('job', '7')\n"
        "for number in range(60): c.send(AttemptEnded(number, 1, 'again'))\n"
        "print(c.ask(EvidenceRequest(())).asked, flush=True)\n",
    )
    while program.poll() is None:
        if sresctld.registry.wake.wait(0.01):
            sresctld.registry.wake.clear()
            rounds += 1
    assert said_by(program) == "True\n"
    assert 1 <= rounds <= 10
    assert len(sresctld.inbox.take()) == 60


def test_what_users_say_leaves_room_for_an_administrator(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_WAITING_OF_USER", 30)
    monkeypatch.setattr(inbox, "MAX_QUEUED", 40)
    talk = (
        "try:\n"
        "    c = connect('job', '7')\n"
        "    for number in range(50): c.send(AttemptEnded(number, 1, 'again'))\n"
        "    print(c.receive(10).reason)\n"
        "except SresError as error: print(error)\n"
    )
    assert "messages within one cycle are too many" in said_by(run_as(ALICE, sresctld, talk))
    with sresctld.connect() as roots:
        assert roots.ask(PauseRequest("by hand")) == Status({"paused": "by hand"})
    heard = sresctld.inbox.take()
    assert len(heard) == 31 and heard[-1].message == PauseRequest("by hand")


def test_what_waits_for_a_round_takes_little_memory(sresctld: Sresctld) -> None:
    """A round may be long in coming, while Slurm cannot be read: a thousand messages of a user may
    wait, and each frame of his has room for a hundred thousand names."""
    program = run_as(
        ALICE,
        sresctld,
        "c = connect('job', '7')\n"
        "names = ('n1', 'far', *('%x' % n for n in range(80000)), 'n1', 'x' * 9999)\n"
        "c.send(AttemptStarted(1, names))\n"
        "c.send(AttemptEnded(1, 1, 'again ' * 80000))\n"
        "c.send(RequeueRequest('again ' * 80000))\n"
        "print(c.ask(EvidenceRequest(())).asked, flush=True)\n",
    )
    assert said_by(program) == "True\n"
    started, *others = (heard.message for heard in sresctld.inbox.take())
    assert isinstance(started, AttemptStarted)
    assert started.nodes[:2] == ("n1", "far") and len(started.nodes) < 200
    assert len(others) == 2
    assert all(len(msgspec.msgpack.encode(message)) < 10_000 for message in (started, *others))


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        ("connect('job', '7').ask(EvidenceRequest(())).asked", False),
        ("isinstance(connect().ask(StatusRequest('status')), Status)", True),
    ],
    ids=["a supervisor's", "a query's"],
)
def test_a_supervisor_does_not_pause_for_the_time_in_which_sresctld_waits(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch, call: str, counts: bool
) -> None:
    """It waits for a core then, on a busy machine, and a pause ten times as long had the
    supervisor's kernel give its connection up. A query may have it wait for the disk: that counts.
    """
    took: list[float] = []
    pause, received = limits.UserLimits.pause, sresctld.inbox.received

    def noted(of: limits.UserLimits, uid: int, seconds: float, now: float) -> float:
        took.append(seconds)
        return pause(of, uid, seconds, now)

    def later(*words: Any) -> None:
        threading.Event().wait(0.5)
        received(*words)

    monkeypatch.setattr(limits.UserLimits, "pause", noted)
    monkeypatch.setattr(sresctld.inbox, "received", later)
    assert said_by(run_as(ALICE, sresctld, f"print({call}, flush=True)\n")) == "True\n"
    assert took and (max(took) > 0.4) == counts


def test_root_may_pause(sresctld: Sresctld) -> None:
    with sresctld.connect() as connection:
        assert connection.ask(PauseRequest("by hand")) == Status({"paused": "by hand"})
    (heard,) = sresctld.inbox.take()
    assert (heard.message, heard.connection.uid) == (PauseRequest("by hand"), 0)


QUESTION = NodeQuestion("n1", SendLog.kind, msgspec.Raw(msgspec.msgpack.encode(SendLog(5))), 5.0)


def test_root_asks_a_node_and_its_sresd_answers(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as sresd, sresctld.connect() as roots:
        sresd.send(NodeHello("boot"))
        until(lambda: "n1" in sresctld.registry.agents(), "it is known")
        roots.send(QUESTION)
        asked = sresd.receive(10)
        assert isinstance(asked, NodeRequest) and asked.kind == SendLog.kind
        assert msgspec.msgpack.decode(asked.body, type=SendLog).lines == 5
        tail = msgspec.msgpack.encode(LogTail(("all is well",), ()))
        sresd.send(NodeAnswer(asked.id, msgspec.Raw(tail)))
        answer = roots.receive(10)
        assert isinstance(answer, NodeAnswer)
        assert msgspec.msgpack.decode(answer.body, type=LogTail).lines == ("all is well",)


def test_a_node_that_does_not_answer_is_not_waited_for(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as sresd, sresctld.connect() as roots:
        until(lambda: "n1" in sresctld.registry.agents(), "it is known")
        answer = roots.ask(msgspec.structs.replace(QUESTION, seconds=0.1))
        assert isinstance(answer, NodeAnswer) and "did not answer within 0.1 s" in answer.refused
        asked = sresd.receive(10)
        assert isinstance(asked, NodeRequest)
        roots.send(QUESTION)
        sresd.close()
        answer = roots.receive(10)
        assert isinstance(answer, NodeAnswer) and "was lost before it answered" in answer.refused
        with pytest.raises(WireError, match="the sresd of n2 is not connected"):
            roots.ask(msgspec.structs.replace(QUESTION, node="n2"))


def test_users_and_nodes_ask_no_node(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as sresd:
        until(lambda: "n1" in sresctld.registry.agents(), "it is known")
        said = said_by(
            run_as(
                ALICE,
                sresctld,
                "import msgspec\n"
                "question = NodeQuestion('n1', 'send-log', msgspec.Raw(b'\\xc0'))\n"
                "try: connect().ask(question)\n"
                "except SresError as error: print(type(error).__name__, error)\n",
            )
        )
        assert said == "NotPermitted only root and SlurmUser may ask nodes\n"
        sresd.send(QUESTION)
        sresd.send(NodeAnswer(12345))
        assert sresd.receive(0.2) is None


def test_a_server_that_stops_lets_go_of_everybody(munged: Callable[[str], str]) -> None:
    sresctld = Sresctld(munged("ours"))
    connection = sresctld.connect()
    sresctld.server.stop()
    with pytest.raises(WireError):
        connection.receive(10)
    again = Server(sresctld.inbox, sresctld.server.port, "127.0.0.1", munged("ours"))
    again.start()
    sresctld.connect().close()
    again.stop()


def test_a_fault_of_ours_ends_one_connection_only(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(peer: Client, message: Any) -> None:
        raise RuntimeError("a bug")

    other = sresctld.connect()
    with monkeypatch.context() as patch:
        patch.setattr(sresctld.inbox, "received", broken)
        for _ in range(3):
            with sresctld.connect() as connection, pytest.raises(WireError):
                connection.ask(StatusRequest("status"))
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == 1, "a user who has found it must not fill the disk"
    assert isinstance(other.ask(StatusRequest("status")), Status)


def test_a_host_that_is_no_name_is_one_line_too() -> None:
    """A typo in controller.host ended a thread of the supervisor, and sresd, with a traceback."""
    with pytest.raises(WireError, match=r"does not answer at ctl\.\.example:1"):
        Connection.open("ctl..example", 1, "query")


def test_frames_too_large_to_send_are_refused_here() -> None:
    with pytest.raises(WireError, match="too large"):
        FRAMES.pack(Status({"x": "y" * MAX_FRAME_BYTES}))
