"""Ending a process group that others are blocked in. gloo has no abort: its sockets are shut.

What was found by experiment on torch 2.13: `pg.abort()` unblocks nothing on gloo; shutting down a
connected socket makes the call that waits on it raise within milliseconds; shutting down gloo's
listener ends the process, so listeners are left alone; dropping the last reference to a group whose
calls are still on their way can hang, so dead groups are kept for a while.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import socket
import sys
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
    """Keeps dead groups, and whatever holds them, until nothing of theirs is on its way.

    Destructors run in a thread of their own: one that waits for ever costs that thread, not the
    training. Wrappers (DDP) go before the groups: a group's own destructor lets other threads run,
    but one that a wrapper's destructor calls does not.
    """

    def __init__(self, keep: float = KEEP_SECONDS) -> None:
        self._keep = keep
        self._dead: deque[tuple[float, list[Any], list[Any]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        atexit.register(self.seal)

    def bury(self, groups: list[Any], wrappers: list[Any]) -> None:
        """Keep these for a while, then let go of them."""
        with self._changed:
            self._dead.append((time.monotonic() + self._keep, groups, wrappers))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sres-groups", daemon=True)
                self._thread.start()
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._dead)

    def seal(self) -> None:
        """At the end of the process: what is dead now is never let go of. Destructors that run
        while the interpreter is taken down hang now and then."""
        with self._changed:
            for _, groups, wrappers in self._dead:
                for thing in (groups, wrappers):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._dead:
                    self._changed.wait()
                due, groups, wrappers = self._dead[0]
                if (left := due - time.monotonic()) > 0:
                    self._changed.wait(left)
                    continue
                self._dead.popleft()
            for wrapper in wrappers:
                if hasattr(wrapper, "reducer"):
                    wrapper.reducer = wrapper.logger = None
            wrapper = None
            wrappers.clear()
            groups.clear()
            del groups, wrappers
            if "torch.distributed.fsdp" in sys.modules:
                # Its modules are in reference cycles, and hold the groups that they were built in,
                # with threads and sockets. Python itself would collect them many faults later.
                gc.collect()
