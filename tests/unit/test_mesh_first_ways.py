"""The first way to a peer is taken without a choice, and a large world's words are gathered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.mesh.events import ConnectionClosed, ConnectionProven, MessageReceived, Send
from slurm_resilience.mesh.messages import Reachable, Speaks, Unreachable
from slurm_resilience.mesh.model import Member, Peer, PeerStatus, Speakers
from slurm_resilience.mesh.protocol.bundling import (
    GATHER_MOST_SECONDS,
    GATHER_SEAT_SECONDS,
    GATHER_SECONDS,
)
from slurm_resilience.mesh.protocol.links import RETIRED
from slurm_resilience.mesh.protocol.relay import Relay

PEERS = [Peer(f"peer-{seat}", seat, node=f"node{seat // 3}") for seat in range(9)]
ME, NEAR, FAR = PEERS[0], PEERS[1:3], PEERS[3:]


class ChoosingRelay(Relay):
    """Chooses the first way to a peer as it does any later one."""

    def _take_first(self, number: int, offers: Any) -> None:
        self._choose([offer.member.peer.id for offer in offers], 0.0)


def relay_of(kind: type[Relay], me: Peer = ME) -> Relay:
    return kind(me, 0.0, lambda: 2.0, lambda _: PeerStatus())


def ways_of(relay: Relay) -> dict[str, Any]:
    """Return the ways of a process, whatever the numbers of their connections."""
    return {peer_id: (way.chosen, way.number < 0) for peer_id, way in relay._ways.to.items()}


KEYS = st.sampled_from([(0, -3), (1, -3), (1, -4), (2, -6)])
LINKS = st.integers(1, 5)
WORDS = st.one_of(
    st.tuples(st.just("comes"), LINKS, st.sampled_from([*NEAR, FAR[0], FAR[3]])),
    st.tuples(st.just("speaks"), LINKS, st.sampled_from([(0, -1), (1, -1), (2, -2), RETIRED])),
    st.tuples(st.just("reaches"), LINKS, st.tuples(KEYS, st.lists(st.sampled_from(PEERS[1:])))),
    st.tuples(st.just("does not reach"), LINKS, st.sampled_from(FAR)),
    st.tuples(st.just("goes"), LINKS, st.sampled_from(["closed", "lost", "reset"])),
)


@settings(max_examples=300)
@given(st.lists(WORDS, max_size=20))
def test_a_first_way_is_the_one_that_would_be_chosen(words: list[tuple[str, int, Any]]) -> None:
    relays = [relay_of(Relay), relay_of(ChoosingRelay)]
    links: dict[int, Peer] = {}
    for at, (word, number, what) in enumerate(words, 1):
        event: Any = None
        if word == "comes" and number not in links:
            links[number] = what
            event = ConnectionProven(number, what, PeerStatus())
        elif number in links:
            peer = links[number].id
            if word == "goes":
                del links[number]
                event = ConnectionClosed(number, what, what)
            elif word == "speaks":
                event = MessageReceived(number, peer, peer, Speaks(what))
            elif word == "reaches":
                members = tuple(Member(one, PeerStatus()) for one in dict.fromkeys(what[1]))
                event = MessageReceived(number, peer, peer, Reachable(what[0], members))
            elif word == "does not reach":
                event = MessageReceived(number, peer, peer, Unreachable((what.id,), "lost"))
        if event is not None:
            for relay in relays:
                relay.step(event, at * 0.001)
        quick, choosing = relays
        assert ways_of(quick) == ways_of(choosing)
        assert quick._ways.passed == choosing._ways.passed


@pytest.mark.parametrize(
    ("seats", "seconds"),
    [
        (8, GATHER_SECONDS),
        (512, 512 * GATHER_SEAT_SECONDS),
        (100_000, GATHER_MOST_SECONDS),
    ],
)
def test_the_words_of_a_large_world_that_starts_are_gathered_for_longer(
    seats: int, seconds: float
) -> None:
    me = Peer("peer-0", 0, node="node0", seats=seats)
    for starts in (True, False):
        relay = relay_of(Relay, me)
        relay.step(ConnectionProven(1, NEAR[0], PeerStatus()), 0.0)
        relay.begin(Speakers(here=me), 0.0)
        begun = 0.0
        while begun < (0.0 if starts else 10.0):
            relay.tick(begun)
            relay.flush(begun)
            begun = relay.wake_at
        relay.tick(begun)
        relay.flush(begun)
        relay.step(ConnectionProven(2, FAR[0], PeerStatus()), begun)
        word = Reachable((1, -3), (Member(FAR[0], PeerStatus()),))
        relay.step(MessageReceived(2, FAR[0].id, FAR[0].id, word), begun)
        waits = seconds if starts else GATHER_SECONDS
        told = [
            effect.message
            for at in (begun + 0.9 * waits, begun + 1.01 * waits)
            for effect in relay.flush(at)
            if isinstance(effect, Send) and effect.connections == (1,)
        ]
        assert told[-1:] == [word]
