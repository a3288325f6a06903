"""A task that crashed: the others are asked to end, unless the user or Slurm said otherwise."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.resume.crash_watch import CRASH_SECONDS, CrashWatch, GatheringStage
from slurm_resilience.resume.decide.task_ends import TaskEnd
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.stderr_reader import EndedTasks
from slurm_resilience.resume.srun.step_set import StepSet
from slurm_resilience.resume.srun.task_reports import StepReports
from slurm_resilience.slurm.client import StepInfo

GRACE = 10.0
CRASHED = TaskEnd(0, 1, 1, 139, by_signal=True)
FAILED = TaskEnd(0, 1, 1, 5)


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return 1_790_000_000.0 + self.time

    def monotonic(self) -> float:
        return self.time

    def wait(self, event: threading.Event, seconds: float) -> bool:
        raise AssertionError("it does not wait")


class Watched:
    """One step, its tasks' ends, and what Slurm is told."""

    def __init__(
        self,
        *words: str,
        lives: bool = False,
        stage: GatheringStage = GatheringStage.STEPS,
        **environment: str,
    ) -> None:
        self.clock = Clock()
        self.signals: list[tuple[int, str, str]] = []
        self.user = ""
        self.step: Any = SimpleNamespace(
            job=12,
            reports=StepReports(""),
            cancelled=False,
            aborted=False,
            running=True,
            pid=7,
            ended_tasks=[],
            failed_nodes=set(),
            ends_by_us=lambda killed: None,
        )
        steps = (StepInfo(12, "3", ("n1", "n2"), "n1", 7),)
        client = SimpleNamespace(
            steps=lambda job: steps, cancel_step=lambda *told: self.signals.append(told)
        )
        self.context: Any = SimpleNamespace(
            clock=self.clock,
            command=split(words, BUILTIN),
            environment=environment,
            client=client,
            allocation=SimpleNamespace(id=12),
            host="n1",
            limits=SimpleNamespace(grace=GRACE),
            user_ended=lambda step, stopped_by_us: self.user,
        )
        self.watch = CrashWatch(
            self.context, StepSet(self.step), lives=lives, training=lambda: stage
        )

    def after(self, seconds: float) -> bool:
        """Look again after some time."""
        self.clock.time += seconds
        return self.watch.look()

    def told(self, end: TaskEnd) -> None:
        self.step.reports.take(end)
        assert not self.watch.look()


def test_the_others_are_asked_once_and_then_have_their_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen = Watched()
    assert seen.watch.pause(60.0) == 60.0
    seen.told(CRASHED)
    assert seen.signals == []
    assert seen.watch.pause(60.0) == CRASH_SECONDS
    assert not seen.after(CRASH_SECONDS)
    assert seen.signals == [(12, "3", "TERM")]
    assert seen.watch.crash == CRASHED
    assert seen.watch.pause(60.0) == GRACE
    assert not seen.after(GRACE - 1.0)
    assert seen.after(1.0)
    assert len(seen.signals) == 1
    assert capfd.readouterr().err.count("ending the other tasks") == 1


def test_words_that_the_step_is_aborted_hold_a_crash_up_while_they_count() -> None:
    """A task may run an srun of its own, and print what that says: the others waited for ever."""
    seen = Watched()
    seen.step.aborted = True
    seen.told(CRASHED)
    assert not seen.after(CRASH_SECONDS) and not seen.after(CRASH_SECONDS)
    assert seen.signals == []
    seen.step.aborted = False  # srun runs still, for longer than it waits for such a step
    assert not seen.after(1.0) and not seen.after(CRASH_SECONDS)
    assert seen.signals == [(12, "3", "TERM")]


def test_a_plain_exit_code_is_left_to_srun() -> None:
    seen = Watched()
    seen.told(FAILED)
    assert not seen.after(3600.0)
    assert seen.signals == []


def test_a_crash_that_follows_from_a_plain_exit_is_left_to_srun() -> None:
    seen = Watched()
    seen.told(FAILED)
    seen.told(TaskEnd(0, 0, 0, 143, by_signal=True))
    assert not seen.after(3600.0)
    assert seen.signals == []


