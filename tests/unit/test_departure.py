"""A rank leaves on request, between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.mesh.model import GenerationEnd, Peer
from slurm_resilience.training.departure import Departure


def mesh(*, may_leave: bool = True, end: GenerationEnd | None = None) -> Any:
    ends: list[GenerationEnd] = []
    return SimpleNamespace(
        me=Peer("p1", 1), end=end, over=ends.append, ends=ends, may_leave=lambda _: may_leave
    )


def test_it_stays_unless_asked() -> None:
    here = mesh()
    Departure().end_world(here, 5, 3)
    assert here.ends == []


def test_it_ends_the_world_as_one_that_joins() -> None:
    here, departure = mesh(), Departure()
    departure.reason = "SIGTERM"
    departure.end_world(here, 5, 3)
    (end,) = here.ends
    assert (end.kind, end.generation, end.culprit, end.step) == ("join", 5, "", 3)
    assert "seat 1 leaves after step 3" in end.reason
    ended = mesh(end=end)
    departure.end_world(ended, 5, 3)
    assert ended.ends == [], "the world is over"


def test_the_last_holder_of_a_part_stays(caplog: pytest.LogCaptureFixture) -> None:
    departure = Departure()
    departure.reason = "SIGTERM"
    alone = mesh(may_leave=False)
    departure.end_world(alone, 5, 3)
    departure.end_world(alone, 5, 4)
    assert alone.ends == [] and caplog.text.count("alone holds its part") == 1
