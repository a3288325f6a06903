"""A stranger who does not know the secret gets nowhere, and disturbs no member."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mesh_peers import LIMIT, Crew, crew, unsettled, until, world

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh import messages, transport
from slurm_resilience.mesh.dial_book import DialAddress
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.messages import (
    Evict,
    GenerationEnded,
    Message,
    PeerChallenge,
    PeerHello,
    PeerWelcome,
)
from slurm_resilience.mesh.model import GenerationEnd, Peer, PeerStatus
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.mesh.rendezvous import AddressList, SharedDirectory, rendezvous_at
from slurm_resilience.training.rank_environment import read_environment


class Stranger:
    """A plain socket that speaks the mesh's words, or does not."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(LIMIT)
        self.sock = sock
        self._inbox = bytearray()

    @classmethod
    def to(cls, mesh: Mesh) -> Stranger:
        return cls(socket.create_connection(("127.0.0.1", mesh.me.port)))

    def say(self, *said: Message) -> None:
        self.sock.sendall(b"".join(map(messages.FRAMES.pack, said)))

    def hear(self) -> Message | None:
        """The next message; None: hung up on."""
        while (message := messages.FRAMES.take(self._inbox, messages.MAX_FRAME_BYTES)) is None:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._inbox += data
        return message

    def challenge(self) -> PeerChallenge:
        message = self.hear()
        assert isinstance(message, PeerChallenge)
        return message


ME = Peer("stranger", 0, 99, node="node0", host="127.0.0.1")
OBSERVER = Peer("observer", -1)


def hello(secret: bytes, asked: PeerChallenge, to: str = "peer-0.0", me: Peer = ME) -> PeerHello:
    nonce = secrets.token_bytes(32)
    proof = messages.proof(secret, "dial", asked.nonce, nonce, me.id, to)
    return PeerHello(me, PeerStatus(), nonce, proof, to)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Crew]:
    """Two in a world; at the end of the test nothing has happened to them."""
    with crew(tmp_path, 2, min_world=2) as peers:
        view = world(peers.several(2))
        until(lambda: not any(unsettled(mesh) for mesh in peers.all), "all have shaken hands")
        before = open_files()
        yield peers
        until(lambda: not any(unsettled(mesh) for mesh in peers.all), "strangers are gone")
        # An address that does not answer is tried again now and then, which takes one for a moment.
        until(lambda: open_files() <= before, "file descriptors do not grow")
        peers.all[0].put(view.generation, "still", b"here")
        assert peers.all[1].get(view.generation, ["still"], LIMIT) == [b"here"]
        assert [mesh.end for mesh in peers.all] == [None, None]
        assert [mesh.evicted for mesh in peers.all] == ["", ""]
        assert [len(mesh._membership.side.contacts) for mesh in peers.all] == [1, 1]


def dial(mesh: Mesh, host: str, listener: socket.socket) -> None:
    """Have a mesh connect to a peer that it was told of."""
    mesh._transport.dial(DialAddress("stranger", host, listener.getsockname()[1]))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def evil(pair: Crew) -> tuple[Message, ...]:
    view = pair.all[0].current
    assert view is not None
    return GenerationEnded(GenerationEnd(view.generation, "die", "", "stop")), Evict("go")


def test_words_without_a_proof(pair: Crew) -> None:
    stranger = Stranger.to(pair.all[0])
    stranger.challenge()
    stranger.say(*evil(pair))
    assert stranger.hear() is None
    stranger.sock.close()


@pytest.mark.parametrize("secret", [b"", b"\0" * 32, b"wrong"])
def test_a_wrong_secret(pair: Crew, secret: bytes) -> None:
    stranger = Stranger.to(pair.all[0])
    stranger.say(hello(secret, stranger.challenge()), *evil(pair))
    assert stranger.hear() is None
    stranger.sock.close()


