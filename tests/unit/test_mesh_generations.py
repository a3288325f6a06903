"""Generations begin and end for all members alike: real meshes, over loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mesh_peers import LIMIT, crew, leave, meet, retime, unsettled, until, world

from slurm_resilience.errors import WireError
from slurm_resilience.mesh.dial_book import DialAddress
from slurm_resilience.mesh.events import MessageReceived
from slurm_resilience.mesh.mesh import Mesh, Stopped
from slurm_resilience.mesh.messages import Evict
from slurm_resilience.mesh.model import (
    BEATS_A_SECOND,
    GenerationEnd,
    Peer,
    PeerStatus,
    Timing,
    View,
)
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.mesh.protocol.contacts import Contact
from slurm_resilience.mesh.protocol.membership import Membership
from slurm_resilience.mesh.protocol.side import STRIKE_WORLDS, Losses
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import AddressList, SharedDirectory
from slurm_resilience.mesh.transport import Transport


def ended(meshes: list[Mesh]) -> list[GenerationEnd]:
    until(lambda: all(mesh.end for mesh in meshes), "the generation has ended everywhere")
    return [mesh.end for mesh in meshes if mesh.end]


def test_all_get_the_same_view(tmp_path: Path) -> None:
    with crew(tmp_path, 5, min_world=5) as peers:
        view = world(peers.several(5))
        assert [member.peer.seat for member in view.members] == [0, 1, 2, 3, 4]


def test_a_closed_peer_ends_the_generation_and_the_survivors_meet_again(tmp_path: Path) -> None:
    with crew(tmp_path, 4) as peers:
        meshes = peers.several(4)
        first = world(meshes)
        meshes[0].close()
        ends = ended(meshes[1:])
        assert {(end.kind, end.culprit) for end in ends} == {("lost", meshes[0].me.id)}
        leave(meshes[1:], first)
        second = world(meshes[1:])
        assert second.counter == first.counter + 1
        assert [member.peer.seat for member in second.members] == [1, 2, 3]


def test_who_was_held_up_itself_does_not_judge_the_others(tmp_path: Path) -> None:
    """A machine, or a whole cluster's virtual machines, stands still and comes back bit by bit."""
    timing = Timing(beat_seconds=0.05, silence_seconds=0.6)
    with crew(tmp_path, 2, min_world=2) as peers:
        first, second = (peers.add(seat, timing=timing) for seat in (0, 1))
        world([first, second])
        with second._lock:
            with first._lock:
                time.sleep(1.0)
            asked = first._membership.side.timers.wake_at
            until(
                lambda: first._membership.side.timers.wake_at != asked, "the first one looks around"
            )
            assert first.end is None
        time.sleep(0.2)
        assert first.end is second.end is None


@contextmanager
def one_stood_still(place: Path, outcome: int | None = None) -> Iterator[tuple[Mesh, View]]:
    """Have one of three stand still until the others have gone on without it, and are gone; yield
    it, and the last world that it was in."""
    timing = Timing(beat_seconds=0.05, silence_seconds=0.6)
    with crew(place, 3) as peers:
        stopped, *others = (peers.add(seat, timing=timing) for seat in (0, 1, 2))
        last = world([stopped, *others])
        with stopped._lock:
            ended(others)
            leave(others, last)
            world(others)
            if outcome is not None:
                SharedDirectory(place).outcome(outcome, 9, "")
            for mesh in others:
                mesh.close()
        yield stopped, last
        assert not stopped.evicted


def test_who_stood_still_while_the_others_ended_the_training_learns_of_it(tmp_path: Path) -> None:
    """It is in its block, and all others are gone: it would do their steps again."""
    with one_stood_still(tmp_path, outcome=0) as (stopped, _):
        until(lambda: stopped._membership.side.standing.finished, "it knows")


def test_who_stood_still_goes_on_where_those_that_gave_it_up_are_gone(tmp_path: Path) -> None:
    """All that is left of the training may lie in its memory."""
    with one_stood_still(tmp_path) as (stopped, last):
        ended([stopped])
        leave([stopped], last)
        assert world([stopped]).counter > last.counter


