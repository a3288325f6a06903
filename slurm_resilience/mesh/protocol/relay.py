"""Ways to the peers on other nodes: over one speaker of each node. Pure.

```
 rank a ──► speaker of its node ══ one connection for two nodes ══► speaker of the other ──► rank b
```
A `Relay` stands between the connections of a process (*links*) and its membership. The ranks of a
node are linked with each other, and the membership sees these links as they are. For each peer
elsewhere it sees a connection of its own, with a negative number, which is a *way* over links:
its messages travel inside `Relayed`, in order.

- A process that holds a link to another node *speaks*: it tells that node's speaker which ranks
  are here (`Reachable`), and the ranks here which ranks are there. One process of a node does so on
  purpose: the lowest seat that is there when none speaks. It keeps this part while it lives, and
  looks for the other nodes.
- A rank is dead when its own node says that its link was closed. A speaker's death says nothing of
  the ranks that it spoke for: their ways are held open, while the lowest seat left there speaks.
- A speaker that is silent, and may live, is spoken for too: a later one has the higher key.
- A way that changes may have lost messages: the membership says again what may have been lost
  (`ConnectionProven.rerouted`), and asks again for what is not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from slurm_resilience.mesh.events import (
    BytesReceived,
    Close,
    ConnectionClosed,
    ConnectionProven,
    Dial,
    DialKnown,
    Event,
    Finish,
    MessageReceived,
    NothingHeard,
    PeerAbsent,
    Send,
    SeveralProven,
)
from slurm_resilience.mesh.messages import (
    FRAMES,
    Bundle,
    Bundled,
    Leaving,
    Reachable,
    Relayed,
    Roster,
    Speaks,
    Superseded,
    Unreachable,
)
from slurm_resilience.mesh.model import CloseCause, Member, Peer, PeerStatus, Speakers
from slurm_resilience.mesh.protocol.bundling import Outboxes, Waits, gather_seconds, waits_of
from slurm_resilience.mesh.protocol.links import (
    NO_KEY,
    RETIRED,
    Found,
    Key,
    Links,
    Near,
    Offer,
    Offers,
    Ways,
)
from slurm_resilience.mesh.protocol.routing import Routing, addressed
from slurm_resilience.mesh.protocol.speaker_role import SpeakerRole
from slurm_resilience.mesh.protocol.speaker_search import START_SECONDS, SpeakerSearch
from slurm_resilience.mesh.protocol.way_choice import WayChoice
from slurm_resilience.mesh.protocol.way_connections import WayConnections

HOLD_SECONDS = 1.0
"""So long a way without a speaker is held open at least, and as long as a silent speaker would be
waited for. Another one takes milliseconds to speak, where it has a core to run on."""
QUIET_SHARE = 0.1
"""A heartbeat waits for others for so large a part of the patience with a speaker."""
LATE_SECONDS = 0.2
"""A turn that comes so much too late: this process did not run, and judges none by that time."""


class Told(NamedTuple):
    """Tell the membership."""

    event: Event


LinkEffect = Told | Send | Close | Finish | Dial | DialKnown
"""The connections of all but `Told` are links."""


class Relay:
    """The ways of one process."""

    def __init__(
        self,
        me: Peer,
        now: float,
        patience: Callable[[], float],
        status_of: Callable[[str], PeerStatus],
    ) -> None:
        """
        Args:
            me: this process.
            now: the time.
            patience: seconds of a speaker's silence after which another one speaks.
            status_of: the newest status of a rank of this node.
        """
        self._me = me
        self._near = Near(patience)
        self._status_of = status_of
        self._links = Links(me.node)
        self._offers = Offers()
        self._ways = Ways()
        self._choice = WayChoice(me, self._links, self._offers, self._near, self._ways)
        self._search = SpeakerSearch(me)
        self._role = SpeakerRole(me, self._near, self._search, now)
        self._asked = now
        """When the next turn was asked for."""
        self._late = 0.0
        """So much later the last one came."""
        self._effects: list[LinkEffect] = []
        self._outboxes = Outboxes(me, self._links, self._offers, self._effects.append, now)
        self._routing = Routing(me.id, self._ways, self._offers, self._outboxes)
        self._connections = WayConnections(me, self._ways, self._routing, self._tell, status_of)

    # -- for the owner ----------------------------------------------------------------------------

    def begin(self, speakers: Speakers, now: float) -> list[LinkEffect]:
        """Take in what is written down of speakers as this process, one of the first, starts.

        Args:
            speakers: with the one of this node.
            now: the time.
        """
        here = speakers.here
        assert here is not None
        if not self._role.begin(here, now):
            # It tells of the ranks that it knows, which are dialed then: so no two dial each other.
            self._search.written[here.id] = here.node
            self._dial(here, now)
        self._find(speakers, now)
        return self._drain()

    def look_again(self, speakers: Speakers | None, now: float) -> list[LinkEffect]:
        """Look for those that may have come, or may be reached again.

        Args:
            speakers: as they are written down now; None: that is not known.
            now: the time.
        """
        self._outboxes.now = now
        if speakers is not None:
            self._find(speakers, now)
        for way in list(self._ways.to.values()):
            self._connections.reopen(way)
        return self._drain()

    def _find(self, speakers: Speakers, now: float) -> None:
        patience = self._near.patience()
        for peer in speakers.before:
            self._search.find(peer, now, patience, finds_me=False)
        for peer in speakers.after:
            self._search.find(peer, now, patience, finds_me=True)

    @property
    def looks_beyond(self) -> bool:
        """Tell whether this process has to know who is written down of other nodes."""
        return self._role.looks_beyond

    def looks_at(self, node: str) -> bool:
        """Tell whether this process has to know the ranks of a node that are written down."""
        if node == self._me.node:
            return True
        return self._role.looks_beyond and not self._search.relies_on_speaker_of(node)

    def is_starting(self, now: float) -> bool:
        """Tell whether the ranks of this node are left to dial each other as they find its speaker:
        two that dial each other have a connection too many."""
        return self._role.is_starting(now)

    def step(self, event: Event, now: float) -> list[LinkEffect]:
        """Take an event of a link in."""
        self._outboxes.now = now
        match event:
            case ConnectionProven():
                self._meet(event, now)
            case ConnectionClosed():
                self._part(event, now)
            case MessageReceived():
                self._hear(event, now)
            case BytesReceived(connection=number):
                self._mark(number, now)
                if not self._links.is_far(number):
                    self._tell(event)
            case PeerAbsent(peer_id=peer_id):
                if peer_id in self._search.written:
                    # There may be other ranks of its node.
                    self._effects.append(DialKnown())
                if peer_id not in self._ways.to:
                    self._near.end(peer_id, now)
                    self._send_far(Unreachable((peer_id,), "closed"))
                self._end(peer_id)
                self._tell(event)
                self._send_near(Unreachable((peer_id,), "closed"))
            case _:
                self._tell(event)
        return self._drain()

    def carry(self, effect: Send | Close | Finish | Dial, now: float) -> list[LinkEffect]:
        """Carry an effect of the membership out."""
        self._outboxes.now = now
        match effect:
            case Send(connections=numbers, message=message, calm=calm):
                links = self._routing.send(numbers, message, calm)
                if links:
                    self._effects.append(Send(links, message))
            case Dial(peer=peer, in_world=in_world):
                self._dial(peer, now)
                if in_world:
                    self._search.hurry_to(peer.node, now)
            case Close(connection=number):
                self._close(number, now)
            case Finish(connection=number) if number > 0:
                self._effects.append(effect)
        return self._drain()

    def retire(self, now: float) -> list[LinkEffect]:
        """Speak for no other rank any more: they go on without this process, and close their links
        to it, which it must not take, and tell, for their deaths."""
        self._outboxes.now = now
        self._role.retire()
        self._send_near(Speaks(RETIRED))
        for number in self._links.far():
            self._close(number, now)
        return self._drain()

    def tick(self, now: float) -> list[LinkEffect]:
        """Do what time brings; call it after events, and at `wake_at`; then `flush`."""
        self._outboxes.now = now
        late = self._late = now - self._asked
        if late > LATE_SECONDS:
            self._near.catch_up(late, now)
            self._links.catch_up(late, now)
            self._role.catch_up(late)
            self._search.catch_up(late)
        self._note_silence(now)
        if self._role.should_speak(self._near_peers(), now):
            self._speak(now)
        for way in tuple(self._ways.held.values()):
            if now - way.lost_at >= self._hold_seconds:
                self._connections.forget(way, "no way leads to it", "lost")
        if self._role.searches and now >= self._search.next_at:
            silent = self._links.silent_far(now, self._near.patience()) if self._took_over else {}
            reached = {
                offer.member.peer.node for offer in self._far_offers(except_over=silent.keys())
            }
            self._effects += map(Dial, self._search.due(reached, now, silent.values()))
        self._asked = self._wake_at(now)
        return self._drain()

    def flush(self, now: float) -> list[LinkEffect]:
        """Send what has waited for the end of the turn; heartbeats wait for others."""
        self._outboxes.now = now
        self._outboxes.flush(self._waits(now))
        return self._drain()

    @property
    def speaks(self) -> bool:
        """Tell whether other nodes are reached over this process, on purpose."""
        return self._role.speaks

    @property
    def wake_at(self) -> float:
        """When `tick` must be called, if nothing happens before."""
        return min(self._asked, self._outboxes.next_at(self._waits(self._outboxes.now)))

    def _waits(self, now: float) -> Waits:
        """Return how long words wait for others. Those that no other rank waits for: only where
        they meet any. A heartbeat: only where this process has its turns in time, too. On too few
        cores it would wait for the next one besides."""
        meets = self._role.key != NO_KEY
        quiet = QUIET_SHARE * self._near.patience() if meets else 0.0
        coming = self._me.seats if self._role.is_starting(now) else 0
        gathers = gather_seconds(coming)
        return waits_of(
            quiet=quiet if self._late < quiet else 0.0,
            calm=gathers if meets else 0.0,
            gathers=gathers,
        )

    @property
    def _took_over(self) -> bool:
        """Tell whether this process speaks in the place of another one, which may live. Then those
        of other nodes may be silent for the same reason, and their ranks speak, too."""
        return self._role.key[0] > 1

    @property
    def _hold_seconds(self) -> float:
        return max(HOLD_SECONDS, self._near.patience())

    def _wake_at(self, now: float) -> float:
        due = [now + self._near.patience() / 4]
        if self._role.searches:
            due.append(self._search.next_at)
        due += [way.lost_at + self._hold_seconds for way in self._ways.held.values()]
        start_ends_at = self._role.start_ends_at(now)
        if start_ends_at is not None:
            due.append(start_ends_at)
        return max(now + 0.001, min(due))

    # -- who speaks -------------------------------------------------------------------------------

    def _note_silence(self, now: float) -> None:
        """Leave the ways over a speaker that has fallen silent, if there are others."""
        for peer_id in self._near.change_silent(now):
            links = self._links.all_to(peer_id)
            if peer_id in self._near.silent:
                beyond = tuple(way.peer.id for way in self._ways.over(links))
                if beyond:
                    self._tell(NothingHeard(beyond, now - self._near.heard[peer_id]))
                    self._search.hurry(now)
            for link in links:
                self._choose(self._offers.over(link), now)

    def _speak(self, now: float) -> None:
        is_written = self._take_key(self._near.next_term, now)
        self._send_far(Reachable(self._role.key, self._near_members()))
        if is_written:
            return
        self._search.hurry(now)
        if not self._ways.to:
            self._effects.append(DialKnown())

    def _take_key(self, term: int, now: float) -> bool:
        is_written = self._role.take(term)
        self._send_near(Speaks(self._role.key))
        self._choose(self._ways.passed, now)
        return is_written

    def _near_peers(self) -> Iterable[Peer]:
        return (self._links.peers[number] for number in self._links.near().values())

    def _near_members(self) -> tuple[Member, ...]:
        everyone = (self._me, *self._near_peers())
        return tuple(Member(peer, self._status_of(peer.id)) for peer in everyone)

    # -- links ------------------------------------------------------------------------------------

    def _meet(self, event: ConnectionProven, now: float) -> None:
        number, peer = event.connection, event.peer
        known = self._links.to(peer.id) is not None
        self._links.add(number, peer, now)
        if not self._links.is_far(number):
            self._tell(event)
            if peer.seat >= 0:
                self._near.meet(peer.id, now)
                self._role.meet(now)
                self._announce(number)
                if not known:
                    self._send_far(Reachable(self._role.key, (Member(peer, event.status),)))
            return
        if self._role.is_retired:
            self._close(number, now)
            return
        self._search.know((peer,), now)
        if self._role.key == NO_KEY:
            self._take_key(0, now)
        self._outboxes.add((number,), Reachable(self._role.key, self._near_members()))
        ended = self._near.ended(now)
        if ended:
            # The one that spoke before may have ended together with these.
            self._outboxes.add((number,), Unreachable(ended, "closed"))

    def _announce(self, number: int) -> None:
        """Tell a rank of this node what this process has told the others."""
        self._outboxes.add((number,), Speaks(self._role.key))
        offers = self._far_offers()
        for key in sorted({offer.key for offer in offers}):
            members = tuple(offer.member for offer in offers if offer.key == key)
            self._outboxes.add((number,), Reachable(key, members))

    def _part(self, event: ConnectionClosed, now: float) -> None:
        number, cause = event.connection, event.cause
        if not self._links.is_far(number):
            self._tell(event)
        if cause == "closed" and number in self._links.superseded:
            cause = "reset"  # that says nothing of its life
        self._drop_link(number, cause, now)

    def _drop_link(self, number: int, cause: CloseCause, now: float) -> None:
        far = self._links.is_far(number)
        peer, last = self._links.drop(number)
        self._outboxes.drop(number)
        lost = self._offers.drop_link(number)
        if peer is None:
            return
        if last and far and cause == "closed":
            self._end(peer.id)
            self._send_near(Unreachable((peer.id,), "closed"))
        elif last and far and cause == "reset" and not self._role.is_retired:
            # Dead, or it took this process for lost: its machine can tell.
            self._effects.append(Dial(peer))
        elif last and not far and peer.seat >= 0:
            self._near.forget(peer.id)
            if cause == "closed":
                self._near.end(peer.id, now)
            self._search.meet(peer.id)
            self._send_far(Unreachable((peer.id,), cause))
        other = self._links.to(peer.id)
        if other is not None and not far and peer.seat >= 0:
            self._announce(other)
        if lost:
            self._search.hurry(now)
            self._choose(lost, now)

    def _close(self, number: int, now: float) -> None:
        if number > 0:
            self._outboxes.empty(number, False)
            self._effects.append(Close(number))
            self._drop_link(number, "lost", now)
            return
        self._connections.close(number)

    def _dial(self, peer: Peer, now: float) -> None:
        if peer.node == self._me.node:
            self._search.expect(peer)
            self._effects.append(Dial(peer))
            return
        way = self._ways.to.get(peer.id)
        if way is None:
            # At a start the speaker of its node may not have written that it is one.
            at = now + START_SECONDS if self._role.is_starting(now) else now
            self._search.know((peer,), at)
        else:
            self._connections.reopen(way)

    # -- messages ---------------------------------------------------------------------------------

    def _mark(self, number: int, now: float) -> None:
        peer = self._links.mark(number, now)
        if peer is not None and peer.id in self._near.heard:
            self._near.heard[peer.id] = now

    def _hear(self, event: MessageReceived, now: float) -> None:
        number = event.connection
        self._mark(number, now)
        match event.message:
            case Speaks(key=key):
                self._search.meet(event.speaker)
                self._near.learn_key(event.speaker, key)
                self._choose(self._offers.over(number), now)
            case Reachable() as offer:
                self._offer(number, (offer,), now)
            case Unreachable(peers=peers, cause=cause):
                self._withdraw(number, peers, cause, now)
            case Relayed() as relayed:
                self._pass_on(number, relayed, event.age)
            case Bundle(messages=messages):
                self._hear_several(messages, event, now)
            case Roster(peers=peers) if self._links.is_far(number):
                for peer in peers:
                    self._dial(peer, now)
            case _ if not self._links.is_far(number):
                if isinstance(event.message, Superseded):
                    self._links.superseded.add(number)
                elif isinstance(event.message, Leaving):
                    self._let_go(number, event.message, now)
                self._tell(event)

    def _hear_several(
        self, messages: Sequence[Bundled], event: MessageReceived, now: float
    ) -> None:
        number = event.connection
        for kind, alike in groupby(messages, key=type):
            if kind is Reachable:
                # A speaker tells of many nodes at once: none of them needs a turn of its own.
                reached = (message for message in alike if isinstance(message, Reachable))
                self._offer(number, reached, now)
                continue
            for message in alike:
                if isinstance(message, Relayed):  # as most are
                    self._pass_on(number, message, event.age)
                else:
                    self._hear(msgspec.structs.replace(event, message=message), now)

    def _let_go(self, number: int, message: Leaving, now: float) -> None:
        """Tell other nodes that a rank of this one leaves: its link is closed at once, and what it
        has said to them there is not read any more."""
        peer = self._links.peers[number]
        if peer.seat >= 0:
            self._near.end(peer.id, now)
            self._routing.pass_on(Relayed((peer.id,), (), FRAMES.encode(message)))
            self._send_far(Unreachable((peer.id,), "closed"))

    def _offer(self, number: int, reached: Iterable[Reachable], now: float) -> None:
        stamp = self._offers.stamp = self._offers.stamp + 1
        offers: dict[str, Offer] = {}
        for one in reached:
            key, members = one.key, one.members
            for node in {member.peer.node for member in members}:
                self._search.note_speaker(node, key)
            offers |= {member.peer.id: Offer(member, key, stamp) for member in members}
        known = self._search.know((offer.member.peer for offer in offers.values()), now)
        if len(known) < len(offers):
            offers = {peer_id: offers[peer_id] for peer_id in known}
        before, offered, ways = self._offers.over(number), self._offers.peers, self._ways.to
        touched = [peer_id for peer_id in known if peer_id in ways or peer_id in offered]
        new = {**offers}
        for peer_id in touched:
            old, offer = before.get(peer_id), new.pop(peer_id)
            if old is not None and old.key < offer.key and old.key[1] == offer.key[1]:
                # The same speaker has only begun to speak on purpose: that is no other way.
                offers[peer_id] = Offer(offer.member, offer.key, old.stamp)
        self._offers.put(number, offers)
        self._take_first(number, tuple(new.values()))
        self._choose(touched, now)

    def _take_first(self, number: int, offers: Sequence[Offer]) -> None:
        """Take the first way to each of several peers: nothing has to be chosen. As in `_choose`
        for one offer, which costs each rank of a large world far more as it starts."""
        if not offers:
            return
        self._routing.forget()
        is_far, stamp = self._links.is_far(number), self._offers.stamp
        if is_far:
            self._ways.passed |= {
                offer.member.peer.id: (number, stamp, offer.key) for offer in offers
            }
        if self._choice.may_take(number):
            members = tuple(offer.member for offer in offers)
            self._connections.open_new(members, [(number, stamp)] * len(members))
        if is_far:
            for key, alike in groupby(offers, key=lambda offer: offer.key):
                self._send_near(Reachable(key, tuple(offer.member for offer in alike)))

    def _withdraw(self, number: int, peers: Sequence[str], cause: CloseCause, now: float) -> None:
        for peer_id in peers:
            self._offers.withdraw(number, peer_id)
            if cause == "closed":
                self._end(peer_id)
        if self._links.is_far(number) and cause == "closed":
            self._send_near(Unreachable(tuple(peers), cause))
        self._choose(peers, now)

    def _pass_on(self, number: int, relayed: Relayed, age: float) -> None:
        near = self._links.near()
        if self._links.is_far(number):
            # There it is delivered, whatever it names.
            told, targets = addressed(relayed, ()), relayed.targets
            if not targets:
                self._outboxes.add_for_all(told, is_far=False)
            else:
                self._outboxes.add((near[target] for target in targets if target in near), told)
            if not targets or self._me.id in targets:
                self._connections.deliver(relayed, age)
        elif (self._links.peers[number].id,) == relayed.sources:
            self._routing.pass_on(relayed)
        else:
            self._connections.deliver(relayed, age)

    # -- ways -------------------------------------------------------------------------------------

    def _far_offers(self, except_over: Collection[int] = ()) -> list[Offer]:
        """Return what the ranks of this node were told of, but for what leads over these links."""
        return [
            self._offers.over(link)[peer_id]
            for peer_id, (link, *_) in self._ways.passed.items()
            if link not in except_over
        ]

    def _choose(self, peers: Iterable[str], now: float) -> None:
        """Choose the best way to each of these again, and tell of what has changed."""
        peers = list(peers)
        if not peers:
            return
        self._routing.forget()
        told: dict[Key, list[Member]] = {}
        lost = []
        new: list[Member] = []
        taken: list[tuple[int, int]] = []
        for peer_id, best, own in self._choice.of(peers):
            passed = None if best is None else (-best[2], best[1].stamp, best[1].key)
            if passed != self._ways.passed.get(peer_id):
                if best is None or passed is None:
                    self._ways.passed.pop(peer_id, None)
                    lost.append(peer_id)
                else:
                    self._ways.passed[peer_id] = passed
                    told.setdefault(best[1].key, []).append(best[1].member)
            if own is not None and peer_id not in self._ways.to:
                new.append(own[1].member)
                taken.append((-own[2], own[1].stamp))
            else:
                self._go(peer_id, own, now)
        self._connections.open_new(new, taken)
        for key, members in told.items():
            self._send_near(Reachable(key, tuple(members)))
        lost = [peer_id for peer_id in lost if not self._search.is_dead(peer_id)]
        if lost:
            self._send_near(Unreachable(tuple(lost), "lost"))

    def _go(self, peer_id: str, best: Found | None, now: float) -> None:
        way = self._ways.to.get(peer_id)
        if way is None:
            return
        if best is None:
            if way.chosen is not None:
                way.chosen, way.lost_at = None, now
                self._ways.held[peer_id] = way
                self._search.hurry(now)
        elif way.chosen != (-best[2], best[1].stamp):
            self._connections.change(way, best)

    def _end(self, peer_id: str) -> None:
        """Take note of a death."""
        self._routing.forget()
        self._search.dead(peer_id)
        self._offers.drop_peer(peer_id)
        self._ways.passed.pop(peer_id, None)
        way = self._ways.to.get(peer_id)
        if way is not None:
            self._connections.forget(way, "its process has ended", "closed")

    # -- effects ----------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if isinstance(event, SeveralProven) and self._effects:
            last = self._effects[-1]
            if isinstance(last, Told) and isinstance(last.event, SeveralProven):
                # A speaker tells of many nodes at once: none of them needs a step of its own.
                event = last.event.with_more(event)
                self._effects.pop()
        self._effects.append(Told(event))

    def _send_near(self, message: Bundled) -> None:
        self._outboxes.add_for_all(message, is_far=False)

    def _send_far(self, message: Bundled) -> None:
        self._outboxes.add_for_all(message, is_far=True)

    def _drain(self) -> list[LinkEffect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects
