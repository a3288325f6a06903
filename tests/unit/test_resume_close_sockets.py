"""Sever: a child's connections to one machine are closed, as if that machine had closed them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slurm_resilience.resume.srun.srun_process import close_sockets, connections

# Connects to 127.0.0.2 and 127.0.0.3 from 127.0.0.1, and says which of them is closed first.
CHILD = """
import select, socket, sys
named = {
    socket.create_connection((host, port), source_address=("127.0.0.1", 0)): host
    for host, port in ((w.split(":")[0], int(w.split(":")[1])) for w in sys.argv[1:])
}
print("up", flush=True)
(first, *_), _, _ = select.select(list(named), [], [])
heard = first.recv(1)
first.close()
print(named[first], heard, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with (
        socket.create_server(("127.0.0.2", 0)) as two,
        socket.create_server(("127.0.0.3", 0)) as three,
    ):
        words = [f"{host}:{port}" for host, port in (two.getsockname(), three.getsockname())]
        argv = [sys.executable, "-c", CHILD, *words]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        with two.accept()[0], three.accept()[0]:
            yield process
        process.kill()
        process.communicate()


def test_only_connections_to_that_machine(child: subprocess.Popen[str]) -> None:
    assert connections(child.pid) == 2
    assert close_sockets(child.pid, "127.0.0.3") == 1
    assert child.stdout is not None
    assert child.stdout.readline() == "127.0.0.3 b''\n"
    assert connections(child.pid) == 1
    assert child.poll() is None


def test_nothing_to_sever(child: subprocess.Popen[str]) -> None:
    assert close_sockets(child.pid, "127.0.0.4") == 0
    assert close_sockets(child.pid, "no-such-host.invalid") == 0
    child.kill()
    child.wait()
    assert close_sockets(child.pid, "127.0.0.3") == 0
    assert connections(child.pid) == -1
