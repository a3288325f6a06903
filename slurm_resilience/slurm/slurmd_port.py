"""See whether the slurmd of nodes takes connections, as Slurm's own programs make them."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterable
from typing import NamedTuple

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.model import Node

SECONDS = 2.0
"""For all nodes together. A machine that lives answers within milliseconds."""
_NOT_THERE = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ECONNRESET})
"""Errors that tell of the other machine. All others may be this one's own."""


class PortsSeen(NamedTuple):
    """The outcome of a connection to each node; a node of which nothing is known is in neither."""

    answering: frozenset[str]
    silent: frozenset[str]
    """slurmd does not run there, or the machine does not answer."""


def look_at_ports(nodes: Iterable[Node], seconds: float = SECONDS) -> PortsSeen:
    """Connect to the slurmd of each node at once, and close the connections again."""
    answering: set[str] = set()
    silent: set[str] = set()
    waiting: dict[int, tuple[str, socket.socket]] = {}
    try:
        for node in nodes:
            _begin(node, waiting, answering, silent)
        _wait(waiting, seconds, answering, silent)
        silent |= {name for name, _ in waiting.values()}
    finally:
        for _, connection in waiting.values():
            connection.close()
    return PortsSeen(frozenset(answering), frozenset(silent))


def _begin(
    node: Node,
    waiting: dict[int, tuple[str, socket.socket]],
    answering: set[str],
    silent: set[str],
) -> None:
    try:
        found = socket.getaddrinfo(node.address or node.name, node.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        connection = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError):
        return
    connection.setblocking(False)
    code = connection.connect_ex(address)
    if code == errno.EINPROGRESS:
        waiting[connection.fileno()] = node.name, connection
        return
    connection.close()
    _note(node.name, code, answering, silent)


def _wait(
    waiting: dict[int, tuple[str, socket.socket]],
    seconds: float,
    answering: set[str],
    silent: set[str],
) -> None:
    # Not select(), which knows no number above 1023: the user may have left us many open files.
    watched = select.poll()
    for number in waiting:
        watched.register(number, select.POLLOUT)
    end = SYSTEM_CLOCK.monotonic() + seconds
    while waiting and (left := end - SYSTEM_CLOCK.monotonic()) > 0:
        for number, _ in watched.poll(left * 1000):
            watched.unregister(number)
            name, connection = waiting.pop(number)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            connection.close()
            _note(name, code, answering, silent)


def _note(name: str, code: int, answering: set[str], silent: set[str]) -> None:
    if code == 0:
        answering.add(name)
    elif code in _NOT_THERE:
        silent.add(name)
