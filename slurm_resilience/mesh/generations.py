"""Worlds: how a generation ends, when the next is proposed, and who has to be out first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from slurm_resilience.errors import WireError
from slurm_resilience.mesh import messages, world_plan
from slurm_resilience.mesh.connection import PeerConnection
from slurm_resilience.mesh.core import log
from slurm_resilience.mesh.members import Members
from slurm_resilience.mesh.messages import GenerationEnded, NewGeneration
from slurm_resilience.mesh.model import GenerationEnd, Member, View, counter_of, generation_number

SILENT_BEATS = 3
"""Beats that who was accused of a hang may miss, when the others are about to go on."""
LAST_COPY = 3
"""So many times longer who alone holds a part of the model is waited for: without it, the training
falls back to its last checkpoint, or ends."""
AGAIN = 0.01
"""Seconds between two calls of `on_end` while the main thread is still in its block: a call that
was not cut the first time is cut the next."""
STRIKES = 2
"""Generations that failed because of one peer, before the others go on without it."""


WAIT_SECONDS = 20.0
"""Who waits for others so long says so; and again whenever the time has doubled."""


class Generations(Members):
    """Ends and beginnings."""

    _waits_since = 0.0
    _tell_at = 0.0

    def _over(self, end: GenerationEnd) -> None:
        if self._view is None or end.generation != self._view.generation or self._end is not None:
            return
        self._end, self._ended_at = end, time.monotonic()
        if end.kind == "lost" and end.culprit in self._links:
            self._strikes[end.culprit] = self._strikes.get(end.culprit, 0) + 1
        log.info("generation %d is over: %s", self._view.counter, end.reason)
        self._broadcast(GenerationEnded(end))
        self._changed.notify_all()

    def _adopt(self, view: View) -> None:
        if view.generation <= self._highest:
            return
        self._highest = view.generation
        if view.rank_of(self.me.id) < 0:
            return
        if self._view is not None and self._end is None:
            self._over(GenerationEnd(self._view.generation, "a newer generation was formed"))
        for generation in [g for g in self._keys if g < view.generation]:
            del self._keys[generation]
        self._view, self._end, self._waits_for = view, None, ""
        self._waits_since = 0.0
        self._adopted_at = time.monotonic()
        for peer in self._unreached():
            # Two that came at the same time may still be shaking hands.
            self._dial(peer.id, peer.host, peer.port)
        # A member may have changed a key here before this process knew of the generation.
        for put in list(self._own_puts.values()):
            self._send_members(put.generation, put)
        self._changed.notify_all()

    def _all_done(self) -> bool:
        """Is everybody done who would be in the next generation? Spares do not count."""
        present = self._present()
        if self.status.phase == "running" or not any(m.status.phase == "done" for m in present):
            return False
        chosen = world_plan.arrange(world_plan.one_a_seat(present), self._rules.replica_size)
        return bool(chosen) and all(member.status.phase == "done" for member in chosen)

    def _consider(self, now: float) -> None:
        """Propose the next generation, if it is time and this is the lowest seat."""
        self._look_again = None
        if self._evicted or self._finished or self.me.seat < 0:
            return
        view = self._view
        going_on = view is not None and self._end is None
        if going_on and self.status.generation < self._current():
            return  # being formed
        if going_on and self.status.phase == "running":
            return  # nearly always
        present = self._present()
        busy = [m for m in present if m.status.phase == "running"]
        if going_on and any(m.status.generation == self._current() for m in busy):
            return
        if any(m.status.generation > self._current() for m in busy):
            return  # a living world that this process is not in: it is asked in at a boundary
        if busy:
            self._hurry(busy, now)
            if any(m.peer.id == self.me.id or m.peer.id in self._links for m in busy):
                return
            present = self._present()
        if self._all_done():
            # Kept: the first to hear of it leave at once, and would be missed otherwise.
            self._finished = True
            self._changed.notify_all()
            return
        if self.me.seat > min(m.peer.seat for m in present):
            return
        for name in [name for name, strikes in self._strikes.items() if strikes >= STRIKES]:
            del self._strikes[name]
            self._give_up(name, "other ranks cannot reach it", dead=False)
            return
        proposal = world_plan.propose(
            present, self._lost, self._worked, self._rules, now - self._since, bool(self._worked)
        )
        if proposal.members is None:
            if proposal.reason != self._waits_for:
                log.debug("%s", proposal.reason)
            self._waits_for = proposal.reason
            if proposal.again is not None:
                self._look_again = now + proposal.again
            self._tell_waiting(proposal.reason, now)
            return
        if not any(m.peer.id == self.me.id for m in proposal.members):
            return
        highest = max(self._highest, *(m.status.generation for m in present))
        generation = generation_number(counter_of(highest) + 1, self.me.seat)
        size = self._rules.replica_size
        new = View(generation, proposal.members, size, self._rules.seats, proposal.reason)
        frame = messages.pack(NewGeneration(new))
        for member in new.members:
            link = self._links.get(member.peer.id)
            if link is not None:
                with contextlib.suppress(WireError):
                    link.send(frame)
                self._interest(link)
        self._adopt(new)

    def _tell_waiting(self, reason: str, now: float) -> None:
        if not self._waits_since:
            self._waits_since, self._tell_at = now, now + WAIT_SECONDS
        if now >= self._tell_at:
            waited = now - self._waits_since
            log.warning("has waited %.0f s for other ranks: %s", waited, reason)
            self._tell_at = now + waited
        self._look_again = min(self._tell_at, self._look_again or self._tell_at)

    def _hurry(self, busy: list[Member], now: float) -> None:
        """Give up who does not leave the block of a generation that is over."""
        links = [self._links[m.peer.id] for m in busy if m.peer.id in self._links]
        if len(links) < len(busy):
            self._look_again = now + AGAIN  # this process is one of them
        patience = self._patience_with(links, now)
        hung = self._end.culprit if self._end and self._end.kind == "hang" else ""
        late = now - max(self._ended_at, self._since)
        last = world_plan.last_holders(self._present(), self._rules.replica_size)
        for link in links:
            peer = link.peer
            assert peer is not None
            silent = now - link.heard
            times = LAST_COPY if peer.id in last else 1
            # Of one whom somebody has accused, all have waited for a word already.
            needed = SILENT_BEATS * self.beat if peer.id == hung else patience[peer.node]
            if silent > times * needed and late > 0:
                self._give_up(peer.id, f"silent for {silent:.1f} s", dead=False)
            elif self._ended_at and late > times * self._abort_timeout:
                text = f"it did not leave its block within {times * self._abort_timeout:g} s"
                self._give_up(peer.id, text, dead=True)
            else:
                self._look_again = min(now + 0.05, self._look_again or now + 0.05)

    def _patience_with(self, links: Sequence[PeerConnection], now: float) -> dict[str, float]:
        """Seconds of silence after which the peers of a machine are given up. Those of a machine
        that is lost fall silent within one beat: they go together, and cost one wait."""
        silent: dict[str, list[float]] = {}
        for link in links:
            assert link.peer is not None
            silent.setdefault(link.peer.node, []).append(now - link.heard)
        together = self.silence - self.beat
        return {
            node: together if max(times) > self.silence and min(times) > together else self.silence
            for node, times in silent.items()
        }
