"""All that one process of the mesh knows, and what it asks for. Pure.

`Departures`, `Election` and `Membership` work on it, each on top of the ones before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import msgspec

from slurm_resilience.mesh.events import Effect, HeldUp, News, Send
from slurm_resilience.mesh.messages import Message, NodeLost, StatusUpdate
from slurm_resilience.mesh.model import (
    SILENCE_BEATS,
    GenerationEnd,
    Member,
    Peer,
    PeerStatus,
    Timing,
    View,
)
from slurm_resilience.mesh.protocol import world_plan
from slurm_resilience.mesh.protocol.contacts import Contact, Contacts
from slurm_resilience.mesh.protocol.generation_state import GenerationState
from slurm_resilience.mesh.protocol.world_plan import WorldRules

LAST_COPY = 3
"""A peer that alone holds a part of the model is waited for this many times longer: without it,
the training falls back to its last checkpoint, or ends."""
HEARD_SHARE = 0.5
"""One that was not heard for so large a part of the silence that is too long makes no other holder
of its part dispensable: those that stand still together do so within a beat of each other, and a
beat is a third of it at most."""
STRIKES = 2
"""Worlds that failed because of one peer, before the others go on without it."""
STRIKE_WORLDS = 3
"""So far apart they are at most: of two that cannot reach each other, either may be the one that is
named, and other faults may end worlds in between."""
ROUNDING_SECONDS = 0.001


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
        self.next_look = now
        """Not before this is the making of a generation looked at."""
        self.dial_again = now
        self.wake_at: float | None = None
        """When the next `tick` was asked for; None before the first."""

    def look(self, at: float) -> None:
        """Look at the making of a generation at this time, at the latest."""
        self.look_again = at if self.look_again is None else min(at, self.look_again)


class Strikes(NamedTuple):
    """Worlds that ended, one soon after the other, because other members could not reach a peer."""

    number: int
    at: float
    """The time of the last one that counts."""
    world: int
    """The last one, as `Losses.worlds` counts them."""


class Misfit(NamedTuple):
    """A peer that was started for a world of another size."""

    peer: Peer
    met_at: float


class Losses:
    """Peers and nodes that are gone."""

    def __init__(self) -> None:
        self.peers: dict[str, bool] = {}
        """Id → known to be dead; False: it fell silent, and may live behind a cut."""
        self._with_state: dict[str, Peer] = {}
        """Those of them that had the training's state when they were heard last."""
        self.listed: Sequence[Peer] | None = ()
        """Those that had it by the rendezvous's word; None: that could not be read."""
        self.nodes: dict[str, NodeLost] = {}
        self.suspected_until: dict[str, float] = {}
        """By node: it is not heard of elsewhere either."""
        self.evicted: dict[str, str] = {}
        """Id → reason: peers that were told to leave, and must not go on."""
        self.told: dict[int, Peer] = {}
        """Connections to those of them whose death is awaited."""
        self.misfits: dict[int, Misfit] = {}
        """By connection: peers that were started for a world of another size."""
        self.worlds = 0
        """Those that have ended."""
        self._strikes: dict[str, Strikes] = {}
        self.gone_done: dict[str, int] = {}
        """Id → generation: peers that were done with it when their connection ended."""

    def strike(self, peer_id: str, now: float, apart: float) -> None:
        """Note that the last world has ended because other members could not reach a peer. Two such
        ends of less than ``apart`` seconds have one cause: a connection that was reset is made anew
        in the meantime. And one of long ago tells nothing, where worlds have worked since."""
        before = self._strikes.get(peer_id)
        if before is None or self.worlds - before.world > STRIKE_WORLDS:
            before = Strikes(0, -math.inf, 0)
        is_new = now - before.at >= apart
        self._strikes[peer_id] = Strikes(
            before.number + is_new, now if is_new else before.at, self.worlds
        )

    def forgive(self, peer_ids: Set[str]) -> None:
        """Forget their strikes: they were reached for long."""
        for peer_id in self._strikes.keys() & peer_ids:
            del self._strikes[peer_id]

    def take_unreachable(self) -> str | None:
        """Return a peer that others could not reach again and again, and forget its strikes. The
        last world has ended for that: a rank that leads only now leaves no peer which has worked
        with all others since."""
        struck = (p for p, one in self._strikes.items() if one.world == self.worlds)
        found = next((p for p in struck if self._strikes[p].number >= STRIKES), None)
        if found is not None:
            del self._strikes[found]
        return found

    def know_any(self, peer_ids: Set[str]) -> bool:
        """Tell whether any of these peers was lost before."""
        lost = (self.peers.keys(), self.evicted.keys(), self.gone_done.keys())
        return not all(ids.isdisjoint(peer_ids) for ids in lost)

    def find(self, peer_id: str) -> None:
        """Note that a peer is there again."""
        self.peers.pop(peer_id, None)
        self.gone_done.pop(peer_id, None)

    def keep(self, members: Set[str]) -> None:
        """Forget all but the members of worlds that may go on: another one has worked."""
        self.gone_done.clear()
        self.listed = ()
        self.peers = {p: dead for p, dead in self.peers.items() if p in members}
        self._with_state = {p: peer for p, peer in self._with_state.items() if p in members}

    def is_apart(self, connection: int) -> bool:
        """Tell whether the peer at the other end is in none of the worlds of this process."""
        return connection in self.told or connection in self.misfits

    def dead(self) -> list[str]:
        """Return those that are known to be dead."""
        return [peer_id for peer_id, dead in self.peers.items() if dead]

    def lose(self, peer_id: str, dead: bool) -> None:
        """Note that a peer is gone; dead once is dead for good."""
        self.peers[peer_id] = self.peers.get(peer_id, False) or dead

    def note_state(self, peer: Peer) -> None:
        """Note that a peer which is gone had the training's state."""
        self._with_state[peer.id] = peer

    @property
    def away(self) -> dict[str, Peer]:
        """Return the peers that had the training's state and may live: those that fell silent, and
        those that the rendezvous names."""
        silent = {p: peer for p, peer in self._with_state.items() if p in self.peers}
        found = {**silent, **{peer.id: peer for peer in self.listed or ()}}
        return {p: peer for p, peer in found.items() if not self.peers.get(p)}


