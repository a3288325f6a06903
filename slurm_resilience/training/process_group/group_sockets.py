"""The sockets of gloo's groups, which are cut when their world is over. gloo has no abort.

Found by experiment on torch 2.13:

- A call that waits on a connection raises within milliseconds when that connection ends; `abort`
  unblocks nothing.
- A connection that ends in the middle of a message loses the call: what was begun to be written, or
  half read, is told of no error. It waits until the time limit of collectives. A write that fails
  counts as begun.
- Shutting down gloo's listener ends the process, so listeners are left alone.

So no write is made to fail. Only reading ends, on this side alone, when no message is under way;
the connection stays open for the other side, which cuts its own end; and what still arrives is
taken from the kernel, so that the other side can finish its writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
import threading
from typing import NamedTuple, Self

from slurm_resilience.clock import SYSTEM_CLOCK, Clock
from slurm_resilience.training.compat import seen

REST_SECONDS = 0.01
"""A message may be under way when something has arrived later than so long ago."""
STALLED_SECONDS = 0.1
"""A message that has not moved for so long will not move any more."""
PATIENCE_SECONDS = 1.0
"""A connection is cut after so long, even if messages still move."""
CHUNK_BYTES = 1 << 20
CHUNKS = 16
"""Pieces that are taken from the kernel at a time, at most."""

KEEPALIVE_SECONDS, KEEPALIVE_PAUSE_SECONDS, KEEPALIVE_PROBES = 60, 20, 6
"""While nothing is said: firewalls forget a connection in that time (AWS: after 350 s), and drop
what comes later without a word. An evaluation or an export takes so long."""

_TCP_INFO = struct.Struct("=52x2I")
"""In Linux's struct tcp_info: milliseconds since data, and since an acknowledgement, arrived."""
_INT = struct.Struct("=i")


class Traffic(NamedTuple):
    """A connection as the kernel sees it."""

    unread: int
    """Bytes that have arrived and were not read."""
    unsent: int
    """Bytes that were written and have not arrived at the other side."""
    since_data: float
    """Seconds."""
    since_acknowledged: float
    """Seconds."""

    def under_way(self) -> bool:
        """Tell whether a message may be in the middle of its way. Pure."""
        if self.since_data < REST_SECONDS:
            return True
        moved = min(self.since_data, self.since_acknowledged)
        return bool(self.unread or self.unsent) and moved < STALLED_SECONDS


class CutConnection:
    """One connection that is cut, or about to be.

    Args:
        descriptor: gloo's own.
        inode: by which gloo's descriptor is known again.
        own: another one for the same connection, so that it stays open when gloo closes its own.
    """

    def __init__(self, descriptor: int, inode: int, own: socket.socket) -> None:
        self._descriptor = descriptor
        self._inode = inode
        self._own = own
        self.is_cut = False

    @classmethod
    def of(cls, descriptor: int, inode: int) -> Self | None:
        """Return it for gloo's file descriptor; None: that is no connection, or not open."""
        with contextlib.suppress(OSError):
            # The number may have been given to another file since.
            if os.fstat(descriptor).st_ino != inode:
                return None
            own = socket.socket(fileno=os.dup(descriptor))
            if own.family in (socket.AF_INET, socket.AF_INET6) and not own.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                with contextlib.suppress(OSError):
                    own.getpeername()
                    return cls(descriptor, inode, own)
            own.close()
        return None

    def cut(self, *, at_once: bool, both_ways: bool = False) -> None:
        """End the reading; take what arrives once gloo has closed its own descriptor.

        Args:
            at_once: even if a message is under way.
            both_ways: end the writing as well.
        """
        with contextlib.suppress(OSError):
            if not self.is_cut and (at_once or not self.traffic().under_way()):
                self._own.shutdown(socket.SHUT_RDWR if both_ways else socket.SHUT_RD)
                self.is_cut = True
            elif self.is_cut and not self._is_gloos():
                self._drain()

    def traffic(self) -> Traffic:
        """Ask the kernel.

        Raises:
            OSError: the connection is gone.
        """
        unread = fcntl.ioctl(self._own, termios.FIONREAD, bytes(_INT.size))
        unsent = fcntl.ioctl(self._own, termios.TIOCOUTQ, bytes(_INT.size))
        info = self._own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        data, acknowledged = _TCP_INFO.unpack(info)
        return Traffic(
            _INT.unpack(unread)[0], _INT.unpack(unsent)[0], data / 1000, acknowledged / 1000
        )

    def _is_gloos(self) -> bool:
        with contextlib.suppress(OSError):
            return os.fstat(self._descriptor).st_ino == self._inode
        return False

    def _drain(self) -> None:
        # After the end of reading, the kernel still takes what arrives, and hands it out.
        for _ in range(CHUNKS):
            if not self._own.recv(CHUNK_BYTES, socket.MSG_DONTWAIT):
                return

    def close(self) -> None:
        """Close the connection for good."""
        self._own.close()


