"""When a block is interrupted whose world is over."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.mesh.model import GenerationEnd
from slurm_resilience.training import interrupter as interrupter_module
from slurm_resilience.training.interrupter import Interrupter
from slurm_resilience.training.recovery.exceptions import Interrupted

STEP = 5
JOIN = GenerationEnd(1, "seat 2 joins", "", "join", step=STEP)
LOST = GenerationEnd(1, "seat 2 is gone", "00002.0.a", "lost")


class Seen:
    """An interrupter, and when (seconds after the end) it cut and nudged."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, after_update: bool = False, step: int = STEP - 1
    ) -> None:
        self.now = 100.0
        self.cuts: list[float] = []
        self.nudges: list[float] = []
        self.is_starting_threads = False
        monkeypatch.setattr(interrupter_module, "_raise_in", self._raise)
        clock: Any = SimpleNamespace(monotonic=lambda: self.now)
        group: Any = SimpleNamespace(cut=lambda: self.cuts.append(self.now - 100))
        self.participant: Any = SimpleNamespace(
            updating=False, updates=SimpleNamespace(after_update=after_update), step=step
        )
        self.interrupter = Interrupter(
            self.participant, [group], abort_timeout=5.0, event=lambda *_, **__: None, clock=clock
        )
        self.interrupter.enter()

    def _raise(self, _: int, kind: type[BaseException]) -> bool:
        if self.is_starting_threads:
            return False
        self.nudges.append(self.now - 100)
        return True

    def until(self, seconds: float, end: GenerationEnd) -> None:
        while self.now < 100 + seconds:
            self.interrupter.cut(end)
            self.now += 0.01


@pytest.mark.parametrize(("ranks", "paused", "ends"), [(2, False, 1), (2, True, 0), (1, False, 0)])
def test_a_resize_hook_that_hangs_is_told_and_left(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ranks: int,
    paused: bool,
    ends: int,
) -> None:
    """All ranks waited for it without a word, until gloo's half an hour was over."""
    seen = Seen(monkeypatch)
    over: list[GenerationEnd] = []
    seen.participant.mesh = SimpleNamespace(
        current=SimpleNamespace(generation=1, size=ranks),
        end=None,
        me=SimpleNamespace(id="p0"),
        over=over.append,
        status=SimpleNamespace(phase="ready"),
    )
    seen.participant.where = SimpleNamespace(seat=0)
    seen.participant.watch = SimpleNamespace(is_paused=paused, beat=lambda: None)
    seen.interrupter.on_resize.begin(0.0)
    for now in range(601):
        seen.interrupter.tick(float(now))
    assert caplog.text.count("on_resize has taken") == 5, "after 20, 40, 80, 160 and 320 s"
    assert not over
    seen.interrupter.tick(601.0)
    assert [(end.kind, end.culprit) for end in over] == [("hang", "p0")] * ends
    seen.interrupter.on_resize.end()
    seen.interrupter.tick(2000.0)
    assert len(over) == ends


def test_what_follows_an_update_has_time_when_somebody_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Seen(monkeypatch, after_update=True)
    seen.until(5, JOIN)
    assert seen.cuts[0] == pytest.approx(interrupter_module.JOIN_SECONDS, abs=0.02)
    assert seen.nudges == [pytest.approx(2.0, abs=0.02)]


def test_a_step_that_cannot_be_finished_is_cut_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that lets another one in does not take part in the next step."""
    seen = Seen(monkeypatch, step=STEP)
    seen.until(1, JOIN)
    assert seen.cuts[0] == 0


def test_a_block_that_starts_a_thread_is_interrupted_a_moment_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Seen(monkeypatch)
    seen.is_starting_threads = True
    seen.until(1, LOST)
    assert not seen.nudges
    seen.is_starting_threads = False
    seen.until(5, LOST)
    assert seen.nudges == [pytest.approx(1, abs=0.02)]


def test_a_thread_that_is_just_starting_is_not_taken_for_the_one_that_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPython has both under one number for a moment: the new one got what was meant for the
    block."""
    me, said = threading.get_ident(), []
    begin = threading._start_new_thread  # type: ignore[attr-defined]

    def begin_later(*how: Any) -> Any:
        said.append(interrupter_module._raise_in(me, Interrupted))
        return begin(*how)

    monkeypatch.setattr(threading, "_start_new_thread", begin_later)
    starting = threading.Thread(target=said.append, args=("ran",))
    starting.start()
    starting.join(60)
    assert said == [False, "ran"]
    with pytest.raises(Interrupted):
        assert interrupter_module._raise_in(me, Interrupted)
        for _ in range(100):
            pass


