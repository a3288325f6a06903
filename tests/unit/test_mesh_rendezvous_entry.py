"""A shared directory that is full, or removed, in the middle of a training."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from mesh_peers import crew, leave, until, world

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh import rendezvous_entry
from slurm_resilience.mesh.model import Peer, PeerStatus
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.mesh.protocol.world_plan import SEARCH_SECONDS
from slurm_resilience.mesh.rendezvous import RECENT_SECONDS, SharedDirectory
from slurm_resilience.mesh.rendezvous_entry import RendezvousEntry


class Full(SharedDirectory):
    """Takes no file until there is room."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_room = threading.Event()

    def enter(self, peer: Peer) -> None:
        if not self.has_room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        super().enter(peer)


def entry(place: Path, peer: Peer, kind: str = ".json") -> Path:
    return place / "peers" / f"{peer.id}@{peer.node}{kind}"


def test_a_process_that_comes_while_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error ended it, and the training with the second one that came."""
    with crew(tmp_path, 2, min_world=2) as peers:
        first, full = peers.add(0), Full(tmp_path)
        newcomer = peers.add(1, 1, full)
        world([first, newcomer])
        assert not entry(tmp_path, newcomer.me).exists()
        assert caplog.text.count("(No space left on device)") == 1
        full.has_room.set()
        until(entry(tmp_path, newcomer.me).exists, "it is written when there is room")


def test_a_first_process_needs_the_directory(tmp_path: Path) -> None:
    """Several that cannot find each other would each begin the training."""
    first = Peer("first", 0, node="n", host="127.0.0.1")
    with pytest.raises(OSError, match="No space left"):
        RendezvousEntry(Full(tmp_path), first).begin()


def test_an_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write on a full disk names none."""

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    first = Peer("first", 0, node="n", host="127.0.0.1")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/peers/first@n.new'"):
        RendezvousEntry(SharedDirectory(tmp_path), first).begin()


def test_a_directory_that_was_removed(tmp_path: Path) -> None:
    """Those that go on make it anew, with the same secret, before one that is lost is replaced."""
    place = tmp_path / "mesh"
    with crew(place, 3, min_world=2) as peers:
        meshes = peers.several(3)
        first = world(meshes)
        secret = (place / "secret").read_text()
        shutil.rmtree(place)
        meshes[1].close()
        until(entry(place, meshes[2].me).exists, "it is there again")
        assert (place / "secret").read_text() == secret
        leave([meshes[0], meshes[2]], first)
        newcomer = peers.add(1, 1)
        until(lambda: len(newcomer.beats()) == 2, "it is let in")
        SharedDirectory(place).outcome(0, 3, "")
        assert (place / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("newcomers", [1, 2])
def test_who_comes_while_the_directory_is_gone_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newcomers: int
) -> None:
    """It makes a secret of its own, which those that train take beside theirs."""
    place = tmp_path / "mesh"
    with crew(place, 2 + newcomers, min_world=2, core=2) as peers:
        meshes = peers.several(2)
        world(meshes)
        secret = (place / "secret").read_text()
        shutil.rmtree(place)
        # Not before: those that train would look at once, too.
        monkeypatch.setattr(rendezvous_entry, "NEW_SECONDS", 0.05)
        late = [peers.add(2 + number) for number in range(newcomers)]
        new_secret = (place / "secret").read_text()
        assert new_secret != secret
        monkeypatch.setattr(rendezvous_entry, "LOOK_SECONDS", 0.05)
        for mesh in meshes:
            mesh._entry.look()
        ranks = [*meshes, *late]
        until(lambda: all(len(one.beats()) == 1 + newcomers for one in ranks), "all meet")
        assert (place / "secret").read_text() == new_secret
        assert (place / "secret").stat().st_mode & 0o077 == 0


def test_two_worlds_with_a_secret_each_have_one_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each put its own in the place of the other's, again and again, and none was let in."""
    monkeypatch.setattr(rendezvous_entry, "NEW_SECONDS", 60.0)
    place = tmp_path / "mesh"
    with crew(place, 4, min_world=2, start_patience=0.0) as peers:
        first = [peers.add(0), peers.add(1)]
        world(first)
        shutil.move(place, tmp_path / "elsewhere")
        second = [peers.add(2), peers.add(3)]
        world(second)
        secret = (place / "secret").read_text()
        assert secret != (tmp_path / "elsewhere" / "secret").read_text()
        # Those of the second do not know where the first is, and hang up on it.
        first[0]._dial_known()
        until(lambda: all(first[0].me.id in mesh.beats() for mesh in second), "they meet")
        assert (place / "secret").read_text() == secret


