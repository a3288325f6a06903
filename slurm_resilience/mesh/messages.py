"""Messages between peers: a 4-byte length, then one of these as msgpack. Pure.

accepted socket: Challenge →          ← Hello          Welcome →          then anything
"""

# Annotations are no texts here: each process would compile them again to make its decoder, 2 ms.

import hashlib
import hmac
from typing import Literal

import msgspec

from slurm_resilience.mesh.model import (
    CloseCause,
    GenerationEnd,
    Member,
    Peer,
    PeerStatus,
    View,
)
from slurm_resilience.wire.frames import FrameCodec

PROTOCOL = 13
MAX_FRAME_BYTES = 64 << 20
"""Bytes. The largest message is a value of the store, or the view of a large world."""
MAX_UNPROVEN_BYTES = 16 << 10
"""Bytes accepted from a process that has not shown the secret yet."""
QUIET_BYTES = 512
"""Fewer unread bytes wake no receiver (SO_RCVLOWAT): heartbeats, which are read when the receiver
wakes for a beat of its own. Room for several of them; anything else is filled up to so many."""


class PeerChallenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: bytes
    protocol: int = PROTOCOL


class PeerHello(msgspec.Struct, frozen=True, tag="hello"):
    peer: Peer
    status: PeerStatus
    nonce: bytes
    proof: bytes
    to: str
    """Whom it is for: a peer's id, or ``:PORT`` of who listens there. Who was reached by mistake
    cannot pass it on."""
    protocol: int = PROTOCOL


class PeerWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    peer: Peer
    status: PeerStatus
    proof: bytes


class Roster(msgspec.Struct, frozen=True, tag="roster"):
    """The peers that the sender is connected to: one address leads to all."""

    peers: tuple[Peer, ...]


class StatusUpdate(msgspec.Struct, frozen=True, tag="say"):
    """My status has changed."""

    number: int
    status: PeerStatus


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """I live; and how far my main thread is."""

    step: int = -1
    phase: str = ""
    since: float = 0.0
    """Seconds since the main thread's last mark."""
    seconds: float = 0.0
    """Its own computing time in the last step, without waiting for others."""


class VoteRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Vote for this world: it is formed when its members have, and enough of each older one."""

    view: View
    known: tuple[int, ...] = ()
    """Worlds that may go on already, as the sender knows them."""
    worked: int = 0
    """The newest of them that has worked."""


class Vote(msgspec.Struct, frozen=True, tag="vote"):
    """The answer."""

    generation: int
    granted: bool
    promised: int
    """The newest number that the sender has voted for."""
    worked: int = 0
    """The newest world that has worked, as the sender knows."""
    possible: tuple[int, ...] = ()
    """Worlds that may go on already."""
    views: tuple[View, ...] = ()
    """Those of them that the lead does not know."""
    dead: tuple[str, ...] = ()
    """Ids of their members of which the sender knows that they are dead."""


class NewGeneration(msgspec.Struct, frozen=True, tag="form"):
    """Be the next generation."""

    generation: int
    view: View | None = None
    """None: the one of this number for which the receiver has voted. A large one takes its time to
    be read."""


class WorldKnown(msgspec.Struct, frozen=True, tag="world"):
    """A world has worked without you; only a part of it that is large enough may go on."""

    view: View


class GenerationEnded(msgspec.Struct, frozen=True, tag="over"):
    """A generation has ended."""

    end: GenerationEnd


class KeyPut(msgspec.Struct, frozen=True, tag="put"):
    """A key of a generation's store."""

    generation: int
    key: str
    value: bytes


class KeyChange(msgspec.Struct, frozen=True, tag="change"):
    """Change a key at its home, the one peer that orders all changes of it."""

    generation: int
    number: int
    key: str
    add: int = 0
    expected: bytes | None = None
    """With `desired`: set it only if this is the value (empty: if there is none)."""
    desired: bytes | None = None
    append: bytes | None = None


class KeyChanged(msgspec.Struct, frozen=True, tag="changed"):
    """The value after it."""

    generation: int
    number: int
    value: bytes


class NodeLost(msgspec.Struct, frozen=True, tag="finding"):
    """An observer, such as a supervisor, says this of a node."""

    node: str
    reason: str
    dead: bool


