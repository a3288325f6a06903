"""Ranks that end with a last checkpoint: fake worlds, real seconds cut short."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.training.leaving import last_save
from slurm_resilience.training.leaving.last_save import ASKED_TO_END, LastSave

DEADLINE = 30.0
"""By then a process has long been ended."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_save, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(last_save, "ALL_ASKED_SECONDS", 0.2)
    monkeypatch.setattr(last_save, "BETWEEN_SECONDS", 0.2)


class World:
    """A rank's mesh, and the world that it is in."""

    def __init__(self, seat: int, seats: list[int], generation: int = 1) -> None:
        self.me = SimpleNamespace(seat=seat)
        self.keys: dict[tuple[int, str], bytes] = {}
        members = [SimpleNamespace(peer=SimpleNamespace(seat=one)) for one in seats]
        self.view: Any = SimpleNamespace(generation=generation, members=members)

    def put(self, generation: int, key: str, value: bytes) -> None:
        self.keys[generation, key] = value

    def peek(self, generation: int, key: str) -> bytes | None:
        return self.keys.get((generation, key))

    def asks(self, *seats: int) -> None:
        for seat in seats:
            self.put(self.view.generation, f"{last_save.ASKED}{seat}", b"1")

    def __call__(self) -> Any:
        return self, self.view


def comes(save: LastSave, world: Any, plans: list[str]) -> bool:
    """Ask a rank; the last step is over as soon as it is planned."""

    def plan(reason: str) -> None:
        plans.append(reason)
        save._begun.set()

    return save._comes_to_save(world, plan)


def test_all_are_asked_and_the_lowest_seat_plans() -> None:
    first = World(0, [0, 1])
    first.asks(1)
    plans: list[str] = []
    assert comes(LastSave(), first, plans) and plans == [ASKED_TO_END]


def test_a_rank_that_is_asked_alone_ends(caplog: pytest.LogCaptureFixture) -> None:
    plans: list[str] = []
    assert not comes(LastSave(), World(0, [0, 1]), plans) and not plans
    assert "SIGTERM came to this rank, and not to seat 1" in caplog.text


def test_a_lent_rank_need_not_be_asked() -> None:
    plans: list[str] = []
    assert comes(LastSave(core=1), World(0, [0, 1]), plans) and plans == [ASKED_TO_END]


def test_a_rank_without_state_ends() -> None:
    assert not comes(LastSave(), lambda: None, [])


def test_a_rank_that_no_world_takes_in_ends() -> None:
    lonely = World(0, [0])
    assert not comes(LastSave(), lambda: (lonely, None), [])


def test_a_request_between_two_worlds_is_kept_for_the_next_one() -> None:
    old, new = World(0, [0, 1], 1), World(0, [0], 2)
    now: list[Any] = [(old, old.view), (old, None), (new, new.view)]
    looks: Iterator[Any] = iter(now)
    plans: list[str] = []
    assert comes(LastSave(), lambda: next(looks, now[-1]), plans) and plans == [ASKED_TO_END]
    assert new.keys and old.keys


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def listening(world: Callable[[], Any] = lambda: None) -> LastSave:
    save = LastSave()
    save.on_term(world, lambda reason: None)
    return save


def in_child(act: Callable[[Callable[[str], Any]], None]) -> tuple[int, str]:
    """Act in a process of its own, that SIGTERM may end; return its exit code, negative: of a
    signal, and what it told."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            act(lambda text: os.write(writer, f"{text}\n".encode()))
            os._exit(0)
        os._exit(9)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def test_an_error_in_the_middle_of_a_request_leaves_no_process_deaf() -> None:
    def act(tell: Callable[[str], Any]) -> None:
        def world() -> None:
            tell("looked")
            raise KeyError("world")

        listening(world)
        ask()
        time.sleep(DEADLINE)

    assert in_child(act) == (-signal.SIGTERM, "looked\n")


def test_a_request_at_the_end_waits_for_what_is_being_written() -> None:
    def act(tell: Callable[[str], Any]) -> None:
        save = listening()

        def write_out() -> None:
            ask()
            while not save.is_asked:
                time.sleep(0.001)
            tell("written")

        save.close(write_out)
        tell("over")

    assert in_child(act) == (-signal.SIGTERM, "written\n")


def test_sigterm_ends_a_process_after_its_training() -> None:
    def act(tell: Callable[[str], Any]) -> None:
        listening().close(lambda: tell("written"))
        ask()
        time.sleep(DEADLINE)

    assert in_child(act) == (-signal.SIGTERM, "written\n")


def test_a_handler_that_the_program_has_set_meanwhile_stays() -> None:
    def act(tell: Callable[[str], Any]) -> None:
        save = listening()
        signal.signal(signal.SIGTERM, lambda *_: tell("mine"))
        ask()
        save.close(lambda: tell("written"))
        ask()

    assert in_child(act) == (0, "mine\nwritten\nmine\n")