def test_an_observer_takes_the_secret_of_those_that_come_later(tmp_path: Path) -> None:
    place = tmp_path / "mesh"
    with crew(place, 2, min_world=1) as peers:
        peers.add(0)
        with Observer(f"dir:{place}") as observer:
            until(lambda: len(observer.picture().peers) == 1, "it sees the first")
            shutil.move(place, tmp_path / "elsewhere")
            newcomer = peers.add(1)
            until(lambda: newcomer.me in observer.picture().peers, "it sees the newcomer")


def test_a_secret_that_another_may_have_put_there_is_not_taken(tmp_path: Path) -> None:
    """The directory was removed, and another one is in its place."""
    place, known = SharedDirectory(tmp_path / "mesh"), SharedDirectory(tmp_path / "known")
    place.secret(), known.secret()
    secret = place.path / "secret"
    secret.unlink()
    secret.symlink_to(known.path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        place.other_secret()
    secret.unlink()
    shutil.copy(known.path / "secret", secret)
    secret.chmod(0o644)
    with pytest.raises(UsageError, match="not be readable"):
        place.other_secret()
    secret.chmod(0o600)
    place.path.chmod(0o777)
    with pytest.raises(UsageError, match="not be writable"):
        place.other_secret()
    place.path.chmod(0o700)
    assert place.other_secret() == known.secret()
    assert place.other_secret() is None
    secret.write_text("no secret")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"/secret: .* hexadecimal"):
            place.other_secret()


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_the_place_of_one_is_passed_over(
    tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    """A pipe would be waited for, by each rank that comes."""
    place = SharedDirectory(tmp_path)
    known = Peer("known", 0, node="n1", host="127.0.0.1", port=1)
    place.enter(known)
    (tmp_path / "speakers").mkdir()
    for name in ("peers/other@n2.json", "speakers/n1.json", "outcome"):
        kind(tmp_path / name)
    found: list[object] = []
    reads = (place.peers, place.ended, lambda: place.speakers.read(known).here)
    reader = threading.Thread(target=lambda: found.extend(read() for read in reads), daemon=True)
    reader.start()
    until(lambda: not reader.is_alive(), "nothing is waited for")
    assert found == [[known], None, None]


def test_files_that_were_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site may remove what was not used for weeks: nothing was lost meanwhile."""
    monkeypatch.setattr(rendezvous_entry, "LOOK_SECONDS", 0.05)
    others = set(threading.enumerate())
    with crew(tmp_path, 2) as peers:
        meshes = peers.several(2)
        world(meshes)
        mine = entry(tmp_path, meshes[0].me)
        mine.unlink()
        until(mine.exists, "the entry is there again")
        (tmp_path / "secret").unlink()
        until((tmp_path / "secret").exists, "the secret is there again")
        meshes[0].close()
        threads = [
            thread
            for thread in threading.enumerate()
            if thread.name == "sres-entry" and thread not in others
        ]
        until(lambda: sum(thread.is_alive() for thread in threads) <= 1, "its thread ends")
        assert not mine.exists()


def test_the_end_is_told_where_the_directory_was_removed(tmp_path: Path) -> None:
    place = SharedDirectory(tmp_path / "mesh")
    shutil.rmtree(place.path)
    place.outcome(0, 7, "")
    ended = place.ended()
    assert ended is not None
    assert (ended.code, ended.step) == (0, 7)


def test_a_full_disk_keeps_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SharedDirectory(tmp_path)

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        place.enter(Peer("one", 0, node="n", host="127.0.0.1"))
    assert list((tmp_path / "peers").iterdir()) == []


def test_a_lent_rank_tells_that_it_has_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that replace the job's own ranks wait for it, where they cannot reach it."""
    monkeypatch.setattr(rendezvous_entry, "LOOK_SECONDS", 0.05)
    with crew(tmp_path, 3, min_world=2, core=2) as peers:
        meshes = peers.several(2)
        first = world(meshes)
        meshes.append(lent := peers.add(2))
        until(lambda: all(lent.me.id in mesh.beats() for mesh in meshes[:2]), "they see it")
        leave(meshes[:2], first)
        world(meshes)
        told = entry(tmp_path, lent.me, ".state")
        until(told.exists, "it has told")
        assert len(list((tmp_path / "peers").glob("*.state"))) == 1, "the job's own ranks do not"
        newcomer = Peer("newcomer", 0, 1)
        place = SharedDirectory(tmp_path)
        place.enter(newcomer)
        until(lambda: place.holders(newcomer) == (lent.me,), "it is found")
        os.utime(told, (0, 0))
        until(lambda: place.holders(newcomer) != (), "it tells again and again")
        lent.close()
        until(lambda: place.holders(newcomer) == (), "it has taken that back")


def test_what_was_told_long_ago_does_not_count(tmp_path: Path) -> None:
    """One that was killed takes nothing back."""
    dead, newcomer = Peer("dead", 2), Peer("newcomer", 0, 1)
    place = SharedDirectory(tmp_path)
    place.enter(dead)
    place.note_state(dead)
    assert place.holders(newcomer) == (dead,), "without an entry of its own it cannot tell"
    place.enter(newcomer)
    entered = entry(tmp_path, newcomer).stat().st_mtime
    for age, found in ((RECENT_SECONDS - 1, (dead,)), (RECENT_SECONDS + 1, ())):
        os.utime(entry(tmp_path, dead, ".state"), (entered - age,) * 2)
        assert place.holders(newcomer) == found
    shutil.rmtree(tmp_path)
    assert place.holders(newcomer) is None, "it cannot be read"


def test_newcomers_wait_for_a_lent_rank_that_they_cannot_reach(tmp_path: Path) -> None:
    """They began anew after three seconds; its state was lost, or two trainings stepped."""
    with crew(tmp_path, 2, min_world=1, core=1) as peers:
        silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and says nothing
        lent = Peer("lent", 1, node="lent", host="127.0.0.1", port=silent.getsockname()[1])
        place = SharedDirectory(tmp_path)
        place.enter(lent)
        place.note_state(lent)
        newcomer = peers.add(0, 1)
        newcomer.say(PeerStatus("ready", step=-1))
        with pytest.raises(TimeoutError, match=r"seat 1 \(lent\) had it, and may live"):
            newcomer.meet(SEARCH_SECONDS + 1.0)
        silent.close()
        found = newcomer.meet(20.0)
        assert found is not None and found.size == 1, "no process listens there any more"


def test_a_process_that_refuses_another_looks_for_a_new_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until each had looked by itself, those with the old secret and the new one did not meet, and
    one of them was taken for unreachable."""
    monkeypatch.setattr(rendezvous_entry, "NEW_SECONDS", 60.0)
    with crew(tmp_path / "mesh", 2, min_world=2) as peers:
        first = peers.add(0)
        elsewhere = SharedDirectory(tmp_path / "elsewhere")
        elsewhere.secret()
        elsewhere.enter(first.me)
        shutil.copy(tmp_path / "elsewhere" / "secret", tmp_path / "mesh" / "secret")
        world([first, peers.add(1, 0, elsewhere)])
        refused = first._entry
        assert refused.look_at_refusal(1e9) and not refused.look_at_refusal(1e9 + 0.9)


def test_only_a_process_that_trains_looks_where_another_hangs_up(tmp_path: Path) -> None:
    """At a start many do, of which each would look."""
    entry = RendezvousEntry(SharedDirectory(tmp_path), Peer("one", 0))
    assert not entry.look_at_hang_up(1e9)
    entry.entered()
    assert entry.look_at_hang_up(1e9) and not entry.look_at_hang_up(1e9 + 0.9)


def test_newcomers_wait_where_the_directory_was_removed(tmp_path: Path) -> None:
    """Those that live, and have the state, look at it every minute only."""
    place, newcomer = tmp_path / "mesh", Peer("newcomer", 0, 1)
    first, second = SharedDirectory(place), SharedDirectory(place)
    first.secret()
    RendezvousEntry(first, newcomer).announce()
    second.secret()
    second.enter(Peer("second", 1, 1))
    assert first.holders(newcomer) is None and second.holders(Peer("second", 1, 1)) is None
    os.utime(place / "removed", (0, 0))
    assert first.holders(newcomer) == ()


def test_first_processes_wait_for_none(tmp_path: Path) -> None:
    place, first = SharedDirectory(tmp_path / "mesh"), Peer("first", 0)
    place.secret()
    RendezvousEntry(place, first).announce()
    assert place.holders(first) == ()
