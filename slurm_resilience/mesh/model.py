"""The data that messages carry, and the frozen picture that every decision is made from. Pure.

A *seat* is a place in the training (rank 0 … world-1 of the full world); a *peer* is a process that
sits on one. A replaced process takes the same seat with a higher incarnation. A *generation* is one
world of peers that step together; it ends as a whole, and the next one has a higher number.
"""

# Annotations are no texts here: each process would compile them again to make its decoder, 2 ms.

from collections.abc import Set
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

Phase = Literal["ready", "running", "done"]
"""ready: outside the block, waits for the next generation; running: in it; done: finished."""


CloseCause = Literal["closed", "reset", "lost"]
"""closed: by the other side, which is how the death of a process shows; reset: the other machine
knows of no such connection: the process died, or took this one for lost; lost: nothing is heard
from over there, and the process may live."""

SEAT_TAKEN = "a newer process took seat"
"""Beginning of the reason for which the others go on without one of two processes on a seat."""

_SEATS = 1_048_576
_INCARNATIONS = 16


def generation_number(counter: int, lead: int, incarnation: int = 0) -> int:
    """Return a generation's number: later ones are higher, and no two leads make the same one.

    Args:
        counter: how many generations there were, as far as the lead knows; the new one counts.
        lead: seat of the peer that proposes it; of two proposals the lower seat's is the higher.
        incarnation: the lead's. After the death of all, counters begin again; a process that was
            only stopped must not take the new generations for the old ones.
    """
    seat = _SEATS - 1 - lead
    return (counter * _SEATS + seat) * _INCARNATIONS + incarnation % _INCARNATIONS


def counter_of(generation: int) -> int:
    """Return the part of a generation's number that people are shown."""
    return generation // (_SEATS * _INCARNATIONS)


class Peer(msgspec.Struct, frozen=True):
    """A process of the training. Never changes while it lives."""

    id: str
    """Unique among all processes that ever take part."""
    seat: int
    incarnation: int = 0
    """Number of processes that sat on this seat before."""
    node: str = ""
    domain: str = ""
    """Failure domain (switch, rack); empty: unknown."""
    host: str = ""
    port: int = 0
    """Port that its mesh listens on."""
    pid: int = 0
    seats: int = 0
    """Size of the full world, as this process was told; 0: unknown."""


SPEAKERS_ABOVE = 64
"""Worlds of more seats have speakers, where nothing else is said. With 8 ranks a node, the first
world of 64 costs each rank a third of the processor time that it costs in a full mesh, of 128 a
sixth (`scripts/bench mesh`); in smaller ones the full mesh is known to be as quick, and simpler."""


class Speakers(NamedTuple):
    """The speakers of the nodes, as they are written down."""

    here: Peer | None = None
    """The speaker of this process's own node; itself, perhaps; None: none is."""
    before: tuple[Peer, ...] = ()
    """The speakers of other nodes that came before this process, and may know nothing of it."""
    after: tuple[Peer, ...] = ()
    """The ones that came later than this process, which speaks too: they find it."""


class PeerStatus(msgspec.Struct, frozen=True):
    """A peer's word on itself; sent when it changes."""

    phase: Phase = "ready"
    generation: int = 0
    """The last generation it was in; 0: none."""
    step: int = -1
    """Committed optimizer steps that its state contains; -1: it has no state."""
    dirty: bool = False
    """Interrupted inside an update: its state is neither the old nor the new one."""
    position: int = -1
    """Part of a model replica that it holds (0 … replica_size-1); -1: none yet."""
    digest: str = ""
    """Checksum of its state at `step`; empty: not computed."""
    snapshot: int = -1
    """Step of its in-memory snapshot (partner copies); -1: none."""
    keeps: tuple[int, ...] = ()
    """Seats whose snapshot of the same step it keeps for them."""
    disk: int = -1
    """Step of the newest verified checkpoint that it can read; -1: none."""
    gate: int = -1
    """Step for which it has complete gradients, when its world ended at the gate before the update
    of a model in parts; -1: it is not there."""

    @property
    def healthy(self) -> bool:
        return self.step >= 0 and not self.dirty


