"""Close srun's connections to a node that is gone, so that srun does not end the whole step.

srun keeps a connection to each node for the tasks' output. When a new machine answers under the
old one's name, it resets that connection, slurmctld tells srun that the node misses the step, and
srun gives up: "Aborting, io error and missing step on node 2" (seen on 22.05). A connection that
was closed in the regular way is no error to it. Slurm tells srun of the node's failure only where
the node goes down while the job still has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438
"""pidfd_getfd(2), Linux 5.6; the same number on every architecture."""
_SOCKET = re.compile(r"socket:\[\d+\]")


def close_sockets(pid: int, address: str) -> int:
    """Close a child's connections to one machine, as if that machine had closed them.

    Args:
        pid: a child of this process (the kernel allows it for no other).
        address: the machine's name or address.

    Returns:
        The number of connections. 0 as well where the kernel forbids it.
    """
    addresses = _resolve(address)
    count = 0
    with contextlib.suppress(OSError):
        for connection in _connections(pid) if addresses else ():
            if _is_to(connection, addresses):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connections(pid: int) -> int:
    """Return the number of network connections of a child; -1 where the kernel does not tell."""
    try:
        return sum(1 for _ in _connections(pid))
    except OSError:
        return -1


def _connections(pid: int) -> Iterator[socket.socket]:
    handle = os.pidfd_open(pid)
    try:
        for number in _sockets(pid):
            with _copy(handle, number) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    with contextlib.suppress(OSError):
                        connection.getpeername()  # fails where there is no other end
                        yield connection
    finally:
        os.close(handle)


def _resolve(address: str) -> frozenset[str]:
    try:
        entries = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset(str(entry[4][0]) for entry in entries)


def _sockets(pid: int) -> Iterator[int]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if _SOCKET.fullmatch(str(entry.readlink())):
                yield int(entry.name)


def _copy(handle: int, number: int) -> socket.socket:
    copy = _libc.syscall(_PIDFD_GETFD, handle, number, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return socket.socket(fileno=copy)


def _is_to(connection: socket.socket, addresses: frozenset[str]) -> bool:
    peer = str(connection.getpeername()[0]).removeprefix("::ffff:")
    # Several nodes of one machine have one address: then connections cannot be told apart.
    own = str(connection.getsockname()[0]).removeprefix("::ffff:")
    return peer in addresses and peer != own
