"""Ending a process group that others are blocked in. gloo has no abort: its sockets are shut.

What was found by experiment on torch 2.13: `pg.abort()` unblocks nothing on gloo; shutting down a
connected socket makes the call that waits on it raise within milliseconds; shutting down gloo's
listener ends the process, so listeners are left alone; dropping the last reference to a group whose
calls are still on their way can hang, so dead groups are kept for a while.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from typing import Any

KEEP_SECONDS = 2.0
"""How long a dead group is kept before its destructor may run."""


def open_sockets() -> dict[int, int]:
    """File descriptor → inode of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    return found


class Sockets:
    """The sockets that were opened while a group was made."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def begin(self) -> None:
        """Remember what is open."""
        self._before = open_sockets()

    def end(self, but: set[int]) -> None:
        """Take what was opened since ``begin``, without ``but`` (file descriptors of others)."""
        for descriptor, inode in open_sockets().items():
            if self._before.get(descriptor) != inode and descriptor not in but:
                self._inodes[descriptor] = inode

    def cut(self) -> int:
        """Shut every connection of the group down; how many were open. May be called again."""
        cut = 0
        for descriptor, inode in list(self._inodes.items()):
            # The number may have been given to another file since.
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino != inode:
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as own:
                    if own.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        continue
                    own.getpeername()
                    own.shutdown(socket.SHUT_RDWR)
                    cut += 1
        return cut

    def __len__(self) -> int:
        return len(self._inodes)


class Graveyard:
    """Keeps dead groups, and whatever holds them, until nothing of theirs is on its way."""

    def __init__(self, keep: float = KEEP_SECONDS) -> None:
        self._keep = keep
        self._dead: deque[tuple[float, list[Any]]] = deque()
        self._lock = threading.Lock()

    def bury(self, things: list[Any]) -> None:
        """Keep these; they are let go by a later `sweep`."""
        with self._lock:
            self._dead.append((time.monotonic() + self._keep, things))

    def sweep(self) -> int:
        """Let go of what has been dead for long enough; how many are left."""
        while True:
            with self._lock:
                if not self._dead or self._dead[0][0] > time.monotonic():
                    return len(self._dead)
                _, things = self._dead.popleft()
            # Outside of the lock: destructors join threads.
            del things
