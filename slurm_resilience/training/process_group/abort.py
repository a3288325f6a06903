"""Keep process groups that were left until they can be let go of.

To drop the last reference to a group whose calls are still on their way can hang (seen on torch
2.13), so dead groups are kept for a while.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
import threading
from collections import deque
from typing import Any

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.training import compat

KEEP_SECONDS = 2.0
"""A dead group is kept for so long before its destructor may run."""


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
            self._dead.append((SYSTEM_CLOCK.monotonic() + self._keep, groups, wrappers))
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
                if (left := due - SYSTEM_CLOCK.monotonic()) > 0:
                    self._changed.wait(left)
                    continue
                self._dead.popleft()
            for wrapper in wrappers:
                compat.let_reducer_go(wrapper)
            wrapper = None
            wrappers.clear()
            groups.clear()
            del groups, wrappers
            if "torch.distributed.fsdp" in sys.modules:
                # Its modules are in reference cycles, and hold the groups that they were built in,
                # with threads and sockets. Python itself would collect them many faults later.
                gc.collect()
