"""The sruns of a living attempt are ended, whatever each of them does meanwhile."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.resume.live_step import live_steps
from slurm_resilience.resume.live_step.live_steps import EndWord, LiveSteps, StepState
from slurm_resilience.resume.srun.stderr_reader import EndedTasks
from slurm_resilience.resume.srun.step import ToldEnd
from slurm_resilience.slurm.client import StepInfo


class HeldUpSrun:
    """An srun that a disk holds up: it was killed, and has not ended."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pid, self.running, self.killed = 1 << 30, True, 0
        self.code, self.ended_tasks, self.may_leave_tasks = 0, (), False
        self.failed_launches: dict[str, str] = {}
        self.only_signalled = False
        self.told_end, self.killed_by = ToldEnd(cancelled=False, aborted=False), 0
        self.clock, self.tasks_ended_at = SYSTEM_CLOCK, 0.0

    def wait(self, seconds: float) -> bool:
        return False

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> LiveSteps:
    """The steps of an attempt, of which one joined."""
    monkeypatch.setattr(live_steps, "end_step", lambda step, *_, **__: step.kill())
    context: Any = SimpleNamespace(
        clock=SYSTEM_CLOCK,
        start_join=lambda argv, environment, _: HeldUpSrun(argv, environment, lambda: None),
        client=SimpleNamespace(steps=lambda _: ()),
        allocation=SimpleNamespace(id=7),
        limits=SimpleNamespace(grace=0.0),
        host="n1",
        host_calls=SimpleNamespace(connections=lambda _: 0),
        wake=SimpleNamespace(set=lambda: None),
        user_signals=SimpleNamespace(starting=contextlib.nullcontext(), steps=[]),
        user_ended=lambda step, stopped_by_us: "",
    )
    seats: Any = SimpleNamespace(held_by=lambda _: {1}, all_of=lambda _: (1,))
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


def test_a_join_of_which_no_task_was_started_names_the_reason(steps: LiveSteps) -> None:
    joined: Any = steps.step(1)
    joined.running, joined.code = False, 167
    joined.failed_launches = {"n4": "Job credential expired"}
    how = "srun could start no task on it: Job credential expired"
    assert list(steps.died()) == [(1, EndedTasks((), (0,), how), True)]
    assert list(steps.died()) == []


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


@pytest.mark.parametrize(
    ("told", "how", "number"),
    [
        (ToldEnd(True, False), "Killed", 0),
        (ToldEnd(False, True), "Terminated", 0),
        # Any task may print those words, and then fail.
        (ToldEnd(True, True), "Segmentation fault", None),
        (ToldEnd(False, False), "Killed", None),
    ],
)
def test_a_person_who_cancels_it_is_heard_before_its_lost_node_is(
    steps: LiveSteps, told: ToldEnd, how: str, number: int | None
) -> None:
    """srun waits for a node of whose loss nothing else knows; the tasks that it can reach end."""
    first: Any = steps.step(0)
    first.told_end = told
    assert steps.ended_by_user() is None
    first.ended_tasks = [EndedTasks(("n1",), (0,), how)]
    assert steps.ended_by_user() == number
    assert steps.word is (EndWord.SRUN if number is None else EndWord.PERSON)


def test_tasks_that_are_told_to_end_have_their_grace_time(steps: LiveSteps) -> None:
    """Their step had lost a node before. It was ended 10 s later."""
    first: Any = steps.step(0)
    steps.lose_node([0], "")
    first.told_end, first.only_signalled = ToldEnd(True, False), True
    assert steps.ended_by_user() is None
    first.ended_tasks = [EndedTasks(("n1",), (0,), "Terminated")]
    assert steps.ended_by_user() == 0


def test_tasks_that_are_told_to_end_were_not_cancelled(steps: LiveSteps) -> None:
    """Slurm may preempt the job. That it has ended one of the steps weighs more."""
    first, joined = (steps.step(number) for number in (0, 1))
    killed = [EndedTasks(("n1",), (0,), "Terminated")]
    for srun in (first, joined):
        vars(srun).update(told_end=ToldEnd(True, False), only_signalled=True)
        steps.ended_by_user()
        vars(srun).update(ended_tasks=killed)
    assert steps.ended_by_user() == 0
    assert (steps.word, steps.word_at_end()) == (EndWord.SIGNALLED, EndWord.SIGNALLED)
    vars(joined).update(only_signalled=False)
    assert steps.word_at_end() is EndWord.PERSON


def test_a_signal_is_heard_before_a_lost_node_is(steps: LiveSteps) -> None:
    context: Any = steps._context
    context.user_ended = lambda step, stopped_by_us: "SIGINT twice"
    assert steps.ended_by_user() is None
    first: Any = steps.step(0)
    first.ended_tasks = [EndedTasks(("n1",), (0,), "Killed")]
    assert steps.ended_by_user() == 0


def test_tasks_that_an_earlier_join_step_left_are_ended_before_the_next_one(
    steps: LiveSteps,
) -> None:
    context: Any = steps._context
    joined: Any = steps.step(1)
    joined.may_leave_tasks, joined.clock, joined.tasks_ended_at = True, SYSTEM_CLOCK, None
    context.allocation.user_stop = threading.Event()
    shown = [StepInfo(7, "3", ("n1",), "n1", joined.pid, 1)]
    cancelled: list[str] = []

    def cancel(job: int, step: str) -> None:
        cancelled.append(step)
        shown.clear()

    joined.ends_by_us = lambda killed: None
    context.client = SimpleNamespace(steps=lambda _: tuple(shown), cancel_step=cancel)
    seats: Any = steps._seats
    seats.all_of = lambda number: (number,)
    steps.end_tasks_left((0, 2))
    assert cancelled == []
    steps.end_tasks_left((1,))
    assert cancelled == ["3"]
    assert joined.tasks_ended_at is not None


def test_a_person_who_cancels_an_srun_that_is_about_to_be_released_is_heard(
    steps: LiveSteps,
) -> None:
    joined: Any = steps.step(1)
    steps.lose_node([1], "")

    def wait(seconds: float) -> bool:
        joined.told_end = ToldEnd(cancelled=False, aborted=True)
        return False

    joined.wait = wait
    steps.release(set())
    assert joined.killed == 0
    assert steps.ended_by_user() == 1
