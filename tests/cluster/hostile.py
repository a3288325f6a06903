"""A user's program that takes from sresctld what it can get, until its standard input ends.

python hostile.py HOST PORT MUNGE_SOCKET JOB, where JOB is a running job of the user.
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import struct
import sys
from collections.abc import Callable

from slurm_resilience.errors import SresError
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    AttemptStarted,
    EvidenceRequest,
    Message,
    RequeueRequest,
    Role,
    StatusRequest,
)

HOST, PORT, SOCKET, JOB = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]


def connect(role: Role = "query", subject: str = "") -> Connection:
    return Connection.open(HOST, PORT, role, subject, munge_socket=SOCKET, timeout=5.0)


def thousand_connections() -> None:
    """Keep a thousand that prove nothing, and open another one for each that is closed."""
    kept: list[socket.socket] = []
    while True:
        try:
            kept.append(socket.create_connection((HOST, PORT), timeout=1))
        except OSError:
            continue
        if len(kept) > 1000:
            kept.pop(random.randrange(1000)).close()


def proven_connections() -> None:
    """Keep as many as are to be had that have proven who the user is."""
    kept = []
    while True:
        try:
            kept.append(connect())
        except SresError:
            continue


def half_frames() -> None:
    """Begin forty messages of the largest size, on forty connections, and never end them."""
    while True:
        begun = []
        for number in range(40):
            try:
                one = connect("job", JOB)
                size = 8 << 20 if number % 2 else 512 << 10
                one._sock.sendall(struct.pack(">I", size) + b"x" * (400 << 10))
                begun.append(one)
            except (SresError, OSError):
                continue


def long_lists() -> None:
    """Send lists of up to 8 MB."""
    messages: list[Message] = [
        AttemptStarted(1, ("n1",) * 100_000),
        AttemptStarted(1, tuple(f"n{i}" for i in range(60_000))),
        EvidenceRequest(tuple(f"m{i}" for i in range(60_000))),
        EvidenceRequest(("n1",) * 100_000),
        AttemptStarted(1, ("n" * 100,) * 80_000),
        RequeueRequest("x" * ((8 << 20) - 1000)),
    ]
    while True:
        try:
            one = connect("job", JOB)
            for message in messages:
                one.send(message)
        except SresError:
            continue


def random_jobs() -> None:
    """Name job ids at random."""
    while True:
        try:
            connect("job", str(random.randrange(1, 10**9)))
        except SresError:
            continue


def unread_answers() -> None:
    """Ask for everything, and read nothing."""
    asked = []
    while True:
        try:
            one = connect()
            asked.append(one)
            for what in ("status", "history") * 20:
                one.send(StatusRequest(what, limit=1000))  # type: ignore[arg-type]
        except SresError:
            asked = asked[-200:]


ATTACKS: tuple[Callable[[], None], ...] = (
    thousand_connections,
    proven_connections,
    half_frames,
    long_lists,
    random_jobs,
    random_jobs,
    unread_answers,
)

if __name__ == "__main__":
    programs = [multiprocessing.Process(target=attack, daemon=True) for attack in ATTACKS]
    for program in programs:
        program.start()
    print("begun", flush=True)
    sys.stdin.read()
    for program in programs:
        program.kill()