def test_each_secret_that_a_process_has_had_is_a_proof(pair: Crew, tmp_path: Path) -> None:
    """Others may not know the newest yet. The answer is made with the same one."""
    mesh, old, new = pair.all[0], SharedDirectory(tmp_path).secret(), secrets.token_bytes(32)
    mesh._transport.take_secret(new)
    for secret in (old, new, secrets.token_bytes(32)):
        stranger = Stranger.to(mesh)
        asked = stranger.challenge()
        said = hello(secret, asked, me=OBSERVER)
        stranger.say(said)
        answer = stranger.hear()
        if secret in (old, new):
            assert isinstance(answer, PeerWelcome)
            proof = messages.proof(secret, "accept", said.nonce, asked.nonce, mesh.me.id)
            assert answer.proof == proof
        else:
            assert answer is None
        stranger.sock.close()
    until(lambda: len(mesh._membership.side.contacts) == 1, "the strangers are gone")
    mesh._transport.take_secret(old)
    assert mesh._transport._secrets == (old, new)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack(">I", 0),
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", messages.MAX_UNPROVEN_BYTES + 1) + b"x" * 100,
        struct.pack(">I", 2) + msgspec.msgpack.encode([1]),
        struct.pack(">I", 8) + b"\x81\xa4type\xa1\xff",
        struct.pack(">I", 16_000) + b"\x81\xa1a" * 5_333 + b"\x01",
        secrets.token_bytes(100_000),
    ],
)
def test_garbage(pair: Crew, garbage: bytes) -> None:
    stranger = Stranger.to(pair.all[0])
    try:
        stranger.sock.sendall(garbage)
        stranger.sock.shutdown(socket.SHUT_WR)
        while stranger.hear() is not None:
            pass
    except OSError:
        pass  # hung up on in the middle
    stranger.sock.close()


def test_a_recorded_hello(pair: Crew, tmp_path: Path) -> None:
    first = Stranger.to(pair.all[0])
    recorded = hello(SharedDirectory(tmp_path).secret(), first.challenge())
    first.sock.close()
    second = Stranger.to(pair.all[0])
    second.challenge()
    second.say(recorded, *evil(pair))
    assert second.hear() is None
    second.sock.close()


