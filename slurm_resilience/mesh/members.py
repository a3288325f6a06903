"""Who lives: peers that come, die, fall silent, are given up, or must go."""

from __future__ import annotations

import contextlib
import threading
import time

from slurm_resilience.errors import WireError
from slurm_resilience.mesh import messages
from slurm_resilience.mesh.connection import PeerConnection
from slurm_resilience.mesh.core import log
from slurm_resilience.mesh.dialing import Dialing
from slurm_resilience.mesh.messages import Evict, NodeLost, StatusUpdate
from slurm_resilience.mesh.model import GenerationEnd, Peer


class Members(Dialing):
    """What a proven, closed or silent link says of its peer."""

    def _proven(self, link: PeerConnection) -> None:
        self._raw.discard(link)
        peer = link.peer
        assert peer is not None
        if peer.id == self.me.id:
            self._drop(link)
            return
        known = self._links.get(peer.id)
        if known is not None:
            # Both dialed at once. The connection of the lower id stays, and its dialer, who sees
            # it proven last, ends the other one: so nobody takes that for a death. What was sent
            # there before is still read.
            keep_new = link.dialed == (self.me.id < peer.id)
            new, old = (link, known) if keep_new else (known, link)
            self._links[peer.id] = new
            new.said = max(new.said, old.said)
            if old.said >= 0:
                new.status = old.status
            old.superseded, old.born = True, time.monotonic()
            self._raw.add(old)
            if self.me.id < peer.id:
                old.finish()
        else:
            self._links[peer.id] = link
            if peer.incarnation > 0 and peer.id not in self._lost:
                # A new process on a lost seat: its node is in order (again), whatever was found
                # of a machine of that name before; the next finding about it counts.
                self._bad_nodes.pop(peer.node, None)
        # The handshake's status may have changed meanwhile.
        self._send(self._links[peer.id], StatusUpdate(self._said, self.status))
        if known is None and self._in_view(peer.id):
            for put in list(self._own_puts.values()):
                if put.generation == self._current():
                    self._send(link, put)
        self._same_seat(peer)
        self.knock.set()
        self._changed.notify_all()

    def _same_seat(self, peer: Peer) -> None:
        """A newer process took a seat: whoever sat there is dead, or must go."""
        if peer.seat < 0:
            return
        if peer.seat == self.me.seat and peer.id != self.me.id:
            if (peer.incarnation, peer.id) > (self.me.incarnation, self.me.id):
                self._evict_me(f"a newer process took seat {peer.seat}")
            return
        for other in list(self._links.values()):
            if other.peer and other.peer.id != peer.id and other.peer.seat == peer.seat:
                older = min((other.peer, peer), key=lambda p: (p.incarnation, p.id))
                self._give_up(older.id, f"a newer process took seat {peer.seat}", dead=True)
        if self._worked:
            for member in self._worked.members:
                if member.peer.seat == peer.seat and member.peer.incarnation < peer.incarnation:
                    self._lost[member.peer.id] = True

    def _gone(self, link: PeerConnection, why: str) -> None:
        self._drop(link)
        peer = link.peer
        if peer is None or link.superseded or self._links.get(peer.id) is not link:
            return
        del self._links[peer.id]
        if link.status.phase == "done" and self.status.phase == "done":
            self._changed.notify_all()
            return
        closed = "timed out" not in why and "unreachable" not in why.lower()
        self._lose(peer, why, dead=closed)

    def _lose(self, peer: Peer, why: str, dead: bool) -> None:
        self._lost[peer.id] = self._lost.get(peer.id, False) or dead
        if peer.seat >= 0 and self._in_view(peer.id):
            text = f"rank on seat {peer.seat} ({peer.node}) is gone: {why}"
            self._over(GenerationEnd(self._current(), text, peer.id, "lost"))
        self._changed.notify_all()

    def _give_up(self, name: str, reason: str, dead: bool) -> None:
        """Go on without a peer that is still connected."""
        link = self._links.get(name)
        if link is None or link.peer is None:
            return
        with contextlib.suppress(WireError):
            link.send(messages.pack(Evict(reason)))
        log.warning("seat %d (%s) is given up: %s", link.peer.seat, link.peer.node, reason)
        self._drop(link)
        del self._links[name]
        # No cable can be cut between two processes of one machine.
        self._lose(link.peer, reason, dead or link.peer.node == self.me.node)
        self._on_given_up(link.peer, reason)

    def _evict_me(self, reason: str) -> None:
        if self._evicted:
            return
        self._evicted = reason
        # Not "stop": that would end the training for everybody.
        self._over(GenerationEnd(self._current(), reason, self.me.id, "lost"))
        self._changed.notify_all()
        threading.Thread(target=self._on_evict, args=(reason,), daemon=True).start()

    def _find(self, finding: NodeLost) -> None:
        known = self._bad_nodes.get(finding.node)
        if known is not None and (known.dead or not finding.dead):
            return
        self._bad_nodes[finding.node] = finding
        self._broadcast(finding)
        if self.me.node == finding.node:
            # This node must be left, or was given up as dead while it was only cut off.
            self._evict_me(f"{finding.node} must be left: {finding.reason}")
            return
        for link in self._usable():
            if link.peer and link.peer.node == finding.node:
                self._give_up(link.peer.id, finding.reason, dead=True)
        for member in self._worked.members if self._worked else ():
            if member.peer.node == finding.node:
                self._lost[member.peer.id] = True
        self._changed.notify_all()

    def _judge_silence(self, link: PeerConnection, now: float) -> None:
        if link.peer and now - link.heard > self.silence and self._in_view(link.peer.id):
            text = f"rank on seat {link.peer.seat} ({link.peer.node}) silent for {self.silence:g} s"
            self._over(GenerationEnd(self._current(), text, link.peer.id, "hang"))
            if link.status.phase != "running":
                # Stopped between two worlds: no block of its own is waited for, and each new world
                # would be formed with it.
                self._give_up(link.peer.id, f"silent for {now - link.heard:.1f} s", dead=False)