class GroupSockets:
    """The sockets that gloo opened while a group was made.

    Args:
        both_ways: let writes fail as well, for a backend that can abort what waits.
        clock: tells the time.
    """

    def __init__(self, *, both_ways: bool = False, clock: Clock = SYSTEM_CLOCK) -> None:
        self._both_ways = both_ways
        self._clock = clock
        self._inodes: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._connections: dict[int, CutConnection] = {}
        """By inode: those of the group that were found when it was cut."""
        self._cut_at: float | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._poll = select.poll()

    def begin(self) -> None:
        """Remember what is open."""
        self._before = open_sockets()

    def end(self, but: set[int]) -> None:
        """Take what was opened since `begin`, without `but` (file descriptors of others)."""
        known = set(self._before.values())
        for descriptor, inode in open_sockets().items():
            # A connection of an earlier world may have got a second descriptor meanwhile.
            if inode not in known and descriptor not in but:
                self._inodes[descriptor] = inode
                keep_alive(descriptor)
                self._poll.register(descriptor, select.POLLRDHUP)

    def lost(self) -> bool:
        """Tell whether the group was cut, or a connection has ended since this was asked last: by
        the death of its other side, or by gloo, which closes it after an error."""
        if self._cut_at is not None:
            return True
        ended = self._poll.poll(0)
        for descriptor, _ in ended:
            self._poll.unregister(descriptor)
        return bool(ended)

    @seen("2.13")
    def cut(self) -> int:
        """Cut every connection of the group on which no message is under way. From any thread.

        Call it again: later all of them are cut, and what arrives on them is taken.

        Returns:
            The number of those that are cut.
        """
        now = self._clock.monotonic()
        with self._lock:
            if self._closed:
                return 0
            self._cut_at = now if self._cut_at is None else self._cut_at
            at_once = self._both_ways or now - self._cut_at >= PATIENCE_SECONDS
            for descriptor, inode in list(self._inodes.items()):
                if inode not in self._connections:
                    found = CutConnection.of(descriptor, inode)
                    if found is None:
                        continue
                    self._connections[inode] = found
                self._connections[inode].cut(at_once=at_once, both_ways=self._both_ways)
            return sum(connection.is_cut for connection in self._connections.values())

    def close(self) -> None:
        """Close what was kept open for the other side."""
        with self._lock:
            self._closed = True
            while self._connections:
                self._connections.popitem()[1].close()

    def __len__(self) -> int:
        return len(self._inodes)


def keep_alive(descriptor: int) -> None:
    """Have the kernel say something on a connection that is idle. Ends one whose other machine
    answers no more, if nothing is under way on it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6):
            return
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_PAUSE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def open_sockets() -> dict[int, int]:
    """Return file descriptor → inode of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names alone: this runs in a fault
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115  # as above
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    return found
