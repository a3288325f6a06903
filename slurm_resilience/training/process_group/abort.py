"""Keep process groups that were left until they can be let go of.

To drop the last reference to a group whose calls are still on their way can hang (seen on torch
2.13), so dead groups are kept for a while.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.training import compat, thread_ends
from slurm_resilience.training.process_group.group_sockets import GroupSockets

KEEP_SECONDS = 2.0
"""A dead group is kept for so long before its destructor may run."""
CUT_AGAIN_SECONDS = 0.05
"""Between two looks at the connections of groups that are kept."""
LAST_WAIT_SECONDS = 10.0
"""So long the end of the process waits for a destructor. It takes milliseconds, seconds where a
machine is very busy, and for ever now and then."""
STUCK_SECONDS = 30.0
"""A destructor that takes longer waits for ever: another thread goes on with the next groups."""
COLLECT_SECONDS = 10.0
"""Between two collections. One stops the process, for the longer the more the block has made
(0.02 s and more), so faults in close succession share one."""


class DeadGroups(NamedTuple):
    """The remains of one world."""

    until: float
    groups: list[Any]
    wrappers: list[Any]
    sockets: GroupSockets


class HeldByCycles:
    """Groups that outlive their world, since reference cycles hold them, with threads and sockets.

    FSDP's modules are in such cycles, and hold the groups that they were built in. Python itself
    would collect them many faults later.
    """

    def __init__(self) -> None:
        self._groups: list[weakref.ref[Any]] = []
        self._next = 0.0
        """When the next collection may be, on the monotonic clock."""

    def add(self, groups: Iterable[weakref.ref[Any]]) -> None:
        """Note groups that their world has let go of; those that are gone do not count."""
        self._groups = [group for group in (*self._groups, *groups) if group() is not None]

    def seconds_left(self) -> float | None:
        """Return the time until a collection is due; None: nothing is held."""
        if not self._groups:
            return None
        return max(0.0, self._next - SYSTEM_CLOCK.monotonic())

    def collect(self) -> None:
        """Collect what cycles hold. What is still held then is held by the user's program."""
        gc.collect()
        self._groups.clear()
        self._next = SYSTEM_CLOCK.monotonic() + COLLECT_SECONDS


class Graveyard:
    """Keeps dead groups, and whatever holds them, until nothing of theirs is on its way.

    Destructors run in a thread of their own: one that waits for ever costs that thread and what
    its world holds, not the training, and not what later worlds hold. Wrappers (DDP) go before the
    groups: a group's own destructor lets other threads run, but one that a wrapper's destructor
    calls does not.
    """

    def __init__(self, keep: float = KEEP_SECONDS, stuck: float = STUCK_SECONDS) -> None:
        """
        Args:
            keep: seconds between a group's death and its destructor.
            stuck: seconds that a destructor may take.
        """
        self._keep, self._stuck = keep, stuck
        self._dead: deque[DeadGroups] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._letting_go: dict[threading.Thread, float] = {}
        """Threads in a destructor, and since when, on the monotonic clock."""
        self._cycles = HeldByCycles()
        self._sealed = False
        thread_ends.at_exit(self.seal)

    def bury(self, groups: list[Any], wrappers: list[Any], sockets: GroupSockets) -> None:
        """Keep these for a while, then let go of them."""
        until = SYSTEM_CLOCK.monotonic() + self._keep
        dead = DeadGroups(until, groups, wrappers, sockets)
        with self._changed:
            if self._sealed:
                _keep_for_ever(dead)
                return
            self._dead.append(dead)
            thread, now = self._thread, SYSTEM_CLOCK.monotonic()
            is_stuck = thread in self._letting_go and now - self._letting_go[thread] > self._stuck
            if thread is None or not thread.is_alive() or is_stuck:
                self._thread = threading.Thread(target=self._run, name="sres-groups", daemon=True)
                # Without one they wait for the next world's: a rank must not die for that, which
                # may have the last copy of the state.
                with contextlib.suppress(RuntimeError):
                    self._thread.start()
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._dead)

    def seal(self) -> None:
        """At the end of the process: what is dead now is never let go of. Destructors that run
        while the interpreter is taken down hang or abort the process; one that runs already is
        waited for."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._letting_go, LAST_WAIT_SECONDS)
            for dead in self._dead:
                _keep_for_ever(dead)

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            kept: list[GroupSockets] = []
            dead = None
            with self._changed:
                while not self._dead and not self._sealed and self._thread is me:
                    if not self._changed.wait(self._cycles.seconds_left()):
                        break
                if self._sealed or self._thread is not me:
                    return
                now = SYSTEM_CLOCK.monotonic()
                if self._dead and self._dead[0].until > now:
                    self._changed.wait(min(self._dead[0].until - now, CUT_AGAIN_SECONDS))
                    kept = [waiting.sockets for waiting in self._dead]
                elif self._dead:
                    dead = self._dead.popleft()
                if not kept:
                    self._letting_go[me] = now
            for sockets in kept:
                # Others may still write to this process.
                sockets.cut()
            if dead is not None:
                self._cycles.add(_let_go(dead))
                dead = None
            if not kept:
                if self._cycles.seconds_left() == 0:
                    self._cycles.collect()
                with self._changed:
                    del self._letting_go[me]
                    self._changed.notify_all()


def _keep_for_ever(dead: DeadGroups) -> None:
    for things in (dead.groups, dead.wrappers):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(things))


def _let_go(dead: DeadGroups) -> list[weakref.ref[Any]]:
    """Drop the world's references to its groups, and return others, weak ones."""
    dead.sockets.close()
    for wrapper in dead.wrappers:
        compat.let_reducer_go(wrapper)
    wrapper = None
    groups = [weakref.ref(group) for group in dead.groups]
    dead.wrappers.clear()
    dead.groups.clear()
    return groups
