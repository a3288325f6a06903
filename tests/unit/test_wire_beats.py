"""The wire: the beats of nodes, sealed or light, and a node's other words."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
from wire_peers import KEY, NEEDS_MUNGE, Sresctld, exactly, hello, read, until

from slurm_resilience.errors import WireError
from slurm_resilience.model import Finding, Severity
from slurm_resilience.wire import munge, seal
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    FRAMES,
    Beat,
    Challenge,
    Goodbye,
    NodeHello,
    Proof,
    Refused,
    Report,
    Welcome,
)

pytestmark = NEEDS_MUNGE


def heard_since(sresctld: Sresctld, moment: float) -> bool:
    return sresctld.registry.agents()["n1"].heard_at > moment


def test_sealed_beats_are_messages_like_any_other(sresctld: Sresctld) -> None:
    """Those of an older release, which knows no light ones."""
    with sresctld.connect("node", "n1") as sresd:
        until(lambda: sresctld.registry.agent("n1"), "it is known")
        for number in (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32):
            before = sresctld.registry.agents()["n1"].heard_at
            sresd.send(Beat(number))
            until(functools.partial(heard_since, sresctld, before), "it has beaten")
        sresd.send(NodeHello("boot", "machine"))
        sresd.send(Beat(9))
        until(lambda: sresctld.registry.agents()["n1"].boot_id, "its hello was read")
        sresd.send(Report((), (), (), full=True))
        until(lambda: sresctld.registry.agents()["n1"].reported, "its report was read")


def test_a_beat_of_another_key_ends_the_connection(sresctld: Sresctld) -> None:
    sock, challenge = sresctld.raw()
    sock.sendall(FRAMES.pack(hello(challenge.nonce, sresctld, "node", "n1")))
    assert isinstance(read(sock), Welcome)
    wrong = seal.FrameSeal(b"x" * seal.KEY_BYTES, seal.FROM_CLIENT)
    sock.sendall(FRAMES.frame(wrong.close(FRAMES.encode(Beat(1)))))
    sealed = exactly(sock, FRAMES.unpack_length(exactly(sock, 4)))
    answer = FRAMES.unpack(seal.FrameSeal(KEY, seal.FROM_SERVER).open(sealed))
    assert isinstance(answer, Refused) and "changed on its way" in answer.reason
    assert read(sock) is None and sresctld.beaten == []


def test_a_light_beat_is_good_once_and_in_its_place() -> None:
    """A light beat has nothing to seal: it must be the mark that only its place has."""
    sender = seal.FrameSeal(KEY, seal.FROM_CLIENT)
    frames = [sender.beat() for _ in range(10)]
    assert len(set(frames)) == 10 and {len(frame) for frame in frames} == {seal.LIGHT_BEAT_BYTES}
    receiver = seal.FrameSeal(KEY, seal.FROM_CLIENT)
    for place, mark in enumerate(frames):
        for wrong in (*frames[:place], *frames[place + 1 :], b"", mark + b"x", mark[:-1]):
            assert not receiver.are_beats(wrong)
        assert receiver.are_beats(mark)
    for other in (
        seal.FrameSeal(KEY, seal.FROM_SERVER),
        seal.FrameSeal(b"x" * seal.KEY_BYTES, seal.FROM_CLIENT),
    ):
        assert not other.are_beats(frames[0])


def test_light_beats_are_taken_together_as_one_by_one() -> None:
    sender = seal.FrameSeal(KEY, seal.FROM_CLIENT)
    frames = [sender.beat() for _ in range(60)]
    for first in range(20):
        for size in range(1, 40):
            receiver = seal.FrameSeal(KEY, seal.FROM_CLIENT)
            assert not first or receiver.are_beats(b"".join(frames[:first]))
            run = frames[first : first + size]
            for wrong in (
                b"".join(run)[:-1],
                b"".join([*run, b"x"]),
                b"".join([*run[:-1], frames[-1]]),
                b"".join([*run, frames[first]]),
            ):
                assert not receiver.are_beats(wrong)
            assert receiver.are_beats(b"".join(run))
            assert receiver.are_beats(frames[first + size])


def test_a_frame_that_is_left_out_shows_at_the_next_beat_and_a_beat_at_the_next_frame() -> None:
    sender, receiver = (seal.FrameSeal(KEY, seal.FROM_CLIENT) for _ in range(2))
    assert receiver.are_beats(sender.beat())
    assert receiver.open(sender.close(b"report")) == b"report"
    sender.close(b"a fault")
    assert not receiver.are_beats(sender.beat())
    sender, receiver = (seal.FrameSeal(KEY, seal.FROM_CLIENT) for _ in range(2))
    sender.beat()
    with pytest.raises(WireError):
        receiver.open(sender.close(b"report"))


def test_light_beats_are_taken_alone_and_between_other_messages(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as sresd:
        assert sresd.welcome.light_beats
        before = until(lambda: sresctld.registry.agent("n1"), "it is known")
        for number in range(20):
            sresd.beat(number)
            until(lambda: sresctld.beaten, "it has beaten")
            assert sresctld.beaten == ["n1"]
            sresctld.beaten.clear()
        assert sresctld.registry.agents()["n1"].heard_at > before.heard_at
        sresd.beat(20)
        sresd.send(NodeHello("boot", "machine"))
        sresd.beat(21)
        sresd.send(Report((), (), (), full=True))
        sresd.beat(22)
        until(lambda: sresctld.registry.agents()["n1"].reported, "its report was read")
        before = sresctld.registry.agents()["n1"]
        sresd.send(Beat(23))  # of an older release, which knows no others
        until(lambda: heard_since(sresctld, before.heard_at), "it has beaten")
        sresctld.beaten.clear()
        sresd.beat(24)
        until(lambda: sresctld.beaten, "it has beaten")


@pytest.mark.parametrize("forge", ["another mark", "the last one again", "one that comes later"])
def test_a_forged_light_beat_ends_the_connection(sresctld: Sresctld, forge: str) -> None:
    sock, challenge = sresctld.raw()
    sock.sendall(FRAMES.pack(hello(challenge.nonce, sresctld, "node", "n1")))
    assert isinstance(read(sock), Welcome)
    sender = seal.FrameSeal(KEY, seal.FROM_CLIENT)
    first, _, third = (sender.beat() for _ in range(3))
    sock.sendall(first)
    until(lambda: sresctld.beaten, "it has beaten")
    known = {
        "another mark": first[:4] + b"x" * 8,
        "the last one again": first,
        "one that comes later": third,
    }
    sock.sendall(known[forge])
    sealed = exactly(sock, FRAMES.unpack_length(exactly(sock, 4)))
    answer = FRAMES.unpack(seal.FrameSeal(KEY, seal.FROM_SERVER).open(sealed))
    assert isinstance(answer, Refused) and "changed on its way" in answer.reason
    assert read(sock) is None and sresctld.beaten == ["n1"]


class OldWelcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """As it was before there were light beats, in the same protocol."""

    proof: bytes
    peers: tuple[str, ...] = ()


def test_an_older_sresctld_gets_sealed_beats(munged: Callable[[str], str]) -> None:
    """It says nothing of light ones in its welcome."""
    came: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as sock:
            sock.settimeout(10)
            sock.sendall(FRAMES.pack(Challenge(b"c" * 32, 0)))
            credential = munge.decode(read(sock).credential, munged("ours"))
            proof = msgspec.msgpack.decode(credential.payload, type=Proof)
            welcome = OldWelcome(seal.welcome(proof.key, ()).proof)
            sock.sendall(FRAMES.frame(msgspec.msgpack.encode(welcome)))
            sealed = exactly(sock, FRAMES.unpack_length(exactly(sock, 4)))
            came.append(seal.FrameSeal(proof.key, seal.FROM_CLIENT).open(sealed))

    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    thread = threading.Thread(target=serve, args=(listener,), daemon=True)
    thread.start()
    with Connection.open("127.0.0.1", port, "node", "n1", munge_socket=munged("ours")) as sresd:
        assert not sresd.welcome.light_beats
        sresd.beat(5)
        thread.join(timeout=10)
    assert [FRAMES.unpack(body) for body in came] == [Beat(5)]


def test_an_older_sresd_reads_the_welcome(munged: Callable[[str], str]) -> None:
    """It leaves out what it does not know, and finds the proof right."""
    body = FRAMES.encode(seal.welcome(KEY, ("192.0.2.1:6818",)))
    read_by_it = msgspec.msgpack.decode(body, type=OldWelcome)
    assert read_by_it.peers == ("192.0.2.1:6818",)
    assert seal.is_proof(Welcome(read_by_it.proof, read_by_it.peers), KEY)


def test_the_last_words_of_a_node_are_read_though_it_is_gone(sresctld: Sresctld) -> None:
    """They come together with the connection's end, and are no less true."""
    for number in range(20):
        sresd = sresctld.connect("node", "n1")
        sresd.send(NodeHello(f"boot-{number}", "machine"))
        sresd.beat(1)
        sresd.send(Goodbye("test"))
        sresd.close()
        known = until(lambda: sresctld.registry.agent("n1"), "it is known")
        until(lambda: sresctld.registry.agents()["n1"].was_stopped, "its goodbye was read")
        assert known.node == "n1"
        assert sresctld.registry.agents()["n1"].boot_id == f"boot-{number}"
        sresctld.registry.forget("n1")
        until(lambda: not sresctld.server.connections, "nothing is left of it")


