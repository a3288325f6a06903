"""The process of an srun: its start, without a copy of our memory, and its connections.

`subprocess` can neither clear the mask of blocked signals nor tie the child to its parent but by
Python code in a copy of this process, which a step would wait for. `posix_spawn` clears the mask,
and the plugin ties srun to us (spank/srun.c).

srun keeps a connection to each node for the tasks' output. When a new machine answers under the
old one's name, it resets that connection, slurmctld tells srun that the node misses the step, and
srun gives up: "Aborting, io error and missing step on node 2" (seen on 22.05). A connection that
was closed in the regular way is no error to it. Slurm tells srun of the node's failure only where
the node goes down while the job still has it. So our end of it is closed first.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

NO_INPUT = -3
"""In place of the file for standard input: there is nothing to read. As `subprocess.DEVNULL`."""
_PIDFD_GETFD = 438
"""pidfd_getfd(2), Linux 5.6; the same number on every architecture."""
_SOCKET = r"socket:\[\d+\]"
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


class SrunProcess:
    """A child process, with those members of `subprocess.Popen` that a step needs."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], files: Sequence[int | None]
    ) -> None:
        """
        Args:
            argv: the program's path, and its arguments.
            environment: all of its variables.
            files: those that become its standard input, output and error; None: our own.

        Raises:
            OSError: it cannot be started.
        """
        actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_DUP2, file, number)
            if file != NO_INPUT
            else (os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDONLY, 0)
            for number, file in enumerate(files)
            if file is not None
        ]
        self.returncode: int | None = None
        """The exit code, or the signal that ended it, below 0; None: it was not waited for."""
        self._reaping = threading.Lock()
        self.pid = os.posix_spawn(
            argv[0],
            list(argv),
            environment,
            file_actions=actions,
            # srun 22.05 comes to us with some of these blocked, and a child inherits the mask.
            setsigmask=(),
            setsigdef=_PYTHON_IGNORES,
        )

    def wait(self) -> int:
        """Wait for its end, in one thread only; return `returncode`."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        # Its number may be another process's as soon as it was waited for.
        with self._reaping:
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


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
            if re.fullmatch(_SOCKET, str(entry.readlink())):
                yield int(entry.name)


def _copy(handle: int, number: int) -> socket.socket:
    import ctypes  # late: no step waits for what only a lost node needs

    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, number, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return socket.socket(fileno=copy)


def _is_to(connection: socket.socket, addresses: frozenset[str]) -> bool:
    peer = str(connection.getpeername()[0]).removeprefix("::ffff:")
    # Several nodes of one machine have one address: then connections cannot be told apart.
    own = str(connection.getsockname()[0]).removeprefix("::ffff:")
    return peer in addresses and peer != own