class Member(msgspec.Struct, frozen=True):
    """A peer in a generation, with the status that it had when the generation was proposed."""

    peer: Peer
    status: PeerStatus


class View(msgspec.Struct, frozen=True, dict=True):
    """One generation: the members in rank order, the same for all of them."""

    generation: int
    """See `generation_number`."""
    members: tuple[Member, ...]
    replica_size: int = 1
    """Ranks that together hold one copy of the model; rank r holds part ``r % replica_size``."""
    seats: int = 0
    """Size of the full world."""
    reason: str = ""

    @property
    def counter(self) -> int:
        """The generation as people count it."""
        return counter_of(self.generation)

    @property
    def size(self) -> int:
        return len(self.members)

    def rank_of(self, peer_id: str) -> int:
        """Return the rank of a peer; -1 when it is not in this generation."""
        return self._ranks.get(peer_id, -1)

    @property
    def ids(self) -> Set[str]:
        """Return the ids of all members."""
        return self._ranks.keys()

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {member.peer.id: rank for rank, member in enumerate(self.members)}

    def lets_in(self, peer_id: str) -> bool:
        """Tell whether a peer lets newcomers in, for all: the member on the lowest seat. It makes
        the next world too, which takes in those that it reaches itself."""
        return peer_id == self._doorkeeper

    @cached_property
    def _doorkeeper(self) -> str:
        return min(
            ((member.peer.seat, member.peer.id) for member in self.members), default=(0, "")
        )[1]

    def position(self, rank: int) -> int:
        """Return the part of a replica that a rank holds."""
        return rank % self.replica_size


class GenerationEnd(msgspec.Struct, frozen=True):
    """The end of a generation, and why."""

    generation: int
    reason: str
    culprit: str = ""
    """Id of the peer at fault; empty: none in particular."""
    kind: Literal["fault", "lost", "hang", "join", "finding", "stop"] = "fault"
    wrong_nodes: tuple[str, ...] = ()
    """Nodes whose ranks were found to have other parameters than most replicas."""
    step: int = -1
    """Committed steps of the rank that ended it between two steps; -1: it was ended within one."""


BEATS_A_SECOND = 250
"""Sent by one process, at most. A beat costs its two ends 0.1 ms together, so this is about 2 % of
a core in each process, however large the world; beyond 125 peers beats come less often."""
SILENCE_BEATS = 3
"""Beats that are missed, at least, before a peer counts as hung."""


class Timing(msgspec.Struct, frozen=True):
    """Limits of waiting."""

    beat_seconds: float = 0.5
    """Between two beats, at least."""
    silence_seconds: float = 5.0
    """Without a word after which a peer is taken for hung or gone."""
    abort_seconds: float = 5.0
    """After the end of a generation in which a peer must be out of its block."""
    reach_seconds: float = 3.0
    """Within which every member of a new generation must have reached every other."""
    known_again_seconds: float = 3.0
    """After which a process without a world dials all that are known, again and again: a world is
    formed much sooner than that."""
    tell_waiting_seconds: float = 20.0
    """After which it is said for what a process waits; again whenever the time has doubled."""
    cut_again_seconds: float = 0.01
    """Between two attempts to get the main thread out of its block: a call that was not cut the
    first time is cut the next."""
    look_seconds_a_peer: float = 2e-6
    """Between two looks at the making of a world, for each peer. A look takes time for each of
    them, and each of them says something: without a pause the cost would grow with their square."""
    looks_freely_peers: int = 64
    """With so many peers or fewer there is no pause between two looks."""

    def beat(self, peers: int) -> float:
        """Seconds between two beats of a process that has so many peers."""
        return max(self.beat_seconds, peers / BEATS_A_SECOND)

    def look_pause(self, peers: int) -> float:
        """Seconds between two looks at the making of a world of so many peers."""
        return self.look_seconds_a_peer * peers if peers > self.looks_freely_peers else 0.0

    def silence(self, peers: int) -> float:
        """Seconds of silence that are too long, in a world of so many peers."""
        return max(self.silence_seconds, SILENCE_BEATS * self.beat(peers))
