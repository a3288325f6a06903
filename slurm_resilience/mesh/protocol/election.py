"""The making of generations: who must leave first, the lead, its votes, and what is adopted. Pure.

The rules of the vote are in `ballot`, those of the members in `world_plan`.
"""

from __future__ import annotations

from itertools import islice

from slurm_resilience.mesh.events import Adopt, CutBlock, Dial, Send, StillWaiting
from slurm_resilience.mesh.messages import (
    GenerationEnded,
    NewGeneration,
    Roster,
    Vote,
    VoteRequest,
)
from slurm_resilience.mesh.model import (
    SILENCE_BEATS,
    GenerationEnd,
    Member,
    Peer,
    PeerStatus,
    View,
    counter_of,
    generation_number,
)
from slurm_resilience.mesh.protocol import world_plan
from slurm_resilience.mesh.protocol.ballot import Ballot, Promise, answer
from slurm_resilience.mesh.protocol.contacts import Contact
from slurm_resilience.mesh.protocol.departures import Departures
from slurm_resilience.mesh.protocol.side import LAST_COPY, ROUNDING_SECONDS, Side

LAST_JUDGE = 10
"""After so many abort timeouts in the block of an ended generation a process ends itself. The other
members judge it sooner, but they may all be gone, and peers that come later know nothing of its
world and wait for it. Not sooner: what it holds may be the last copy of the model."""
NEWER_FORMED = "a newer generation was formed"
LOOK_SECONDS, LOOK_SECONDS_A_PEER = 0.05, 2.5e-4
"""Between two looks at peers that are still in the block of an ended generation."""


