"""The speakers that are written down: the first one of a node wins, and it is a hint alone."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

import msgspec
import pytest

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import Peer, PeerStatus, Speakers
from slurm_resilience.mesh.protocol.speaker_search import SEARCH_SECONDS, SpeakerSearch
from slurm_resilience.mesh.rendezvous import SharedDirectory
from slurm_resilience.mesh.speaker_files import SpeakerEntry, SpeakerFiles
from tests.unit.mesh_peers import Crew, crew, until, world

NODES, RANKS = 3, 3
PATIENCE = 20.0
CLOCK_STEP_SECONDS = 0.02
"""A file system's clock goes on in this time."""


def on_node(seat: int, node: str, incarnation: int = 0) -> Peer:
    return Peer(f"peer-{seat}.{incarnation}", seat, incarnation, node=node, host="127.0.0.1")


def add(made: Crew, seat: int, node: str) -> Mesh:
    mesh = Mesh(SharedDirectory(made.place), on_node(seat, node), made.rules, speakers=True)
    made.all.append(mesh)
    mesh.start()
    mesh.say(PeerStatus())
    return mesh


def written(place: Path) -> dict[str, str]:
    """Ids of the speakers that are written down, by node."""
    found = SpeakerFiles(place / "speakers").read(on_node(99, "another", 1))
    return {peer.node: peer.id for peer in found.before}


def test_the_first_rank_of_a_node_speaks(tmp_path: Path) -> None:
    files = SpeakerFiles(tmp_path / "speakers")
    first, second, third = on_node(1, "a"), on_node(0, "a"), on_node(2, "b/c")
    for peer in (first, second, third):
        files.claim(peer)
    assert files.read(second) == Speakers(first), "the others are looked for by the speaker"
    assert files.read(third).before == (first,)
    assert files.read(first).here == first
    assert {path.name for path in (tmp_path / "speakers").iterdir()} == {"a.json", "b%2Fc.json"}


def test_who_came_later_finds_the_one_before(tmp_path: Path) -> None:
    files = SpeakerFiles(tmp_path / "speakers")
    peers = [on_node(seat, f"n{seat}") for seat in range(3)]
    for peer in peers:
        files.claim(peer)
        time.sleep(CLOCK_STEP_SECONDS)
    assert files.read(peers[1]) == Speakers(peers[1], (peers[0],), (peers[2],))
    newcomer = on_node(5, "n1", 1)
    assert files.read(newcomer) == Speakers(peers[1], (peers[0], peers[2]))


