"""The protocol of the mesh: life, silence, eviction, and the making of generations. Pure.

A `Membership` is one process's side of it. It is told events, with the time, and answers with
effects; it opens no socket, reads no clock and starts no thread, so that it can be tested by
scripts of events and simulated (`slurm_resilience.simulate`).

The owner calls `step` for every event, then `tick`; and `tick` again at `wake_at`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import assert_never

import msgspec

from slurm_resilience.mesh.events import (
    BeatDue,
    BytesReceived,
    Close,
    ConnectionClosed,
    ConnectionProven,
    Dial,
    DialKnown,
    Effect,
    Event,
    Finish,
    HoldersListed,
    LocalBeat,
    LocalEnd,
    LocalStatus,
    LocalStop,
    MessageReceived,
    NothingHeard,
    OutcomeFound,
    PeerAbsent,
    Reached,
    SameReceived,
    Send,
    SeveralProven,
    WorldWorked,
)
from slurm_resilience.mesh.messages import (
    Evict,
    GenerationEnded,
    Heartbeat,
    Leaving,
    NewGeneration,
    NodeLost,
    NodeSuspected,
    Roster,
    StatusUpdate,
    Superseded,
    TrainingDone,
    Vote,
    VoteRequest,
    WorldKnown,
)
from slurm_resilience.mesh.model import GenerationEnd, Peer, PeerStatus, Timing, View
from slurm_resilience.mesh.protocol.contacts import Contact
from slurm_resilience.mesh.protocol.departures import Departures
from slurm_resilience.mesh.protocol.election import Election
from slurm_resilience.mesh.protocol.side import ROUNDING_SECONDS, Misfit, Side
from slurm_resilience.mesh.protocol.world_plan import WorldRules

SUSPICION_SECONDS = 10.0
"""So long a suspicion counts. By then a finding has followed it, or the node is in order."""
MISFIT_SECONDS = 20.0
"""A process without a world gives up after so long beside a peer that was started for a world of
another size. Not sooner: it may belong to a training whose other ranks are on their way."""


class Membership:
    """One process among the others."""

    def __init__(self, me: Peer, rules: WorldRules, timing: Timing, now: float) -> None:
        self.side = Side(me, rules, timing, now)
        self._departures = Departures(self.side)
        self._election = Election(self.side, self._departures)

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event in; what has to be done about it."""
        side = self.side
        match event:
            case MessageReceived():
                self._hear(event, now)
            case SameReceived():
                self._hear_same(event, now)
            case BytesReceived() | NothingHeard():
                self._note_sound(event, now)
            case ConnectionProven():
                self._meet(event, now)
            case SeveralProven():
                self._meet_several(event, now)
            case ConnectionClosed():
                self._part(event, now)
            case PeerAbsent(peer_id=peer_id):
                self._departures.note_absent(peer_id, now)
            case LocalStatus(status=status):
                self._say(status, now)
            case LocalBeat(beat=beat):
                self._beat(beat, now)
            case LocalEnd(end=end):
                self._departures.end(end, now)
            case LocalStop(end=end):
                side.broadcast(GenerationEnded(end))
            case WorldWorked(view=view):
                self._note_worked(view)
            case HoldersListed(peers=peers):
                self._departures.note_listed(peers)
            case OutcomeFound(code=code):
                self._departures.note_outcome(code)
            case _ as other:
                assert_never(other)
        return side.drain()

    def tick(self, now: float) -> list[Effect]:
        """Do what time brings; call it after events, and at `wake_at`."""
        side = self.side
        side.catch_up(now)
        side.greet()
        self._judge_misfits(now)
        if now >= side.timers.next_beat:
            side.effects.append(BeatDue())
        else:
            self._election.look_around(now)
        return side.drain()

    # -- connections ------------------------------------------------------------------------------

    def _meet(self, event: ConnectionProven, now: float) -> None:
        side = self.side
        peer = event.peer
        if peer.id == side.me.id or side.standing.evicted:
            side.effects.append(Close(event.connection))
            return
        if side.is_misfit(peer):
            # The connection stays, so that it is not dialed again.
            side.losses.misfits[event.connection] = Misfit(peer, now)
            side.timers.look(now + MISFIT_SECONDS + ROUNDING_SECONDS)
            return
        if peer.id in side.losses.evicted:
            # It may not have heard. The connection stays: its end is the peer's.
            side.effects.append(Send((event.connection,), Evict(side.losses.evicted[peer.id])))
            side.losses.told[event.connection] = peer
            return
        contact = side.contacts.get(peer.id)
        if contact is not None:
            self._choose_connection(contact, event)
            if event.rerouted:
                # While there was no way, nothing could be heard: what it said before is old.
                contact.heard = contact.met_at = now
                self._repeat(contact)
                self._election.ask_again(peer.id, now)
        else:
            side.contacts.add([Contact(peer, event.connection, event.status, now, now)])
            if peer.incarnation > 0 and peer.id not in side.losses.peers:
                # A new process on a lost seat: its node is in order (again), whatever was found
                # of a machine of that name before; the next finding about it counts.
                side.losses.nodes.pop(peer.node, None)
            side.losses.find(peer.id)
        # The handshake's status may have changed meanwhile.
        side.untold.append(event.connection)
        if side.standing.finished:
            side.send(peer.id, TrainingDone())
        self._tell_world(side.contacts.get(peer.id))
        if contact is None and side.generation.holds(peer.id):
            side.effects.append(Reached(event.connection))
        self._departures.clear_seat(peer, now)
        side.news(knock=True)

    def _meet_several(self, event: SeveralProven, now: float) -> None:
        """Meet several peers at once. Before its first world a process meets all the others, and
        most of them for the first time: nothing else is to be said of these."""
        side = self.side
        members = event.members
        peers = [member.peer for member in members]
        fit = not any(map(side.is_misfit, peers))
        if side.has_no_world and fit and side.are_new(peers):
            met = zip(event.connections, members, strict=True)
            side.contacts.add([Contact(m.peer, number, m.status, now, now) for number, m in met])
            side.untold += event.connections
            side.news(knock=True)
            return
        for number, member in zip(event.connections, members, strict=True):
            dialed = side.me.id < member.peer.id
            self._meet(ConnectionProven(number, member.peer, member.status, dialed), now)

    def _tell_world(self, contact: Contact | None) -> None:
        """Have a peer of an older world know the newest one, which went on without it: it might
        take itself for the larger part of the older one. Newcomers have no world to go on with."""
        worked = self.side.generation.worked
        if contact is None or worked is None or contact.peer.seat < 0:
            return
        older = 0 < contact.status.generation < worked.generation
        if older and worked.rank_of(contact.peer.id) < 0:
            self.side.send(contact.peer.id, WorldKnown(worked))

    def _choose_connection(self, contact: Contact, event: ConnectionProven) -> None:
        """Both sides dialed at once. The connection that the lower id dialed stays, and its dialer,
        for which it is proven last, ends the other one: so no side takes that for a death. What was
        sent there before is still read."""
        side = self.side
        mine = side.me.id < event.peer.id
        keep_new = event.dialed == mine
        kept, dropped = event.connection, contact.connection
        if not keep_new:
            kept, dropped = dropped, kept
        elif contact.number < 0:
            side.contacts.note_status(contact, event.status)
        side.contacts.supersede(contact, kept, dropped, finish=mine)
        if mine:
            # The one that is kept may be dead at its other end, which then counts this one.
            side.effects += [Send((dropped,), Superseded()), Finish(dropped)]

    def _part(self, event: ConnectionClosed, now: float) -> None:
        side = self.side
        misfit = side.losses.misfits.get(event.connection)
        if misfit is not None:
            # One that gives up leaves the other behind: that one has nearly waited as long.
            if now - misfit.met_at < MISFIT_SECONDS / 2:
                del side.losses.misfits[event.connection]
            return
        owner = side.contacts.owner(event.connection)
        counted = owner is not None and owner.connection == event.connection
        on_purpose = side.contacts.ends_on_purpose(event.connection)
        cause = "reset" if on_purpose and event.cause == "closed" else event.cause
        contact = side.contacts.close(event.connection)
        if contact is None:
            told = side.losses.told.pop(event.connection, None)
            if told is not None:
                self._departures.note_end_of(told, event.cause)
            if owner is not None and counted:
                self._repeat(owner)
            return
        if contact.status.phase == "done" and side.status.phase == "done":
            side.losses.gone_done[contact.peer.id] = contact.status.generation
            side.news()
            return
        dead, step = cause == "closed", contact.status.step
        self._departures.lose(contact.peer, event.reason, dead, now, step=step)
        if (cause == "reset" or on_purpose) and not side.standing.evicted:
            # Dead, or it took this process for lost: its machine can tell.
            side.effects.append(Dial(contact.peer))

    def _repeat(self, contact: Contact) -> None:
        """Say again what may have been said on a connection that was dead already."""
        side = self.side
        state, to = side.generation, (contact.connection,)
        side.effects.append(Send(to, StatusUpdate(side.said, side.status)))
        if state.view is None or not state.holds(contact.peer.id):
            return
        if state.end is not None:
            side.effects.append(Send(to, GenerationEnded(state.end)))
        elif contact.status.generation < state.view.generation:
            # It may not have heard. A large world takes time to say: not to those that are in it.
            side.effects.append(Send(to, NewGeneration(state.number, state.view)))
        side.effects.append(Reached(contact.connection))

    # -- messages ---------------------------------------------------------------------------------

    def _note_sound(self, event: BytesReceived | NothingHeard, now: float) -> None:
        if isinstance(event, NothingHeard):
            self.side.excuse(event.speakers, event.seconds, now)
        else:
            self._mark_heard(event.speaker, now - event.age)

    def _mark_heard(self, peer_id: str, at: float) -> None:
        contact = self.side.contacts.get(peer_id)
        if contact is not None:
            contact.heard = max(contact.heard, at)

    def _hear(self, event: MessageReceived, now: float) -> None:
        side = self.side
        self._mark_heard(event.speaker, now - event.age)
        if event.subject != event.speaker:
            self._mark_heard(event.subject, now - event.age)
        contact = side.contacts.get(event.subject)
        if side.losses.is_apart(event.connection):
            self._hear_evicted(event, now)
            return
        match event.message:
            case Heartbeat() as beat:
                if contact is not None:
                    contact.beat = beat
            case StatusUpdate(number=number, status=status):
                if contact is not None:
                    self._note_statuses((contact,), number, status, now)
            case Roster(peers=peers):
                self._dial_unknown(peers)
            case NodeLost() as finding:
                self._departures.lose_node(finding, now)
            case NodeSuspected() as suspicion:
                self._suspect_node(suspicion, now)
            case Evict() as evict:
                self._departures.hear_evict(evict, contact, event.connection, now)
            case Superseded():
                side.contacts.expect_end(event.connection)
            case Leaving(reason=reason):
                if contact is not None:
                    self._departures.let_go(contact, reason, now)
            case TrainingDone():
                self._departures.conclude()
            case _:
                self._hear_of_worlds(event, now)

    def _hear_same(self, event: SameReceived, now: float) -> None:
        """Hear what several say of themselves, in a large world most of all that is said: each word
        costs a microsecond or less here."""
        side = self.side
        contacts = side.contacts.of(event.speakers)
        heard_at = now - event.age
        for contact in contacts:
            if contact.heard < heard_at:
                contact.heard = heard_at
        match event.message:
            case Heartbeat() as beat:
                for contact in contacts:
                    contact.beat = beat
            case StatusUpdate(number=number, status=status):
                self._note_statuses(contacts, number, status, now)
            case GenerationEnded(end=end):
                if contacts:  # and not from those alone that were told to leave
                    self._hear_end(end, now)

    def _hear_end(self, end: GenerationEnd, now: float) -> None:
        side = self.side
        if end.kind == "stop":
            side.standing.stopped = end
            side.news()
        self._departures.end(end, now)

    def _hear_of_worlds(self, event: MessageReceived, now: float) -> None:
        side = self.side
        match event.message:
            case WorldKnown(view=view):
                side.generation.worlds.learn(view)
            case VoteRequest() as request:
                self._election.vote(request, event.speaker, now)
            case Vote() as vote:
                self._election.count(vote, event.speaker, now)
            case NewGeneration() as formed:
                self._election.hear_formed(formed, event.speaker, now)
            case GenerationEnded(end=end):
                self._hear_end(end, now)
            case _:
                pass

    def _hear_evicted(self, event: MessageReceived, now: float) -> None:
        """Hear a peer that was told to leave: it leaves, or has told the same."""
        if event.connection in self.side.losses.misfits:
            return
        match event.message:
            case Leaving():
                self.side.losses.lose(event.speaker, dead=True)
                self.side.news()
            case Evict() as evict:
                self._departures.hear_evict(evict, None, event.connection, now)
            case _:
                pass

    def _dial_unknown(self, peers: Sequence[Peer]) -> None:
        side = self.side
        for peer in peers:
            known = peer.id in side.contacts or peer.id == side.me.id
            if not known and not side.standing.evicted:
                side.effects.append(Dial(peer))

    def _note_statuses(
        self, contacts: Iterable[Contact], number: int, status: PeerStatus, now: float
    ) -> None:
        newer = [contact for contact in contacts if number > contact.number]
        leaves = status.phase != "running"
        for contact in newer:
            if leaves and contact.status.phase == "running":
                self.side.generation.left_at = now
            contact.number = number
            self.side.contacts.note_status(contact, status)
        if newer:
            self._departures.note_newer(newer, status.generation, now)
            self.side.news(knock=status.phase == "ready")

    def _suspect_node(self, suspicion: NodeSuspected, now: float) -> None:
        side = self.side
        until = side.losses.suspected_until.get(suspicion.node, now)
        if suspicion.node == side.me.node or until > now:
            return
        # This process may itself have been stopped until now, and its peers with it.
        side.catch_up(now)
        side.losses.suspected_until[suspicion.node] = now + SUSPICION_SECONDS
        side.broadcast(suspicion)
        limit = side.silence_limit(suspicion.node, now)
        for contact in side.contacts.seated():
            if contact.peer.node == suspicion.node:
                # The next beat, before which what has arrived quietly is read, and which judges
                # silence, comes when that of this peer is too long: at once, perhaps.
                too_long = max(now, contact.heard + limit + ROUNDING_SECONDS)
                side.timers.next_beat = min(side.timers.next_beat, too_long)

    # -- the main thread --------------------------------------------------------------------------

    def _say(self, status: PeerStatus, now: float) -> None:
        side = self.side
        if status.phase != "running" and side.status.phase == "running":
            side.outside_since = now
        if side.generation.end is not None:
            # As in `_end`: one that was never entered counts too.
            newest = max(status.generation, side.generation.number)
            status = msgspec.structs.replace(status, generation=newest)
        side.generation.say(status.generation if status.phase == "running" else None)
        side.status = status
        side.tell_status()
        side.news()

    def _note_worked(self, view: View) -> None:
        side = self.side
        worlds = side.generation.worlds
        worlds.learn(view)
        side.losses.keep(worlds.members())
        for peer_id in side.contacts.besides(view.ids):
            self._tell_world(side.contacts.get(peer_id))

    # -- time -------------------------------------------------------------------------------------

    def _beat(self, beat: Heartbeat | None, now: float) -> None:
        side = self.side
        side.catch_up(now)
        side.timers.next_beat = now + side.beat_seconds
        side.broadcast(beat or Heartbeat(side.status.step))
        self._judge_silence(now)
        self._judge_reach(now)
        waited = now - side.outside_since > side.timing.known_again_seconds
        waits = side.status.phase != "running" and not side.standing.evicted
        if waits and waited and now >= side.timers.dial_again:
            # A peer that was stopped for a while answers again, and no other would dial it.
            side.timers.dial_again = now + side.timing.known_again_seconds
            side.effects.append(DialKnown())
        self._election.look_around(now)

    def _judge_misfits(self, now: float) -> None:
        """Give up where no world can be formed, since peers wait for one of another size."""
        side = self.side
        if not side.losses.misfits or not side.has_no_world or side.standing.stopped:
            return
        waited = now - min(misfit.met_at for misfit in side.losses.misfits.values())
        others_train = any(contact.status.generation for contact in side.contacts.seated())
        if waited >= MISFIT_SECONDS and not others_train:
            side.standing.stopped = GenerationEnd(0, side.tell_misfits(), side.me.id, "stop")
            side.news()

    def _judge_silence(self, now: float) -> None:
        """Judge the peers that are silent for too long."""
        side = self.side
        # No limit is shorter; of all others a large world has many.
        since = now - side.shortest_silence
        overdue = [
            contact
            for contact in side.contacts
            if contact.heard < since
            and contact.peer.seat >= 0
            and now - contact.heard > side.silence_limit(contact.peer.node, now)
        ]
        last = side.last_holders(now) if overdue else frozenset[str]()
        for contact in overdue:
            self._judge(contact, last, now)

    def _judge(self, contact: Contact, last: Set[str], now: float) -> None:
        """End the world of a silent peer; go on without it where nothing else makes it leave."""
        side = self.side
        peer, silence = contact.peer, side.silence_limit(contact.peer.node, now)
        if side.standing.evicted:
            return  # those that it must leave do not talk to it any more
        silent = now - contact.heard
        is_over = silent > side.patience_of(peer.id, silence, last)
        if is_over and self._election.awaits(peer.id):
            self._departures.give_up(peer.id, f"silent for {silent:.1f} s", "silent", now)
        if not side.generation.holds(peer.id):
            return
        text = f"rank on seat {peer.seat} ({peer.node}) silent for {silence:g} s"
        self._departures.end(GenerationEnd(side.generation.number, text, peer.id, "hang"), now)
        if is_over and contact.status.phase != "running":
            # Stopped between two worlds: no block of its own is waited for, and each new world
            # would be formed with it.
            self._departures.give_up(peer.id, f"silent for {silent:.1f} s", "silent", now)

    def _judge_reach(self, now: float) -> None:
        side = self.side
        missing = side.unreached()
        if not missing or now - side.generation.adopted_at <= side.timing.reach_seconds:
            return
        text = f"{missing[0].node} cannot be reached from {side.me.node}"
        # The one that misses most of the others is cut off itself.
        size = side.generation.view.size if side.generation.view else 0
        own = len(missing) > 1 and 2 * len(missing) >= size - 1
        culprit = side.me.id if own else missing[0].id
        self._departures.end(GenerationEnd(side.generation.number, text, culprit, "lost"), now)