def test_machines_that_are_silent_are_given_up_in_one_wait() -> None:
    now = 100.0
    membership = Membership(Peer("0", 0), WorldRules(4, 1), Timing(), now)
    beat, silence = membership.side.beat_seconds, membership.side.silence_seconds

    def contacts(*silent: tuple[str, float]) -> list[Contact]:
        return [
            Contact(
                Peer(f"{seat}", seat, node=node), seat, PeerStatus(), now - seconds, now - seconds
            )
            for seat, (node, seconds) in enumerate(silent)
        ]

    lost = contacts(("a", silence + 0.01), ("a", silence - beat + 0.1), ("b", silence - beat))
    found = membership.side.patience_with(lost, now)
    assert found == {"a": silence - beat, "b": silence}
    alive = contacts(("a", silence + 0.01), ("a", 0.3))
    assert membership.side.patience_with(alive, now) == {"a": silence}


def test_nobody_goes_on_before_all_survivors_are_out(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as peers:
        meshes = peers.several(3)
        first = world(meshes)
        meshes[2].close()
        ended(meshes[:2])
        leave(meshes[:1], first)
        with pytest.raises(TimeoutError):
            meshes[0].meet(0.3)
        leave(meshes[1:2], first)
        world(meshes[:2])


def test_who_waits_says_for_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with crew(tmp_path, 2, min_world=2) as peers:
        peers.add(0, timing=Timing(tell_waiting_seconds=0.05)).say(PeerStatus())
        until(lambda: "1 of 2 ranks are there, at least 2" in caplog.text, "it is said")
        assert "missing: seat 1" in caplog.text


def test_who_was_stopped_for_long_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer gave its address up, and the stopped one never knew of the newcomer."""
    with crew(tmp_path, 2, min_world=2) as peers:
        meeting = SharedDirectory(tmp_path)
        peer = Peer(id="stopped", seat=1, node="n2", host="127.0.0.1")
        stopped = Mesh(meeting, peer, peers.rules)  # it listens, and does not answer
        meeting.enter(stopped.me)
        newcomer = peers.add(0, timing=Timing(known_again_seconds=2 * LIMIT), handshake_seconds=0.1)
        # A beat after the handshake's time was over.
        until(lambda: unsettled(newcomer) and not newcomer.beats(), "it is dialed")
        until(lambda: not unsettled(newcomer), "it is given up")
        retime(newcomer, known_again_seconds=0.2)
        monkeypatch.setattr(stopped, "_dial_known", lambda: None)
        peers.all.append(stopped.start())
        assert [view is not None for view in meet(peers.all)] == [True, True]


def test_who_stays_in_its_block_is_given_up(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as peers:
        meshes = [peers.add(seat, abort_timeout=0.3) for seat in range(3)]
        first = world(meshes)
        meshes[0].over(GenerationEnd(first.generation, "a fault", meshes[0].me.id))
        ended(meshes)
        leave(meshes[:2], first)
        world(meshes[:2])
        until(lambda: meshes[2].evicted, "the one that stayed knows")


def test_a_newer_process_takes_the_seat(tmp_path: Path) -> None:
    with crew(tmp_path, 3, min_world=3) as peers:
        meshes = peers.several(3)
        first = world(meshes)
        newer = peers.add(1, incarnation=1)
        until(lambda: meshes[1].evicted, "the old one knows")
        others = [meshes[0], meshes[2]]
        ended(others)
        leave([*others, meshes[1]], first)
        with pytest.raises(WireError, match="seat 1"):
            meshes[1].meet(LIMIT)
        # Its end must not be taken for the end of the training.
        second = world([*others, newer])
        assert [member.peer.incarnation for member in second.members] == [0, 1, 0]


def test_an_evicted_process_tells_nobody_to_stop(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        first = world(meshes)
        me = meshes[0].me.id
        with meshes[1]._lock:
            evict = Evict("told so")
            number = meshes[1]._membership.side.contacts.connections()[0]
            meshes[1]._take(MessageReceived(number, me, me, evict))
        assert [end.kind for end in ended(meshes)] == ["lost", "lost"]
        meshes[1].close()
        leave(meshes[:1], first)
        world(meshes[:1])


@pytest.mark.parametrize("leaves_at_once", [False, True])
def test_everybody_is_done(tmp_path: Path, leaves_at_once: bool) -> None:
    with crew(tmp_path, 3) as peers:
        meshes = peers.several(3)
        view = world(meshes)
        got: list[object] = []

        def finish(mesh: Mesh) -> None:
            mesh.say(PeerStatus("done", view.generation, 9))
            got.append(mesh.meet(LIMIT))
            if leaves_at_once:
                mesh.close()

        threads = [threading.Thread(target=finish, args=(mesh,)) for mesh in meshes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert got == [None, None, None]


def test_nobody_is_done_before_the_last(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        view = world(meshes)
        leave(meshes[:1], view, "done")
        with pytest.raises(TimeoutError):
            meshes[0].meet(0.3)
        leave(meshes[1:], view, "done")
        assert meet(meshes) == [None, None]


def test_a_spare_waits_steps_in_and_is_let_go(tmp_path: Path) -> None:
    with crew(tmp_path, 4, min_world=2, replica_size=2, start_patience=0.0) as peers:
        meshes = peers.several(2)
        views = meet(meshes)
        assert views[0] is not None and views[0].size == 2
        view = views[0]
        for mesh in meshes[:2]:
            mesh.say(PeerStatus("running", view.generation, 0, position=view.rank_of(mesh.me.id)))
            mesh.worked(view)
        meshes.append(peers.add(2))
        with pytest.raises(TimeoutError):
            meshes[2].meet(0.2)
        meshes[0].close()
        ended(meshes[1:2])
        meshes[1].say(PeerStatus("ready", view.generation, 1, position=1))
        second = world(meshes[1:])
        assert {member.peer.seat for member in second.members} == {1, 2}
        late = peers.add(3)
        until(lambda: len(late.picture()[1]) == 3, "the new spare sees both")
        leave(meshes[1:], second, "done")
        assert meet([*meshes[1:], late]) == [None, None, None]


def test_who_comes_late_finds_the_outcome(tmp_path: Path) -> None:
    with crew(tmp_path, 2, min_world=2) as peers:
        SharedDirectory(tmp_path).outcome(0, 100, "")
        assert peers.add(0).meet(LIMIT) is None


def test_a_break_by_one_reaches_all(tmp_path: Path) -> None:
    with crew(tmp_path, 4) as peers:
        calls: list[str] = []
        meshes = [peers.add(s, on_end=lambda end: calls.append(end.reason)) for s in range(4)]
        view = world(meshes)
        end = GenerationEnd(view.generation, "bad luck", meshes[2].me.id)
        meshes[2].over(end)
        assert ended(meshes) == [end] * 4
        until(lambda: len(calls) > 8, "the block is cut again and again while it is not left")
        assert set(calls) == {"bad luck"}


def test_a_break_of_an_older_generation_means_nothing(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        first = world(meshes)
        meshes[0].over(GenerationEnd(first.generation, "once"))
        ended(meshes)
        leave(meshes, first)
        second = world(meshes)
        meshes[0].over(GenerationEnd(first.generation, "late"))
        meshes[0].put(second.generation, "after", b"")
        meshes[1].get(second.generation, ["after"], LIMIT)
        assert meshes[0].end is None and meshes[1].end is None


def test_stop_ends_all(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as peers:
        meshes = peers.several(3)
        view = world(meshes)
        meshes[0].stop(GenerationEnd(view.generation, "it makes no sense", meshes[0].me.id, "stop"))
        ended(meshes[1:])
        for mesh in meshes[1:]:
            with pytest.raises(Stopped, match="no sense"):
                mesh.meet(LIMIT)


def test_a_last_word_is_heard_though_something_is_said_after_it(tmp_path: Path) -> None:
    """A machine is busy: this process says something before it reads what the other one said."""
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        view = world(meshes)
        with meshes[0].quiet():  # its thread reads nothing
            meshes[1].stop(GenerationEnd(view.generation, "no sense", meshes[1].me.id, "stop"))
            closing = threading.Thread(target=meshes[1].close)
            closing.start()
            until(lambda: not meshes[1]._transport.connections, "it is about to close")
            for step in range(20):
                meshes[0].say(PeerStatus("running", view.generation, step))
                time.sleep(0.005)
        with pytest.raises(Stopped, match="no sense"):
            meshes[0].meet(LIMIT)
        closing.join()


def test_a_dead_node_is_given_up_by_all_and_by_itself(tmp_path: Path) -> None:
    with crew(tmp_path, 4) as peers:
        meshes = peers.several(4)
        first = world(meshes)
        with Observer(f"dir:{tmp_path}") as observer:
            until(lambda: len(observer.picture().peers) == 4, "the observer sees all")
            observer.find("node2", "its memory is broken", dead=True)
            until(lambda: meshes[2].evicted, "it goes by itself")
            rest = [mesh for mesh in meshes if mesh is not meshes[2]]
            ended(rest)
            leave(rest, first)
            second = world(rest)
            assert [member.peer.seat for member in second.members] == [0, 1, 3]
            until(
                lambda: observer.picture().running == (0, 1, 3),
                "the observer sees the new world",
            )


def test_an_observer_hears_of_wrong_results_once(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as peers:
        meshes = peers.several(3)
        view = world(meshes)
        with Observer(f"dir:{tmp_path}") as observer:
            until(lambda: len(observer.picture().peers) == 3, "the observer sees all")
            for mesh in meshes:
                mesh.over(GenerationEnd(view.generation, "it differs", wrong_nodes=("node2",)))
            heard: dict[str, str] = {}
            until(lambda: heard.update(observer.take_wrong_nodes()) or heard, "it hears of it")
            assert heard == {"node2": "it differs"}
            ended(meshes)
            assert observer.take_wrong_nodes() == {}


def test_fixed_addresses(tmp_path: Path) -> None:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    addresses = [("127.0.0.1", sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    with crew(tmp_path, 3, min_world=3) as peers:
        meshes = [peers.add(s, meeting=AddressList(addresses, "ab" * 32)) for s in (2, 0, 1)]
        world(meshes)


@pytest.mark.parametrize("cut", [{(1, 2)}, {(1, 3), (2, 3)}])
def test_who_is_reached_by_some_only_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: set[tuple[int, int]]
) -> None:
    real = Transport.dial

    def dial(self: Transport, address: DialAddress) -> None:
        seat = int(address.peer_id.removeprefix("peer-").split(".")[0])
        if tuple(sorted((self.me.seat, seat))) not in cut:
            real(self, address)

    monkeypatch.setattr(Transport, "dial", dial)
    with crew(tmp_path, 4, min_world=4) as peers:
        meshes = [peers.add(seat, timing=Timing(reach_seconds=0.2)) for seat in range(4)]
        deadline = time.monotonic() + LIMIT
        while not any(mesh.evicted for mesh in meshes):
            assert time.monotonic() < deadline
            for mesh in meshes:
                view = mesh.current
                if view and mesh.end and mesh.status.phase == "running":
                    mesh.say(PeerStatus("ready", view.generation, 0))
                elif view and not mesh.end and mesh.status.generation < view.generation:
                    mesh.say(PeerStatus("running", view.generation, 0))
            threading.Event().wait(0.01)
        gone = [mesh for mesh in meshes if mesh.evicted]
        # One end of the cut: of two cut pairs, the one in both, if it says so before the others.
        assert len(gone) == 1 and gone[0].me.seat in {seat for ends in cut for seat in ends}
        assert "reach" in gone[0].evicted


def test_a_world_is_not_ended_for_one_whom_the_next_one_cannot_take_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer on seat 0 reaches rank 0, and not the rank that makes worlds."""
    real, cut = Transport.dial, {(0, 1)}

    def dial(self: Transport, address: DialAddress) -> None:
        seat = int(address.peer_id.removeprefix("peer-").split(".")[0])
        if tuple(sorted((self.me.seat, seat))) not in cut:
            real(self, address)

    with crew(tmp_path, 4, min_world=2, replica_size=2) as peers:
        meshes = peers.several(4)
        first = world(meshes)
        meshes[0].close()
        ended(meshes[1:])
        leave(meshes[1:], first)
        inside = [meshes[2], meshes[1]]
        view = world(inside)
        assert [member.peer.seat for member in view.members] == [2, 1]
        monkeypatch.setattr(Transport, "dial", dial)
        newcomer = peers.add(0, incarnation=1)

        def welcome() -> tuple[int, ...]:
            found = [
                peer for mesh in inside if view.lets_in(mesh.me.id) for peer in mesh.newcomers()
            ]
            return tuple(sorted(peer.seat for peer in found))

        until(meshes[2].newcomers, "rank 0 has met the newcomer")
        assert welcome() == ()
        cut.clear()
        until(lambda: welcome() == (0, 3), "the one that makes worlds has met it")
        meshes[1].over(GenerationEnd(view.generation, "let in", "", "join", step=1))
        ended(inside)
        leave(inside, view)
        world([newcomer, *meshes[1:]])


def test_two_that_start_at_once_never_see_a_death(tmp_path: Path) -> None:
    for turn in range(40):
        with crew(tmp_path / str(turn), 3, min_world=3) as peers:
            together = threading.Barrier(3)

            class Late(SharedDirectory):
                """All read the directory only when all are in it: each dials each."""

                def others(
                    self, together: threading.Barrier = together
                ) -> list[tuple[str, str, int]]:
                    together.wait(LIMIT)
                    return super().others()

            place = peers.place
            starts = [
                threading.Thread(target=peers.add, args=(seat, 0, Late(place))) for seat in range(3)
            ]
            for thread in starts:
                thread.start()
            for thread in starts:
                thread.join(LIMIT)
            view = world(peers.all)
            for mesh in peers.all:
                mesh.put(view.generation, f"from {mesh.me.seat}", b"x")
            for mesh in peers.all:
                mesh.get(view.generation, [f"from {seat}" for seat in range(3)], LIMIT)
            until(
                lambda meshes=peers.all: not any(unsettled(mesh) for mesh in meshes),
                "second connections are closed",
            )
            assert [mesh.end for mesh in peers.all] == [None] * 3
            assert [mesh.picture()[2] for mesh in peers.all] == [{}] * 3


def test_a_closed_mesh_waits_for_nothing(tmp_path: Path) -> None:
    with crew(tmp_path, 2, min_world=2) as peers:
        mesh = peers.add(0)
        threading.Timer(0.1, mesh.close).start()
        with pytest.raises(WireError, match="closed"):
            mesh.meet(LIMIT)


def test_a_large_world_is_told_to_a_newcomer(tmp_path: Path) -> None:
    """The list of peers is longer than what is accepted before the secret is shown."""
    with crew(tmp_path, 2, min_world=2) as peers:
        first = peers.add(0)
        many = tuple(
            Peer(f"{seat}-" + "x" * 40, seat, node="n" * 40, host="127.0.0.1", port=1)
            for seat in range(2, 1002)
        )
        first._known_peers = lambda: many  # type: ignore[method-assign]
        world([first, peers.add(1)])


@pytest.mark.parametrize("peers", [0, 3, 125, 126, 1023, 8191])
def test_a_large_world_beats_less_often(peers: int) -> None:
    beat = Timing().beat(peers)
    assert beat >= 0.5
    assert peers / beat <= BEATS_A_SECOND * 1.001
    assert peers > 125 or beat == 0.5


def test_waiting_for_the_end_is_not_ended_by_other_news(tmp_path: Path) -> None:
    with crew(tmp_path, 2, min_world=2) as peers:
        view = world(peers.several(2))
        first, second = peers.all
        for step in range(1, 4):
            threading.Timer(
                0.05 * step, second.say, [PeerStatus("running", view.generation, step)]
            ).start()
        end = GenerationEnd(view.generation, "the end", second.me.id, "fault")
        threading.Timer(0.3, second.over, [end]).start()
        first.wait_for_end(LIMIT)
        assert first.end == end


@pytest.mark.parametrize("between", [0, 2, 3])
def test_a_peer_is_left_that_others_cannot_reach_in_two_worlds(between: int) -> None:
    """A connection that is reset now and then, and made anew, costs no living rank its place."""
    losses = Losses()
    for at in (0.0, 100.0):
        losses.worlds += 1
        losses.strike("peer", at, 3.0)
        losses.strike("peer", at + 1.0, 3.0)  # of the same cause
        if not at:
            assert losses.take_unreachable() is None
            losses.worlds += between
    assert losses.take_unreachable() == (None if between >= STRIKE_WORLDS else "peer")


def test_no_peer_is_left_after_a_world_that_had_another_end() -> None:
    """A rank that leads now, since others were killed, counts nothing that those let pass."""
    losses = Losses()
    for at in (0.0, 100.0):
        losses.worlds += 1
        losses.strike("peer", at, 3.0)
    losses.worlds += 1
    assert losses.take_unreachable() is None
    losses.worlds += 1
    losses.strike("peer", 110.0, 3.0)
    assert losses.take_unreachable() == "peer"
