"""Peers that are lost, given up or told to leave, and the end of the world they were in. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from slurm_resilience.mesh.events import Close, Dial, EndGeneration, Evicted, GaveUp
from slurm_resilience.mesh.messages import Evict, GenerationEnded, Leaving, NodeLost, TrainingDone
from slurm_resilience.mesh.model import SEAT_TAKEN, CloseCause, GenerationEnd, Peer
from slurm_resilience.mesh.protocol.contacts import Contact
from slurm_resilience.mesh.protocol.side import Side

Fate = Literal["silent", "unreached", "told", "dead"]
"""Fate of a peer that is given up. silent, unreached: it may live behind a cut, and come back;
told: it was told to leave, and is dead when it says so; dead: its launcher or an observer sees to
its end."""


class Departures:
    """Peers that are gone or must go, and the worlds that end with them."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def end(self, end: GenerationEnd, now: float) -> None:
        side = self._side
        if not side.generation.finish(end, now):
            return
        side.losses.worlds += 1
        view = side.generation.view
        if view is not None and now - side.generation.adopted_at > side.long_seconds:
            side.losses.forgive(view.ids)
        if end.kind == "lost" and end.culprit in side.contacts:
            side.losses.strike(end.culprit, now, side.timing.reach_seconds)
        side.effects.append(EndGeneration(end))
        if side.status.phase != "running" and side.status.generation < end.generation:
            # It was never entered. The next lead must know its number all the same, or it would
            # make one that this process has seen the end of.
            side.status = msgspec.structs.replace(side.status, generation=end.generation)
            side.tell_status()
        side.broadcast(GenerationEnded(end))
        side.news()

    def lose(self, peer: Peer, reason: str, dead: bool, now: float, *, step: int = -1) -> None:
        side = self._side
        side.losses.lose(peer.id, dead)
        if step >= 0:
            side.losses.note_state(peer)
        if peer.seat >= 0 and side.generation.holds(peer.id):
            text = f"rank on seat {peer.seat} ({peer.node}) is gone: {reason}"
            self.end(GenerationEnd(side.generation.number, text, peer.id, "lost"), now)
        side.news()

    def give_up(self, peer_id: str, reason: str, fate: Fate, now: float) -> None:
        """Go on without a peer that is still connected."""
        side = self._side
        contact = side.contacts.get(peer_id)
        if contact is None:
            return
        # No cable can be cut between two processes of one machine.
        dead = fate == "dead" or contact.peer.node == side.me.node
        why = fate if fate in ("silent", "unreached") and not dead else "must go"
        side.send(peer_id, Evict(reason, why))
        connections = side.contacts.drop(peer_id)
        if dead or fate == "told":
            side.losses.evicted[peer_id] = reason
        if fate == "told":
            # It may not hear of it, and live on behind a cut: dead it is when it says so.
            side.losses.told.update(dict.fromkeys(connections, contact.peer))
        else:
            side.effects += map(Close, connections)
        self.lose(contact.peer, reason, dead, now, step=contact.status.step)
        side.effects.append(GaveUp(contact.peer, reason))

    def leave_the_others(self, reason: str, now: float) -> None:
        side = self._side
        if side.standing.evicted:
            return
        side.standing.evicted = reason
        # Not "stop": that would end the training for all.
        self.end(GenerationEnd(side.generation.number, reason, side.me.id, "lost"), now)
        side.effects.append(Evicted(reason))
        # Others may not have heard yet, and would form worlds with this process.
        side.broadcast(Leaving(reason))
        side.news()

    def hear_evict(
        self, evict: Evict, contact: Contact | None, connection: int, now: float
    ) -> None:
        """Leave the others, unless this process knows better. Who reads that it was silent is not
        so any more: a cut, or a standstill of its own, is over, and the next world has it. Were it
        to leave, the training's state could go with it, where those that gave it up have left as
        well. And a peer that was left behind by the world that goes on here takes its own silence
        for that of all others."""
        side, state = self._side, self._side.generation
        side.catch_up(now)
        is_behind = (
            contact is not None
            and state.goes_on
            and not state.holds(contact.peer.id)
            and contact.status.generation < state.number
        )
        if evict.why != "silent" and not (evict.why == "unreached" and is_behind):
            self.leave_the_others(evict.reason, now)
            return
        # It closes the connection, which is no death.
        side.contacts.expect_end(connection)
        told = side.losses.told.pop(connection, None)
        if told is not None:  # it is told again
            side.effects += [Close(connection), Dial(told)]

    def note_newer(self, contacts: Sequence[Contact], number: int, now: float) -> None:
        """End the world of this process if some of its members have seen a newer one. Its end was
        said while no way led here: they took the loss of the way for a loss of this process, which
        had another way before it was missed."""
        state = self._side.generation
        if not state.goes_on or number <= state.number:
            return
        for contact in contacts:
            if state.holds(contact.peer.id):
                text = f"rank on seat {contact.peer.seat} has gone on to a newer generation"
                self.end(GenerationEnd(state.number, text), now)
                return

    def let_go(self, contact: Contact, reason: str, now: float) -> None:
        side = self._side
        if side.standing.finished:
            return  # so do all
        side.effects += map(Close, side.contacts.drop(contact.peer.id))
        self.lose(contact.peer, f"it leaves: {reason}", True, now)

    def conclude(self) -> None:
        """End the training for all, well. It is final: who hears of it leaves at once, and would be
        missed otherwise."""
        side = self._side
        if not side.standing.finished:
            side.finish()
            side.broadcast(TrainingDone())

    def note_absent(self, peer_id: str, now: float) -> None:
        if peer_id in self._side.contacts:
            return
        for member in self._side.known_members():
            if member.id == peer_id:
                self.lose(member, "no process listens at its address", True, now)
                return

    def note_listed(self, peers: Sequence[Peer] | None) -> None:
        """Take in who had the training's state a moment ago, as the rendezvous tells it."""
        side = self._side
        if side.generation.worked is not None:
            return  # those of that world have it
        side.losses.listed = peers
        for peer in peers or ():
            finding = side.losses.nodes.get(peer.node)
            if finding is not None and finding.dead:
                side.losses.lose(peer.id, dead=True)
        self.lose_replaced([member.peer for member in side.present()])

    def note_outcome(self, code: int) -> None:
        """Take in how the training has ended, as the rendezvous tells it."""
        if code == 0:
            self.conclude()

    def note_end_of(self, told: Peer, cause: CloseCause) -> None:
        """Judge by the end of a connection if a peer that was told to leave is dead."""
        side = self._side
        if cause == "closed":
            side.losses.lose(told.id, dead=True)
        elif cause == "reset" and not side.standing.evicted:
            side.effects.append(Dial(told))
        side.news()

    def clear_seat(self, peer: Peer, now: float) -> None:
        """Clear a seat for a newer process: an older one there is dead, or must go."""
        side = self._side
        if peer.seat < 0:
            return
        if peer.seat == side.me.seat:
            if (peer.incarnation, peer.id) > (side.me.incarnation, side.me.id):
                self.leave_the_others(f"{SEAT_TAKEN} {peer.seat}", now)
            return
        for other in side.contacts.on_seat(peer.seat):
            if other.peer.id != peer.id:
                older = min((other.peer, peer), key=lambda p: (p.incarnation, p.id))
                self.give_up(older.id, f"{SEAT_TAKEN} {peer.seat}", "dead", now)
        self.lose_replaced([peer])

    def lose_replaced(self, newer: Sequence[Peer]) -> None:
        """Note the death of members on whose seat there is a newer process."""
        newest = {peer.seat: peer.incarnation for peer in newer if peer.incarnation > 0}
        if not newest:
            return  # each is the first on its seat
        for member in self._side.known_members():
            if member.incarnation < newest.get(member.seat, 0):
                self._side.losses.lose(member.id, dead=True)

    def lose_node(self, finding: NodeLost, now: float) -> None:
        side = self._side
        known = side.losses.nodes.get(finding.node)
        if known is not None and (known.dead or not finding.dead):
            return
        side.losses.nodes[finding.node] = finding
        side.broadcast(finding)
        if side.me.node == finding.node:
            # This node must be left, or was given up as dead while it was only cut off.
            self.leave_the_others(f"{finding.node} must be left: {finding.reason}", now)
            return
        for contact in side.contacts.seated():
            if contact.peer.node == finding.node:
                fate: Fate = "dead" if finding.dead else "told"
                self.give_up(contact.peer.id, finding.reason, fate, now)
        for member in side.known_members():
            # A sick node that cannot be reached from here may work with others.
            if member.node == finding.node and finding.dead:
                side.losses.lose(member.id, dead=True)
        side.news()