def test_a_proof_sent_back_to_its_maker(pair: Crew, tmp_path: Path) -> None:
    """A stranger is dialed, and answers the dialer's proof with the same."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(LIMIT)
        with pair.all[0]._lock:
            dial(pair.all[0], "127.0.0.1", trap)
        sock, _ = trap.accept()
        stranger = Stranger(sock)
        stranger.say(PeerChallenge(secrets.token_bytes(32)))
        said = stranger.hear()
        assert isinstance(said, PeerHello)
        # No second look at who hangs up after the hello: the trap is gone by then.
        trap.close()
        stranger.say(PeerWelcome(said.peer, PeerStatus(), said.proof), *evil(pair))
        assert stranger.hear() is None
        sock.close()


def test_a_challenge_passed_on_as_ones_own(pair: Crew) -> None:
    """Refuse a challenge that a stranger passes on: it answers one member with another's
    question."""
    outer, inner = Stranger.to(pair.all[0]), Stranger.to(pair.all[0])
    outer.say(PeerChallenge(inner.challenge().nonce))
    outer.challenge()
    assert outer.hear() is None
    outer.sock.close()
    inner.sock.close()


def test_a_proof_passed_on_to_another_member(pair: Crew) -> None:
    """A stranger who listens where a dead rank did is dialed, and lets the dialer answer what a
    third one asked."""
    inner = Stranger.to(pair.all[1])
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(LIMIT)
        with pair.all[0]._lock:
            dial(pair.all[0], "127.0.0.1", trap)
        outer = Stranger(trap.accept()[0])
    outer.say(inner.challenge())
    said = outer.hear()
    assert isinstance(said, PeerHello)
    inner.say(said, *evil(pair))
    assert inner.hear() is None
    outer.sock.close()
    inner.sock.close()


def test_another_version(pair: Crew, tmp_path: Path) -> None:
    stranger = Stranger.to(pair.all[0])
    said = hello(SharedDirectory(tmp_path).secret(), stranger.challenge())
    stranger.say(msgspec.structs.replace(said, protocol=messages.PROTOCOL + 1))
    assert stranger.hear() is None
    stranger.sock.close()


def test_many_who_say_nothing(pair: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = pair.all[0]._transport
    monkeypatch.setattr(carrier, "_limits", carrier._limits._replace(seconds=0.5))
    silent = [Stranger.to(pair.all[0]) for _ in range(3 * transport.STRANGERS)]
    until(
        lambda: len(unsettled(pair.all[0])) <= transport.STRANGERS,
        "no more of them than there may be",
    )
    # One who knows the secret comes in all the same; the others are hung up on.
    with Observer(f"dir:{tmp_path}") as observer:
        until(lambda: len(observer.picture().peers) == 2, "an observer comes in")
    until(lambda: len(pair.all[0]._membership.side.contacts) == 1, "the observer has left")
    for stranger in silent:
        while stranger.hear() is not None:
            pass
        stranger.sock.close()


def test_who_connects_without_a_pause_does_not_keep_it_from_its_beats(pair: Crew) -> None:
    mesh = pair.all[0]
    real = mesh._transport._listener
    theirs: list[socket.socket] = []

    class Endless:
        def accept(self) -> tuple[socket.socket, str]:
            if len(theirs) == 10 * transport.ACCEPTED_AT_ONCE:
                raise BlockingIOError
            ours, other = socket.socketpair()
            theirs.append(other)
            return ours, ""

    with mesh._lock:
        mesh._transport._listener = Endless()  # type: ignore[assignment]
        mesh._transport._accept(0)
        mesh._transport._listener = real
    assert len(theirs) == transport.ACCEPTED_AT_ONCE
    for sock in theirs:
        sock.close()


def test_a_name_server_that_does_not_answer_keeps_nobody_waiting(
    pair: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ask = threading.Event(), socket.getaddrinfo

    def slow(host: str, port: int | None, flags: int = 0, **more: Any) -> Any:
        if host != "slow.test":
            return ask(host, port, flags=flags, **more)
        if flags:
            raise socket.gaierror("not a number")
        assert answers.wait(LIMIT)
        return ask("127.0.0.1", port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with socket.create_server(("127.0.0.1", 0)) as there:
        there.settimeout(LIMIT)
        with pair.all[0]._lock:
            dial(pair.all[0], "slow.test", there)
        assert not answers.is_set(), "it arrived without being waited for"
        answers.set()
        there.accept()[0].close()


def test_strangers_do_not_fill_the_log(pair: Crew, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        stranger = Stranger.to(pair.all[0])
        stranger.say(hello(b"wrong", stranger.challenge()))
        assert stranger.hear() is None
        stranger.sock.close()
    assert sum("refused" in record.message for record in caplog.records) == 1


def test_a_child_of_a_fork_keeps_no_connection_open(pair: Crew) -> None:
    """Else the others would learn of its parent's death by its silence, seconds later."""
    fds = {fd for mesh in pair.all for fd in mesh.own_fds()}
    assert len(fds) >= 2 * len(pair.all)
    child = os.fork()
    if not child:
        still_open = sum(Path(f"/proc/self/fd/{fd}").exists() for fd in fds)
        # As it is where the mesh's thread held it at the fork; it may have.
        pair.all[0]._lock.acquire(blocking=False)
        try:
            pair.all[0].over(GenerationEnd(1, "said by a child", "", "fault"))
        except RuntimeError:
            pair.all[0].close()
            os._exit(still_open)
        os._exit(255)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_rank_of_another_release_is_told_of(pair: Crew, caplog: pytest.LogCaptureFixture) -> None:
    """Both sides say so: it waits, and the others go on without it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dial(pair.all[0], "127.0.0.1", listener)
        newer = Stranger(listener.accept()[0])
        newer.say(PeerChallenge(secrets.token_bytes(32), messages.PROTOCOL + 1))
        until(lambda: "another release of slurm-resilience" in caplog.text, "it is told")
    older = Stranger.to(pair.all[1])
    asked = msgspec.structs.replace(hello(b"", older.challenge()), protocol=messages.PROTOCOL - 1)
    older.say(asked)
    until(lambda: f"version {messages.PROTOCOL - 1} " in caplog.text, "it is told")


def test_addresses_of_ipv6(tmp_path: Path) -> None:
    with crew(tmp_path, 2, min_world=2) as peers:
        assert world([peers.add(seat, host="::1") for seat in range(2)]).size == 2


def test_the_number_of_a_closed_file_is_left_to_its_next_owner(tmp_path: Path) -> None:
    """Neither a child of a fork closes what has it by then, nor does a late ring write there."""
    with crew(tmp_path, 1) as peers:
        (mesh,) = peers.several(1)
        number = mesh._transport._wake
        mesh.close()
        out, into = os.pipe()
        os.dup2(into, number)
        mesh._transport.ring()
        os.set_blocking(out, False)
        with pytest.raises(BlockingIOError):
            os.read(out, 8)
        child = os.fork()
        if not child:
            os._exit(not Path(f"/proc/self/fd/{number}").exists())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for fd in (out, into, number):
            os.close(fd)


def test_no_file_descriptor_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a loop that eats a core, nor the end: it listens again later."""
    with crew(tmp_path, 1) as peers:
        (mesh,) = peers.several(1)
        calls = threading.Semaphore(0)
        real = mesh._transport._listener

        class Full:
            def accept(self) -> None:
                calls.release()
                raise OSError(24, "Too many open files")

            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

        with mesh._lock:
            mesh._transport._listener = Full()  # type: ignore[assignment]
        with socket.create_connection(("127.0.0.1", mesh.me.port)) as sock:
            assert calls.acquire(timeout=LIMIT)
            until(lambda: real not in mesh._transport._selector.get_map(), "it listens no more")
            with mesh._lock:
                mesh._transport._listener = real
            stranger = Stranger(sock)
            stranger.challenge()


