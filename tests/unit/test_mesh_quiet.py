"""Heartbeats wake no process; anything else does, and so does the end of a connection."""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
from collections.abc import Iterator

import pytest
from mesh_peers import until

from slurm_resilience.errors import WireError
from slurm_resilience.mesh import messages
from slurm_resilience.mesh.connection import PeerConnection
from slurm_resilience.mesh.messages import Heartbeat, KeyPut, StatusUpdate
from slurm_resilience.mesh.model import Peer, PeerStatus

BEAT = Heartbeat(10**6, "collective#1000000#1000000.1000000.1000", 0.123456, 0.123456)
Pair = tuple[socket.socket, PeerConnection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The sending side, and a connection that is proven."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    connection = PeerConnection(accepted, [b"secret"])
    connection.peer = Peer("peer", 0)
    assert list(connection.received()) == []
    yield sender, connection
    sender.close()
    connection.close()


def wakes(connection: PeerConnection, seconds: float = 0) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def unread(connection: PeerConnection) -> int:
    size: int = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)))[0]
    return size


def test_beats_wait_to_be_read(pair: Pair) -> None:
    sender, connection = pair
    frame = messages.framed(BEAT)
    sender.sendall(2 * frame)
    until(lambda: unread(connection) == 2 * len(frame), "both beats are there")
    assert not wakes(connection)
    assert connection.take(late=True)
    assert list(connection.received()) == [BEAT, BEAT]
    assert connection.age >= 0
    assert not connection.take(late=True)


def test_whatever_else_is_said_wakes_with_all_that_came_before(pair: Pair) -> None:
    sender, connection = pair
    status = StatusUpdate(1, PeerStatus())
    sender.sendall(messages.framed(BEAT) + messages.framed(status))
    assert wakes(connection, 20)
    assert connection.take()
    assert list(connection.received()) == [BEAT, status]


@pytest.mark.parametrize("missing", [1, 100])
def test_the_rest_of_a_message_wakes_however_short(pair: Pair, missing: int) -> None:
    sender, connection = pair
    put = KeyPut(1, "key", bytes(2 * messages.QUIET_BYTES))
    frame = messages.framed(put)
    sender.sendall(frame[:-missing])
    until(lambda: unread(connection) == len(frame) - missing, "the beginning is there")
    assert connection.take()
    assert list(connection.received()) == []
    sender.sendall(frame[-missing:])
    assert wakes(connection, 20)
    assert connection.take()
    assert list(connection.received()) == [put]


def test_the_end_wakes(pair: Pair) -> None:
    sender, connection = pair
    sender.sendall(messages.framed(BEAT))
    sender.close()
    assert wakes(connection, 20)
    assert connection.take()
    assert list(connection.received()) == [BEAT]
    with pytest.raises(WireError, match="closed"):
        connection.take()
