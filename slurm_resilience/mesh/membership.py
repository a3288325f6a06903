"""The protocol of the mesh: life, silence, eviction, and the making of generations. Pure.

A `Membership` is one process's side of it. It is told events, with the time, and answers with
effects; it opens no socket, reads no clock and starts no thread, so that it can be tested by
scripts of events and simulated (`slurm_resilience.simulate`).

The owner calls `step` for every event, then `tick`; and `tick` again at `wake_at`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from slurm_resilience.mesh import world_plan
from slurm_resilience.mesh.ballot import Ballot, Promise, answer
from slurm_resilience.mesh.contacts import Contact, Contacts
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
from slurm_resilience.mesh.generation_state import GenerationState
from slurm_resilience.mesh.messages import (
    Evict,
    GenerationEnded,
    Heartbeat,
    Leaving,
    Message,
    NewGeneration,
    NodeLost,
    NodeSuspected,
    Roster,
    StatusUpdate,
    Superseded,
    Vote,
    VoteRequest,
    WorldKnown,
)
from slurm_resilience.mesh.model import (
    SILENCE_BEATS,
    CloseCause,
    GenerationEnd,
    Member,
    Peer,
    PeerStatus,
    Timing,
    View,
    counter_of,
    generation_number,
)
from slurm_resilience.mesh.world_plan import WorldRules

STRIKES = 2
"""Generations that failed because of one peer, before the others go on without it."""
LAST_COPY = 3
"""So many times longer a peer is waited for that alone holds a part of the model: without it, the
training falls back to its last checkpoint, or ends."""
LAST_JUDGE = 10
"""After so many abort timeouts in the block of an ended generation a process ends itself. The other
members judge it sooner, but they may all be gone, and peers that come later know nothing of its
world and wait for it. Not sooner: what it holds may be the last copy of the model."""
SUSPICION_SECONDS = 10.0
"""So long a suspicion counts. By then a finding has followed it, or the node is in order."""
ROUNDING_SECONDS = 0.001
LOOK_SECONDS = 0.05
"""Between two looks at peers that are still in the block of an ended generation."""


Fate = Literal["silent", "told", "dead"]
"""Fate of a peer that is given up. silent: it may live behind a cut, and come back; told: it was
told to leave, and is dead when it says so; dead: its launcher or an observer sees to its end."""


class Waiting:
    """For what a process waits before a world can be formed, and since when."""

    def __init__(self) -> None:
        self.reason = ""
        self.since: float | None = None
        self.tell_at = 0.0

    def begin(self, reason: str, now: float, tell_after: float) -> None:
        """Note the reason; the time counts from the first one."""
        self.reason = reason
        if self.since is None:
            self.since, self.tell_at = now, now + tell_after

    def over(self) -> None:
        """Note that a world was formed."""
        self.reason, self.since = "", None


class Timers:
    """The times at which something is to be done."""

    def __init__(self, now: float, beat: float) -> None:
        self.next_beat = now + beat
        self.look_again: float | None = None
        self.next_cut = now
        self.dial_again = now
        self.wake_at: float | None = None
        """When the next `tick` was asked for; None before the first."""

    def look(self, at: float) -> None:
        """Look at the making of a generation at this time, at the latest."""
        self.look_again = at if self.look_again is None else min(at, self.look_again)


class Losses:
    """Peers and nodes that are gone."""

    def __init__(self) -> None:
        self.peers: dict[str, bool] = {}
        """Id → known to be dead; False: it fell silent, and may live behind a cut."""
        self.nodes: dict[str, NodeLost] = {}
        self.suspected_until: dict[str, float] = {}
        """By node: it is not heard of elsewhere either."""
        self.evicted: dict[str, str] = {}
        """Id → reason: peers that were told to leave, and must not go on."""
        self.told: dict[int, Peer] = {}
        """Connections to those of them whose death is awaited."""
        self._strikes: dict[str, list[float]] = {}
        """When generations failed because other members could not reach a peer."""

    def strike(self, peer_id: str, now: float, apart: float) -> None:
        """Others could not reach a peer. Two such ends in a row of less than ``apart`` seconds have
        one cause: a connection that was reset is made anew in the meantime."""
        times = self._strikes.setdefault(peer_id, [])
        if not times or now - times[-1] >= apart:
            times.append(now)

    def take_unreachable(self) -> str | None:
        """Return a peer that others could not reach again and again, and forget its strikes."""
        found = next((p for p, times in self._strikes.items() if len(times) >= STRIKES), None)
        if found is not None:
            del self._strikes[found]
        return found

    def find(self, peer_id: str) -> None:
        """Note that a peer is there again."""
        self.peers.pop(peer_id, None)

    def dead(self) -> list[str]:
        """Return those that are known to be dead."""
        return [peer_id for peer_id, dead in self.peers.items() if dead]

    def lose(self, peer_id: str, dead: bool) -> None:
        """Note that a peer is gone; dead once is dead for good."""
        self.peers[peer_id] = self.peers.get(peer_id, False) or dead


class Standing(msgspec.Struct):
    """The end of this process's part in the training."""

    evicted: str = ""
    finished: bool = False
    stopped: GenerationEnd | None = None


