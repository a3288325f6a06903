"""Ranks that end with a last checkpoint: fake worlds, real seconds cut short."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.training.leaving import last_save
from slurm_resilience.training.leaving.last_save import ASKED_TO_END, LastSave


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
