"""Looks for the newest checkpoint, of a directory that answers, hangs, or fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.training.recovery.checkpoint_look import CheckpointLook


class Keeper:
    """A checkpointer whose directory hangs until it is let go on."""

    def __init__(self) -> None:
        self.step, self.looks, self.counts = 5, 0, SimpleNamespace(last=-1)
        self.error: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()

    def readable(self) -> int:
        self.looks += 1
        self.goes_on.wait()
        if self.error is not None:
            raise self.error
        return self.step


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    made.goes_on.set()


def look_at(keeper: Any) -> CheckpointLook:
    """Look for a hundredth of a second."""
    return CheckpointLook(keeper, 0.04)


def test_a_directory_that_answers_is_asked_each_time(keeper: Keeper) -> None:
    look = CheckpointLook(keeper, 4000.0)
    for step in (5, 7, 9):
        keeper.step = step
        assert look.newest(has_state=True) == step
    assert keeper.looks == 3


def test_a_rank_with_the_state_goes_on_without_an_answer(
    keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    look = look_at(keeper)
    assert look.newest(has_state=False) == 5
    keeper.goes_on.clear()
    assert look.newest(has_state=True) == 5, "what was there before"
    keeper.counts.last = 8
    assert look.newest(has_state=True) == 8, "what this rank has saved since"
    assert keeper.looks == 2, "it waits in the same look"
    assert caplog.text.count("has not answered") == 1


def test_a_hang_that_is_over_is_forgotten(keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    look = look_at(keeper)
    for step in (10, 20):
        keeper.goes_on.clear()
        assert look.newest(has_state=True) < step
        keeper.goes_on.set()
        assert look._thread is not None
        look._thread.join()
        keeper.step = step
        look._limit = 1000.0
        assert look.newest(has_state=True) == step
        look._limit = 0.01
    assert caplog.text.count("has not answered") == 2


def test_a_rank_without_state_waits_for_the_answer(keeper: Keeper) -> None:
    """Or a training that has checkpoints would begin from scratch."""
    keeper.goes_on.clear()
    threading.Timer(0.1, keeper.goes_on.set).start()
    assert look_at(keeper).newest(has_state=False) == 5


def test_errors_come_to_the_one_who_asked(keeper: Keeper) -> None:
    look = CheckpointLook(keeper, 4000.0)
    keeper.error = ValueError("no")
    for has_state in (True, False):
        with pytest.raises(ValueError, match="no"):
            look.newest(has_state=has_state)
