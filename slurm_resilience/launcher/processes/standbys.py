"""Warm standbys: processes that have imported torch, and wait for a seat.

A new one must not slow the recovery that it was made for: it is nice where a niceness can be taken
back (root, RLIMIT_NICE); elsewhere it is started when the recovery is over, or after a pause.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from slurm_resilience.launcher.processes.children import Children
from slurm_resilience.launcher.processes.process import Process, may_renice

NICE = 10
PAUSE_SECONDS = 5.0
"""From a recovery to the start of standbys, if no rank says that it is over."""
FIRST_PAUSE_SECONDS = 10.0
"""Seconds after the start."""
DEATHS = 3
"""So many in a row, and there are no more."""
IMPORT_SECONDS = 300.0
"""One that has a seat may import for so long: shared file systems are slow at times."""


class Standbys:
    """Keeps some standbys.

    Args:
        loop: the event loop.
        children: starts and buries processes.
        start: starts one standby of a niceness; raises OSError when the system refuses.
        most: how many; 0: none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        children: Children,
        start: Callable[[int], Process],
        most: int,
    ) -> None:
        self._loop = loop
        self._children = children
        self._start = start
        self._wanted = most
        self._nice = NICE if most and may_renice() else 0
        self._waiting: list[Process] = []
        self._deaths = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> Process | None:
        """Take a warm one if there is one; a half-warm one is still ahead of a new process, unless
        the last one died."""
        half_warm = None if self._deaths else next(iter(self._waiting), None)
        best = next((p for p in self._waiting if p.warm), half_warm)
        if best is not None:
            self._waiting.remove(best)
        return best

    def soon(self, first: bool = False) -> None:
        """Start the missing ones, at a moment that disturbs no rank."""
        if self._timer is None and self._wanted:
            pause = 0.0 if self._nice else FIRST_PAUSE_SECONDS if first else PAUSE_SECONDS
            self._timer = self._loop.call_later(pause, self._fill)

    def now(self) -> None:
        """Note that the recovery is over: what waited for that need not wait longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._fill()

    def at_most(self, count: int) -> None:
        """So many seats are not done: more standbys are of no use."""
        self._wanted = min(self._wanted, count)

    def warm(self) -> None:
        """One of them is ready."""
        self._deaths = 0

    def died(self, process: Process) -> bool:
        """Note that a process without a seat has ended. Return whether it was the last straw."""
        if process not in self._waiting:
            return False
        self._waiting.remove(process)
        return self._another_death()

    def died_on_seat(self) -> bool:
        """Note that one which was given a seat has ended in its imports. Return whether it was the
        last straw."""
        return self._another_death()

    def dismiss(self) -> None:
        """End them all, for good."""
        self._wanted = 0
        if self._timer is not None:
            self._timer.cancel()
        for process in self._waiting:
            process.signal(signal.SIGKILL)
        for process in self._waiting:
            self._children.bury(process)
        self._waiting.clear()

    def _fill(self) -> None:
        self._timer = None
        while len(self._waiting) < self._wanted:
            try:
                self._waiting.append(self._start(self._nice))
            except OSError:
                self._another_death()
                return

    def _another_death(self) -> bool:
        self._deaths += 1
        if self._deaths == DEATHS:
            self._wanted = 0
            return True
        # Something is wrong with them; a loop would burn the processor.
        if self._timer is None and self._wanted:
            self._timer = self._loop.call_later(PAUSE_SECONDS, self._fill)
        return False