class Membership:
    """One process among the others."""

    def __init__(self, me: Peer, rules: WorldRules, timing: Timing, now: float) -> None:
        self.me = me
        self.rules = rules
        self.timing = timing
        self.status = PeerStatus()
        self.contacts = Contacts()
        self.generation = GenerationState()
        self.losses = Losses()
        self.standing = Standing()
        self.waiting = Waiting()
        self.timers = Timers(now, timing.beat_seconds)
        self._promise = Promise()
        self._ballot: Ballot | None = None
        """The world that this process, as the lead, has asked for."""
        self._said = 0
        self._since = now
        """Since when the main thread is outside of its block."""
        self._effects: list[Effect] = []

    # -- the two calls ------------------------------------------------------------------------

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event in; what has to be done about it."""
        match event:
            case MessageReceived():
                self._hear(event, now)
            case BytesReceived(speaker=speaker):
                self._mark_heard(speaker, now)
            case ConnectionProven():
                self._meet(event, now)
            case ConnectionClosed():
                self._part(event, now)
            case PeerAbsent(peer_id=peer_id):
                self._note_absent(peer_id, now)
            case LocalStatus(status=status):
                self._say(status, now)
            case LocalBeat(beat=beat):
                self._beat(beat, now)
            case LocalEnd(end=end):
                self._end(end, now)
            case LocalStop(end=end):
                self._broadcast(GenerationEnded(end))
            case WorldWorked(view=view):
                self._note_worked(view)
            case OutcomeFound(code=code):
                if code == 0:
                    self._finish()
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        """Do what time brings; call it after events, and at `wake_at`."""
        self._catch_up(now)
        if now >= self.timers.next_beat:
            self._effects.append(BeatDue())
        else:
            self._look_around(now)
        return self._drain()

    @property
    def wake_at(self) -> float:
        """When `tick` must be called, if nothing happens before."""
        timers = self.timers
        due = timers.next_beat
        if self.generation.block_end and self.status.phase == "running":
            due = min(due, timers.next_cut)
        return due if timers.look_again is None else min(due, timers.look_again)

    # -- questions ----------------------------------------------------------------------------

    @property
    def beat_seconds(self) -> float:
        """Seconds between two beats in a world of this size."""
        return self.timing.beat(len(self.contacts))

    @property
    def silence_seconds(self) -> float:
        """Seconds without a word after which a peer counts as hung."""
        return self.timing.silence(len(self.contacts))

    def present(self) -> list[Member]:
        """All living peers with a seat, this process first."""
        return [Member(self.me, self.status), *self.contacts.members()]

    def invitation(self) -> View | None:
        """Return the generation that the main thread should enter; None: there is none now."""
        view = self.generation.view
        fresh = view is not None and view.generation > self.status.generation
        return view if fresh and self.generation.end is None else None

    def is_alone(self) -> bool:
        """Has this process never been in a world, and is no other here? Then it may have come when
        the training was over."""
        return self.generation.worked is None and not self.contacts.seated()

    def all_done(self) -> bool:
        """Are all done that would be in the next generation? Spares do not count."""
        if self.standing.finished:
            return True
        present = self.present()
        if self.status.phase == "running" or not any(m.status.phase == "done" for m in present):
            return False
        chosen = world_plan.arrange(world_plan.one_a_seat(present), self.rules.replica_size)
        return bool(chosen) and all(member.status.phase == "done" for member in chosen)

    def newcomers(self) -> tuple[Peer, ...] | None:
        """Peers that wait outside of the current generation and would make it larger; None: none
        waits at all."""
        view = self.generation.view
        if view is None:
            return ()
        waiting = [
            Member(contact.peer, contact.status)
            for contact in self.contacts.seated()
            if view.rank_of(contact.peer.id) < 0 and contact.status.phase == "ready"
        ]
        if not waiting:
            return None
        ours = [m for m in view.members if m.peer.id == self.me.id or m.peer.id in self.contacts]
        seated = world_plan.one_a_seat([*ours, *waiting])
        if len(world_plan.arrange(seated, self.rules.replica_size)) <= view.size:
            return ()
        return tuple(member.peer for member in waiting)

    def unreached(self) -> list[Peer]:
        """Members of the current generation without a connection."""
        view = self.generation.view
        if view is None or self.generation.end is not None:
            return []
        members = (member.peer for member in view.members)
        return [peer for peer in members if peer.id not in self.contacts and peer.id != self.me.id]

    def patience_with(self, contacts: Sequence[Contact], now: float) -> dict[str, float]:
        """Seconds of silence after which the peers of a machine are given up. Those of a machine
        that is lost fall silent within one beat: they go together, and cost one wait."""
        silent: dict[str, list[float]] = {}
        for contact in contacts:
            silent.setdefault(contact.peer.node, []).append(now - contact.heard)
        patience = {}
        for node, times in silent.items():
            limit = self.silence_limit(node, now)
            together = limit - self.beat_seconds
            all_silent = max(times) > limit and min(times) > together
            patience[node] = together if all_silent else limit
        return patience

    def silence_limit(self, node: str, now: float) -> float:
        """Return the seconds of silence that are too long for a peer of a node. Those of a node
        that is not heard of elsewhere either are left soon: that can be undone."""
        if self.losses.suspected_until.get(node, now) > now:
            return min(self.silence_seconds, SILENCE_BEATS * self.beat_seconds)
        return self.silence_seconds

    # -- connections --------------------------------------------------------------------------

    def _meet(self, event: ConnectionProven, now: float) -> None:
        peer = event.peer
        if peer.id == self.me.id or self.standing.evicted:
            self._effects.append(Close(event.connection))
            return
        if peer.id in self.losses.evicted:
            # It may not have heard. The connection stays: its end is the peer's.
            self._effects.append(Send((event.connection,), Evict(self.losses.evicted[peer.id])))
            self.losses.told[event.connection] = peer
            return
        contact = self.contacts.get(peer.id)
        if contact is not None:
            self._choose_connection(contact, event)
        else:
            self.contacts.add(Contact(peer, event.connection, event.status, now))
            if peer.incarnation > 0 and peer.id not in self.losses.peers:
                # A new process on a lost seat: its node is in order (again), whatever was found
                # of a machine of that name before; the next finding about it counts.
                self.losses.nodes.pop(peer.node, None)
            self.losses.find(peer.id)
        # The handshake's status may have changed meanwhile.
        self._send(peer.id, StatusUpdate(self._said, self.status))
        self._tell_world(self.contacts.get(peer.id))
        if contact is None and self.generation.holds(peer.id):
            self._effects.append(Reached(event.connection))
        self._clear_seat(peer, now)
        self._news(knock=True)

    def _tell_world(self, contact: Contact | None) -> None:
        """Have a peer of an older world know the newest one, which went on without it: it might
        take itself for the larger part of the older one. Newcomers have no world to go on with."""
        worked = self.generation.worked
        if contact is None or worked is None or contact.peer.seat < 0:
            return
        older = 0 < contact.status.generation < worked.generation
        if older and worked.rank_of(contact.peer.id) < 0:
            self._send(contact.peer.id, WorldKnown(worked))

    def _choose_connection(self, contact: Contact, event: ConnectionProven) -> None:
        """Both sides dialed at once. The connection that the lower id dialed stays, and its dialer,
        for which it is proven last, ends the other one: so no side takes that for a death. What was
        sent there before is still read."""
        mine = self.me.id < event.peer.id
        keep_new = event.dialed == mine
        kept, dropped = event.connection, contact.connection
        if not keep_new:
            kept, dropped = dropped, kept
        elif contact.number < 0:
            contact.status = event.status
        self.contacts.supersede(contact, kept, dropped, finish=mine)
        if mine:
            # The one that is kept may be dead at its other end, which then counts this one.
            self._effects += [Send((dropped,), Superseded()), Finish(dropped)]

    def _clear_seat(self, peer: Peer, now: float) -> None:
        """Clear a seat for a newer process: an older one there is dead, or must go."""
        if peer.seat < 0:
            return
        if peer.seat == self.me.seat:
            if (peer.incarnation, peer.id) > (self.me.incarnation, self.me.id):
                self._leave_the_others(f"a newer process took seat {peer.seat}", now)
            return
        for other in self.contacts.seated():
            if other.peer.id != peer.id and other.peer.seat == peer.seat:
                older = min((other.peer, peer), key=lambda p: (p.incarnation, p.id))
                self._give_up(older.id, f"a newer process took seat {peer.seat}", "dead", now)
        self._lose_replaced([peer])

    def _lose_replaced(self, newer: Sequence[Peer]) -> None:
        """Note the death of members on whose seat there is a newer process."""
        newest = {peer.seat: peer.incarnation for peer in newer}
        for member in self._known_members():
            if member.incarnation < newest.get(member.seat, 0):
                self.losses.lose(member.id, dead=True)

    def _known_members(self) -> list[Peer]:
        """Return the members of all worlds that may go on."""
        return [member.peer for view in self.generation.worlds.all() for member in view.members]

    def _part(self, event: ConnectionClosed, now: float) -> None:
        owner = self.contacts.owner(event.connection)
        counted = owner is not None and owner.connection == event.connection
        on_purpose = self.contacts.ends_on_purpose(event.connection)
        cause = "reset" if on_purpose and event.cause == "closed" else event.cause
        contact = self.contacts.close(event.connection)
        if contact is None:
            told = self.losses.told.pop(event.connection, None)
            if told is not None:
                self._note_end_of(told, event.cause)
            if owner is not None and counted:
                self._repeat(owner)
            return
        if contact.status.phase == "done" and self.status.phase == "done":
            self._news()
            return
        self._lose(contact.peer, event.reason, cause == "closed", now)
        if cause == "reset" and not self.standing.evicted:
            # Dead, or it took this process for lost: its machine can tell.
            self._effects.append(Dial(contact.peer))

    def _note_end_of(self, told: Peer, cause: CloseCause) -> None:
        """Judge by the end of a connection if a peer that was told to leave is dead."""
        if cause == "closed":
            self.losses.lose(told.id, dead=True)
        elif cause == "reset" and not self.standing.evicted:
            self._effects.append(Dial(told))
        self._news()

    def _repeat(self, contact: Contact) -> None:
        """Say again what may have been said on a connection that was dead already."""
        state, to = self.generation, (contact.connection,)
        self._effects.append(Send(to, StatusUpdate(self._said, self.status)))
        if state.view is None or not state.holds(contact.peer.id):
            return
        again = GenerationEnded(state.end) if state.end else NewGeneration(state.view)
        self._effects += [Send(to, again), Reached(contact.connection)]

    def _note_absent(self, peer_id: str, now: float) -> None:
        if peer_id in self.contacts:
            return
        for member in self._known_members():
            if member.id == peer_id:
                self._lose(member, "no process listens at its address", True, now)
                return

    def _lose(self, peer: Peer, reason: str, dead: bool, now: float) -> None:
        self.losses.lose(peer.id, dead)
        if peer.seat >= 0 and self.generation.holds(peer.id):
            text = f"rank on seat {peer.seat} ({peer.node}) is gone: {reason}"
            self._end(GenerationEnd(self.generation.number, text, peer.id, "lost"), now)
        self._news()

    def _give_up(self, peer_id: str, reason: str, fate: Fate, now: float) -> None:
        """Go on without a peer that is still connected."""
        contact = self.contacts.get(peer_id)
        if contact is None:
            return
        self._send(peer_id, Evict(reason))
        connections = self.contacts.drop(peer_id)
        # No cable can be cut between two processes of one machine.
        dead = fate == "dead" or contact.peer.node == self.me.node
        if dead or fate == "told":
            self.losses.evicted[peer_id] = reason
        if fate == "told":
            # It may not hear of it, and live on behind a cut: dead it is when it says so.
            self.losses.told.update(dict.fromkeys(connections, contact.peer))
        else:
            self._effects += map(Close, connections)
        self._lose(contact.peer, reason, dead, now)
        self._effects.append(GaveUp(contact.peer, reason))

    def _leave_the_others(self, reason: str, now: float) -> None:
        if self.standing.evicted:
            return
        self.standing.evicted = reason
        # Not "stop": that would end the training for all.
        self._end(GenerationEnd(self.generation.number, reason, self.me.id, "lost"), now)
        self._effects.append(Evicted(reason))
        # Others may not have heard yet, and would form worlds with this process.
        self._broadcast(Leaving(reason))
        self._news()

    # -- messages -----------------------------------------------------------------------------

    def _mark_heard(self, peer_id: str, now: float) -> None:
        contact = self.contacts.get(peer_id)
        if contact is not None:
            contact.heard = now

    def _hear(self, event: MessageReceived, now: float) -> None:
        self._mark_heard(event.speaker, now)
        if event.subject != event.speaker:
            self._mark_heard(event.subject, now)
        contact = self.contacts.get(event.subject)
        if event.connection in self.losses.told:
            self._hear_evicted(event, now)
            return
        match event.message:
            case Heartbeat() as beat:
                if contact is not None:
                    contact.beat = beat
            case StatusUpdate(number=number, status=status):
                self._note_status(contact, number, status)
            case Roster(peers=peers):
                self._dial_unknown(peers)
            case NodeLost() as finding:
                self._lose_node(finding, now)
            case NodeSuspected() as suspicion:
                self._suspect_node(suspicion, now)
            case Evict(reason=reason):
                self._leave_the_others(reason, now)
            case Superseded():
                self.contacts.expect_end(event.connection)
            case Leaving(reason=reason):
                if contact is not None:
                    self._let_go(contact, reason, now)
            case _:
                self._hear_of_worlds(event, now)

    def _hear_of_worlds(self, event: MessageReceived, now: float) -> None:
        match event.message:
            case WorldKnown(view=view):
                self.generation.worlds.learn(view)
            case VoteRequest() as request:
                self._vote(request, event.speaker, now)
            case Vote() as vote:
                self._count(vote, event.speaker, now)
            case NewGeneration(view=view):
                self._consider(view, event.speaker, now)
            case GenerationEnded(end=end):
                if end.kind == "stop":
                    self.standing.stopped = end
                    self._news()
                self._end(end, now)
            case _:
                pass

    def _hear_evicted(self, event: MessageReceived, now: float) -> None:
        """Hear a peer that was told to leave: it leaves, or has told the same."""
        match event.message:
            case Leaving():
                self.losses.lose(event.speaker, dead=True)
                self._news()
            case Evict(reason=reason):
                self._leave_the_others(reason, now)
            case _:
                pass

    def _dial_unknown(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            known = peer.id in self.contacts or peer.id == self.me.id
            if not known and not self.standing.evicted:
                self._effects.append(Dial(peer))

    def _let_go(self, contact: Contact, reason: str, now: float) -> None:
        if contact.status.phase == "done":
            # It leaves only when it knows that all are done.
            self._finish()
            return
        self._effects += map(Close, self.contacts.drop(contact.peer.id))
        self._lose(contact.peer, f"it leaves: {reason}", True, now)

    def _note_status(self, contact: Contact | None, number: int, status: PeerStatus) -> None:
        if contact is None or number <= contact.number:
            return
        contact.number, contact.status = number, status
        self._news(knock=status.phase == "ready")

    def _lose_node(self, finding: NodeLost, now: float) -> None:
        known = self.losses.nodes.get(finding.node)
        if known is not None and (known.dead or not finding.dead):
            return
        self.losses.nodes[finding.node] = finding
        self._broadcast(finding)
        if self.me.node == finding.node:
            # This node must be left, or was given up as dead while it was only cut off.
            self._leave_the_others(f"{finding.node} must be left: {finding.reason}", now)
            return
        for contact in self.contacts.seated():
            if contact.peer.node == finding.node:
                fate: Fate = "dead" if finding.dead else "told"
                self._give_up(contact.peer.id, finding.reason, fate, now)
        for member in self._known_members():
            # A sick node that cannot be reached from here may work with others.
            if member.node == finding.node and finding.dead:
                self.losses.lose(member.id, dead=True)
        self._news()

    def _suspect_node(self, suspicion: NodeSuspected, now: float) -> None:
        until = self.losses.suspected_until.get(suspicion.node, now)
        if suspicion.node == self.me.node or until > now:
            return
        # This process may itself have been stopped until now, and its peers with it.
        self._catch_up(now)
        self.losses.suspected_until[suspicion.node] = now + SUSPICION_SECONDS
        self._broadcast(suspicion)
        limit = self.silence_limit(suspicion.node, now)
        for contact in self.contacts.seated():
            if contact.peer.node == suspicion.node:
                self._judge_silence(contact, now)
                # The next beat, which judges silence, comes when that of this peer is too long.
                too_long = max(now, contact.heard + limit + ROUNDING_SECONDS)
                self.timers.next_beat = min(self.timers.next_beat, too_long)

    # -- the main thread ----------------------------------------------------------------------

    def _say(self, status: PeerStatus, now: float) -> None:
        if status.phase != "running" and self.status.phase == "running":
            self._since = now
        if self.generation.end is not None:
            # As in `_end`: one that was never entered counts too.
            newest = max(status.generation, self.generation.number)
            status = msgspec.structs.replace(status, generation=newest)
        self.generation.say(status.generation if status.phase == "running" else None)
        self.status = status
        self._tell_status()
        self._news()

    def _tell_status(self) -> None:
        self._said += 1
        self._broadcast(StatusUpdate(self._said, self.status))

    def _note_worked(self, view: View) -> None:
        worlds = self.generation.worlds
        worlds.learn(view)
        here = worlds.members()
        self.losses.peers = {p: dead for p, dead in self.losses.peers.items() if p in here}
        for contact in self.contacts.seated():
            self._tell_world(contact)

    def _finish(self) -> None:
        self.standing.finished = True
        self._news()

    # -- time ---------------------------------------------------------------------------------

    def _catch_up(self, now: float) -> None:
        """Count no time in which this process did not run, because the machine was stopped or
        overloaded or another thread held the interpreter, as silence of the others: they may have
        shared it."""
        asked, self.timers.wake_at = self.timers.wake_at, now
        late = now - asked if asked is not None else 0.0
        if late <= self.beat_seconds:
            return
        for contact in self.contacts:
            contact.heard = min(now, contact.heard + late)
        self.generation.shift(late)
        self._effects.append(HeldUp(late))

    def _beat(self, beat: Heartbeat | None, now: float) -> None:
        self._catch_up(now)
        self.timers.next_beat = now + self.beat_seconds
        self._broadcast(beat or Heartbeat(self.status.step))
        for contact in self.contacts.seated():
            self._judge_silence(contact, now)
        self._judge_reach(now)
        waited = now - self._since > self.timing.known_again_seconds
        waits = self.status.phase != "running" and not self.standing.evicted
        if waits and waited and now >= self.timers.dial_again:
            # A peer that was stopped for a while answers again, and no other would dial it.
            self.timers.dial_again = now + self.timing.known_again_seconds
            self._effects.append(DialKnown())
        self._look_around(now)

    def _judge_silence(self, contact: Contact, now: float) -> None:
        peer, silence = contact.peer, self.silence_limit(contact.peer.node, now)
        if now - contact.heard <= silence or self.standing.evicted:
            return  # those that it must leave do not talk to it any more
        if self._ballot is not None and peer.id in self._ballot.missing:
            self._give_up(peer.id, f"silent for {now - contact.heard:.1f} s", "silent", now)
        if not self.generation.holds(peer.id):
            return
        text = f"rank on seat {peer.seat} ({peer.node}) silent for {silence:g} s"
        self._end(GenerationEnd(self.generation.number, text, peer.id, "hang"), now)
        if contact.status.phase != "running":
            # Stopped between two worlds: no block of its own is waited for, and each new world
            # would be formed with it.
            self._give_up(peer.id, f"silent for {now - contact.heard:.1f} s", "silent", now)

    def _judge_reach(self, now: float) -> None:
        missing = self.unreached()
        if not missing or now - self.generation.adopted_at <= self.timing.reach_seconds:
            return
        text = f"{missing[0].node} cannot be reached from {self.me.node}"
        # The one that misses most of the others is cut off itself.
        size = self.generation.view.size if self.generation.view else 0
        own = len(missing) > 1 and 2 * len(missing) >= size - 1
        culprit = self.me.id if own else missing[0].id
        self._end(GenerationEnd(self.generation.number, text, culprit, "lost"), now)

    # -- generations --------------------------------------------------------------------------

    def _end(self, end: GenerationEnd, now: float) -> None:
        if not self.generation.finish(end, now):
            return
        if end.kind == "lost" and end.culprit in self.contacts:
            self.losses.strike(end.culprit, now, self.timing.reach_seconds)
        self._effects.append(EndGeneration(end))
        if self.status.phase != "running" and self.status.generation < end.generation:
            # It was never entered. The next lead must know its number all the same, or it would
            # make one that this process has seen the end of.
            self.status = msgspec.structs.replace(self.status, generation=end.generation)
            self._tell_status()
        self._broadcast(GenerationEnded(end))
        self._news()

    def _consider(self, view: View, lead: str, now: float) -> None:
        """Adopt a generation, unless a living one is known of which its lead cannot know."""
        elsewhere = self._is_elsewhere(view)
        if elsewhere or (self.generation.goes_on and view.generation > self.generation.highest):
            # Two leads that do not know of each other would take turns without end.
            self._send(lead, Roster(tuple(c.peer for c in self.contacts.seated())))
        old = view.generation < max(self.generation.highest, self._promise.number)
        if not elsewhere and not old:
            self._adopt(view, now)
        elif view.rank_of(self.me.id) >= 0:
            text = "a newer generation was formed" if old else "another world goes on"
            self._send(lead, GenerationEnded(GenerationEnd(view.generation, text)))

    def _is_elsewhere(self, view: View) -> bool:
        """Return if a living world is known of which the lead of a new one cannot know: it would
        have made a higher number."""
        newest = self.generation.number
        return any(
            contact.status.phase == "running"
            and contact.status.generation > newest
            and counter_of(contact.status.generation) >= counter_of(view.generation)
            and view.rank_of(contact.peer.id) < 0
            for contact in self.contacts.seated()
        )

    def _adopt(self, view: View, now: float) -> None:
        if view.generation <= self.generation.highest or self.standing.evicted:
            return
        self.generation.highest = view.generation
        if view.rank_of(self.me.id) < 0:
            return
        if self.generation.goes_on:
            number = self.generation.number
            self._end(GenerationEnd(number, "a newer generation was formed"), now)
        early_end = self.generation.adopt(view, now)
        self._promise.release()
        self.waiting.over()
        for peer in self.unreached():
            # Two that came at the same time may still be shaking hands.
            self._effects.append(Dial(peer))
        self._effects.append(Adopt(view))
        self._news()
        if early_end is not None:
            self._end(early_end, now)

    def _look_around(self, now: float) -> None:
        """Propose the next generation if it is time; keep the main thread on its way out."""
        self.timers.look_again = None
        if self._may_assemble(now):
            self._assemble(now)
        else:
            self._ballot = None
        end = self.generation.block_end
        if end and self.status.phase == "running" and now >= self.timers.next_cut:
            self.timers.next_cut = now + self.timing.cut_again_seconds
            self._effects.append(CutBlock(end))
            limit = LAST_JUDGE * self.timing.abort_seconds
            if now - self.generation.ended_at > limit:
                self._leave_the_others(f"it did not leave its block within {limit:g} s", now)
        self.timers.wake_at = self.wake_at

    def _may_assemble(self, now: float) -> bool:
        """Return if this process is outside of any world that goes on, and all others are too."""
        if self.standing.evicted or self.standing.finished or self.me.seat < 0:
            return False
        goes_on, number = self.generation.goes_on, self.generation.number
        if goes_on and (self.status.phase == "running" or self.status.generation < number):
            return False  # it works, or is being formed
        busy = [m for m in self.present() if m.status.phase == "running"]
        if goes_on and any(m.status.generation == number for m in busy):
            return False
        if any(m.status.generation > number for m in busy):
            # A living world without this process: it is asked in at a boundary. The members of that
            # world may not see those that are still inside the ended one.
            self._hurry([m for m in busy if m.status.generation <= number], now)
            return False
        if busy:
            self._hurry(busy, now)
        return not any(m.peer.id == self.me.id or m.peer.id in self.contacts for m in busy)

    def _hurry(self, busy: list[Member], now: float) -> None:
        """Evict peers still inside an ended generation."""
        found = (self.contacts.get(member.peer.id) for member in busy)
        inside = [contact for contact in found if contact is not None]
        patience = self.patience_with(inside, now)
        end = self.generation.end
        hung = end.culprit if end and end.kind == "hang" else ""
        out = now - max(self.generation.ended_at, self._since)
        last = world_plan.last_holders(self.present(), self.rules.replica_size)
        for contact in inside:
            peer = contact.peer
            silent = now - contact.heard
            times = LAST_COPY if peer.id in last else 1
            limit = times * self.timing.abort_seconds
            # What a peer said at its handshake may be old: it has the whole time from then on.
            late = min(out, now - contact.met_at)
            # Of one that was accused of a hang, all have waited for a word already.
            needed = SILENCE_BEATS * self.beat_seconds
            needed = needed if peer.id == hung else patience[peer.node]
            if silent > times * needed and out > 0:
                self._give_up(peer.id, f"silent for {silent:.1f} s", "silent", now)
            elif self.generation.ended_at and late > limit:
                text = f"it did not leave its block within {limit:g} s"
                self._give_up(peer.id, text, "told", now)
            else:
                self.timers.look(now + LOOK_SECONDS)

    def _assemble(self, now: float) -> None:
        """Propose a generation, if this is the lowest seat and one can be formed."""
        if self.all_done():
            # Kept: the first to hear of it leave at once, and would be missed otherwise.
            self._finish()
            return
        present = self.present()
        if self._lead_of(present).peer.id != self.me.id:
            self._ballot = None
            return
        unreachable = self.losses.take_unreachable()
        if unreachable is not None:
            self._give_up(unreachable, "other ranks cannot reach it", "silent", now)
            self.timers.look(now)
            return
        # Newer worlds that may go on are left to the vote: a member may say that they are void.
        worked = [self.generation.worked] if self.generation.worked else []
        waited = now - self._since
        proposal = world_plan.propose(
            present, self.losses.peers, worked, self.rules, waited, bool(worked)
        )
        if proposal.members is None:
            self._ballot = None
            if proposal.again is not None:
                # Not at the very moment: a rounded sum may lie before it, again and again.
                self.timers.look(now + proposal.again + ROUNDING_SECONDS)
            self._wait_on(proposal.reason, now)
        elif any(member.peer.id == self.me.id for member in proposal.members):
            self._ask(proposal.members, proposal.reason, present, now)

    def _lead_of(self, present: list[Member]) -> Member:
        """Return the lowest seat; of those that have a state, if there are any: they know of the
        worlds that worked, and a newcomer does not."""
        return min(present, key=lambda m: (m.status.step < 0, m.peer.seat, m.peer.id))

    # -- votes --------------------------------------------------------------------------------

    def _ask(
        self, members: tuple[Member, ...], reason: str, present: list[Member], now: float
    ) -> None:
        """Have all that are present vote for a world, and form it when enough of them have."""
        if self._holds_its_vote("", now):
            # It may be asked into another world at any moment.
            self._ballot = None
            self.timers.look(self._promise.until)
            return
        ballot = self._ballot
        if ballot is None or ballot.view.members != members:
            ballot = self._begin_ballot(members, reason, present, now)
        elif ballot.add({member.peer.id for member in present}):
            self._send_request(ballot)
        split = ""
        if ballot.is_full:
            worlds = self.generation.worlds
            ballot.drop_void(worlds)
            split = world_plan.other_side(worlds.all(), ballot.voted, self.losses.peers)
            if not split:
                self._form(ballot.view, now)
                return
        if now >= ballot.again_at:
            if ballot.refused:
                ballot = self._begin_ballot(members, reason, present, now)
            else:
                ballot.ask_again(now, all_of_them=bool(split))
                self._send_request(ballot)
        self._wait_on(split or f"waits for the votes of {len(members)} ranks", now)
        self.timers.look(ballot.again_at)

    def _begin_ballot(
        self, members: tuple[Member, ...], reason: str, present: list[Member], now: float
    ) -> Ballot:
        highest = max(
            self._promise.number,
            self.generation.highest,
            *(member.status.generation for member in present),
        )
        wait, before = self.beat_seconds, self._ballot
        if before is not None and before.refused:
            # Those that were asked may know of a higher number.
            highest = max(highest, before.promised)
            wait = before.longer_wait if before.view.members == members else wait
        number = generation_number(counter_of(highest) + 1, self.me.seat, self.me.incarnation)
        view = View(number, members, self.rules.replica_size, self.rules.seats, reason)
        self._ballot = ballot = Ballot(view, self.me.id, now, wait)
        self._promise.give(number, "", 0.0)
        ballot.add({member.peer.id for member in present})
        self._send_request(ballot)
        return ballot

    def _send_request(self, ballot: Ballot) -> None:
        missing = ballot.missing
        to = tuple(c.connection for c in self.contacts.seated() if c.peer.id in missing)
        if to:
            worlds = self.generation.worlds
            request = VoteRequest(ballot.view, worlds.numbers(), worlds.worked_number)
            self._effects.append(Send(to, request))

    def _vote(self, request: VoteRequest, lead: str, now: float) -> None:
        """Answer a lead."""
        if self.standing.evicted or self.standing.finished or self.me.seat < 0:
            return
        view, worlds = request.view, self.generation.worlds
        worlds.note_worked(request.worked)
        worlds.drop_void(lead, view.generation, request.known, request.worked)
        granted = self._may_vote(view, lead, now)
        if granted:
            self._ballot = None
            self._promise.give(view.generation, lead, now + self.beat_seconds)
            if view.rank_of(self.me.id) < 0:
                worlds.add(view)
        else:
            # Two leads that do not know of each other would take turns without end.
            self._send(lead, Roster(tuple(c.peer for c in self.contacts.seated())))
        promised = max(self._promise.number, self.generation.highest)
        self._send(lead, answer(request, granted, promised, worlds, self.losses.dead()))

    def _may_vote(self, view: View, lead: str, now: float) -> bool:
        if view.generation <= self.generation.highest or self._is_elsewhere(view):
            return False
        promise = self._promise
        if promise.number >= view.generation:
            # Asked again: the answer may have been lost.
            return promise.number == view.generation and promise.lead == lead
        if self.status.phase == "running" or self._is_being_formed():
            return False
        if self._holds_its_vote(lead, now):
            return False
        # One that asks for votes itself gives its own to no lead that should vote for it.
        return self._ballot is None or self._lead_of(self.present()).peer.id == lead

    def _holds_its_vote(self, lead: str, now: float) -> bool:
        """Return if another lead than this one may form a world with this process's vote."""
        held_for = self._promise.held_for(now)
        return held_for not in ("", lead) and held_for in self.contacts

    def _is_being_formed(self) -> bool:
        """Return if there is a world that this process is about to enter."""
        return self.generation.goes_on and self.status.generation < self.generation.number

    def _count(self, vote: Vote, voter: str, now: float) -> None:
        """Take a vote in, and what the voter knows."""
        worlds = self.generation.worlds
        worlds.note_worked(vote.worked)
        for view in vote.views:
            if view.generation <= vote.worked:
                worlds.learn(view)
            elif view.rank_of(self.me.id) < 0:
                # One that this process is in, and did not adopt, it will not adopt any more.
                worlds.add(view)
        if vote.views:
            self._lose_replaced([member.peer for member in self.present()])
        for peer_id in vote.dead:
            if peer_id not in self.contacts and peer_id != self.me.id:
                self.losses.lose(peer_id, dead=True)
        ballot = self._ballot
        if ballot is None or vote.generation != ballot.view.generation:
            return
        ballot.count(voter, vote)
        if not vote.granted and vote.promised >= ballot.view.generation:
            ballot.again_at = now  # only its number was too low

    def _form(self, view: View, now: float) -> None:
        self._ballot = None
        found = (self.contacts.get(member.peer.id) for member in view.members)
        connections = tuple(contact.connection for contact in found if contact is not None)
        if connections:
            self._effects.append(Send(connections, NewGeneration(view)))
        self._adopt(view, now)

    def _wait_on(self, reason: str, now: float) -> None:
        self.waiting.begin(reason, now, self.timing.tell_waiting_seconds)
        since = self.waiting.since
        if since is not None and now >= self.waiting.tell_at:
            self._effects.append(StillWaiting(now - since, reason))
            self.waiting.tell_at = now + (now - since)
        self.timers.look(self.waiting.tell_at)

    # -- effects ------------------------------------------------------------------------------

    def _send(self, peer_id: str, message: Message) -> None:
        contact = self.contacts.get(peer_id)
        if contact is not None:
            self._effects.append(Send((contact.connection,), message))

    def _broadcast(self, message: Message) -> None:
        if len(self.contacts):
            self._effects.append(Send(self.contacts.connections(), message))

    def _news(self, knock: bool = False) -> None:
        self._effects.append(News(knock))

    def _drain(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