def test_of_two_at_the_same_time_one_finds_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the first one has no name yet when the second one looks: so it is the first one
    that dials."""
    files, link = SpeakerFiles(tmp_path / "speakers"), os.link
    first, second = on_node(0, "a"), on_node(1, "b")

    def second_comes(*paths: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        time.sleep(CLOCK_STEP_SECONDS)
        files.claim(second)
        assert files.read(second) == Speakers(second)
        time.sleep(CLOCK_STEP_SECONDS)
        link(*paths)

    monkeypatch.setattr(os, "link", second_comes)
    files.claim(first)
    assert files.read(first) == Speakers(first, (second,))


def test_a_speaker_that_ends_takes_its_own_word_back_alone(tmp_path: Path) -> None:
    files = SpeakerFiles(tmp_path / "speakers")
    before, after = on_node(0, "a"), on_node(1, "a")
    files.claim(before)
    files.write(after)
    files.leave(before)
    assert files.read(after).here == after
    files.leave(after)
    assert files.read(on_node(2, "a")).here is None
    files.keep(after)
    assert files.read(after).here == after, "it was written again"


def test_what_cannot_be_read_or_written_is_done_without(tmp_path: Path) -> None:
    place = tmp_path / "speakers"
    place.mkdir()
    (place / "a.json").write_text("{")
    (place / "b.json").mkdir()
    for node in ("a", "b"):
        assert SpeakerEntry(SpeakerFiles(place), on_node(0, node)).claim() is None
    missing = SpeakerFiles(tmp_path / "none" / "speakers")
    assert SpeakerEntry(missing, on_node(0, "a")).claim() is None
    assert SpeakerEntry(missing, on_node(0, "a")).read() is None
    late = SpeakerEntry(SpeakerFiles(place), on_node(0, "c", 1))
    assert late.claim() is None
    assert not (place / "c.json").exists(), "it is none of the first"


def test_one_rank_of_each_node_speaks_and_is_written_down(tmp_path: Path) -> None:
    with crew(tmp_path, NODES * RANKS) as made:
        meshes = [add(made, seat, f"n{seat // RANKS}") for seat in range(NODES * RANKS)]
        world(meshes)
        speaks = {mesh.me.node: mesh.me.id for mesh in meshes if mesh._relay and mesh._relay.speaks}
        assert written(tmp_path) == speaks
        assert len(speaks) == sum(bool(m._relay and m._relay.speaks) for m in meshes)


def test_the_next_speaker_is_written_down(tmp_path: Path) -> None:
    with crew(tmp_path, 2 * RANKS, min_world=1) as made:
        meshes = [add(made, seat, f"n{seat // RANKS}") for seat in range(2 * RANKS)]
        world(meshes)
        speaker = next(mesh for mesh in meshes if mesh.me.id == written(tmp_path)["n0"])
        with speaker._lock:  # as its kernel does where it is killed
            for number in list(speaker._transport.connections):
                speaker._transport.close(number)
        speaker._transport.stop(PATIENCE)
        made.all.remove(speaker)
        left = {mesh.me.id for mesh in meshes if mesh.me.node == "n0"} - {speaker.me.id}
        until(lambda: written(tmp_path)["n0"] in left, "another one has written that it speaks")


@pytest.mark.parametrize("kind", ["dead", "of another kind"])
def test_a_world_is_formed_where_a_wrong_speaker_is_written_down(tmp_path: Path, kind: str) -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    place = tmp_path / "speakers"
    place.mkdir(mode=0o700)
    for node in ("n0", "n1"):
        wrong = msgspec.structs.replace(on_node(7, node), id=f"wrong-{node}", port=port)
        word = msgspec.json.encode(wrong) if kind == "dead" else b"[]"
        (place / f"{node}.json").write_bytes(word)
    with crew(tmp_path, 2 * RANKS) as made:
        meshes = [add(made, seat, f"n{seat // RANKS}") for seat in range(2 * RANKS)]
        assert world(meshes).size == 2 * RANKS


def test_a_world_is_formed_where_none_can_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: SpeakerFiles, __: Peer) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("claim", "write", "keep"):
        monkeypatch.setattr(SpeakerFiles, name, full)
    with crew(tmp_path, 2 * RANKS) as made:
        meshes = [add(made, seat, f"n{seat // RANKS}") for seat in range(2 * RANKS)]
        assert world(meshes).size == 2 * RANKS


def test_a_written_speaker_is_waited_for(tmp_path: Path) -> None:
    """On a few cores none answers at once where all start; each that was dialed beside another one
    cost a connection, and changed the ways of all."""
    me, *others = [on_node(seat, f"n{seat // RANKS}") for seat in range(2 * RANKS)]
    search, speaker = SpeakerSearch(me), others[4]
    search.find(speaker, 0.0, PATIENCE, finds_me=False)
    for peer in others:
        search.know((peer,), 0.0)
    looks = [step * SEARCH_SECONDS for step in range(int(PATIENCE / SEARCH_SECONDS))]
    assert [peer for now in looks for peer in search.due((), now)] == [speaker]
    later = search.due((), PATIENCE)
    assert later, "it may hang, and the one in its place may not find this process"
    assert later != [speaker]


def test_one_that_finds_this_process_dials_first() -> None:
    me, other = on_node(0, "a"), on_node(1, "b")
    search = SpeakerSearch(me)
    search.find(other, 0.0, PATIENCE, finds_me=True)
    assert search.due((), 0.0) == []
    assert search.due((), 1.0) == []
    assert search.due((), PATIENCE) == [other]


def test_ranks_of_a_node_are_looked_for_where_its_written_speaker_is_of_no_use() -> None:
    search = SpeakerSearch(on_node(0, "a"))
    ended, hung = on_node(1, "b"), on_node(2, "c")
    for peer in (ended, hung):
        search.find(peer, 0.0, PATIENCE, finds_me=False)
        assert search.relies_on_speaker_of(peer.node)
    assert set(search.due((), 0.0)) == {ended, hung}
    search.dead(ended.id)
    search.find(ended, 1.0, PATIENCE, finds_me=False)  # its file is still there
    assert not search.relies_on_speaker_of(ended.node)
    assert search.relies_on_speaker_of(hung.node), "it may take its time"
    assert search.due((), PATIENCE) == [hung]
    assert not search.relies_on_speaker_of(hung.node)
