"""Worlds in which one rank of each node speaks for the others: real meshes over loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.mesh.events import (
    BytesReceived,
    Close,
    ConnectionClosed,
    ConnectionProven,
    Dial,
    MessageReceived,
    NothingHeard,
    Send,
    SeveralProven,
)
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.messages import (
    FRAMES,
    HungUp,
    KeyChange,
    Message,
    Opened,
    Reachable,
    Relayed,
    Speaks,
    Superseded,
    Unreachable,
)
from slurm_resilience.mesh.model import GenerationEnd, Member, Peer, PeerStatus, Speakers
from slurm_resilience.mesh.protocol.bundling import GATHER_SECONDS
from slurm_resilience.mesh.protocol.links import NO_KEY, RETIRED, Offer, Offers
from slurm_resilience.mesh.protocol.relay import Relay, Told
from slurm_resilience.mesh.protocol.speaker_search import SEARCH_SECONDS, SpeakerSearch
from slurm_resilience.mesh.rendezvous import SharedDirectory
from tests.unit.mesh_peers import LIMIT, Crew, crew, leave, until, world

NODES, RANKS = 3, 3
SEATS = NODES * RANKS


def add(made: Crew, seat: int, incarnation: int = 0) -> Mesh:
    """Start a mesh on its node."""
    peer = Peer(
        id=f"peer-{seat}.{incarnation}",
        seat=seat,
        incarnation=incarnation,
        node=f"node{seat // RANKS}",
        host="127.0.0.1",
    )
    mesh = Mesh(SharedDirectory(made.place), peer, made.rules, speakers=True)
    made.all.append(mesh)
    mesh.start()
    mesh.say(PeerStatus())
    return mesh


def speakers(meshes: list[Mesh]) -> list[Mesh]:
    return [mesh for mesh in meshes if mesh._relay is not None and mesh._relay.speaks]


def links(mesh: Mesh) -> set[str]:
    """Ids of the peers that a process has a connection to."""
    with mesh._lock:
        return {connection.name for connection in mesh._transport.connections.values()}


def test_connections_grow_with_nodes(tmp_path: Path) -> None:
    with crew(tmp_path, SEATS) as made:
        meshes = [add(made, seat) for seat in range(SEATS)]
        world(meshes)
        assert {mesh.me.node for mesh in speakers(meshes)} == {m.me.node for m in meshes}
        for mesh in meshes:
            near = {m.me.id for m in meshes if m.me.node == mesh.me.node and m is not mesh}
            assert near <= links(mesh)
            assert mesh in speakers(meshes) or len(links(mesh) - near) < len(meshes) - RANKS


def die(made: Crew, mesh: Mesh) -> None:
    """End a process, as its kernel does: its sockets are closed, and nothing is said."""
    with mesh._lock:
        for number in list(mesh._transport.connections):
            mesh._transport.close(number)
    mesh._transport.stop(LIMIT)
    made.all.remove(mesh)


@pytest.mark.parametrize("speaks", [True, False], ids=["speaker", "other rank"])
def test_a_death_ends_the_world_and_no_other_rank_is_lost(tmp_path: Path, speaks: bool) -> None:
    with crew(tmp_path, SEATS) as made:
        meshes = [add(made, seat) for seat in range(SEATS)]
        view = world(meshes)
        victim = next(mesh for mesh in meshes if (mesh in speakers(meshes)) is speaks)
        die(made, victim)
        left = [mesh for mesh in meshes if mesh is not victim]
        until(lambda: all(mesh.end is not None for mesh in left), "all know of the death")
        assert {mesh.end.culprit for mesh in left if mesh.end is not None} == {victim.me.id}
        leave(left, view)
        after = world(left, SEATS - 1)
        assert after.rank_of(victim.me.id) == -1


def test_the_keys_reach_all_and_a_change_is_made_once(tmp_path: Path) -> None:
    with crew(tmp_path, SEATS) as made:
        meshes = [add(made, seat) for seat in range(SEATS)]
        view = world(meshes)
        number = view.generation
        for mesh in meshes:
            mesh.put(number, f"of {mesh.me.seat}", b"x")
            mesh.change(KeyChange(number, 0, "sum", add=1), LIMIT)
        for mesh in meshes:
            mesh.get(number, [f"of {seat}" for seat in range(SEATS)], LIMIT)
        until(
            lambda: all(mesh.known(number).get("sum") == b"9" for mesh in meshes),
            "the sum is known to all",
        )


def test_a_change_that_is_asked_for_twice_is_made_once(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as made:
        meshes = [add(made, seat) for seat in range(2)]
        number = world(meshes).generation
        change = KeyChange(number, 7, "sum", add=1)
        with meshes[0]._lock:
            for _ in range(2):
                assert meshes[0]._keys.hear(0, "peer-1.0", change)
        assert meshes[0].known(number)["sum"] == b"1"


def test_a_replaced_rank_comes_back(tmp_path: Path) -> None:
    with crew(tmp_path, SEATS) as made:
        meshes = [add(made, seat) for seat in range(SEATS)]
        view = world(meshes)
        victim = speakers(meshes)[0]
        die(made, victim)
        left = [mesh for mesh in meshes if mesh is not victim]
        until(lambda: all(mesh.end is not None for mesh in left), "all know of the death")
        leave(left, view)
        after = world(left, SEATS - 1)
        newcomer = add(made, victim.me.seat, 1)
        first = next(mesh for mesh in left if after.rank_of(mesh.me.id) == 0)
        until(lambda: first.newcomers(), "the newcomer is known to the first rank")
        first.over(GenerationEnd(after.generation, "a newcomer joins", "", "join"))
        until(lambda: all(mesh.end is not None for mesh in left), "all know of the end")
        leave(left, after)
        world([*left, newcomer], SEATS)


def test_a_rank_that_does_not_speak_is_seldom_awake() -> None:
    peers = [Peer(f"peer-{seat}", seat, node=f"node{seat // 2}") for seat in range(4)]
    patience = 2.0
    relay = Relay(peers[1], 0.0, lambda: patience, lambda _: PeerStatus())
    relay.step(ConnectionProven(1, peers[0], PeerStatus()), 0.0)
    relay.step(MessageReceived(1, peers[0].id, peers[0].id, Speaks((1, 0))), 0.0)
    members = tuple(Member(peer, PeerStatus()) for peer in peers[2:])
    relay.step(MessageReceived(1, peers[0].id, peers[0].id, Reachable((1, -2), members)), 0.0)
    relay.tick(1.0)
    relay.flush(1.0)
    assert relay.wake_at >= 1.0 + patience / 4


@pytest.mark.parametrize(("word", "reaches"), [(NO_KEY, True), (RETIRED, False)])
def test_an_old_word_on_a_speaker_comes_late_over_another_connection(
    word: tuple[int, int], reaches: bool
) -> None:
    """Two ranks that dial each other have two connections for a moment, each with its own pace."""
    peers = [Peer(f"peer-{seat}", seat, node=f"node{seat // 2}") for seat in range(4)]
    relay = Relay(peers[1], 0.0, lambda: 2.0, lambda _: PeerStatus())

    def hear(link: int, message: Message) -> list[Any]:
        return relay.step(MessageReceived(link, peers[0].id, peers[0].id, message), 0.0)

    relay.step(ConnectionProven(1, peers[0], PeerStatus()), 0.0)
    relay.step(ConnectionProven(2, peers[0], PeerStatus()), 0.0)
    hear(1, Speaks((1, 0)))
    hear(2, Speaks(word))
    effects = hear(1, Reachable((1, -2), (Member(peers[2], PeerStatus()),)))
    assert any(isinstance(effect, Told) for effect in effects) is reaches


def test_a_rank_that_begins_to_speak_on_purpose_is_no_other_way() -> None:
    peers = [Peer(f"peer-{seat}", seat, node=f"node{seat // 2}") for seat in range(4)]
    relay = Relay(peers[1], 0.0, lambda: 2.0, lambda _: PeerStatus())
    relay.step(ConnectionProven(1, peers[0], PeerStatus()), 0.0)
    relay.step(MessageReceived(1, peers[0].id, peers[0].id, Speaks((1, 0))), 0.0)
    members = tuple(Member(peer, PeerStatus()) for peer in peers[2:])

    def ways(key: tuple[int, int]) -> list[str]:
        message = MessageReceived(1, peers[0].id, peers[0].id, Reachable(key, members))
        told = [effect.event for effect in relay.step(message, 0.0) if isinstance(effect, Told)]
        new = [event.members for event in told if isinstance(event, SeveralProven)]
        other = [event.peer.id for event in told if isinstance(event, ConnectionProven)]
        return [member.peer.id for members in new for member in members] + other

    assert ways((0, -2)) == ["peer-2", "peer-3"]
    assert ways((1, -2)) == []
    assert ways((2, -3)) == ["peer-2", "peer-3"], "another one speaks"


def test_the_machine_of_a_rank_whose_connection_was_reset_is_asked() -> None:
    peers = [Peer(f"peer-{seat}", seat, node=f"node{seat}") for seat in range(2)]
    relay = Relay(peers[0], 0.0, lambda: 2.0, lambda _: PeerStatus())
    relay.step(ConnectionProven(1, peers[1], PeerStatus()), 0.0)
    assert Dial(peers[1]) in relay.step(ConnectionClosed(1, "reset", "reset"), 1.0)


def test_a_rank_that_is_slow_to_answer_is_given_time_before_the_next_is_dialed() -> None:
    peers = [Peer(f"peer-{seat}", seat, node=f"node{seat // 4}") for seat in range(8)]
    search = SpeakerSearch(peers[0])
    search.know((peers[4],), 0.0)
    assert search.due((), 0.0) == [peers[4]]
    # One more is known now: that makes the first no less able to answer.
    search.know((peers[5],), 0.1)
    assert search.due((), 0.1) == []
    assert search.due((), SEARCH_SECONDS) == [peers[5]]


@pytest.mark.parametrize("urgent", [False, True])
def test_a_rank_that_was_held_up_dials_no_other_for_that(urgent: bool) -> None:
    """A machine may have far more ranks than cores, and each that is tried in vain has to answer
    too. One that has lost its way looks at once all the same."""
    peers = [Peer(f"p{seat}", seat, node=f"n{seat // 4}") for seat in range(8)]
    search = SpeakerSearch(peers[0])
    for peer in peers:
        search.know((peer,), 0.0)
    assert [peer.seat for peer in search.due((), 0.0)] == [4]
    if urgent:
        search.hurry(5.0)
    search.catch_up(5.0)
    assert [peer.seat for peer in search.due((), 5.0)] == ([4] if urgent else [])
    assert urgent or [peer.seat for peer in search.due((), 5.0 + SEARCH_SECONDS)] == [5]


LINKS = st.integers(1, 4)
PEERS = st.sampled_from(["p1", "p2", "p3"])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), LINKS, PEERS),
            st.tuples(st.just("withdraw"), LINKS, PEERS),
            st.tuples(st.just("drop_link"), LINKS),
            st.tuples(st.just("drop_peer"), PEERS),
        ),
        max_size=40,
    )
)
def test_offers_are_the_same_by_link_and_by_peer(calls: list[tuple[Any, ...]]) -> None:
    offers, known = Offers(), dict[tuple[int, str], Offer]()
    for stamp, (name, *words) in enumerate(calls):
        if name == "put":
            link, peer_id = words
            known[link, peer_id] = Offer(Member(Peer(peer_id, 1), PeerStatus()), (1, 0), stamp)
            offers.put(link, {peer_id: known[link, peer_id]})
            continue
        getattr(offers, name)(*words)
        gone = {"withdraw": tuple(words)}
        known = {
            where: offer
            for where, offer in known.items()
            if where != gone.get(name)
            and not (name == "drop_link" and where[0] == words[0])
            and not (name == "drop_peer" and where[1] == words[0])
        }
    for link in range(1, 5):
        assert offers.over(link) == {p: o for (on, p), o in known.items() if on == link}
    for peer_id in ("p1", "p2", "p3"):
        assert offers.to(peer_id) == {on: o for (on, p), o in known.items() if p == peer_id}


def test_a_rank_that_leaves_the_dialing_to_another_begins_with_the_lowest_seat() -> None:
    peers = [Peer(f"peer-{seat}", seat, node=f"node{seat // 4}") for seat in range(8)]
    search = SpeakerSearch(peers[4])
    for peer in peers[:4]:
        search.know((peer,), 0.0)
    assert search.due((), 0.0) == []
    assert search.due((), SEARCH_SECONDS) == [peers[0]]


def test_a_member_of_ones_world_is_looked_for_at_once() -> None:
    peers = [Peer(f"peer-{seat}", seat, node=f"node{seat // 2}") for seat in range(4)]
    relay = Relay(peers[0], 0.0, lambda: 2.0, lambda _: PeerStatus())
    relay.begin(Speakers(here=peers[0]), 0.0)
    relay.tick(0.0)
    relay.carry(Dial(peers[2]), 0.0)
    assert relay.tick(0.1) == [], "its speaker may be about to be written down"
    relay.carry(Dial(peers[2], in_world=True), 0.1)
    assert relay.tick(0.1) == [Dial(peers[2])]
    relay.carry(Dial(peers[3], in_world=True), 0.1)
    assert relay.tick(0.1) == [], "one rank of a node is enough"


def test_a_new_speaker_looks_for_another_rank_where_a_link_is_silent() -> None:
    peers = [Peer(f"peer-{seat}", seat, node=f"node{seat // 2}") for seat in range(4)]
    relay = Relay(peers[1], 0.0, lambda: 2.0, lambda _: PeerStatus())
    relay.step(ConnectionProven(1, peers[0], PeerStatus()), 0.0)
    relay.step(MessageReceived(1, peers[0].id, peers[0].id, Speaks((1, 0))), 0.0)
    relay.step(ConnectionProven(2, peers[2], PeerStatus()), 0.0)
    members = tuple(Member(peer, PeerStatus()) for peer in peers[2:])
    relay.step(MessageReceived(2, peers[2].id, peers[2].id, Reachable((1, -2), members)), 0.0)
    now = 0.0
    dialed: list[tuple[float, Dial]] = []
    while now < 4.0:
        dialed += [(now, effect) for effect in relay.tick(now) if isinstance(effect, Dial)]
        relay.flush(now)
        now = relay.wake_at
    assert dialed[0][1] == Dial(peers[3]), "the one that is linked does not answer"
    assert 2.0 < dialed[0][0] < 3.0, "as it speaks in the silent one's place"


def test_a_rank_that_speaks_never_again_is_not_waited_for() -> None:
    peers = [Peer(f"peer-{seat}", seat, node="node0") for seat in range(3)]
    relay = Relay(peers[1], 0.0, lambda: 2.0, lambda _: PeerStatus())
    for number, (peer, key) in enumerate(((peers[0], RETIRED), (peers[2], (1, -2))), 1):
        relay.step(ConnectionProven(number, peer, PeerStatus()), 0.0)
        relay.step(MessageReceived(number, peer.id, peer.id, Speaks(key)), 0.0)
    relay.tick(0.1)
    assert not relay.speaks
    relay.step(ConnectionClosed(2, "closed", "closed"), 0.2)
    relay.tick(0.2)
    assert relay.speaks


def test_who_speaks_for_one_whose_connection_was_reset_has_a_higher_key() -> None:
    peers = [Peer(f"peer-{seat}", seat, node=f"node{seat // 2}") for seat in range(4)]
    relay = Relay(peers[1], 0.0, lambda: 2.0, lambda _: PeerStatus())
    relay.step(ConnectionProven(1, peers[0], PeerStatus()), 0.0)
    relay.step(MessageReceived(1, peers[0].id, peers[0].id, Speaks((1, 0))), 0.0)
    relay.step(ConnectionClosed(1, "reset", "reset"), 1.0)
    relay.tick(1.0)
    relay.step(ConnectionProven(2, peers[2], PeerStatus()), 1.0)
    assert relay.flush(1.0) == [], "more peers may follow"
    sent = [effect for effect in relay.flush(1.0 + GATHER_SECONDS) if isinstance(effect, Send)]
    # The one before may live, stopped: its connection to the other node is still there.
    assert [effect.message.key for effect in sent if isinstance(effect.message, Reachable)] == [
        (2, -1)
    ]


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_waits_at_its_start_is_not_waited_for(waits: bool) -> None:
    """It came when the speaker was silent already. Ranks of other nodes gave up those of this one,
    or were given up by them, before it spoke."""
    new, speaker, me = (Peer(f"peer-{seat}", seat, node="n") for seat in range(3))
    relay = Relay(me, 0.0, lambda: 1.0, lambda _: PeerStatus())
    relay.step(ConnectionProven(1, speaker, PeerStatus()), 0.0)
    relay.step(MessageReceived(1, speaker.id, speaker.id, Speaks((1, -1))), 0.0)
    for tenth in range(1, 112):
        now = tenth / 10
        if tenth <= 100:
            relay.step(BytesReceived(1, speaker.id), now)
        if tenth == (105 if waits else 95):
            relay.step(ConnectionProven(2, new, PeerStatus()), now)
        relay.step(BytesReceived(2, new.id), now)
        relay.tick(now)
    assert relay.speaks is waits


def test_what_a_silent_speaker_does_not_pass_on_is_no_silence() -> None:
    """Ranks elsewhere are not judged by the time in which nothing could come through, and another
    way is looked for at once, also where it is no speaker that has fallen silent."""
    me, near, far = Peer("me", 1, node="n0"), Peer("near", 3, node="n0"), Peer("far", 2, node="n1")
    relay = Relay(me, 0.0, lambda: 1.0, lambda _: PeerStatus())
    relay.step(ConnectionProven(1, near), 0.0)
    relay.step(MessageReceived(1, "near", "near", Speaks((0, -3))), 0.0)
    reached = Reachable((1, -2), (Member(far, PeerStatus()),))
    relay.step(MessageReceived(1, "near", "near", reached), 0.0)
    for tenth in range(11):
        relay.tick(tenth / 10)
    effects = relay.tick(1.1)
    told = [one.event for one in effects if isinstance(one, Told)]
    assert NothingHeard(("far",), pytest.approx(1.1)) in told
    assert Dial(far) in effects


def test_the_only_rank_of_a_node_is_dialed_again_beside_none() -> None:
    search = SpeakerSearch(Peer("me", 0, node="n0"))
    for seat in (1, 2):
        search.know((Peer(f"p{seat}", seat, node=f"n{seat}"),), 0.0)
    assert len(search.due((), 0.0)) == 2
    assert len(search.due((), 1.0)) == 2


def test_a_silent_speaker_is_spoken_for_while_others_may_still_come() -> None:
    me, speaker, dead = (Peer(f"p{seat}", seat, node="n0") for seat in (1, 0, 2))
    relay = Relay(me, 0.0, lambda: 1.0, lambda _: PeerStatus())
    relay.carry(Dial(dead), 0.0)
    relay.step(ConnectionProven(1, speaker), 0.0)
    relay.step(MessageReceived(1, speaker.id, speaker.id, Speaks((1, 0))), 0.0)
    for tenth in range(1, 13):
        relay.tick(tenth / 10)
    assert relay.speaks


def test_a_connection_that_is_ended_on_purpose_is_no_death_elsewhere() -> None:
    """A speaker may have lost the connection that counts, and know the other end of this one as
    closed."""
    me, near, far = Peer("me", 0, node="n0"), Peer("near", 1, node="n0"), Peer("far", 2, node="n1")
    relay = Relay(me, 0.0, lambda: 1.0, lambda _: PeerStatus())
    for number, peer in enumerate((near, far)):
        relay.step(ConnectionProven(number, peer), 0.0)
    relay.flush(0.1)
    relay.step(MessageReceived(0, "near", "near", Superseded()), 0.1)
    relay.step(ConnectionClosed(0), 0.1)
    sent = [one.message for one in relay.flush(0.2) if isinstance(one, Send)]
    assert sent == [Unreachable(("near",), "reset")]


NEAR_LINK = 9
"""To another rank of the same node, which may speak as well."""


class TwoSpeakers:
    """A rank that speaks, and how it sees the way to another one that does."""

    def __init__(self) -> None:
        self.far = Peer("far", 1, node="n1")
        self._relay = Relay(Peer("me", 0, node="n0"), 0.0, lambda: 1.0, lambda _: PeerStatus())
        self._relay.step(ConnectionProven(NEAR_LINK, Peer("near", 2, node="n0")), 0.0)

    def link(self, number: int) -> list[Any]:
        """Have a link come; return what the membership is told of the way."""
        member = Member(self.far, PeerStatus())
        self._relay.step(ConnectionProven(number, self.far), 0.0)
        reached = Reachable((1, -1), (member,))
        return self._told(MessageReceived(number, "far", "far", reached))

    def lose(self, number: int) -> list[Any]:
        return self._told(ConnectionClosed(number, "timed out", "lost"))

    def hear(self, number: int, message: Message) -> list[Any]:
        """Have the other one say this of the way, over a link."""
        relayed = Relayed(("far",), ("me",), FRAMES.encode(message))
        return self._told(MessageReceived(number, "far", "far", relayed))

    def carry(self, effect: Close | Dial) -> None:
        self._relay.carry(effect, 0.0)

    def _told(self, event: Any) -> list[Any]:
        return [one.event for one in self._relay.step(event, 0.0) if isinstance(one, Told)]


def test_a_word_on_a_way_that_a_cut_has_held_is_void_after_a_newer_one() -> None:
    """An older link sends again what a cut has held, long after a newer one has said more."""
    pair = TwoSpeakers()
    pair.link(1)
    pair.link(2)
    assert any(isinstance(event, ConnectionProven) for event in pair.hear(2, Opened(5)))
    assert not pair.hear(1, Opened(3))
    assert not pair.hear(1, HungUp(0, 4)), "its sender has opened the way since"
    (closed,) = pair.hear(2, HungUp(0, 5))
    assert isinstance(closed, ConnectionClosed) and closed.cause == "lost"


@pytest.mark.parametrize("asked_by", ["the membership", "the other side"])
def test_a_way_that_is_wanted_while_no_link_leads_there_is_opened_with_the_next(
    asked_by: str,
) -> None:
    pair = TwoSpeakers()
    (first,) = pair.link(1)
    assert isinstance(first, SeveralProven)
    pair.carry(Close(first.connections[0]))
    assert not pair.lose(1)
    if asked_by == "the membership":
        pair.carry(Dial(pair.far))
    else:
        pair.hear(NEAR_LINK, Opened(7))
    assert [type(event) for event in pair.link(2)] == [ConnectionProven]
