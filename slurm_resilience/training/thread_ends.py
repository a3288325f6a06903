"""End this library's own threads before the interpreter ends.

CPython before 3.14 unwinds the stack of a daemon thread that asks for the interpreter's lock while
the interpreter is taken down. Where that thread is in one of torch's calls, the way leads through
C++ that must not be left so: "terminate called without an active exception", and SIGABRT in place
of the exit code that the program chose. A training that had come to its end would have failed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable

PATIENCE_SECONDS = 2.0
"""So long the end of the process waits for one thread. A replaced process must not be late."""

_ends: list[weakref.WeakMethod[Callable[[], object]]] = []


def at_exit(end: Callable[[], object]) -> None:
    """Have a thread ended before the interpreter ends; the newest one first.

    Args:
        end: a method that tells a thread to end and waits for it, `PATIENCE_SECONDS` at most. Its
            object is not kept alive for it.
    """
    _ends[:] = [other for other in _ends if other() is not None]
    _ends.append(weakref.WeakMethod(end))


def _end_all() -> None:
    for reference in reversed(_ends):
        end = reference()
        if end is not None:
            with contextlib.suppress(Exception):  # the next thread must be ended all the same
                end()


atexit.register(_end_all)
# A child of a fork has none of these threads, and may have got their locks closed.
os.register_at_fork(after_in_child=_ends.clear)
