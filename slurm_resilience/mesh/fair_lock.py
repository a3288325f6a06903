"""A lock that its threads have in turn.

A thread that releases a plain lock and takes it again at once has it before the one that waits: it
is running, and the other one has to be woken. So a mesh's thread with much to do kept the main
thread from saying that it had left its block, until the others went on without it.
"""

from __future__ import annotations

import threading
from typing import Any


class FairLock:
    """A reentrant lock, also for a `threading.Condition`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._next = threading.Lock()
        """Held by the thread that has the lock next."""

    def acquire(self, blocking: bool = True) -> bool:
        """Take it, behind the threads that wait already; or tell that it is not free."""
        if not blocking or self._lock._is_owned():  # type: ignore[attr-defined]
            return self._lock.acquire(blocking)
        with self._next:
            return self._lock.acquire()

    def release(self) -> None:
        """Give it to the next one.

        Raises:
            RuntimeError: this thread does not have it.
        """
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    # A condition calls these three of any lock that has them, and a reentrant one needs them. They
    # are in the types neither of `threading.RLock` nor of a condition's lock: hence the ignores.

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _release_save(self) -> Any:
        return self._lock._release_save()  # type: ignore[attr-defined]

    def _acquire_restore(self, state: Any) -> None:
        with self._next:
            self._lock._acquire_restore(state)  # type: ignore[attr-defined]
