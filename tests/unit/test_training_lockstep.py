"""A rank that left out an update is found: it begins a batch at an earlier step than others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.mesh.model import Peer
from slurm_resilience.training.guards.left_out import APART_STEPS, MOST, LeftOutUpdates
from slurm_resilience.training.watch import Watch
from slurm_resilience.training.watch.lockstep import (
    COUNTED,
    KEPT,
    BatchBegun,
    Lockstep,
    Made,
    heard,
    told,
)


class Rank:
    """It begins batches; after some of them it makes its update."""

    def __init__(self, updates: list[bool], world: int = 1) -> None:
        self.lockstep, self.step, self.said = Lockstep(), 0, [BatchBegun(0, -1, world)]
        self.lockstep.enter(world)
        for update in updates:
            self.lockstep.begin(self.step)
            self.said.append(self.lockstep.last)
            self.step += update


LOOP = st.lists(st.booleans(), min_size=1, max_size=30)


@given(LOOP, st.integers(0, 30), st.integers(0, 30))
def test_ranks_in_lockstep_accuse_none(updates: list[bool], here: int, there: int) -> None:
    """However many batches each has begun, and whatever it accumulates."""
    one, other = Rank(updates[:here]), Rank(updates[:there])
    assert not any(one.lockstep.behind(heard(told(said))) for said in other.said)


@given(LOOP, st.data())
def test_a_rank_that_left_out_an_update_is_behind(updates: list[bool], data: Any) -> None:
    at = data.draw(st.integers(0, len(updates) - 1))
    whole = [*updates[:at], True, *updates[at + 1 :], False]
    lacks = [*whole[:at], False, *whole[at + 1 :]]
    one, other = Rank(lacks), Rank(whole)
    for said in other.said:
        assert one.lockstep.behind(said) == (said.batch > at + 1)
    assert not any(other.lockstep.behind(said) for said in one.said)


def test_batches_of_another_world_and_of_long_ago_tell_nothing() -> None:
    assert not Rank([False] * 3).lockstep.behind(BatchBegun(2, 9, world=2))
    assert not Rank([False] * (KEPT + 5)).lockstep.behind(BatchBegun(3, 9, world=1))


def test_a_rank_that_waits_in_its_update_says_where_the_next_batch_begins() -> None:
    """Each batch is compared there at first, and the others have gone on meanwhile."""
    one, other = Rank([True, True]), Rank([True, False, False])
    assert not other.lockstep.behind(heard(told(one.lockstep.next)))
    one.lockstep.waits_in_update()
    assert other.lockstep.behind(heard(told(one.lockstep.next)))
    assert not Rank([True, True, False]).lockstep.behind(one.lockstep.next)
    none = Lockstep()
    none.waits_in_update()
    assert not none.next.batch  # it has begun no batch: the loop takes them from elsewhere


class Batch(NamedTuple):
    calls: int = 0
    """Collectives before the update."""
    waits: int = 0
    """So often the update waits for the others, in a collective each."""
    after: int = 0
    """Collectives after the update."""


class Calling(Rank):
    """It makes collectives in each batch, and waits for others in some updates. It is in the midst
    of its last batch."""

    def __init__(self, batches: list[Batch], inside: int = 0, *, enters: bool = False) -> None:
        """
        Args:
            batches: those that it has begun.
            inside: collectives of the last one that it has entered.
            enters: it is about to enter the next one.
        """
        super().__init__([])
        self.count = 0
        for number, batch in enumerate(batches, 1):
            self.lockstep.begin(self.step, self.count if self.lockstep.counts else -1)
            entered = sum(batch) if number < len(batches) else inside
            for wait in range(batch.waits):
                if batch.calls + wait < entered + enters:
                    self.lockstep.waits_in_update(self.count + batch.calls + wait)
            self.step, self.count = self.step + 1, self.count + entered

    def judges(self, other: Calling) -> Made:
        """Judge, by what the other one says."""
        told_of = heard(told(other.lockstep.next))
        return self.lockstep.more_collectives(self.count, told_of, other.count)


FEW = st.integers(0, 2)
BATCHES = st.lists(st.builds(Batch, FEW, FEW, FEW), min_size=2, max_size=6)


@settings(max_examples=1000)
@given(BATCHES, st.data())
def test_ranks_that_make_the_same_collectives_accuse_none(batches: list[Batch], data: Any) -> None:
    """One may be far ahead of the other, where no collective is between them."""
    ranks = []
    for _ in range(2):
        at = data.draw(st.integers(0, len(batches)))
        inside = data.draw(st.integers(0, sum(batches[at - 1]))) if at else 0
        ranks.append(Calling(batches[:at], inside, enters=data.draw(st.booleans())))
    one, other = ranks
    assert one.judges(other) is other.judges(one) is Made.NEITHER


@given(BATCHES, st.data())
def test_a_rank_that_calls_a_collective_alone_is_known(batches: list[Batch], data: Any) -> None:
    """The others wait in the next batch, or in the update of this one."""
    at = data.draw(st.integers(1, len(batches) - 1))
    calls, before = batches[at - 1].calls, batches[: at - 1]
    alone = Calling([*before, Batch(calls)], inside=calls + 1)
    ahead = Calling([*before, Batch(calls), Batch(1)], inside=1)
    compares = Calling([*before, Batch(calls, 1)], inside=calls + 1)
    for other in (ahead, compares):
        assert alone.judges(other) is Made.HERE
        assert other.judges(alone) is Made.THERE


@given(BATCHES)
def test_one_that_calls_it_after_an_update_that_waits_is_known(batches: list[Batch]) -> None:
    calls, waits, _ = batches[-1]
    alone = Calling([*batches[:-1], Batch(calls, waits)], inside=calls + waits + 1)
    ahead = Calling([*batches[:-1], Batch(calls, waits), Batch(1)], inside=1)
    assert alone.judges(ahead) is Made.HERE


def test_one_that_went_on_after_it_is_known_by_its_next_batch() -> None:
    alone, other = ([Batch(2), Batch(calls), Batch(2)] for calls in (3, 2))
    assert Calling(other).judges(Calling(alone)) is Made.THERE


def test_collectives_are_counted_in_the_first_batches_alone() -> None:
    long = [Batch(1)] * (COUNTED + 3)
    assert Calling(long, 2).judges(Calling([*long, Batch(1)], 1)) is Made.NEITHER
    assert Calling(long, 2).judges(Calling([*long[1:], Batch(1, 1)], 2)) is Made.HERE


@pytest.mark.parametrize("text", ["", "12", "collective", "1.2", "1.2.x", "-1.2.3"])
def test_what_is_no_batch_is_read_as_none(text: str) -> None:
    assert heard(text).batch == 0


@pytest.mark.parametrize("counted", [True, False])
def test_a_watch_hears_of_it_by_beats(counted: bool) -> None:
    watches = [Watch(), Watch()]
    for seat, watch in enumerate(watches):
        watch.enter(f"p{seat}", seat, (lambda: 4) if counted else None, world=3)
    steps = [0, 0]
    for batch in range(4):
        for seat, watch in enumerate(watches):
            watch.begin(steps[seat])
            if (seat, batch) != (1, 2):
                steps[seat] += 1
                watch.commit(steps[seat])
    for seat, watch in enumerate(watches):
        other = 1 - seat
        beats = {f"p{other}": (Peer(f"p{other}", other), watches[other].beat(), 0.0)}
        assert ("left out an update that seat 0 made" in watch.left_out(beats)) == bool(seat)
        assert watch.stalled(0.0, beats) is None


def world(size: int = 2, replica_size: int = 1) -> Any:
    return SimpleNamespace(size=size, replica_size=replica_size)


def test_it_is_healed_some_times_in_a_row_and_then_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else a program whose ranks accumulate differently would be healed for ever."""
    left_out = LeftOutUpdates(heals=True)
    assert all(left_out.heals(world(), step, "why") for step in range(MOST))
    assert not left_out.heals(world(), MOST, "why")
    assert not left_out.heals(world(), MOST + 1, "why")
    assert [record.message for record in caplog.records] == ["why"]
    assert left_out.heals(world(), MOST + 2 + APART_STEPS, "why")


@pytest.mark.parametrize(
    ("heals", "view"), [(True, world(4, 4)), (True, world(1)), (False, world())]
)
def test_where_nothing_can_heal_it_is_only_told_of(heals: bool, view: Any) -> None:
    left_out = LeftOutUpdates(heals=heals)
    assert not left_out.heals(view, 3, "why")
    assert not left_out.reason
