"""Wake the threads that wait for a change in the mesh.

A large world tells a process something new in each of hundreds of turns, and of all that a thread
waits for one thing. Waking it to look costs more than the turn itself: two switches, in which it
and the mesh's thread wait for each other. So the mesh's thread looks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from slurm_resilience.mesh.fair_lock import FairLock


class Wakeups:
    """The threads that wait, and what each of them waits for. Its methods need the lock."""

    def __init__(self, lock: FairLock) -> None:
        self._lock = lock
        # It takes any such lock; its type names the two of `threading` alone.
        self._changed = threading.Condition(lock)  # type: ignore[arg-type]
        self._awaited: list[Callable[[], bool]] = []
        self._is_due = False

    def __enter__(self) -> None:
        """Take the lock."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Give the lock back."""
        self._lock.release()

    def wait(self, is_there: Callable[[], bool], seconds: float) -> None:
        """Wait until something may be there, or the time is over.

        Args:
            is_there: tells whether it is; called in the mesh's thread, at the end of its turns.
            seconds: to wait at most.
        """
        self._awaited.append(is_there)
        try:
            self._changed.wait(seconds)
        finally:
            self._awaited.remove(is_there)

    def wake(self) -> None:
        """Wake all, at once."""
        self._changed.notify_all()

    def note(self) -> None:
        """Note that something has changed in this turn."""
        self._is_due = True

    def tell(self) -> None:
        """Wake those for whom something has, at the end of a turn: once, and when the lock is about
        to be free."""
        if self._is_due:
            self._is_due = False
            if any(is_there() for is_there in self._awaited):
                self._changed.notify_all()