class Election:
    """The making of the next world, as this process takes part in it: as its lead or as a voter."""

    def __init__(self, side: Side, departures: Departures) -> None:
        self._side = side
        self._departures = departures
        self._promise = Promise()
        self._ballot: Ballot | None = None
        """The world that this process, as the lead, has asked for."""

    def awaits(self, peer_id: str) -> bool:
        """Tell whether the world that this process has asked for waits for the vote of a peer."""
        return self._ballot is not None and peer_id in self._ballot.missing

    def ask_again(self, peer_id: str, now: float) -> None:
        """Ask a peer again, if its answer is missing: the question may have been lost."""
        if self._ballot is not None and peer_id in self._ballot.missing:
            self._ballot.again_at = now

    def look_around(self, now: float) -> None:
        """Propose the next generation if it is time; keep the main thread on its way out."""
        side = self._side
        if now < side.timers.next_look:
            side.timers.look_again = side.timers.next_look
        else:
            side.timers.next_look = now + side.timing.look_pause(len(side.contacts))
            self._look(now)
        self._cut_block(now)
        side.timers.wake_at = side.wake_at

    def _look(self, now: float) -> None:
        """Propose the next generation if it is time."""
        self._side.timers.look_again = None
        if self._may_assemble(now):
            self._assemble(now)
        else:
            self._ballot = None

    def _cut_block(self, now: float) -> None:
        """Keep the main thread on its way out of an ended generation's block."""
        side = self._side
        end = side.generation.block_end
        if end and side.status.phase == "running" and now >= side.timers.next_cut:
            side.timers.next_cut = now + side.timing.cut_again_seconds
            side.effects.append(CutBlock(end))
            limit = LAST_JUDGE * side.timing.abort_seconds
            if now - side.generation.ended_at > limit:
                self._departures.leave_the_others(
                    f"it did not leave its block within {limit:g} s", now
                )

    def _may_assemble(self, now: float) -> bool:
        """Tell whether this process and all others are outside of any world that goes on."""
        side = self._side
        if side.standing.evicted or side.standing.finished or side.me.seat < 0:
            return False
        goes_on, number = side.generation.goes_on, side.generation.number
        if goes_on and (side.status.phase == "running" or side.status.generation < number):
            return False  # it works, or is being formed
        inside = side.contacts.inside()
        if goes_on and any(contact.status.generation == number for contact in inside):
            return False
        if any(contact.status.generation > number for contact in inside):
            # A living world without this process: it is asked in at a boundary. The members of that
            # world may not see those that are still inside the ended one.
            self._hurry([c for c in inside if c.status.generation <= number], now)
            return False
        self._hurry(inside, now)
        is_out = side.status.phase != "running"
        return is_out and not any(contact.peer.id in side.contacts for contact in inside)

    def _hurry(self, inside: list[Contact], now: float) -> None:
        """Evict peers still inside an ended generation."""
        side = self._side
        if not inside:
            return
        generation, abort_seconds = side.generation, side.timing.abort_seconds
        out = now - max(generation.ended_at, side.outside_since)
        # Before that, none needs a closer look: what they say has one at once.
        at = min(contact.heard for contact in inside) + side.shortest_silence
        if generation.ended_at:
            at = min(at, now - min(out, now - generation.left_at) + abort_seconds)
        pause = max(LOOK_SECONDS, LOOK_SECONDS_A_PEER * len(side.contacts))
        side.timers.look(max(now + pause, at + ROUNDING_SECONDS))
        if now <= at:
            return  # as nearly always
        patience = side.patience_with(inside, now)
        end = side.generation.end
        hung = end.culprit if end and end.kind == "hang" else ""
        # Of one that was accused of a hang, all have waited for a word already.
        awaited = SILENCE_BEATS * side.beat_seconds
        overdue = [
            (contact, usual)
            for contact in inside
            if now - contact.heard
            > (usual := awaited if contact.peer.id == hung else patience[contact.peer.node])
            or self._late(contact, now) > abort_seconds
        ]
        if not overdue:
            return
        doubtful = {contact.peer.id for contact in inside}
        if side.status.phase == "running":
            doubtful.add(side.me.id)
        # All that hold a part may be inside because of one and the same call, which ends.
        last, stuck = side.last_holders(now), side.last_holders(now, doubtful)
        for contact, usual in overdue:
            peer_id, silent = contact.peer.id, now - contact.heard
            limit = (LAST_COPY if peer_id in stuck else 1) * abort_seconds
            if silent > side.patience_of(peer_id, usual, last) and out > 0:
                self._departures.give_up(peer_id, f"silent for {silent:.1f} s", "silent", now)
            elif self._late(contact, now) > limit:
                text = f"it did not leave its block within {limit:g} s"
                self._departures.give_up(peer_id, text, "told", now)

    def _late(self, contact: Contact, now: float) -> float:
        """Return for how long a peer was seen inside an ended generation. That it says nothing now
        is silence, and may be the way's: it was seen when it was heard last."""
        side = self._side
        if not side.generation.ended_at:
            return 0.0
        # What it said at its handshake may be old: it has the whole time from then on. And while
        # others come out one by one, their machines have much to do: each one that was given up
        # would end one more world, which is more to do.
        since = max(side.outside_since, side.generation.ended_at, side.generation.left_at)
        return min(now, contact.heard) - max(since, contact.met_at)

    def _assemble(self, now: float) -> None:
        """Propose a generation, if this is the lowest seat and one can be formed."""
        side = self._side
        if side.all_done():
            self._departures.conclude()
            return
        if not self._leads():
            self._ballot = None
            return
        present = side.present()
        unreachable = side.losses.take_unreachable()
        if unreachable is not None:
            self._departures.give_up(unreachable, "other ranks cannot reach it", "unreached", now)
            side.timers.look(now)
            return
        # Newer worlds that may go on are left to the vote: a member may say that they are void.
        worked = [side.generation.worked] if side.generation.worked else []
        waited = now - side.outside_since
        proposal = world_plan.propose(
            present,
            side.losses.peers,
            worked,
            side.rules,
            waited,
            bool(worked),
            side.away(),
        )
        if proposal.members is None:
            self._ballot = None
            if proposal.again is not None:
                # Not at the very moment: a rounded sum may lie before it, again and again.
                side.timers.look(now + proposal.again + ROUNDING_SECONDS)
            self._wait_on(proposal.reason, now)
        elif any(member.peer.id == side.me.id for member in proposal.members):
            self._ask(proposal.members, proposal.reason, present, now)

    def _leads(self) -> bool:
        """Return whether this process is the lead of all that are present. Asked at each news, so
        it ends at the first that comes before, or as soon as one of those must be a member."""
        side = self._side
        if not side.rules.sizes:
            own = _lead_order(side.me, side.status)
            before = (
                contact
                for contact in side.contacts
                if contact.peer.seat >= 0 and _lead_order(contact.peer, contact.status) < own
            )
            # Fewer than one replica has wait as standbys.
            if next(islice(before, side.rules.replica_size - 1, None), None) is not None:
                return False
            if side.rules.replica_size == 1:
                return True
        return self._lead_of(side.present()).peer.id == side.me.id

    def _lead_of(self, present: list[Member]) -> Member:
        """Return the lowest seat; of those that have a state, if there are any: they know of the
        worlds that worked, and a newcomer does not. A standby leads no world of the others: it
        asks for none that it is not in."""
        rules = self._side.rules
        all_in = not rules.sizes and rules.replica_size == 1
        chosen = () if all_in else world_plan.choose(present, rules)
        return min(chosen or present, key=lambda member: _lead_order(member.peer, member.status))

    # -- votes ------------------------------------------------------------------------------------

    def _ask(
        self, members: tuple[Member, ...], reason: str, present: list[Member], now: float
    ) -> None:
        """Have all that are present vote for a world, and form it when enough of them have."""
        side = self._side
        if self._holds_its_vote("", now):
            # It may be asked into another world at any moment.
            self._ballot = None
            side.timers.look(self._promise.until)
            return
        ballot = self._ballot
        if ballot is None or ballot.view.members != members:
            ballot = self._begin_ballot(members, reason, present, now)
        elif ballot.add({member.peer.id for member in present}):
            self._send_request(ballot)
        split = ""
        if ballot.is_full:
            worlds = side.generation.worlds
            ballot.drop_void(worlds)
            split = world_plan.other_side(worlds.all(), ballot.voted, side.losses.peers)
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
        side.timers.look(ballot.again_at)

    def _begin_ballot(
        self, members: tuple[Member, ...], reason: str, present: list[Member], now: float
    ) -> Ballot:
        side = self._side
        highest = max(
            self._promise.number,
            side.generation.highest,
            *(member.status.generation for member in present),
        )
        wait, before = side.beat_seconds, self._ballot
        if before is not None and before.refused:
            # Those that were asked may know of a higher number.
            highest = max(highest, before.promised)
            wait = before.longer_wait if before.view.members == members else wait
        number = generation_number(counter_of(highest) + 1, side.me.seat, side.me.incarnation)
        view = View(number, members, side.rules.replica_size, side.rules.seats, reason)
        self._ballot = ballot = Ballot(view, side.me.id, now, wait)
        self._promise.give(view, "", 0.0)
        ballot.add({member.peer.id for member in present})
        self._send_request(ballot)
        return ballot

    def _send_request(self, ballot: Ballot) -> None:
        side = self._side
        missing = ballot.missing
        to = tuple(c.connection for c in side.contacts.seated() if c.peer.id in missing)
        if to:
            worlds = side.generation.worlds
            request = VoteRequest(ballot.view, worlds.numbers(), worlds.worked_number)
            side.effects.append(Send(to, request))

    def vote(self, request: VoteRequest, lead: str, now: float) -> None:
        """Answer a lead."""
        side = self._side
        if side.standing.evicted or side.standing.finished or side.me.seat < 0:
            return
        view, worlds = request.view, side.generation.worlds
        worlds.note_worked(request.worked)
        worlds.drop_void(lead, view.generation, request.known, request.worked)
        granted = self._may_vote(view, lead, now)
        if granted:
            self._ballot = None
            self._promise.give(view, lead, now + side.beat_seconds)
            if view.rank_of(side.me.id) < 0:
                worlds.add(view)
        else:
            # Two leads that do not know of each other would take turns without end.
            side.send(lead, Roster(tuple(c.peer for c in side.contacts.seated())))
        promised = max(self._promise.number, side.generation.highest)
        side.send(lead, answer(request, granted, promised, worlds, side.losses.dead()))

    def _may_vote(self, view: View, lead: str, now: float) -> bool:
        side = self._side
        if view.generation <= side.generation.highest or self._is_elsewhere(view):
            return False
        promise = self._promise
        if promise.number >= view.generation:
            # Asked again: the answer may have been lost.
            return promise.number == view.generation and promise.lead == lead
        if side.status.phase == "running" or self._is_being_formed():
            return False
        if self._holds_its_vote(lead, now) and not self._is_lead(lead):
            return False  # the lead of all goes before one that does not know of it
        # One that asks for votes itself gives its own to no lead that should vote for it.
        return self._ballot is None or self._is_lead(lead)

    def _is_lead(self, peer_id: str) -> bool:
        return self._lead_of(self._side.present()).peer.id == peer_id

    def _holds_its_vote(self, lead: str, now: float) -> bool:
        """Tell whether another lead than this one may form a world with this process's vote."""
        held_for = self._promise.held_for(now)
        return held_for not in ("", lead) and held_for in self._side.contacts

    def _is_being_formed(self) -> bool:
        """Tell whether there is a world that this process is about to enter."""
        side = self._side
        return side.generation.goes_on and side.status.generation < side.generation.number

    def count(self, vote: Vote, voter: str, now: float) -> None:
        """Take a vote in, and what the voter knows."""
        side = self._side
        worlds = side.generation.worlds
        worlds.note_worked(vote.worked)
        for view in vote.views:
            if view.generation <= vote.worked:
                worlds.learn(view)
            elif view.rank_of(side.me.id) < 0:
                # One that this process is in, and did not adopt, it will not adopt any more.
                worlds.add(view)
        if vote.views:
            self._departures.lose_replaced([member.peer for member in side.present()])
        for peer_id in vote.dead:
            if peer_id not in side.contacts and peer_id != side.me.id:
                side.losses.lose(peer_id, dead=True)
        ballot = self._ballot
        if ballot is None or vote.generation != ballot.view.generation:
            return
        ballot.count(voter, vote)
        if not vote.granted and vote.promised >= ballot.view.generation:
            ballot.again_at = now  # only its number was too low

    def _form(self, view: View, now: float) -> None:
        self._ballot = None
        found = (self._side.contacts.get(member.peer.id) for member in view.members)
        connections = tuple(contact.connection for contact in found if contact is not None)
        if connections:
            self._side.effects.append(Send(connections, NewGeneration(view.generation)))
        self._adopt(view, now)

    # -- worlds that were formed ------------------------------------------------------------------

    def hear_formed(self, formed: NewGeneration, lead: str, now: float) -> None:
        """Take note of a generation that was formed."""
        view = formed.view or self._promise.view_of(formed.generation)
        if view is not None:
            self._consider(view, lead, now)
        else:
            # This process has voted for a newer one since.
            end = GenerationEnd(formed.generation, NEWER_FORMED)
            self._side.send(lead, GenerationEnded(end))

    def _consider(self, view: View, lead: str, now: float) -> None:
        """Adopt a generation, unless a living one is known of which its lead cannot know."""
        side = self._side
        elsewhere = self._is_elsewhere(view)
        if elsewhere or (side.generation.goes_on and view.generation > side.generation.highest):
            # Two leads that do not know of each other would take turns without end.
            side.send(lead, Roster(tuple(c.peer for c in side.contacts.seated())))
        old = view.generation < max(side.generation.highest, self._promise.number)
        if not elsewhere and not old:
            self._adopt(view, now)
        elif view.rank_of(side.me.id) >= 0:
            text = NEWER_FORMED if old else "another world goes on"
            side.send(lead, GenerationEnded(GenerationEnd(view.generation, text)))

    def _is_elsewhere(self, view: View) -> bool:
        """Tell whether a living world is known of which the lead of a new one cannot know: it would
        have made a higher number."""
        newest = self._side.generation.number
        return any(
            contact.status.generation > newest
            and counter_of(contact.status.generation) >= counter_of(view.generation)
            and view.rank_of(contact.peer.id) < 0
            for contact in self._side.contacts.inside()
        )

    def _adopt(self, view: View, now: float) -> None:
        side = self._side
        if view.generation <= side.generation.highest or side.standing.evicted:
            return
        side.generation.highest = view.generation
        if view.rank_of(side.me.id) < 0:
            return
        if side.generation.goes_on:
            number = side.generation.number
            self._departures.end(GenerationEnd(number, NEWER_FORMED), now)
        early_end = side.generation.adopt(view, now)
        self._promise.release()
        side.waiting.over()
        for peer in side.unreached():
            # Two that came at the same time may still be shaking hands.
            side.effects.append(Dial(peer, in_world=True))
        side.effects.append(Adopt(view))
        side.news()
        if early_end is not None:
            self._departures.end(early_end, now)

    def _wait_on(self, reason: str, now: float) -> None:
        side = self._side
        side.waiting.begin(reason, now, side.timing.tell_waiting_seconds)
        since = side.waiting.since
        if since is not None and now >= side.waiting.tell_at:
            side.effects.append(StillWaiting(now - since, reason))
            side.waiting.tell_at = now + (now - since)
        side.timers.look(side.waiting.tell_at)


def _lead_order(peer: Peer, status: PeerStatus) -> tuple[bool, int, str]:
    """Return what is compared of two that may lead."""
    return status.step < 0, peer.seat, peer.id
