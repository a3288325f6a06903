"""Threads that wait for a change in the mesh are woken for what they wait for, and nothing else."""

from __future__ import annotations

import threading

from slurm_resilience.mesh.fair_lock import FairLock
from slurm_resilience.mesh.wakeups import Wakeups

DEADLINE = 30.0


class Waiting:
    """A thread that waits until it finds a number."""

    def __init__(self, changed: Wakeups, numbers: set[int], number: int) -> None:
        self.looks = 0
        self._changed, self._numbers, self._number = changed, numbers, number
        self._thread = threading.Thread(target=self._wait)
        self._begun = threading.Event()
        self._thread.start()
        assert self._begun.wait(DEADLINE)
        with changed:
            pass  # it has given the lock back, and waits

    def _wait(self) -> None:
        with self._changed:
            self._begun.set()
            while self._number not in self._numbers:
                self._changed.wait(lambda: self._number in self._numbers, DEADLINE)
                self.looks += 1

    def is_over(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def test_a_thread_is_woken_when_it_is_there_and_not_before() -> None:
    numbers: set[int] = set()
    changed = Wakeups(FairLock())
    first, second = Waiting(changed, numbers, 7), Waiting(changed, numbers, 8)
    for number in (1, 2, 3, 7):
        with changed:
            numbers.add(number)
            changed.note()
            changed.tell()
    assert first.is_over(DEADLINE) and first.looks == 1
    assert not second.is_over(0.05)
    assert second.looks <= 1, "the first one's change may have woken it, too"
    with changed:
        numbers.add(8)
        changed.tell()  # nothing is noted in this turn
    assert not second.is_over(0.05)
    with changed:
        changed.note()
        changed.tell()
    assert second.is_over(DEADLINE)


def test_all_are_woken_at_an_end() -> None:
    numbers: set[int] = set()
    changed = Wakeups(FairLock())
    waiting = Waiting(changed, numbers, 7)
    with changed:
        numbers.add(7)
        changed.wake()
    assert waiting.is_over(DEADLINE)
