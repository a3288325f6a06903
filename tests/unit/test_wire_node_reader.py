"""Beats that rest on their connections: the same life is seen, the same messages are read."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.agent.agent_link import TOLD_SECONDS
from slurm_resilience.wire.limits import Sender
from slurm_resilience.wire.messages import FRAMES, Beat, Message, NodeHello
from slurm_resilience.wire.node_reader import DUE_AFTER, RESTING, NodeReader
from slurm_resilience.wire.seal import FROM_CLIENT, KEY_BYTES, LIGHT_BEAT_BYTES, FrameSeal
from slurm_resilience.wire.served_connection import (
    NODES_CHUNK_BYTES,
    Client,
    ServedConnection,
)

KEY = b"k" * KEY_BYTES
BEAT = 0.75


class Loop:
    """A loop whose time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self._next: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now

    def call_later(self, _: float, call: Callable[[], None]) -> None:
        self._next = call

    def turn(self) -> None:
        self._next()


class Transport:
    """The part of a transport that a reader uses."""

    def __init__(self) -> None:
        self.is_aborted = False

    def pause_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class Node:
    """A node's connection: its own end, and sresctld's with a reader."""

    def __init__(self, beat_seconds: float) -> None:
        self.loop: Any = Loop()
        self.messages: list[Message] = []
        self.failures: list[Exception] = []
        self.beats = 0
        self.seal = FrameSeal(KEY, FROM_CLIENT)
        self.sock, own = socket.socketpair()
        own.setblocking(False)
        self.own = own
        owner: Any = self
        self.session = ServedConnection(
            owner, memoryview(bytearray(NODES_CHUNK_BYTES)), "192.0.2.1", True
        )
        self.transport: Any = Transport()
        self.session.transport = self.transport
        sender = Sender("node", "n1", 0)
        self.session.proven(sender, KEY, False)
        self.reader = NodeReader(self.loop, self._beaten, beat_seconds)
        self.reader.begin()
        self.reader.add(self.session, own, Client(sender, "192.0.2.1", self.session, self.loop))

    def close(self) -> None:
        self.reader.close()
        self.sock.close()
        self.own.close()

    def _beaten(self, clients: Sequence[Client]) -> None:
        self.beats += len(clients)

    # -- the owner of the session -------------------------------------------------------------

    def received(self, _: ServedConnection, body: bytes) -> None:
        message = FRAMES.unpack(body)
        if isinstance(message, Beat):
            self.beats += 1
        else:
            self.messages.append(message)

    def begins(self, _: ServedConnection, size: int) -> None:
        pass

    def ended(self, _: ServedConnection, size: int) -> None:
        pass

    def failed(self, _: ServedConnection, error: Exception) -> None:
        self.failures.append(error)

    # -- the node -----------------------------------------------------------------------------

    def beat(self) -> None:
        self.sock.sendall(self.seal.beat())

    def say(self, text: str) -> None:
        body = FRAMES.encode(NodeHello(text, "machine"))
        self.sock.sendall(FRAMES.frame(self.seal.close(body)))

    def after(self, seconds: float) -> bool:
        """Have the reader's turn come so much later; tell whether it saw a sign of life."""
        before = self.beats + len(self.messages)
        self.loop.now += seconds
        self.loop.turn()
        return self.beats + len(self.messages) > before

    def unread(self) -> int:
        """Return the bytes that rest on the connection."""
        try:
            return len(self.own.recv(1 << 20, socket.MSG_PEEK))
        except BlockingIOError:
            return 0


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(BEAT)
    yield made
    made.close()


STEPS = st.tuples(
    st.sampled_from([0.05, 0.3, DUE_AFTER * BEAT, BEAT, BEAT, BEAT, 0.9, 1.0, 3.0]),
    st.sampled_from(["beat", "beat", "beat", "message", "both", "many", "large", "nothing"]),
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_the_same_life_is_seen_as_when_all_is_read_at_once(steps: list[tuple[float, str]]) -> None:
    nodes = slow, quick = Node(0.0), Node(BEAT)
    try:
        for number, (seconds, what) in enumerate(steps):
            for node in nodes:
                if what in ("beat", "both"):
                    node.beat()
                if what in ("message", "both", "large"):
                    node.say(str(number) * (10_000 if what == "large" else 1))
                for _ in range(30 if what == "many" else 0):
                    node.beat()
            assert quick.after(seconds) == slow.after(seconds) == (what != "nothing")
            assert quick.messages == slow.messages[: len(quick.messages)]
            if what in ("message", "both", "large"):
                # sresd's next beat comes early.
                for node in nodes:
                    node.beat()
                assert quick.after(TOLD_SECONDS[0]) and slow.after(TOLD_SECONDS[0])
                assert quick.messages == slow.messages
        assert not (quick.failures or slow.failures)
    finally:
        for node in nodes:
            node.close()


def test_beats_in_time_rest_and_are_read_together(node: Node) -> None:
    node.beat()
    assert node.after(BEAT) and not node.unread()
    for number in range(1, RESTING + 1):
        node.beat()
        assert node.after(BEAT) and node.unread() == number * LIGHT_BEAT_BYTES
    node.beat()
    assert node.after(BEAT) and not node.unread()
    assert not node.after(BEAT), "nothing has come"


@pytest.mark.parametrize("seconds", [0.1, DUE_AFTER * BEAT - 0.01, 1.3, 5.0])
def test_what_comes_at_another_time_is_read_at_once(node: Node, seconds: float) -> None:
    node.beat()
    node.after(BEAT)
    node.say("boot")
    assert node.after(seconds) and node.messages == [NodeHello("boot", "machine")]


def test_a_forged_beat_is_found_with_the_next_read(node: Node) -> None:
    node.beat()
    node.after(BEAT)
    for number in range(RESTING + 1):
        assert not node.failures
        node.sock.sendall(b"\x00\x00\x00\x08" + bytes([number]) * 8)
        node.after(BEAT)
    assert node.failures


def test_the_end_of_a_connection_is_seen_though_beats_rest(node: Node) -> None:
    node.beat()
    node.after(BEAT)
    node.beat()
    node.after(BEAT)
    assert node.unread()
    node.say("last")
    node.sock.close()
    node.after(BEAT)
    assert node.messages == [NodeHello("last", "machine")] and node.transport.is_aborted
