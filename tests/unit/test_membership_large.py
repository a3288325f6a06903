"""The work of one process in a large world grows with the world's size, and not with its square."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.mesh.events import (
    ConnectionClosed,
    ConnectionProven,
    Event,
    LocalStatus,
    MessageReceived,
    Send,
)
from slurm_resilience.mesh.messages import Message, NewGeneration, StatusUpdate, Vote, VoteRequest
from slurm_resilience.mesh.model import Peer, PeerStatus, Timing
from slurm_resilience.mesh.protocol.election import Election
from slurm_resilience.mesh.protocol.membership import Membership
from slurm_resilience.mesh.protocol.world_plan import WorldRules

RANKS = 2000
EVENT_SECONDS = 20e-6
"""In which an event is handled."""
MOST_LOOKS = 300
"""At the making of a world, each of which takes time for every rank; there are 6,000 events."""


class Lead:
    """The membership of the lowest seat, and a clock."""

    def __init__(self) -> None:
        self.peers = [Peer(f"{seat:05d}", seat, node=f"n{seat // 8}") for seat in range(RANKS)]
        self.core = Membership(self.peers[0], WorldRules(RANKS, 1), Timing(), 0.0)
        self.now = 0.0
        self.sent: list[Message] = []

    def tell(self, event: Event) -> None:
        self.now += EVENT_SECONDS
        self._note(self.core.step(event, self.now))
        self._note(self.core.tick(self.now))

    def wait(self) -> None:
        self.now = max(self.now, self.core.side.wake_at)
        self._note(self.core.tick(self.now))

    def hear(self, peer: Peer, message: Message) -> None:
        self.tell(MessageReceived(peer.seat, peer.id, peer.id, message))

    def last(self, kind: type) -> Any:
        found = [message for message in self.sent if isinstance(message, kind)]
        return found[-1] if found else None

    def _note(self, effects: list[Any]) -> None:
        self.sent += [effect.message for effect in effects if isinstance(effect, Send)]

    def form(self) -> None:
        """Form a world of all that are there; each event is followed by a turn."""
        self.tell(LocalStatus(PeerStatus()))
        for peer in self.peers[1:]:
            self.tell(ConnectionProven(peer.seat, peer, PeerStatus()))
            self.hear(peer, StatusUpdate(0, PeerStatus()))
        while self.last(VoteRequest) is None:
            self.wait()
        number = self.last(VoteRequest).view.generation
        for peer in self.peers[1:]:
            self.hear(peer, Vote(number, True, number))
        while self.last(NewGeneration) is None:
            self.wait()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each look at the making of a world."""
    found: list[int] = []
    look = Election._may_assemble

    def count(self: Election, now: float) -> bool:
        found.append(1)
        return look(self, now)

    monkeypatch.setattr(Election, "_may_assemble", count)
    return found


def test_a_large_world_is_looked_at_seldom(looks: list[int]) -> None:
    lead = Lead()
    lead.form()
    view = lead.core.side.generation.view
    assert view is not None and view.size == RANKS
    assert len(looks) < MOST_LOOKS


def test_the_end_of_many_connections_is_looked_at_seldom(looks: list[int]) -> None:
    lead = Lead()
    lead.form()
    looks.clear()
    for peer in lead.peers[1:]:
        lead.tell(ConnectionClosed(peer.seat))
    lead.wait()
    assert not lead.core.side.contacts.seated()
    assert lead.core.side.losses.dead() == [peer.id for peer in lead.peers[1:]]
    assert len(looks) < MOST_LOOKS
