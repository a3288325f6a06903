"""Events that a membership is told, and effects that it asks for. Pure.

An event names its *speaker* beside its *subject*: today every process speaks for itself; a speaker
that stands between members may speak for several.
"""

from __future__ import annotations

import msgspec

from slurm_resilience.mesh.messages import GenerationEnded, Heartbeat, Message, StatusUpdate
from slurm_resilience.mesh.model import CloseCause, GenerationEnd, Member, Peer, PeerStatus, View

# -- events ------------------------------------------------------------------------------------


class ConnectionProven(msgspec.Struct, frozen=True, tag=True):
    """The other side of a connection has shown the secret."""

    connection: int
    peer: Peer
    status: PeerStatus = PeerStatus()
    dialed: bool = False
    """By this process."""
    rerouted: bool = False
    """In place of one on which messages may have been lost."""


class SeveralProven(msgspec.Struct, frozen=True, tag=True):
    """Several peers are connected that were not before: the ranks of another node, mostly, over a
    speaker."""

    connections: tuple[int, ...]
    members: tuple[Member, ...]
    """The peer of each, with its status."""

    def with_more(self, later: SeveralProven) -> SeveralProven:
        """Return the event of all peers of this one and a later one."""
        return SeveralProven(self.connections + later.connections, self.members + later.members)


class ConnectionClosed(msgspec.Struct, frozen=True, tag=True):
    """A connection has come to its end."""

    connection: int
    reason: str = "connection closed"
    cause: CloseCause = "closed"


class PeerAbsent(msgspec.Struct, frozen=True, tag=True):
    """A peer's machine says that no process listens at its address any more."""

    peer_id: str


class MessageReceived(msgspec.Struct, frozen=True, tag=True):
    """A message has arrived."""

    connection: int
    speaker: str
    """Id of the peer that sent it."""
    subject: str
    """Id of the peer that it is about."""
    message: Message
    age: float = 0.0
    """Seconds since it has arrived."""


class SameReceived(msgspec.Struct, frozen=True, tag=True):
    """Several peers have said the same, each of itself."""

    speakers: tuple[str, ...]
    """Ids, each on the connection that counts."""
    message: StatusUpdate | GenerationEnded | Heartbeat
    age: float = 0.0
    """Seconds since it has arrived."""


class NothingHeard(msgspec.Struct, frozen=True, tag=True):
    """Nothing that some peers say has come through for a while: who passes it on is silent."""

    speakers: tuple[str, ...]
    """Ids of these peers."""
    seconds: float


class BytesReceived(msgspec.Struct, frozen=True, tag=True):
    """Part of a message, or one that the membership need not know: a sign of life."""

    connection: int
    speaker: str
    age: float = 0.0
    """Seconds since it has arrived."""


class LocalStatus(msgspec.Struct, frozen=True, tag=True):
    """The main thread says how far it is."""

    status: PeerStatus


class LocalEnd(msgspec.Struct, frozen=True, tag=True):
    """The main thread, or its watch, ends the generation."""

    end: GenerationEnd


class LocalStop(msgspec.Struct, frozen=True, tag=True):
    """The main thread ends the training for all."""

    end: GenerationEnd


class LocalBeat(msgspec.Struct, frozen=True, tag=True):
    """The answer to `BeatDue`."""

    beat: Heartbeat | None = None
    """None: say the committed step alone."""


class WorldWorked(msgspec.Struct, frozen=True, tag=True):
    """Every member of a generation could talk to every other."""

    view: View


class HoldersListed(msgspec.Struct, frozen=True, tag=True):
    """The rendezvous names peers on lent nodes that had the training's state a moment ago."""

    peers: tuple[Peer, ...] | None
    """None: it cannot be read, or is new."""


class OutcomeFound(msgspec.Struct, frozen=True, tag=True):
    """The rendezvous says how the training ended."""

    code: int


Event = (
    ConnectionProven
    | SeveralProven
    | ConnectionClosed
    | PeerAbsent
    | MessageReceived
    | SameReceived
    | NothingHeard
    | BytesReceived
    | LocalStatus
    | LocalEnd
    | LocalStop
    | LocalBeat
    | WorldWorked
    | HoldersListed
    | OutcomeFound
)

# -- effects -----------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send a message on each of these connections."""

    connections: tuple[int, ...]
    message: Message
    calm: bool = False
    """The others do not wait for it: a speaker may send it together with what they say just now."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close a connection, after what waits to be sent."""

    connection: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Send nothing more on a connection; go on reading until the other side closes it."""

    connection: int


class Dial(msgspec.Struct, frozen=True, tag=True):
    """Connect to a peer."""

    peer: Peer
    in_world: bool = False
    """It is a member of this process's world, which ends soon if it is not reached."""


class DialKnown(msgspec.Struct, frozen=True, tag=True):
    """Connect to all that the rendezvous lists."""


class Reached(msgspec.Struct, frozen=True, tag=True):
    """A member of the current generation is connected now: give it this process's keys."""

    connection: int


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """This process is a member of a new generation."""

    view: View


class EndGeneration(msgspec.Struct, frozen=True, tag=True):
    """The current generation is over."""

    end: GenerationEnd


class CutBlock(msgspec.Struct, frozen=True, tag=True):
    """Get the main thread out of its block."""

    end: GenerationEnd


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """The others go on without this process."""

    reason: str


class GaveUp(msgspec.Struct, frozen=True, tag=True):
    """This process goes on without a peer."""

    peer: Peer
    reason: str


class BeatDue(msgspec.Struct, frozen=True, tag=True):
    """Answer with a `LocalBeat`."""


class News(msgspec.Struct, frozen=True, tag=True):
    """Wake threads that wait for a change."""

    knock: bool = False
    """A peer may wait outside of the current generation."""


class StillWaiting(msgspec.Struct, frozen=True, tag=True):
    """Say in the log that no world could be formed for so long."""

    seconds: float
    reason: str


class HeldUp(msgspec.Struct, frozen=True, tag=True):
    """Say in the log that this process did not run for so long."""

    seconds: float
    is_long: bool = False
    """Others may have taken it for hung meanwhile, and have gone on without it."""


Effect = (
    Send
    | Close
    | Finish
    | Dial
    | DialKnown
    | Reached
    | Adopt
    | EndGeneration
    | CutBlock
    | Evicted
    | GaveUp
    | BeatDue
    | News
    | StillWaiting
    | HeldUp
)
