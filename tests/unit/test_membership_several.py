"""Several peers that a membership meets at once: the same as one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.mesh.events import (
    ConnectionClosed,
    ConnectionProven,
    Effect,
    Event,
    LocalStatus,
    MessageReceived,
    News,
    SeveralProven,
    WorldWorked,
)
from slurm_resilience.mesh.messages import NewGeneration, NodeLost, TrainingDone
from slurm_resilience.mesh.model import (
    CloseCause,
    Member,
    Peer,
    PeerStatus,
    Timing,
    View,
    generation_number,
)
from slurm_resilience.mesh.protocol.membership import Membership
from slurm_resilience.mesh.protocol.world_plan import WorldRules

SEATS = 6
ME = Peer("p2-0", 2, node="n0")


def _peer(seat: int, incarnation: int) -> Peer:
    return Peer(f"p{seat}-{incarnation}", seat, incarnation, node=f"n{seat // 2}")


class Known(NamedTuple):
    """A history: peers that were met, connections that ended, and a word of the first of them."""

    met: list[tuple[int, int]]
    ended: list[tuple[int, CloseCause]]
    word: str


PEERS = st.tuples(st.integers(0, SEATS - 1), st.integers(0, 1))
BEFORE = st.builds(
    Known,
    st.lists(PEERS, unique=True, max_size=4),
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["closed", "reset", "lost"])), max_size=3
    ),
    st.sampled_from(["", "", "done", "lost node", "world", "worked"]),
)
STATUSES = st.builds(PeerStatus, st.sampled_from(["ready", "running"]), st.integers(0, 3))


def _world(met: list[tuple[int, int]]) -> View:
    """Return a world of this process, those that were met, and one that was not."""
    others = sorted({(5, 0), *met})
    peers = [ME, *(_peer(*one) for one in others if one[0] != ME.seat)]
    return View(generation_number(1, 0), tuple(Member(peer, PeerStatus()) for peer in peers))


def _after(before: Known) -> Membership:
    """Return a membership to which this has happened."""
    membership = Membership(ME, WorldRules(SEATS, 1), Timing(), 0.0)
    events: list[Event] = [LocalStatus(PeerStatus())]
    events += [
        ConnectionProven(number, _peer(*one), PeerStatus("ready", 0, 0))
        for number, one in enumerate(before.met, 1)
    ]
    words: dict[str, Any] = {
        "done": TrainingDone(),
        "lost node": NodeLost("n2", "gone", True),
        "world": NewGeneration(_world(before.met).generation, _world(before.met)),
    }
    if before.word in words and before.met:
        name = _peer(*before.met[0]).id
        events.append(MessageReceived(1, name, name, words[before.word]))
    if before.word == "worked":
        events.append(WorldWorked(_world(before.met)))
    events += [ConnectionClosed(number + 1, "gone", cause) for number, cause in before.ended]
    for event in events:
        membership.step(event, 0.1)
    membership.tick(0.1)
    return membership


def _seen(membership: Membership, effects: list[Effect]) -> tuple[Any, ...]:
    """Return all that shows of a membership: its peers, what it asks for, and what it does next."""
    side = membership.side
    known = [
        (c.peer, c.connection, c.status, c.number, c.heard, c.met_at)
        for c in sorted(side.contacts, key=lambda c: c.peer.id)
    ]
    later = [*membership.tick(0.3), *membership.tick(1.0)]
    words = [[e for e in each if not isinstance(e, News)] for each in (effects, later)]
    inside = sorted(c.peer.id for c in side.contacts.inside())
    seats = [[c.peer.id for c in side.contacts.on_seat(seat)] for seat in range(SEATS)]
    return (
        known,
        inside,
        seats,
        words,
        dict(side.losses.peers),
        side.standing,
        News(True) in effects,
    )


@given(BEFORE, st.lists(st.tuples(PEERS, STATUSES), min_size=1, max_size=5))
def test_several_peers_are_met_as_one_after_the_other(
    before: Known, come: list[tuple[tuple[int, int], PeerStatus]]
) -> None:
    members = tuple(Member(_peer(*one), status) for one, status in come)
    numbers = tuple(range(-1, -len(members) - 1, -1))
    at_once, singly = _after(before), _after(before)
    effects = at_once.step(SeveralProven(numbers, members), 0.2)
    one_by_one: list[Effect] = []
    for number, member in zip(numbers, members, strict=True):
        dialed = ME.id < member.peer.id
        event = ConnectionProven(number, member.peer, member.status, dialed)
        one_by_one += singly.step(event, 0.2)
    assert _seen(at_once, effects) == _seen(singly, one_by_one)
