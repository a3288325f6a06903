"""A rank leaves on request, and a world ends after the step that was planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.mesh.model import GenerationEnd, Peer
from slurm_resilience.training.leaving.departure import Departure
from slurm_resilience.training.leaving.planned_end import PlannedEnd


class Keys:
    """The keys of a generation, as all its ranks hold them."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, str], bytes] = {}

    def peek(self, generation: int, key: str) -> bytes | None:
        return self._keys.get((generation, key))

    def put(self, generation: int, key: str, value: bytes) -> None:
        self._keys[generation, key] = value


def mesh(keys: Keys | None = None, *, may_leave: bool = True) -> Any:
    keys, ends = keys or Keys(), list[GenerationEnd]()
    return SimpleNamespace(
        me=Peer("p1", 1),
        end=None,
        over=ends.append,
        ends=ends,
        may_leave=lambda _: may_leave,
        peek=keys.peek,
        put=keys.put,
    )


def test_it_stays_unless_asked() -> None:
    departure = Departure()
    assert departure.wish(mesh(), 3) == ""
    departure.reason = "SIGTERM"
    assert departure.wish(mesh(), 3) == "seat 1 leaves (SIGTERM)"


def test_the_last_holder_of_a_part_stays(caplog: pytest.LogCaptureFixture) -> None:
    departure = Departure()
    departure.reason = "SIGTERM"
    alone = mesh(may_leave=False)
    assert departure.wish(alone, 3) == departure.wish(alone, 4) == ""
    assert caplog.text.count("alone holds its part") == 1


def test_all_ranks_leave_after_the_same_step() -> None:
    keys = Keys()
    first, second = mesh(keys), mesh(keys)
    ends = [PlannedEnd(), PlannedEnd()]
    ends[0].look(first, 5, 3)
    ends[0].plan(first, 5, 3, "seat 2 joins")
    ends[1].look(second, 5, 3)
    ends[0].plan(first, 5, 3, "another reason")
    assert not first.ends and not second.ends, "they make one more step"
    for here, end in ((first, ends[0]), (second, ends[1])):
        end.look(here, 5, 4)
        (told,) = here.ends
        assert (told.kind, told.generation, told.culprit, told.step) == ("join", 5, "", 4)
        assert told.reason == "seat 2 joins after step 4"
    later = mesh(keys)
    PlannedEnd().look(later, 6, 4)
    assert not later.ends, "that was another world"


def test_a_loop_that_makes_no_step_waits_for_the_change() -> None:
    here, end = mesh(), PlannedEnd()
    end.look(here, 5, 3)
    end.plan(here, 5, 3, "seat 2 joins")
    end.look(here, 5, 3)
    assert [told.step for told in here.ends] == [3]


def test_a_world_that_is_over_is_not_ended_again() -> None:
    here, end = mesh(), PlannedEnd()
    end.plan(here, 5, 3, "seat 2 joins")
    here.end = GenerationEnd(5, "a fault")
    end.look(here, 5, 4)
    assert not here.ends
