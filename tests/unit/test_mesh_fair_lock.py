"""A lock that two threads have in turn, however much one of them has to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slurm_resilience.mesh.fair_lock import FairLock

LIMIT = 20.0
TURNS = 100
"""The most that the other thread may have meanwhile. Without the lock it has thousands."""


@contextmanager
def busy(lock: FairLock) -> Iterator[list[int]]:
    """Have a thread that takes the lock again as soon as it has released it."""
    turns, over = [0], threading.Event()

    def work() -> None:
        while not over.is_set():
            with lock:
                turns[0] += sum(range(20_000)) > 0

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield turns
    finally:
        over.set()
        thread.join(LIMIT)


def test_who_waits_has_it_next() -> None:
    lock = FairLock()
    with busy(lock) as turns:
        most = 0
        for _ in range(100):
            threading.Event().wait(0.002)
            before = turns[0]
            with lock:
                most = max(most, turns[0] - before)
    assert most < TURNS, f"it waited for {most} turns of the other thread"


def test_it_is_reentrant_and_tells_whether_it_is_free() -> None:
    lock, seen = FairLock(), list[bool]()

    def look() -> None:
        seen.append(lock.acquire(blocking=False))
        if seen[-1]:
            lock.release()

    def elsewhere() -> bool:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(LIMIT)
        return seen[-1]

    with lock, lock:
        assert not elsewhere()
    assert elsewhere()


def test_a_condition_waits_on_it_and_has_it_again() -> None:
    lock = FairLock()
    changed = threading.Condition(lock)  # type: ignore[arg-type]
    told = []
    with busy(lock), changed:
        thread = threading.Thread(target=lambda: tell(changed, told))
        with lock:  # held twice: all of it is given back while it waits
            thread.start()
            assert changed.wait_for(lambda: told, LIMIT)
        thread.join(LIMIT)
    assert told == ["told"]


def tell(changed: threading.Condition, told: list[str]) -> None:
    with changed:
        told.append("told")
        changed.notify_all()
