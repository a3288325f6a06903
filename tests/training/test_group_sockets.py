"""The end of a world cuts connections such that every call of gloo's that waits on them ends."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from ranks import Ranks  # noqa: E402

from slurm_resilience.training.process_group.group_sockets import (  # noqa: E402
    KEEPALIVE_SECONDS,
    REST_SECONDS,
    STALLED_SECONDS,
    GroupSockets,
    Traffic,
    open_sockets,
)

pytestmark = pytest.mark.training

LONG = timedelta(seconds=600)
"""A call that is lost waits so long."""
LARGE = 16 << 20
"""More bytes than the kernel takes at once."""


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        time.sleep(0.002)


def formed(rank: int, store: str) -> GroupSockets:
    """Return the sockets of a default group of two ranks that is made anew."""
    dist.destroy_process_group()
    sockets = GroupSockets()
    sockets.begin()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=LONG
    )
    sockets.end(set())
    return sockets


def unread() -> int:
    """Return the bytes that have arrived at this process, and were not read."""
    found = 0
    for descriptor in open_sockets():
        own = socket.socket(fileno=os.dup(descriptor))
        if own.family == socket.AF_INET and not own.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            answer = fcntl.ioctl(own, termios.FIONREAD, bytes(4))
            found += struct.unpack("=i", answer)[0]
        own.close()
    return found


def stands(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def cut_while_parent_stands(sockets: GroupSockets, told: Path) -> None:
    """A fork of the rank, with the same connections: it acts between two looks of gloo's."""
    parent = os.getppid()
    try:
        os.kill(parent, signal.SIGSTOP)
        until(lambda: stands(parent), "the rank stands")
        before = unread()
        told.touch()
        until(lambda: unread() > before, "the other rank asks for the message")
        until(lambda: sockets.cut() == 1, "the connection is cut")
    finally:
        os.kill(parent, signal.SIGCONT)
        os._exit(0)


def is_asked_when_it_is_cut(rank: int, _: Callable[[Any], None], store: str, told: Path) -> str:
    sockets = formed(rank, store)
    values = torch.ones(4)
    if rank == 1:
        until(told.exists, "the other rank stands")
        dist.irecv(values, 0)
        # Keeps its connections.
        until(Path(f"{told}.over").exists, "the other rank's call has ended")
        return "over"
    work = dist.isend(values, 1)
    if os.fork() == 0:
        cut_while_parent_stands(sockets, told)
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    finally:
        Path(f"{told}.over").touch()
    return "sent"


def test_a_message_that_is_asked_for_when_its_connection_is_cut_is_not_lost(
    tmp_path: Path,
) -> None:
    """gloo reads the request after the cut, and writes what nothing would ever tell of."""
    store, told = str(tmp_path / "again"), tmp_path / "told"
    with Ranks(tmp_path, 2, is_asked_when_it_is_cut, store, told) as ranks:
        assert ranks.results() == ["sent", "over"]


Pair = tuple[GroupSockets, socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Yield a connection that is a group's, and its other end."""
    sockets = GroupSockets()
    sockets.begin()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        sockets.end({other.fileno()})
        with one, other:
            yield sockets, one, other
    sockets.close()


def test_the_other_side_learns_nothing_until_the_connection_is_let_go_of(pair: Pair) -> None:
    sockets, one, other = pair
    until(lambda: sockets.cut() == 1, "it is cut")
    assert one.recv(1) == b""
    one.sendall(b"written after the cut")
    one.close()  # as gloo does
    assert other.recv(100) == b"written after the cut"
    with pytest.raises(BlockingIOError):
        other.recv(1, socket.MSG_DONTWAIT)
    sockets.close()
    assert other.recv(1) == b"" and sockets.cut() == 0


def test_the_other_side_finishes_its_writing_to_an_end_that_was_cut(pair: Pair) -> None:
    sockets, one, other = pair
    until(lambda: sockets.cut() == 1, "it is cut")
    one.close()  # as gloo does
    writer = threading.Thread(target=other.sendall, args=(bytes(LARGE),), daemon=True)
    writer.start()
    until(lambda: bool(sockets.cut()) and not writer.is_alive(), "all is written")


def test_a_connection_is_not_cut_while_gloo_has_not_read_what_just_came(pair: Pair) -> None:
    sockets, one, other = pair
    other.sendall(b"x")
    assert sockets.cut() == 0
    until(lambda: sockets.cut() == 1, "what does not move any more is not waited for")
    assert one.recv(2) == b"x"
    assert one.recv(2) == b""


def test_a_connection_without_traffic_is_kept_alive(pair: Pair) -> None:
    """A firewall had forgotten it after a long evaluation: all ranks stood still for 30 minutes."""
    _, one, other = pair
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE_SECONDS
    assert not other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "it is another's"


def test_a_second_descriptor_of_an_older_connection_is_not_the_groups(pair: Pair) -> None:
    _, one, _ = pair
    sockets = GroupSockets()
    sockets.begin()
    with one.dup():
        sockets.end(set())
    assert len(sockets) == 0


OLD = 1.0
UNDER_WAY = [
    (Traffic(0, 0, OLD, OLD), False),
    (Traffic(0, 0, REST_SECONDS / 2, OLD), True),
    (Traffic(1, 0, REST_SECONDS, OLD), True),
    (Traffic(0, 1, OLD, REST_SECONDS), True),
    (Traffic(1, 1, STALLED_SECONDS, STALLED_SECONDS), False),
]


@pytest.mark.parametrize(("traffic", "under_way"), UNDER_WAY)
def test_what_counts_as_under_way(traffic: Traffic, under_way: bool) -> None:
    assert traffic.under_way() is under_way