@pytest.mark.parametrize(("end", "after_update"), [(JOIN, False), (LOST, True), (LOST, False)])
def test_a_step_and_the_end_by_a_fault_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, end: GenerationEnd, after_update: bool
) -> None:
    seen = Seen(monkeypatch, after_update=after_update)
    seen.until(5, end)
    assert seen.nudges == [pytest.approx(interrupter_module.NUDGE_SECONDS, abs=0.02)]


def test_an_update_is_finished_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    seen.participant.updating = True
    seen.until(3, LOST)
    assert seen.nudges == []
    seen.participant.updating = False
    seen.until(4, LOST)
    assert seen.nudges == [pytest.approx(3.0, abs=0.02)]


def test_who_has_left_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stop half-way in what comes between two worlds, and the others would wait for it."""
    seen = Seen(monkeypatch)
    seen.interrupter.leave()
    seen.until(5, LOST)
    assert seen.nudges == []
    seen.interrupter.enter()
    seen.until(10, LOST)
    assert len(seen.nudges) == 1


def test_an_interruption_comes_before_the_block_is_left_or_not_at_all() -> None:
    updates = SimpleNamespace(after_update=False)
    participant: Any = SimpleNamespace(updating=False, updates=updates)
    for _ in range(50):
        interrupter = Interrupter(participant, [], abort_timeout=5.0, event=lambda *_, **__: None)
        interrupter._patience = lambda _: -1.0  # type: ignore[method-assign]
        begun = threading.Event()

        def cut(interrupter: Interrupter = interrupter, begun: threading.Event = begun) -> None:
            begun.wait()
            for _ in range(20):
                interrupter.cut(LOST)

        thread = threading.Thread(target=cut)
        thread.start()
        try:
            interrupter.enter()
            begun.set()
            sum(range(random.randrange(2000)))
            interrupter.leave()
        except Interrupted:
            pass
        thread.join()  # would raise it, if it came now


LEAVES = """
import cProfile, sys, threading, types
from slurm_resilience.mesh.model import GenerationEnd
from slurm_resilience.training.interrupter import Interrupter
from slurm_resilience.training.recovery.exceptions import Interrupted

LOST = GenerationEnd(1, "seat 2 is gone", "00002.0.a", "lost")
updates = types.SimpleNamespace(after_update=False)
participant = types.SimpleNamespace(updating=False, updates=updates)
interrupter = Interrupter(participant, [], abort_timeout=5.0, event=lambda *_, **__: None)
interrupter._patience = lambda _: -1.0

def cut():
    interrupter.cut(LOST)

def what_follows():
    return 1

def block():
    raised = 0
    for interrupted in (False, True, False, True):
        try:
            interrupter.enter()
            if interrupted:
                thread = threading.Thread(target=cut)
                thread.start()
                thread.join()
            interrupter.leave()
        except Interrupted:
            raised += 1
            interrupter.leave()
        what_follows()
    print("through, raised", raised)

if sys.argv[1] == "profile":
    cProfile.run("block()")
elif sys.argv[1] == "trace":
    sys.settrace(lambda *_: None)
    block()
"""


@pytest.mark.parametrize("beside", ["profile", "trace"])
def test_a_block_is_left_under_a_profiler_and_a_debugger(beside: str) -> None:
    """Without an interruption on its way, and with one that has been raised or has not."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, beside],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "through" in done.stdout, done.stderr


def test_who_stays_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen(monkeypatch)
    seen.until(2.4, LOST)
    assert "still in its block" not in caplog.text
    seen.until(5, LOST)
    assert caplog.text.count("still in its block 2.5 s after the end of its world") == 1
    assert "test_training_interrupter.py" in caplog.text
