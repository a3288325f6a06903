"""The sruns of a living attempt are ended, whatever each of them does meanwhile."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.resume.live_step import live_steps
from slurm_resilience.resume.live_step.live_steps import LiveSteps, StepState
from slurm_resilience.resume.srun.step import ToldEnd


class HeldUpSrun:
    """An srun that a disk holds up: it was killed, and has not ended."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pid, self.running, self.killed = 1 << 30, True, 0
        self.code, self.ended_tasks = 0, ()
        self.told_end, self.killed_by = ToldEnd(cancelled=False, aborted=False), 0

    def wait(self, seconds: float) -> bool:
        return False

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> LiveSteps:
    """The steps of an attempt, of which one joined."""
    monkeypatch.setattr(live_steps, "connections", lambda _: 0)
    monkeypatch.setattr(live_steps, "end_step", lambda step, *_, **__: step.kill())
    context: Any = SimpleNamespace(
        clock=SYSTEM_CLOCK,
        client=SimpleNamespace(steps=lambda _: ()),
        allocation=SimpleNamespace(id=7),
        limits=SimpleNamespace(grace=0.0),
        host="n1",
        host_calls=SimpleNamespace(start_srun=HeldUpSrun),
        wake=SimpleNamespace(set=lambda: None),
        user_signals=SimpleNamespace(starting=contextlib.nullcontext(), steps=[]),
        user_ended=lambda step, stopped_by_us: "",
    )
    seats: Any = SimpleNamespace(held_by=lambda _: {1})
    first: Any = HeldUpSrun()
    made = LiveSteps(context, first, seats)
    made.start(1, ["srun"], {})
    return made


def test_a_join_that_fails_when_its_srun_was_killed_and_lives_is_ended_once_more(
    steps: LiveSteps,
) -> None:
    joined: Any = steps.step(1)
    steps.lose_node([1], "")
    steps.release(set())
    assert [srun.state for srun in steps] == [StepState.RUNNING, StepState.RELEASED]
    assert joined.killed == 1 and joined.running
    steps.end_one(1)
    steps.end_one(1)
    assert joined.killed == 3


def test_a_join_that_ended_is_left_alone(steps: LiveSteps) -> None:
    joined: Any = steps.step(1)
    joined.running = False
    list(steps.died())
    steps.end_one(1)
    assert joined.killed == 0
    assert [srun.state for srun in steps] == [StepState.RUNNING, StepState.ENDED]


@pytest.mark.parametrize("told", [ToldEnd(True, False), ToldEnd(False, True)])
def test_a_person_who_cancels_it_is_heard_while_srun_waits_for_a_lost_node(
    steps: LiveSteps, told: ToldEnd
) -> None:
    first: Any = steps.step(0)
    steps.lose_node([0], "")
    assert steps.ended_by_user() is None
    first.told_end = told
    assert steps.ended_by_user() == 0
