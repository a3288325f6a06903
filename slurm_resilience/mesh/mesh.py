"""The mesh: one thread that keeps a connection to every other process of the training.

A closed connection is a dead process, and all know it within a millisecond. Status, the ends and
beginnings of generations, and the store's keys travel over the same connections, in order.

`Mesh` joins three pieces: `Membership` decides, `Transport` carries, `KeyStore` keeps the keys.
Here events go in, effects are carried out, and the main thread waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import SresError, WireError
from slurm_resilience.mesh.connection import HANDSHAKE_SECONDS, UNACKED_SECONDS, PeerConnection
from slurm_resilience.mesh.dial_book import DialAddress
from slurm_resilience.mesh.events import (
    Adopt,
    BeatDue,
    BytesReceived,
    Close,
    ConnectionClosed,
    ConnectionProven,
    CutBlock,
    Dial,
    DialKnown,
    Effect,
    EndGeneration,
    Event,
    Evicted,
    Finish,
    GaveUp,
    HeldUp,
    HoldersListed,
    LocalBeat,
    LocalEnd,
    LocalStatus,
    LocalStop,
    MessageReceived,
    News,
    OutcomeFound,
    PeerAbsent,
    Reached,
    Send,
    StillWaiting,
    WorldWorked,
)
from slurm_resilience.mesh.fair_lock import FairLock
from slurm_resilience.mesh.keys import KeyStore
from slurm_resilience.mesh.messages import Heartbeat, KeyChange, Leaving, Message
from slurm_resilience.mesh.model import (
    SEAT_TAKEN,
    CloseCause,
    GenerationEnd,
    Member,
    Peer,
    PeerStatus,
    Timing,
    View,
    counter_of,
)
from slurm_resilience.mesh.protocol.membership import Membership
from slurm_resilience.mesh.protocol.relay import LinkEffect, Relay, Told
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import Rendezvous, SharedDirectory
from slurm_resilience.mesh.rendezvous_entry import RendezvousEntry
from slurm_resilience.mesh.transport import STRANGERS, Transport
from slurm_resilience.mesh.wakeups import Wakeups

__all__ = ["Mesh", "Stopped"]

T = TypeVar("T")
log = logging.getLogger("sres.mesh")

TELL_SECONDS = 2.0
"""A process that was held up for longer says so."""
OUTCOME_SECONDS, OUTCOME_SECONDS_A_PEER = 1.0, 0.01
"""Between two looks whether the training is over, for a process that waits for a world; rarer
where many may look."""
UNACKED_BEFORE_SECONDS = 1.0
"""A way that carries nothing is taken for lost so long before its peer is silent for too long:
launchers of plain programs, which have patience, outlast a cut of some seconds, as ranks do."""
CLOSE_SECONDS = 2.0
"""Time that `close` waits for the thread."""


class Stopped(Exception):
    """The training was given up by one of its processes."""


class MeshCallbacks(NamedTuple):
    """Functions that are called in the mesh's thread."""

    on_end: Callable[[GenerationEnd], None]
    on_evict: Callable[[str], None]
    on_tick: Callable[[float], Heartbeat | None]
    on_given_up: Callable[[Peer, str], None]


