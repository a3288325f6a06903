"""A process trains once, unless it is alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.model import View
from slurm_resilience.training import block
from slurm_resilience.training.options import Options
from slurm_resilience.training.recovery import startup
from slurm_resilience.training.recovery.exceptions import Interrupted
from slurm_resilience.training.watch.slow_hook import SlowHook


class Runs:
    """Stands for `BlockRunner`."""

    def __init__(self, *_: Any) -> None:
        pass

    def run(self, _: Any) -> str:
        return "trained"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(block, "BlockRunner", Runs)
    monkeypatch.setattr(block, "_been", set())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def fold(session: Any) -> None:
        pass

    return block.resilient(fold)


def test_a_second_training_is_refused(
    train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SRES_MEET", f"dir:{tmp_path}/one")
    assert train() == "trained"
    with pytest.raises(UsageError, match=r"one training a process.*\(fold\)"):
        train()
    monkeypatch.setenv("SRES_MEET", f"dir:{tmp_path}/two")
    assert train() == "trained"


def test_who_is_alone_may_train_again(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRES_MEET", "alone")
    assert [train(), train()] == ["trained", "trained"]


def test_a_hook_that_fails_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    """It writes to a service of logs, say, which is away just when a node is lost."""

    def hook(name: str, details: dict[str, Any]) -> None:
        raise ConnectionError("no route to host")

    runner = block.BlockRunner.__new__(block.BlockRunner)
    runner._options = Options(on_event=hook)
    runner._event("left", reason="seat 1 died")
    assert "the hook on_event failed; the training goes on" in caplog.text


def test_a_slow_hook_does_not_hold_the_mesh_up() -> None:
    came, over = threading.Event(), threading.Event()

    def hook(name: str, details: dict[str, Any]) -> None:
        came.set()
        over.wait(60)

    runner = block.BlockRunner.__new__(block.BlockRunner)
    runner._options = Options(on_event=hook)
    runner._event_beside("hang", reason="step 7 stands still")
    assert came.wait(60)
    over.set()


def test_a_change_of_size_is_told_to_the_script() -> None:
    """Not a world of the same size, and not the first one if it is full."""
    told: list[tuple[Any, int, int]] = []
    runner = block.BlockRunner.__new__(block.BlockRunner)
    runner._interrupter = SimpleNamespace(on_resize=SlowHook())  # type: ignore[assignment]
    runner._options = Options(on_resize=lambda *words: told.append(words))
    runner._session, runner._last_size = "session", 4  # type: ignore[assignment]
    for size in (4, 3, 3, 2, 4):
        runner._tell_resize(size)
    assert told == [("session", 4, 3), ("session", 3, 2), ("session", 2, 4)]
    runner._options = Options()
    runner._tell_resize(1)


def test_a_resize_hook_that_was_cut_off_is_called_again() -> None:
    told: list[tuple[int, int]] = []

    def hook(_: object, before: int, size: int) -> None:
        told.append((before, size))
        if len(told) == 1:
            raise Interrupted("its world is over")

    runner = block.BlockRunner.__new__(block.BlockRunner)
    runner._interrupter = SimpleNamespace(on_resize=SlowHook())  # type: ignore[assignment]
    runner._session, runner._last_size = "session", 4  # type: ignore[assignment]
    runner._options = Options(on_resize=hook)
    with pytest.raises(Interrupted):
        runner._tell_resize(2)
    assert not runner._interrupter.on_resize.seconds(1e9), "it is not running any more"
    runner._tell_resize(2)
    runner._tell_resize(2)
    assert told == [(4, 2), (4, 2)]


def test_one_that_has_finished_was_about_to_come_into_a_world_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other ranks had finished as well, and ended the training: its result was lost, and not
    written down."""
    runner = block.BlockRunner.__new__(block.BlockRunner)
    for name in ("_session", "_participant", "_interrupter", "_mesh", "_exits", "_go_on"):
        setattr(runner, name, MagicMock())
    runner._options, runner._groups, runner._passed, runner._last_size = Options(), [], None, 0
    monkeypatch.setattr(runner._exits, "done", written_down := MagicMock())
    views = iter([View(1, ()), View(2, ()), View(2, ()), None])
    monkeypatch.setattr(runner._mesh, "meet", lambda: next(views))
    monkeypatch.setattr(runner, "_form", MagicMock(side_effect=[None, Interrupted("it is over")]))
    monkeypatch.setattr(runner._mesh.me, "pid", os.getpid())
    monkeypatch.setattr(startup, "own_group", lambda: "")
    assert runner.run(lambda _: "the result") == "the result"
    assert written_down.called


async def later(session: Any) -> None:
    pass


def one_by_one(session: Any) -> Any:
    yield session


class Trainer:
    def fit(self, session: Any) -> str:
        return "fits"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (later, "returns before it has trained"),
        (one_by_one, "returns before it has trained"),
        (Trainer.fit, "would be `self` of a method"),
    ],
)
def test_what_cannot_be_a_block_is_refused_at_once(function: Any, words: str) -> None:
    """An async function ended at once, with exit code 0, and had trained nothing."""
    with pytest.raises(UsageError, match=words):
        block.resilient(function)


def test_a_call_that_does_not_fit_is_refused(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRES_MEET", "alone")
    with pytest.raises(UsageError, match=r"fold\(\): too many.*first argument is the session"):
        train(1)
    with pytest.raises(UsageError, match="first argument is the session"):
        block.resilient(lambda: None)()
    assert block.resilient(Trainer().fit)() == "trained"
    assert block.resilient(max)(2) == "trained"