class NodeSuspected(msgspec.Struct, frozen=True, tag="suspected"):
    """An observer does not hear of a node any more. It may only be cut off for a moment."""

    node: str
    reason: str


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """You do not answer, or your seat was taken: the others go on without you."""

    reason: str
    why: Literal["silent", "unreached", "must go"] = "must go"
    """silent: you were not heard for too long; unreached: others could not reach you again and
    again. Nothing else is held against you then."""


class Leaving(msgspec.Struct, frozen=True, tag="bye"):
    """I leave on purpose."""

    reason: str = ""


class TrainingDone(msgspec.Struct, frozen=True, tag="done"):
    """The training is over: enough of us have done its last step."""


class Superseded(msgspec.Struct, frozen=True, tag="superseded"):
    """Another connection to you counts for me: this one ends now, and its end is no death."""


class Speaks(msgspec.Struct, frozen=True, tag="speaks"):
    """I have links to other nodes."""

    key: tuple[int, int]


class Reachable(msgspec.Struct, frozen=True, tag="reach"):
    """These peers are reached over me: the ranks of my node, or those of other nodes."""

    key: tuple[int, int]
    """The key of the speaker on their node; the higher one counts."""
    members: tuple[Member, ...]


class Unreachable(msgspec.Struct, frozen=True, tag="unreach"):
    """These are not reached over me any more."""

    peers: tuple[str, ...]
    cause: CloseCause


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """Pass these messages on: one of each source, all of the same words."""

    sources: tuple[str, ...]
    """Ids of those that say it, each in its own name."""
    targets: tuple[str, ...]
    """Ids; none: all that are reached over you."""
    body: bytes
    quiet: bool = False
    """A heartbeat: it may wait a moment for others."""
    calm: bool = False
    """The others do not wait for it: it may be sent together with what they say just now."""


Bundled = Speaks | Reachable | Unreachable | Relayed


class Bundle(msgspec.Struct, frozen=True, tag="bundle"):
    """All of these, in order."""

    messages: tuple[Bundled, ...]
    quiet: bool = False
    """Heartbeats, for the receiver alone."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """I count you as connected again."""

    number: int


class HungUp(msgspec.Struct, frozen=True, tag="hungup"):
    """I do not count you as connected."""

    seen: int
    """The number of your last `Opened`: after a newer one this is void."""
    at: int
    """The highest number that an `Opened` of mine may have had until now: after one with a higher
    number, which came sooner over a newer link, this is void."""


class Filler(msgspec.Struct, frozen=True, tag="fill"):
    """Nothing: it makes what it follows long enough to wake the receiver."""

    body: bytes


Message = (
    PeerChallenge
    | PeerHello
    | PeerWelcome
    | Roster
    | StatusUpdate
    | Heartbeat
    | VoteRequest
    | Vote
    | NewGeneration
    | WorldKnown
    | GenerationEnded
    | KeyPut
    | KeyChange
    | KeyChanged
    | NodeLost
    | NodeSuspected
    | Evict
    | Leaving
    | TrainingDone
    | Superseded
    | Speaks
    | Reachable
    | Unreachable
    | Relayed
    | Bundle
    | Opened
    | HungUp
    | Filler
)

FRAMES: FrameCodec[Message] = FrameCodec(Message, MAX_FRAME_BYTES)


def framed(message: Message) -> bytes:
    """Return a message as it is sent to a process that has shown the secret: a heartbeat does not
    wake it, anything else does."""
    frame = FRAMES.pack(message)
    quiet = isinstance(message, Heartbeat) or (isinstance(message, Bundle) and message.quiet)
    if quiet or len(frame) >= QUIET_BYTES:
        return frame
    return frame + FRAMES.pack(Filler(bytes(QUIET_BYTES - len(frame))))


def proof(secret: bytes, side: str, theirs: bytes, own: bytes, who: str, to: str = "") -> bytes:
    """HMAC-SHA256 over both nonces: neither side can repeat what it once heard.

    Args:
        secret: the training's.
        side: `dial` or `accept`, so that a proof cannot be sent back to who made it.
        theirs: the other side's nonce.
        own: one's own.
        who: id of the peer that proves.
        to: as in `PeerHello`.
    """
    words = b"\0".join((side.encode(), theirs, own, who.encode(), to.encode()))
    return hmac.digest(secret, words, hashlib.sha256)