@pytest.mark.parametrize("words", [("-K0",), ("--kill-on-bad-exit=0",), ("-W30",), ("--wait=0",)])
def test_the_user_lets_the_others_go_on(words: tuple[str, ...]) -> None:
    seen = Watched(*words)
    seen.told(CRASHED)
    seen.after(3600.0)
    assert seen.signals == []


@pytest.mark.parametrize("name", ["SLURM_WAIT", "SLURM_KILL_BAD_EXIT"])
def test_the_user_lets_them_go_on_by_the_environment(name: str) -> None:
    seen = Watched(**{name: "0"})
    seen.told(CRASHED)
    seen.after(3600.0)
    assert seen.signals == []


def test_a_living_step_goes_on() -> None:
    seen = Watched(lives=True)
    seen.told(CRASHED)
    seen.after(3600.0)
    assert seen.signals == []


@pytest.mark.parametrize(
    ("end", "words"),
    [(CRASHED, ()), (FAILED, ()), (None, (EndedTasks(("n2",), (1,), "Exited with exit code 5"),))],
)
def test_a_living_step_that_has_not_begun_would_wait_for_ever(
    end: TaskEnd | None, words: tuple[EndedTasks, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    seen = Watched(lives=True, stage=GatheringStage.GATHERS)
    seen.step.ended_tasks += words
    if end is not None:
        seen.told(end)
    else:
        assert not seen.watch.look()
    assert not seen.after(CRASH_SECONDS)
    assert seen.signals == [(12, "3", "TERM")]
    assert seen.watch.crash is not None
    assert (seen.watch.crash.task, seen.watch.crash.node) == (1, "" if end else "n2")
    assert seen.after(GRACE)


@pytest.mark.parametrize("end", [CRASHED, FAILED])
def test_a_program_of_which_nothing_was_heard_is_treated_as_any_other(
    end: TaskEnd, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may be started by the launcher, and not use the library."""
    seen = Watched(lives=True, stage=GatheringStage.UNKNOWN)
    seen.told(end)
    assert not seen.after(CRASH_SECONDS)
    assert bool(seen.signals) is (end is CRASHED)
    kept = Watched("--kill-on-bad-exit=0", lives=True, stage=GatheringStage.UNKNOWN)
    kept.told(end)
    assert not kept.after(CRASH_SECONDS)
    assert kept.signals == []


@pytest.mark.parametrize("end", [CRASHED, FAILED])
def test_after_a_training_that_was_not_watched_over_the_others_go_on(end: TaskEnd) -> None:
    """One of them may save the whole model while another has failed."""
    seen = Watched(lives=True, stage=GatheringStage.OVER)
    seen.told(end)
    assert not seen.after(CRASH_SECONDS)
    assert seen.signals == [] and seen.watch.crash is None


@pytest.mark.parametrize(
    "stage", [GatheringStage.UNKNOWN, GatheringStage.GATHERS, GatheringStage.OVER]
)
def test_a_living_step_that_lost_a_node_before_it_began_is_ended(
    stage: GatheringStage, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm gave the node up, and srun goes on: there is no sresctld that would tell."""
    seen = Watched(lives=True, stage=stage)
    seen.step.failed_nodes.add("n2")
    assert not seen.watch.look()
    assert not seen.after(CRASH_SECONDS)
    assert seen.signals == [(12, "3", "TERM")]


@pytest.mark.parametrize("state", [{"cancelled": True}, {"aborted": True}, {"running": False}])
def test_a_step_that_is_ending_is_left_alone(state: dict[str, bool]) -> None:
    """A person's scancel ends tasks by a signal too: it must stay the person's."""
    seen = Watched()
    seen.told(TaskEnd(0, 1, 1, 137, by_signal=True))
    vars(seen.step).update(state)
    seen.after(CRASH_SECONDS)
    assert (seen.signals, seen.watch.crash) == ([], None)


def test_a_users_signal_is_the_users() -> None:
    seen = Watched()
    seen.told(CRASHED)
    seen.user = "SIGTERM"
    seen.after(CRASH_SECONDS)
    assert (seen.signals, seen.watch.crash) == ([], None)
