"""A server of the wire with a real munged, and its clients."""

from __future__ import annotations

import os
import shutil
import socket
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

from slurm_resilience.controller.inbox import Inbox
from slurm_resilience.controller.job_lookups import JobLookups
from slurm_resilience.controller.registry import Registry
from slurm_resilience.errors import NotFound
from slurm_resilience.model import Job, Node
from slurm_resilience.wire import munge, seal
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    FRAMES,
    Challenge,
    Hello,
    Proof,
)
from slurm_resilience.wire.server import Client, Server

ALICE, BOB = 20001, 20002
KEY = b"k" * seal.KEY_BYTES
EVENT = {"kind": "replacing", "text": "/opt/replace --token s3cret", "data": {}}
MUNGED = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
NEEDS_MUNGE = [
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
