"""Groups of worlds that are over are let go of, and never while the interpreter is taken down."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.training.process_group import abort  # noqa: E402

pytestmark = pytest.mark.training

DEADLINE_SECONDS = 30.0
ENDS = int(os.environ.get("SRES_TEST_ENDS", "6"))
"""Processes that end about when a destructor runs: each takes a second of a core."""


class Connections:
    """Those of a world without any."""

    def cut(self) -> None:
        pass

    def close(self) -> None:
        pass


class SlowGroup:
    """A group with a destructor that waits."""

    def __init__(self) -> None:
        self.begun, self.go, self.gone = (threading.Event() for _ in range(3))

    def wait(self) -> None:
        self.begun.set()
        self.go.wait(DEADLINE_SECONDS)
        self.gone.set()


class Held:
    """The last reference of a world to its group."""

    def __init__(self, group: SlowGroup) -> None:
        self._group = group

    def __del__(self) -> None:
        self._group.wait()


def bury(graveyard: abort.Graveyard, group: SlowGroup) -> None:
    graveyard.bury([Held(group)], [], Connections())  # type: ignore[arg-type]  # a stand-in


def test_the_end_of_the_process_waits_for_a_destructor_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abort, "LAST_WAIT_SECONDS", DEADLINE_SECONDS)
    graveyard, first, second = abort.Graveyard(0.0), SlowGroup(), SlowGroup()
    bury(graveyard, first)
    assert first.begun.wait(DEADLINE_SECONDS)
    bury(graveyard, second)
    sealed = threading.Thread(target=graveyard.seal)
    sealed.start()
    sealed.join(0.05)
    assert sealed.is_alive(), "the destructor runs still"
    first.go.set()
    sealed.join(DEADLINE_SECONDS)
    assert not sealed.is_alive()
    assert first.gone.is_set()
    # The second one is never let go of, and neither is what is left later.
    third = SlowGroup()
    bury(graveyard, third)
    thread = graveyard._thread
    assert thread is not None
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert not second.begun.is_set()
    assert not third.begun.is_set()


def test_a_destructor_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort, "LAST_WAIT_SECONDS", 0.01)
    graveyard, group = abort.Graveyard(0.0), SlowGroup()
    bury(graveyard, group)
    assert group.begun.wait(DEADLINE_SECONDS)
    graveyard.seal()
    assert not group.gone.is_set()
    group.go.set()


def test_a_destructor_that_hangs_does_not_keep_what_later_worlds_hold() -> None:
    graveyard, first, second = abort.Graveyard(0.0, stuck=0.0), SlowGroup(), SlowGroup()
    bury(graveyard, first)
    assert first.begun.wait(DEADLINE_SECONDS)
    stuck = graveyard._thread
    bury(graveyard, second)
    assert second.begun.wait(DEADLINE_SECONDS)
    assert not first.gone.is_set()
    # Where it ends after all, its thread ends with it.
    first.go.set()
    assert stuck is not None
    stuck.join(DEADLINE_SECONDS)
    assert not stuck.is_alive()
    second.go.set()


def test_a_system_without_a_thread_to_give_ends_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have the last copy of the state. What is dead waits for the next world's end."""

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    graveyard, first, second = abort.Graveyard(0.0), SlowGroup(), SlowGroup()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refused)
        bury(graveyard, first)
    assert len(graveyard) == 1
    first.go.set()
    second.go.set()
    bury(graveyard, second)
    assert first.gone.wait(DEADLINE_SECONDS)
    assert second.gone.wait(DEADLINE_SECONDS)
    graveyard.seal()


class InCycle:
    """A group that FSDP's modules hold: its own reference to itself stands for theirs."""

    def __init__(self, gone: Callable[[], None]) -> None:
        self._itself = self
        self._gone = gone

    def __del__(self) -> None:
        self._gone()


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """When the garbage was collected; by the graveyard alone."""
    times: list[float] = []
    collect = gc.collect

    def noted() -> int:
        times.append(time.monotonic())
        return collect()

    gc.disable()
    monkeypatch.setattr(gc, "collect", noted)
    yield times
    gc.enable()


def test_no_garbage_is_collected_for_groups_that_are_gone_without(
    collections: list[float],
) -> None:
    graveyard, group = abort.Graveyard(0.0), SlowGroup()
    group.go.set()
    bury(graveyard, group)
    assert group.gone.wait(DEADLINE_SECONDS)
    # It waits for the graveyard's thread.
    graveyard.seal()
    assert not collections


def test_worlds_that_are_left_in_close_succession_share_a_collection(
    monkeypatch: pytest.MonkeyPatch, collections: list[float]
) -> None:
    monkeypatch.setattr(abort, "COLLECT_SECONDS", 1.0)
    gone = threading.Semaphore(0)
    graveyard = abort.Graveyard(0.0)
    for _ in range(5):
        bury_in_cycle(graveyard, gone.release)
    for _ in range(5):
        assert gone.acquire(timeout=DEADLINE_SECONDS)
    # The first is collected at once, the others when the time is over, though none follows.
    assert len(collections) == 2
    assert collections[1] - collections[0] >= 1.0


def bury_in_cycle(graveyard: abort.Graveyard, gone: Callable[[], None]) -> None:
    graveyard.bury([InCycle(gone)], [], Connections())  # type: ignore[arg-type]  # a stand-in


PROGRAM = """
import os, sys, time
import torch.distributed as dist
from slurm_resilience.training import compat
from slurm_resilience.training.process_group.abort import Graveyard
class Connections:
    def cut(self): pass
    def close(self): pass
KEEP = 0.05
for number in range(int(sys.argv[2])):
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    graveyard = Graveyard(KEEP)
    for group in range(4):
        store = dist.FileStore(f"{sys.argv[1]}.{number}.{group}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        groups = list(compat.known_groups())
        dist.destroy_process_group()
        graveyard.bury(groups, [], Connections())
        groups = None
    # Around the moment in which the first one is let go of: each child a little later.
    time.sleep(KEEP - 0.003 + 0.006 * number / int(sys.argv[2]))
    sys.exit(3)
"""


@pytest.mark.timeout(90 + 10 * ENDS)
def test_an_end_at_the_moment_of_a_destructor_keeps_its_exit_code(tmp_path: Path) -> None:
    """CPython unwinds a thread that wants its lock then; through gloo's destructor that aborts."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "store", str(ENDS)],
        capture_output=True,
        text=True,
        timeout=60 + 10 * ENDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert Counter(done.stdout.split()) == {"3": ENDS}, done.stderr[-2000:]