class Mesh:
    """This process among the others. Its methods may be called from any thread."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        me: Peer,
        rules: WorldRules,
        *,
        abort_timeout: float | None = None,
        silence: float | None = None,
        timing: Timing | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        on_end: Callable[[GenerationEnd], None] = lambda _: None,
        on_evict: Callable[[str], None] = lambda _: None,
        on_tick: Callable[[float], Heartbeat | None] = lambda _: None,
        on_given_up: Callable[[Peer, str], None] = lambda _peer, _reason: None,
        speakers: bool = False,
    ) -> None:
        """
        Args:
            rendezvous: where the others are found.
            me: this process; ``host`` is what it listens on, ``port`` 0 lets the kernel choose.
            rules: when a generation may be formed.
            abort_timeout: seconds after the end of a generation in which a peer must be out of its
                block; then the others go on without it. Default: as in ``timing``.
            silence: seconds without a beat after which a peer counts as hung; three beats in worlds
                so large that this is longer. Default: as in ``timing``.
            timing: all other times of the protocol.
            handshake_seconds: in which a connection must have shown the secret.
            on_end: called in the mesh's thread when the current generation ends, and every 10 ms
                again until `ready` or `done` is said.
            on_evict: called in a thread when the others go on without this process.
            on_tick: called in the mesh's thread before each beat; gives the beat to send.
            on_given_up: called in the mesh's thread with a peer that the others go on without.
            speakers: of each node one rank is connected to other nodes, instead of all; all ranks
                of a training must agree. Needs a rendezvous in a shared directory; without one
                every rank is connected to every other.

        Raises:
            UsageError: the rendezvous cannot be used.
            OSError: the port cannot be listened on.
        """
        chosen = timing or Timing()
        if abort_timeout is not None:
            chosen = msgspec.structs.replace(chosen, abort_seconds=abort_timeout)
        if silence is not None:
            chosen = msgspec.structs.replace(chosen, silence_seconds=silence)
        self._rendezvous = rendezvous
        self._transport = Transport(
            self,
            msgspec.structs.replace(me, port=me.port or rendezvous.port(me.seat)),
            rendezvous.secret(),
            strangers=max(STRANGERS, 2 * rules.seats),
            handshake_seconds=handshake_seconds,
            unacked_seconds=max(UNACKED_SECONDS, chosen.silence_seconds - UNACKED_BEFORE_SECONDS),
        )
        self.me = self._transport.me
        is_lent = 0 < rules.core <= me.seat
        self._entry = RendezvousEntry(rendezvous, self.me, self._take_secret, is_lent=is_lent)
        self._membership = Membership(self.me, rules, chosen, SYSTEM_CLOCK.monotonic())
        self._lock = self._transport.lock
        self._changed = Wakeups(self._lock)
        self._keys = KeyStore(self._membership, self._send, self._changed, self._note_news)
        self._relay = self._make_relay() if speakers else None
        self._callbacks = MeshCallbacks(on_end, on_evict, on_tick, on_given_up)
        self.knock = threading.Event()
        """Set when a peer may be waiting outside of the current generation."""
        self.is_left = False
        """The main thread has to leave the generation that it is in: it has ended, or the others go
        on without this process."""
        self.news = 0
        """Times that something came which is looked at between two steps: a knock, a key, a
        generation, or the end of one."""
        self._cut: GenerationEnd | None = None
        """The end that `on_end` is called with next."""
        self._closing = False

    def start(self) -> Mesh:
        """Start its thread; the others can see this process from now on.

        Raises:
            OSError, UsageError: see `RendezvousEntry.begin`.
        """
        # First, so that a node whose ranks are listed has a speaker that is.
        speakers = self._entry.speaker.claim() if self._relay is not None else None
        try:
            self._entry.begin()
        except (OSError, SresError):
            self._entry.end()
            raise
        if self._relay is not None and speakers is not None:
            with self._lock:
                self._do_on_links(self._relay.begin(speakers, SYSTEM_CLOCK.monotonic()))
        else:
            self._dial_known()
        self._transport.start()
        return self

    def close(self, reason: str = "") -> None:
        """Disconnect. In a child of a fork nothing is to be done: its parent is connected."""
        if self._transport.is_forked:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._send(self._membership.side.contacts.connections(), Leaving(reason))
            self._keys.close()
        self._transport.stop(CLOSE_SECONDS)
        self._entry.end()

    # -- what is known ------------------------------------------------------------------------

    @property
    def status(self) -> PeerStatus:
        """Return the newest word of this process."""
        return self._membership.side.status

    @property
    def current(self) -> View | None:
        """The generation that this process was last a member of."""
        return self._membership.side.generation.view

    @property
    def end(self) -> GenerationEnd | None:
        """Return the end of the generation that the main thread is or was in; None: it goes on."""
        return self._membership.side.generation.block_end

    @property
    def evicted(self) -> str:
        """Return the reason for which the others go on without this process; empty: they do not."""
        return self._membership.side.standing.evicted

    @property
    def is_seat_taken(self) -> bool:
        """Tell whether the others go on with a newer process on this one's seat."""
        return self.evicted.startswith(SEAT_TAKEN)

    @property
    def waits_for(self) -> str:
        """Return in words for what a generation waits that is not formed."""
        return self._membership.side.waiting.reason

    def shortage(self) -> str:
        """Say how many ranks are there, if they are too few for a world: see `Side.shortage`."""
        with self._lock:
            return self._membership.side.shortage()

    @property
    def beat(self) -> float:
        """Seconds between two beats in a world of this size."""
        return self._membership.side.beat_seconds

    @property
    def silence(self) -> float:
        """Seconds without a word after which a peer counts as hung: at least three beats."""
        return self._membership.side.silence_seconds

    def newcomers(self) -> tuple[Peer, ...]:
        """Live peers that wait outside of the current generation and would make it larger."""
        with self._lock:
            found = self._membership.side.newcomers()
            if found is None:
                self.knock.clear()
            return found or ()

    def beats(self) -> dict[str, tuple[Peer, Heartbeat, float]]:
        """Return the last beat of each other peer, and seconds since anything was heard of it."""
        now = SYSTEM_CLOCK.monotonic()
        with self._lock:
            return {
                contact.peer.id: (contact.peer, contact.beat, now - contact.heard)
                for contact in self._membership.side.contacts.seated()
            }

    def picture(self) -> tuple[View | None, list[Member], dict[str, bool]]:
        """Return the generation that works, all living peers, and those that were lost since."""
        with self._lock:
            side = self._membership.side
            return side.generation.worked, side.present(), dict(side.losses.peers)

    def may_leave(self, step: int) -> bool:
        """Tell whether others keep all that this process holds of the model, if it goes now.

        Args:
            step: committed steps that its state contains.
        """
        with self._lock:
            return self._membership.side.may_leave(SYSTEM_CLOCK.monotonic(), step)

    def own_fds(self) -> set[int]:
        """File descriptors of this mesh, which the rest of the program must not close."""
        return self._transport.own_fds()

    def quiet(self) -> FairLock:
        """Hold this lock, and the mesh neither opens nor closes a socket."""
        return self._lock

    # -- what the main thread says ------------------------------------------------------------

    def say(self, status: PeerStatus) -> None:
        """Tell all peers how far this process is."""
        self._tell(LocalStatus(status))

    def worked(self, view: View) -> None:
        """Every member of this generation could talk to every other: it counts from now on."""
        self._entry.entered()
        self._tell(WorldWorked(view))

    def over(self, end: GenerationEnd) -> None:
        """End a generation for all its members, at once."""
        self._tell(LocalEnd(end))

    def stop(self, end: GenerationEnd) -> None:
        """End the training for all, whatever generation they are in."""
        self._tell(LocalStop(end))

    def put(self, generation: int, key: str, value: bytes) -> None:
        """Set a key at every member of a generation."""
        self._keys.put(generation, key, value)

    def get(self, generation: int, keys: Iterable[str], timeout: float) -> list[bytes]:
        """Wait until all keys are there; see `KeyStore.get`."""
        return self._keys.get(generation, keys, timeout)

    def peek(self, generation: int, key: str) -> bytes | None:
        """Return the value of a key of a generation; None: it is not here now."""
        return self._keys.peek(generation, key)

    def known(self, generation: int) -> dict[str, bytes]:
        """All keys of a generation that are here now."""
        return self._keys.known(generation)

    def change(self, change: KeyChange, timeout: float) -> bytes:
        """Change a key at its home; see `KeyStore.change`."""
        return self._keys.change(change, timeout)

    # -- what the main thread waits for -------------------------------------------------------

    def meet(self, timeout: float | None = None) -> View | None:
        """Wait for the next generation, outside of the block (`say` a status `ready` or `done`
        before).

        Returns:
            The generation; None when all are done.

        Raises:
            TimeoutError: none within ``timeout`` seconds; the message says what is waited for.
            WireError: the others go on without this process.
        """
        began = SYSTEM_CLOCK.monotonic()
        deadline = None if timeout is None else began + timeout
        ask_at = began + self._outcome_pause
        while True:
            with self._changed:
                side = self._membership.side
                if side.standing.stopped:
                    raise Stopped(side.standing.stopped.reason)
                if self.evicted:
                    raise WireError(f"the others go on without this process: {self.evicted}")
                if self._closing:
                    raise WireError("the mesh is closed")
                if side.standing.finished:
                    return None
                view = side.invitation()
                if view is not None:
                    return view
                now = SYSTEM_CLOCK.monotonic()
                if deadline is not None and now >= deadline:
                    raise TimeoutError(self.waits_for or "no generation was formed")
                if now >= ask_at:  # only after a wait
                    self._entry.looks.ask(self._look_for_outcome)
                    ask_at = now + self._outcome_pause
                until = ask_at if deadline is None else min(ask_at, deadline)
                self._changed.wait(self._has_an_answer, until - now)

    def _has_an_answer(self) -> bool:
        """Tell whether `meet` has something to return, or to raise."""
        side = self._membership.side
        standing = side.standing
        is_over = bool(standing.stopped or standing.evicted or standing.finished or self._closing)
        return is_over or side.invitation() is not None

    def _look_for_outcome(self) -> None:
        outcome = self._rendezvous.ended()
        if outcome is not None and not self._closing:
            self._tell(OutcomeFound(outcome.code))

    @property
    def _outcome_pause(self) -> float:
        peers = len(self._membership.side.contacts)
        return max(OUTCOME_SECONDS, OUTCOME_SECONDS_A_PEER * peers)

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the current generation has ended, or the time is over."""
        deadline = SYSTEM_CLOCK.monotonic() + seconds
        with self._changed:
            while self.end is None and (left := deadline - SYSTEM_CLOCK.monotonic()) > 0:
                self._changed.wait(lambda: self.end is not None, left)

    def hear_out(
        self, view: View, enough: Callable[[list[PeerStatus]], T | None], seconds: float
    ) -> T | None:
        """Wait until what the other living members of a generation say is enough.

        Args:
            view: the generation.
            enough: what follows from their statuses; None: not enough yet. Called with the lock.
            seconds: to wait at most.

        Returns:
            What follows; None: not enough in time.
        """
        deadline = SYSTEM_CLOCK.monotonic() + seconds
        inside = {member.peer.id for member in view.members}
        with self._changed:
            while True:
                contacts = self._membership.side.contacts
                found = enough([c.status for c in contacts if c.peer.id in inside])
                left = deadline - SYSTEM_CLOCK.monotonic()
                if found is not None or left <= 0 or self._closing or self.evicted:
                    return found
                self._changed.wait(lambda: True, left)  # only the caller knows what is enough

    def wait_until_out(self, seconds: float) -> bool:
        """Wait until the main thread has left its block; False when it has not within the time."""
        deadline = SYSTEM_CLOCK.monotonic() + seconds
        with self._changed:
            while self.status.phase == "running" and not self._closing:
                left = deadline - SYSTEM_CLOCK.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(lambda: self.status.phase != "running", left)
        return True

    # -- what the transport calls -------------------------------------------------------------

    def introduction(self) -> tuple[PeerStatus, Callable[[], tuple[Peer, ...]]]:
        """Return what is said at a handshake."""
        return self.status, self._known_peers

    def _known_peers(self) -> tuple[Peer, ...]:
        known = (contact.peer for contact in self._membership.side.contacts.seated())
        if self._relay is None:
            return tuple(known)
        # The ranks of other nodes are told of by speakers.
        return tuple(peer for peer in known if peer.node == self.me.node)

    def on_proven(self, connection: PeerConnection) -> None:
        """Take a peer in."""
        assert connection.peer is not None
        dialed = connection.address is not None
        event = ConnectionProven(connection.number, connection.peer, connection.status, dialed)
        self._take_from_link(event)

    def on_message(self, connection: PeerConnection, message: Message) -> None:
        """Have the message answered."""
        name = connection.name
        age = connection.age
        self._take_from_link(MessageReceived(connection.number, name, name, message, age))

    def on_bytes(self, connection: PeerConnection) -> None:
        """Note a sign of life."""
        event = BytesReceived(connection.number, connection.name, connection.age)
        self._take_from_link(event)

    def on_closed(self, connection: PeerConnection, reason: str, cause: CloseCause) -> None:
        """Note a loss."""
        self._take_from_link(ConnectionClosed(connection.number, reason, cause))

    def on_absent(self, peer_id: str) -> None:
        """Note a death."""
        self._take_from_link(PeerAbsent(peer_id))

    def on_refused(self, now: float) -> None:
        """Look whether it has the right secret, or this process."""
        self._entry.look_at_refusal(now)

    def on_hung_up(self, now: float) -> None:
        """Look whether it has another secret."""
        self._entry.look_at_hang_up(now)

    def on_turn(self, now: float) -> float:
        """Let the membership do what is due."""
        with self._lock:
            # Waiting for the lock may have taken a while.
            self._do(self._membership.tick(SYSTEM_CLOCK.monotonic()))
            cut, self._cut = self._cut, None
            wake_at = self._membership.side.wake_at
            if self._relay is not None:
                if now >= self._relay.wake_at:
                    self._transport.take_quiet()  # before it judges who is silent
                self._do_on_links(self._relay.tick(SYSTEM_CLOCK.monotonic()))
                self._flush()
                if self._relay.speaks:
                    self._entry.speaks()
                wake_at = min(self._membership.side.wake_at, self._relay.wake_at)
            self._changed.tell()
        # Without the lock: it may take a while, and the main thread may hold it.
        if cut is not None:
            self._callbacks.on_end(cut)
        return wake_at

    def on_failure(self, error: Exception) -> None:
        """Have the main thread end as if the others had gone on without it."""
        with self._changed:
            self._membership.side.standing.evicted = f"its mesh failed: {error!r}"
            self.is_left = True
            self._note_news()
            self._closing = True
            self._keys.close()
        self._callbacks.on_evict(self.evicted)

    # -- events in, effects out ---------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        self._transport.refuse_fork()  # before the lock, which would never be free there
        with self._lock:
            self._take(event)
            self._flush()
            self._changed.tell()
        self._transport.ring()

    def _flush(self) -> None:
        """Send what the relay has kept for the end of a turn."""
        if self._relay is not None:
            self._do_on_links(self._relay.flush(SYSTEM_CLOCK.monotonic()))

    def _take_from_link(self, event: Event) -> None:
        if self._relay is None:
            self._hear(event)
        else:
            self._do_on_links(self._relay.step(event, SYSTEM_CLOCK.monotonic()))

    def _do_on_links(self, effects: list[LinkEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Told):
                self._hear(effect.event)
            else:
                self._carry_on_links(effect)

    def _hear(self, event: Event) -> None:
        """Take what a connection brings: the keys' messages are the store's."""
        if isinstance(event, MessageReceived):
            number, name = event.connection, event.speaker
            if self._keys.hear(number, name, event.message):
                event = BytesReceived(number, name, event.age)
        self._take(event)

    def _take(self, event: Event) -> None:
        self._do(self._membership.step(event, SYSTEM_CLOCK.monotonic()))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send() | Close() | Finish() | Dial() | DialKnown():
                    self._carry(effect)
                case News(knock=knock):
                    if knock and not self.knock.is_set():
                        self.knock.set()
                        self._note_news()
                    self._changed.note()
                case BeatDue():
                    self._beat()
                case Reached(connection=number):
                    self._keys.reach(number)
                case Adopt(view=view):
                    self._keys.adopt(view.generation)
                case CutBlock(end=end):
                    self._cut = end
                case Evicted(reason=reason):
                    if self._relay is not None:
                        self._do_on_links(self._relay.retire(SYSTEM_CLOCK.monotonic()))
                    call = self._callbacks.on_evict
                    threading.Thread(target=call, args=(reason,), daemon=True).start()
                case GaveUp(peer=peer, reason=reason):
                    log.warning("seat %d (%s) is given up: %s", peer.seat, peer.node, reason)
                    self._callbacks.on_given_up(peer, reason)
                case EndGeneration():
                    self._entry.look()
                    _say(effect)
                case StillWaiting() | HeldUp():
                    _say(effect)
                    self._look_around(effect)
        # Noted here, so that a step need not ask for it layer by layer.
        side = self._membership.side
        if side.generation.block_end is not None or side.standing.evicted:
            self.is_left = True
            self._note_news()
        else:
            self.is_left = False

    def _look_around(self, effect: StillWaiting | HeldUp) -> None:
        if isinstance(effect, HeldUp) and effect.is_long:
            # The others may have ended the training without this process, and be gone.
            self._entry.looks.ask(self._look_for_outcome)

    def _note_news(self) -> None:
        self.news += 1

    def _send(self, connections: Iterable[int], message: Message) -> None:
        self._carry(Send(tuple(connections), message))
        if not self._transport.is_serving():
            self._flush()  # the main thread's, whose turn ends here

    def _carry(self, effect: Send | Close | Finish | Dial | DialKnown) -> None:
        if self._relay is None or isinstance(effect, DialKnown):
            self._carry_on_links(effect)
        else:
            self._do_on_links(self._relay.carry(effect, SYSTEM_CLOCK.monotonic()))

    def _carry_on_links(self, effect: Send | Close | Finish | Dial | DialKnown) -> None:
        match effect:
            case DialKnown():
                self._entry.looks.ask(self._dial_known)
            case Send(connections=connections, message=message):
                self._transport.send(connections, message)
            case Close(connection=number):
                self._transport.close(number)
            case Finish(connection=number):
                self._transport.finish(number)
            case Dial(peer=peer):
                self._transport.dial(DialAddress(peer.id, peer.host, peer.port))

    def _beat(self) -> None:
        # Before the silence of any peer is judged: beats wake no thread.
        self._transport.take_quiet()
        now = SYSTEM_CLOCK.monotonic()
        beat = self._callbacks.on_tick(now)
        self._do(self._membership.step(LocalBeat(beat), now))

    def _make_relay(self) -> Relay | None:
        if not isinstance(self._rendezvous, SharedDirectory):
            return None
        side = self._membership.side
        return Relay(self.me, SYSTEM_CLOCK.monotonic(), side.speaker_patience, side.status_of)

    def _take_secret(self, secret: bytes) -> None:
        with self._lock:
            self._transport.take_secret(secret)
        self._dial_known()

    def _dial_known(self) -> None:
        """Dial those that the rendezvous lists. Without the lock while it is read, since the mesh's
        thread needs that: see `DirectoryLooks`."""
        side = self._membership.side
        if side.rules.core and side.generation.worked is None:
            holders = self._rendezvous.holders(self.me)
            with self._lock:
                self._take(HoldersListed(holders))
        if self._relay is not None and isinstance(self._rendezvous, SharedDirectory):
            self._find_speakers(self._relay, self._rendezvous)
        else:
            # Starting behind oneself, so that two newcomers seldom dial each other at once.
            known = sorted(self._rendezvous.others())
            own = (self.me.id, self.me.host, self.me.port)
            with self._lock:
                for address in [k for k in known if k > own] + [k for k in known if k < own]:
                    self._transport.dial(DialAddress(*address))
        self._transport.ring()

    def _find_speakers(self, relay: Relay, directory: SharedDirectory) -> None:
        def looks_at(node: str) -> bool:
            with self._lock:
                return relay.looks_at(node)

        speakers = self._entry.speaker.read() if relay.looks_beyond else None
        with self._lock:
            self._do_on_links(relay.look_again(speakers, SYSTEM_CLOCK.monotonic()))
        peers = directory.peers(looks_at)
        with self._lock:
            now = SYSTEM_CLOCK.monotonic()
            for peer in peers:
                is_near = peer.node == self.me.node
                if not is_near or not (relay.is_starting(now) or peer.id == self.me.id):
                    self._carry(Dial(peer))


def _say(effect: EndGeneration | StillWaiting | HeldUp) -> None:
    match effect:
        case EndGeneration(end=end):
            log.info("generation %d is over: %s", counter_of(end.generation), end.reason)
        case StillWaiting(seconds=seconds, reason=reason):
            log.warning("has waited %.0f s for other ranks: %s", seconds, reason)
        case HeldUp(seconds=seconds):
            log.log(
                logging.WARNING if seconds > TELL_SECONDS else logging.DEBUG,
                "this process was held up for %.1f s; peers are not judged by that time",
                seconds,
            )
