"""The end of a living step of which not all seats were seen, as its training told it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from worlds import FakeClock

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.rendezvous import TrainingOutcome
from slurm_resilience.resume.live_step.live_steps import EndWord
from slurm_resilience.resume.live_step.training import WATCH_SECONDS, TrainingWatch

LOST = ("task 0 on n1 exited with 1",)


class Story:
    """A training of a step whose node Slurm does not show, because slurmctld is away."""

    def __init__(self, directory: Path) -> None:
        self.rendezvous = directory / "mesh"
        (self.rendezvous / "peers").mkdir(parents=True)
        (self.rendezvous / "peers" / "0").touch()
        self.runs = True
        context: Any = SimpleNamespace(
            command=SimpleNamespace(
                program=("a",), multi_prog=False, has=lambda _: False, value=lambda _: None
            ),
            environment={"SRES_CHECKPOINTLESS": "1"},
            clock=FakeClock(),
            wake=Event(),
            host_calls=SimpleNamespace(observe=self.observe),
            allocation=SimpleNamespace(state_now=lambda: self.job_state),
        )
        self.job_state = "RUNNING"
        self.clock = context.clock
        self.errors: list[Exception] = []
        """The next tries to watch the training end so."""
        fence: Any = SimpleNamespace(directory=str(directory))
        self.watch = TrainingWatch(context, fence, lives=True)
        self.step: Any = SimpleNamespace(
            code=1, ended_tasks=[], killed_by=0, failed_nodes=set(), told_end=None
        )

    @contextlib.contextmanager
    def observe(self, *_: object) -> Iterator[str]:
        if self.errors:
            raise self.errors.pop(0)
        yield "observer"

    def connects(self, seconds: float) -> bool:
        """Look at it each quarter of a second, for so long."""
        until = self.clock.monotonic() + seconds
        with contextlib.ExitStack() as stack:
            while self.clock.monotonic() < until and self.watch.lives:
                if self.watch.connect(stack) is not None:
                    return True
                self.clock.wait(Event(), 0.25)
        return False

    def fails(self) -> None:
        """End a task badly; the supervisor sees it."""
        self.step.ended_tasks.append(LOST)
        picture = SimpleNamespace(running=self.runs)
        observer: Any = SimpleNamespace(picture=lambda: picture)
        self.watch.note_losses(self.step, (self.rendezvous, observer))

    def trained(self) -> None:
        """End the training well."""
        self.runs = False
        outcome = TrainingOutcome(0, 100)
        (self.rendezvous / "outcome").write_bytes(msgspec.json.encode(outcome))


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_a_task_that_the_training_went_on_without_is_no_failure(story: Story) -> None:
    story.fails()
    story.trained()
    end = story.watch.told_end(story.step)
    assert end is not None
    assert (end.code, end.word) == (0, EndWord.TRAINING)


def test_what_slurm_ends_with_the_job_is_a_failure(story: Story) -> None:
    story.fails()
    story.trained()
    story.job_state = "NODE_FAIL"
    end = story.watch.told_end(story.step)
    assert end is not None and end.late_code == 1


def test_a_failure_after_the_training_is_one(story: Story) -> None:
    story.fails()
    story.trained()
    story.fails()
    end = story.watch.told_end(story.step)
    assert end is not None
    assert (end.code, end.late_code) == (1, 1)


def test_a_failure_between_the_training_s_end_and_the_others_word_is_a_late_one(
    story: Story,
) -> None:
    story.trained()
    story.runs = True  # the observer hears of the end later than the file is there
    story.fails()
    end = story.watch.told_end(story.step)
    assert end is not None
    assert end.late_code == 1


@pytest.mark.parametrize("lost", [{"killed_by": 9}, {"failed_nodes": {"n1"}}])
def test_what_is_lost_with_the_step_is_not_known_to_be_done(
    story: Story, lost: dict[str, Any]
) -> None:
    story.fails()
    story.trained()
    vars(story.step).update(lost)
    end = story.watch.told_end(story.step)
    assert end is not None
    assert end.code == 1


def test_a_training_that_cannot_be_watched_for_a_moment_is_watched_later(story: Story) -> None:
    """A file system that failed once had it stopped, weeks later, when a node died."""
    story.errors = [UsageError("no secret: Stale file handle"), RuntimeError("no new thread")]
    assert story.connects(10.0)
    assert story.watch.lives


def test_a_training_that_cannot_be_watched_at_all_is_told_of(
    story: Story, capfd: pytest.CaptureFixture[str]
) -> None:
    story.errors = [OSError("no space") for _ in range(1000)]
    began = story.clock.monotonic()
    assert not story.connects(10 * WATCH_SECONDS)
    assert WATCH_SECONDS <= story.clock.monotonic() - began < 2 * WATCH_SECONDS
    said = "the training cannot be watched (no space): it is stopped when a node dies"
    assert capfd.readouterr().err.count(said) == 1