def test_a_secret_that_others_can_read(tmp_path: Path) -> None:
    SharedDirectory(tmp_path).secret()
    (tmp_path / "secret").chmod(0o640)
    with pytest.raises(UsageError, match="not be readable"):
        SharedDirectory(tmp_path).secret()


def test_a_directory_that_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="not be writable"):
        SharedDirectory(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else() -> None:
    with pytest.raises(UsageError, match="must belong to you"):
        SharedDirectory(Path("/usr"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_directory_given_to_somebody_else(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(UsageError, match="must belong to you"):
        SharedDirectory(tmp_path)


def test_a_directory_made_here_is_ones_own(tmp_path: Path) -> None:
    old = os.umask(0o002)
    try:
        SharedDirectory(tmp_path / "mesh").secret()
    finally:
        os.umask(old)
    assert (tmp_path / "mesh").stat().st_mode & 0o077 == 0
    assert (tmp_path / "mesh" / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("secret", ["", "zz", "ab"])
def test_addresses_need_a_secret(secret: str) -> None:
    with pytest.raises(UsageError, match=r"secret|SECRET"):
        AddressList([("127.0.0.1", 1)], secret)


@pytest.mark.parametrize("where", ["", "dir:", "peers:", "peers:a", "peers:a:0", "nfs:/x"])
def test_a_meeting_place_that_is_none(where: str) -> None:
    with pytest.raises(UsageError, match="SRES_MEET"):
        rendezvous_at(where, "ab" * 32)


def test_a_world_of_one_writes_nothing_down() -> None:
    where = read_environment({}).meet
    first, second = rendezvous_at(where), rendezvous_at(where)
    first.outcome(0, 7, "")
    assert (second.ended(), second.others()) == (None, [])
    assert first.secret() != second.secret()


def test_a_requeued_job_meets_at_another_place() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    assert read_environment(job).meet != read_environment(job | {"SLURM_RESTART_COUNT": "1"}).meet


@pytest.mark.parametrize(
    "seats, shape, speakers",
    [
        (64, "", False),
        (65, "", True),
        (65, "auto", True),
        (65, "full", False),
        (2, "speakers", True),
    ],
)
def test_the_ranks_of_a_large_world_have_speakers(seats: int, shape: str, speakers: bool) -> None:
    rank = {"SRES_SEATS": f"{seats}", "SRES_MEET": "dir:/x", "SRES_MESH": shape}
    assert read_environment(rank).speakers is speakers
    with pytest.raises(UsageError, match="auto, full or speakers"):
        read_environment(rank | {"SRES_MESH": "ring"})


def test_a_process_that_ends_while_it_is_dialed_is_known_to_be_gone(
    pair: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of a process that is being ended takes a connection still, and resets it."""
    mesh, absent = pair.all[0], list[str]()
    monkeypatch.setattr(mesh, "on_absent", absent.append)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with mesh._lock:
            mesh._transport.dial(DialAddress("ending", *listener.getsockname()))
        mesh._transport.ring()
        assert select.select([listener], [], [], LIMIT)[0]
    until(lambda: absent == ["ending"], "no process listens there any more")
