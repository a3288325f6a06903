"""A rank leaves on request, between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.mesh.model import GenerationEnd, Member, Peer, PeerStatus
from slurm_resilience.training.departure import Departure


def member(seat: int, position: int) -> Member:
    return Member(Peer(f"p{seat}", seat), PeerStatus(step=3, position=position))


def mesh(*members: Member, end: GenerationEnd | None = None) -> Any:
    ends: list[GenerationEnd] = []
    me = members[-1].peer
    return SimpleNamespace(
        me=me, end=end, over=ends.append, ends=ends, picture=lambda: (None, list(members), {})
    )


def test_it_stays_unless_asked() -> None:
    here = mesh(member(0, 0), member(1, 0))
    Departure().end_world(here, 5, 1, 3)
    assert here.ends == []


def test_it_ends_the_world_as_one_that_joins() -> None:
    here, departure = mesh(member(0, 0), member(1, 0)), Departure()
    departure.reason = "SIGTERM"
    departure.end_world(here, 5, 1, 3)
    (end,) = here.ends
    assert (end.kind, end.generation, end.culprit) == ("join", 5, "")
    assert "seat 1 leaves after step 3" in end.reason
    ended = mesh(member(0, 0), member(1, 0), end=end)
    departure.end_world(ended, 5, 1, 3)
    assert ended.ends == [], "the world is over"


def test_the_last_holder_of_a_part_stays(caplog: pytest.LogCaptureFixture) -> None:
    departure = Departure()
    departure.reason = "SIGTERM"
    alone = mesh(member(0, 0), member(2, 0), member(1, 1))
    departure.end_world(alone, 5, 2, 3)
    departure.end_world(alone, 5, 2, 4)
    assert alone.ends == [] and caplog.text.count("alone holds its part") == 1
    twin = mesh(member(0, 0), member(3, 1), member(1, 1))
    departure.end_world(twin, 6, 2, 4)
    assert len(twin.ends) == 1
