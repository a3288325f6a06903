"""The process's one inotify instance: a descriptor that becomes readable when a watched file grows.

One for all, and for as long as the process lives: closing an instance takes the kernel 10 to 20 ms,
which a recovery has no use for, and a user has 128 of them on a whole machine.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import threading
from pathlib import Path

_IN_MODIFY = 0x2

_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_instance = (0, -1)
"""Process and descriptor; what fork copied belongs to the parent."""
_users: collections.Counter[int] = collections.Counter()
"""By watch: the kernel gives one file one watch, however often it is asked for."""


def watch(path: Path) -> tuple[int, int]:
    """Watch a file.

    Returns:
        the descriptor to poll, and the watch, which `unwatch` takes. (-1, -1): there is no inotify
        to be had, or the file is on a file system without it.
    """
    global _instance
    with _lock:
        if _instance[0] != os.getpid():
            _users.clear()
            _instance = os.getpid(), _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        fd = _instance[1]
        number: int = _libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) if fd >= 0 else -1
        if number < 0:
            return -1, -1
        _users[number] += 1
        return fd, number


def unwatch(fd: int, number: int) -> None:
    """End a watch; whoever else watches the same file keeps it."""
    with _lock:
        if _instance != (os.getpid(), fd):
            return
        _users[number] -= 1
        if _users[number] <= 0:
            del _users[number]
            _libc.inotify_rm_watch(fd, number)


def drain(fd: int) -> None:
    """Take the events that wait; which they are does not matter."""
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 1 << 16)