class Standing(msgspec.Struct):
    """The end of this process's part in the training."""

    evicted: str = ""
    finished: bool = False
    stopped: GenerationEnd | None = None


class Side:
    """All that one process knows of the others, and the effects that it asks for."""

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
        self.said = 0
        """Statuses that were told."""
        self.untold: list[int] = []
        """Connections that are new in this turn: its status goes to all of them at once."""
        self.held_up_at = float("-inf")
        """When this process went on after it had been held up, or learned that it could not hear
        others: what it had heard before is old."""
        self.outside_since = now
        """Since when the main thread is outside of its block."""
        self.effects: list[Effect] = []

    # -- questions --------------------------------------------------------------------------------

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

    def may_leave(self, now: float, step: int | None = None) -> bool:
        """Return whether others keep all that this process holds of the model, if it goes now. One
        that has fallen silent, is accused of a hang, or was not heard since this process was held
        up, keeps nothing for sure.

        Args:
            now: seconds.
            step: committed steps that its state contains; None: as it has told last.
        """
        end = self.generation.end
        accused = end.culprit if end is not None and end.kind == "hang" else ""
        sure = [
            Member(contact.peer, contact.status)
            for contact in self.contacts.seated()
            if contact.peer.id != accused
            and contact.heard > max(self.held_up_at, contact.met_at)
            and self._is_heard(contact, now)
        ]
        return world_plan.may_leave(Member(self.me, self.status), sure, self.rules, step)

    def _is_heard(self, contact: Contact, now: float) -> bool:
        return now - contact.heard <= HEARD_SHARE * self.silence_limit(contact.peer.node, now)

    def away(self) -> tuple[Peer, ...] | None:
        """Return the peers that have the training's state, may live, and are not here; None: there
        may be some of which nothing is known."""
        found = tuple(p for name, p in self.losses.away.items() if name not in self.contacts)
        return None if self.losses.listed is None and not found else found

    def speaker_patience(self) -> float:
        """Return the seconds of its silence after which a speaker is spoken for: long before the
        ranks of its node would be taken for hung."""
        return max(self.silence_seconds / 4, 1.5 * self.beat_seconds)

    def status_of(self, peer_id: str) -> PeerStatus:
        """Return the newest status of a peer, or of this process."""
        if peer_id == self.me.id:
            return self.status
        contact = self.contacts.get(peer_id)
        return contact.status if contact is not None else PeerStatus()

    @property
    def has_no_world(self) -> bool:
        """Tell whether this process takes part, and knows of no world yet."""
        standing, state = self.standing, self.generation
        is_over = bool(standing.evicted) or standing.finished
        return not is_over and state.view is None and state.worked is None

    def is_misfit(self, peer: Peer) -> bool:
        """Tell whether a peer was started for a world of another size. Those of an elastic job may
        be told other sizes."""
        known = peer.seat >= 0 and peer.seats and self.me.seats and not self.rules.core
        return bool(known) and peer.seats != self.me.seats

    def tell_misfits(self) -> str:
        """Say which nodes were started for a world of another size."""
        misfits = [misfit.peer for misfit in self.losses.misfits.values()]
        sizes = {peer.node: peer.seats for peer in misfits}
        others = ", ".join(f"{node} for one of {seats}" for node, seats in sorted(sizes.items()))
        return (
            f"{self.me.node} was started for a world of {self.me.seats}, {others}: start all nodes "
            "with the same --nnodes and --nproc-per-node"
        )

    def are_new(self, peers: Sequence[Peer]) -> bool:
        """Tell whether nothing is known of any of these peers, nor of others that sit, or sat, on
        their seats."""
        seats = {peer.seat for peer in peers}
        return (
            len(seats) == len(peers)
            and min(seats, default=0) >= 0
            and self.me.seat not in seats
            and seats.isdisjoint(self.contacts.seats)
            and not any(peer.incarnation for peer in peers)
            and not self.losses.know_any({peer.id for peer in peers})
        )

    def invitation(self) -> View | None:
        """Return the generation that the main thread should enter; None: there is none now."""
        view = self.generation.view
        fresh = view is not None and view.generation > self.status.generation
        return view if fresh and self.generation.end is None else None

    def all_done(self) -> bool:
        """Tell whether this process may say that the training is over: it has done the last step,
        and so have all that would be in the next generation, and these might go on by themselves.
        A newcomer, or the smaller side of a cut, knows too few to say so; it is told.

        A member that was lost in its block may not have done what it alone does after the last step
        (a last save by rank 0): the others enter one more world, in which one of them does it."""
        if self.status.phase != "done":
            return False
        present = self.present()
        chosen = world_plan.choose(present, self.rules)
        if any(member.status.phase != "done" for member in chosen):
            return False
        number = self.status.generation
        gone = {peer_id for peer_id, done in self.losses.gone_done.items() if done == number}
        if len(chosen) + len(gone) < self.rules.min_world:
            return False
        view, done = self.generation.view, {m.peer.id for m in present if m.status.phase == "done"}
        members = view.members if view is not None and view.generation == number else ()
        if any(member.peer.id not in gone | done for member in members):
            return False
        here = gone | {member.peer.id for member in present}
        return not world_plan.other_side(self.generation.worlds.all(), here, self.losses.peers)

    def shortage(self) -> str:
        """Say how many ranks are there, where they are too few for a world, and no other part of
        the training may go on; else empty."""
        present, rules = self.present(), self.rules
        if any(member.status.phase != "ready" for member in present):
            return ""
        seated = world_plan.one_a_seat(present)
        chosen = world_plan.choose(present, rules)
        least = max(rules.min_world, rules.replica_size)
        here = {member.peer.id for member in present}
        worlds = self.generation.worlds.all()
        if len(chosen) >= least or world_plan.other_side(worlds, here, self.losses.peers):
            return ""
        return f"{len(seated)} of {rules.seats} ranks were there, and at least {least} are needed"

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
        if len(world_plan.choose([*ours, *waiting], self.rules)) <= view.size:
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
        heard: dict[str, list[float]] = {}
        for contact in contacts:
            heard.setdefault(contact.peer.node, []).append(contact.heard)
        usual, suspected, beat = self.silence_seconds, self.shortest_silence, self.beat_seconds
        patience = {}
        for node, times in heard.items():
            until = self.losses.suspected_until.get(node)
            limit = usual if until is None or until <= now else suspected
            together = limit - beat
            all_silent = now - min(times) > limit and now - max(times) > together
            patience[node] = together if all_silent else limit
        return patience

    def patience_of(self, peer_id: str, usual: float, last: Set[str]) -> float:
        """Return the seconds of silence after which a peer is given up.

        Args:
            peer_id: the peer.
            usual: what others of its node have.
            last: `last_holders`.
        """
        return LAST_COPY * self.silence_seconds if peer_id in last else usual

    def last_holders(self, now: float, doubtful: Set[str] = frozenset()) -> frozenset[str]:
        """Ids of peers that are waited for longer: for all that is heard now, a part of the model
        would be lost with them. All that hold it may be silent because of one and the same
        machine or switch that has too much to do, and live.

        Args:
            now: seconds.
            doubtful: ids of others that may be lost, this process among them.
        """
        silent = {
            contact.peer.id
            for contact in self.contacts.seated()
            if not self._is_heard(contact, now)
        }
        present, size = self.present(), self.rules.replica_size
        last = world_plan.last_holders(present, size, silent | doubtful)
        if self.me.id not in world_plan.holders(present, size):
            # It is not sure to hear of whom others give up: two newcomers, each of which gave up
            # one of the last two, each for the other's sake, would lose both. Holders judge.
            last |= world_plan.holders(present, size)
        return last

    def silence_limit(self, node: str, now: float) -> float:
        """Return the seconds of silence that are too long for a peer of a node. Those of a node
        that is not heard of elsewhere either are left soon: that can be undone."""
        if self.losses.suspected_until.get(node, now) > now:
            return self.shortest_silence
        return self.silence_seconds

    @property
    def shortest_silence(self) -> float:
        """Return the same for a peer of a suspected node: the shortest of all."""
        return min(self.silence_seconds, SILENCE_BEATS * self.beat_seconds)

    @property
    def long_seconds(self) -> float:
        """Return the seconds after which a world has told that its members are reached."""
        return self.silence_seconds + self.timing.reach_seconds

    @property
    def wake_at(self) -> float:
        """When `tick` must be called, if nothing happens before."""
        timers = self.timers
        due = timers.next_beat
        if self.generation.block_end and self.status.phase == "running":
            due = min(due, timers.next_cut)
        return due if timers.look_again is None else min(due, timers.look_again)

    def known_members(self) -> list[Peer]:
        """Return the members of all worlds that may go on, and those that are away."""
        members = (member.peer for view in self.generation.worlds.all() for member in view.members)
        return [*members, *self.losses.away.values()]

    # -- changes ----------------------------------------------------------------------------------

    def catch_up(self, now: float) -> None:
        """Count no time in which this process did not run, because the machine was stopped or
        overloaded or another thread held the interpreter, as silence of the others: they may have
        shared it."""
        asked, self.timers.wake_at = self.timers.wake_at, now
        late = now - asked if asked is not None else 0.0
        if late <= self.beat_seconds:
            return
        for contact in self.contacts:
            contact.heard = min(now, contact.heard + late)
        self.held_up_at = now
        self.generation.shift(late)
        self.effects.append(HeldUp(late, late > HEARD_SHARE * self.silence_seconds))

    def excuse(self, peer_ids: Iterable[str], seconds: float, now: float) -> None:
        """Count no time in which nothing of these peers could come through as their silence, and
        nothing that they said before as what they do now."""
        for peer_id in peer_ids:
            contact = self.contacts.get(peer_id)
            if contact is not None:
                contact.heard = min(now, contact.heard + seconds)
                contact.met_at = now
        self.held_up_at = now

    def finish(self) -> None:
        self.standing.finished = True
        self.news()

    def tell_status(self) -> None:
        self.said += 1
        update, is_in = StatusUpdate(self.said, self.status), self.status.phase == "running"
        if len(self.contacts):
            # That it is in a world tells the others nothing that they could go on with.
            self.effects.append(Send(self.contacts.connections(), update, calm=is_in))

    def greet(self) -> None:
        """Tell the status to those that were met in this turn: the one of the handshake may be
        old."""
        new = self.contacts.open_of(self.untold)
        self.untold.clear()
        if new:
            # Before its first world it is seldom another one.
            update, calm = StatusUpdate(self.said, self.status), self.has_no_world
            self.effects.append(Send(new, update, calm=calm))

    def send(self, peer_id: str, message: Message) -> None:
        contact = self.contacts.get(peer_id)
        if contact is not None:
            self.effects.append(Send((contact.connection,), message))

    def broadcast(self, message: Message) -> None:
        if len(self.contacts):
            self.effects.append(Send(self.contacts.connections(), message))

    def news(self, knock: bool = False) -> None:
        self.effects.append(News(knock))

    def drain(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects
