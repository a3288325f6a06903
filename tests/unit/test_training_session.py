"""The warnings of a session about a loop that would not do what it seems to."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.training.options import Options
from slurm_resilience.training.participant import Participant
from slurm_resilience.training.rank_environment import read_environment
from slurm_resilience.training.session import Session


class Batches:
    """A loader of three batches."""

    weight = 1.0

    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.fixture
def session() -> Any:
    """The session of rank 0 in a world that goes on."""
    participant: Any = Participant(read_environment({"RANK": "0", "WORLD_SIZE": "1"}), Options())
    participant.mesh = SimpleNamespace(end=None, evicted="", knock=threading.Event())
    participant._group = SimpleNamespace(rank=0, lost_connection=lambda: False)
    participant.healer.progress.step = 0
    return Session(participant)


def test_two_updates_for_one_batch_are_told_once(
    session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in session._batches(Batches()):
        for _ in range(2):
            with session.update():
                pass
    assert session.step == 6
    assert [r.getMessage()[:13] for r in caplog.records] == ["two `with s.u"]


def test_one_update_for_one_batch_or_for_several_is_as_it_should_be(
    session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for number in session._batches(Batches()):
        if number != 1:
            with session.update():
                pass
    for _ in session._batches(Batches()):
        with session.update():
            pass
        break
    for _ in range(3):  # a loop of the program's own
        with session.update():
            pass
    assert session.step == 6
    assert not caplog.records


def test_a_loop_without_updates_is_told(session: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert list(session._batches(Batches())) == [0, 1, 2]
    assert "3 batches and not one" in caplog.text


def test_a_session_knows_what_follows_an_update(session: Any) -> None:
    told = []
    for _ in session._batches(Batches()):
        told.append(session.after_update)
        with session.update():
            told.append(session.after_update)
        told.append(session.after_update)
    assert told == [False, False, True] * 3
    assert not session.after_update


def test_an_update_counts_as_under_way_until_its_step_is_counted(session: Any) -> None:
    participant = session._participant
    seen = []

    def commit() -> None:
        seen.append((participant.updating, participant.healer.progress.dirty))

    participant.loaders.commit = commit
    with session.update():
        pass
    # An interruption in between would make a whole state void.
    assert seen == [(True, True)]
    assert (participant.updating, participant.healer.progress.dirty, session.step) == (
        False,
        False,
        1,
    )
