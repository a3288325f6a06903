"""When a block is interrupted whose world is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.mesh.model import Break
from slurm_resilience.training import interrupt
from slurm_resilience.training.interrupt import Interrupter

JOIN = Break(1, "seat 2 joins", "", "join")
LOST = Break(1, "seat 2 is gone", "00002.0.a", "lost")


class Seen:
    """An interrupter, and when (seconds after the end) it cut and nudged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **session: bool) -> None:
        self.now = 100.0
        self.cuts: list[float] = []
        self.nudges: list[float] = []
        monkeypatch.setattr(interrupt.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(interrupt, "_raise_in", lambda *_: self.nudges.append(self.now - 100))
        group: Any = SimpleNamespace(cut=lambda: self.cuts.append(self.now - 100))
        self.session: Any = SimpleNamespace(**{"_inside": False, "after_update": False} | session)
        self.interrupter = Interrupter(
            self.session, [group], abort_timeout=5.0, event=lambda *_, **__: None
        )

    def until(self, seconds: float, end: Break) -> None:
        while self.now < 100 + seconds:
            self.interrupter.cut(end)
            self.now += 0.01


def test_what_follows_an_update_has_time_when_somebody_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Seen(monkeypatch, after_update=True)
    seen.until(5, JOIN)
    assert seen.cuts[0] == pytest.approx(interrupt.JOIN_SECONDS, abs=0.02)
    assert seen.nudges == [pytest.approx(2.0, abs=0.02)]


@pytest.mark.parametrize(("end", "after_update"), [(JOIN, False), (LOST, True), (LOST, False)])
def test_a_step_and_the_end_by_a_fault_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, end: Break, after_update: bool
) -> None:
    seen = Seen(monkeypatch, after_update=after_update)
    seen.until(5, end)
    assert seen.nudges == [pytest.approx(interrupt.NUDGE_SECONDS, abs=0.02)]


def test_an_update_is_finished_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch, _inside=True)
    seen.until(3, LOST)
    assert seen.nudges == []
    seen.session._inside = False
    seen.until(4, LOST)
    assert seen.nudges == [pytest.approx(3.0, abs=0.02)]