def test_a_report_larger_than_a_read_is_taken_whole(sresctld: Sresctld) -> None:
    finding = Finding("disk", Severity.MONITOR, "x" * 300_000, 1.0)
    with sresctld.connect("node", "n1") as sresd:
        sresd.beat(0)
        sresd.send(Report(findings=(finding,), full=True))
        sresd.beat(1)
        until(lambda: sresctld.registry.agents().get("n1"), "it is known")
        until(lambda: sresctld.registry.agents()["n1"].findings == (finding,), "it was read")
        sent = time.monotonic()
        sresd.beat(2)
        # What comes with the rest of the report is read with it, and is a message like any other.
        until(lambda: sresctld.registry.agents()["n1"].heard_at > sent, "it beats on")


def test_a_node_that_goes_is_missed_at_once(sresctld: Sresctld) -> None:
    sresd = sresctld.connect("node", "n1")
    sresd.send(Beat(0))
    until(lambda: sresctld.registry.agent("n1"), "it is known")
    until(lambda: sresctld.registry.agents()["n1"].is_connected, "it is there")
    sresctld.registry.wake.clear()
    sresd.close()
    until(lambda: not sresctld.registry.agents()["n1"].is_connected, "it is gone")
    assert sresctld.registry.wake.is_set()
    until(lambda: not sresctld.server.connections, "nothing is left of it")
