#!/usr/bin/env python3
"""Play the sresds of many nodes in one process: one real connection each, and beats on time.

Each node has an address of its own, so its connection is one that sresctld takes for that node's.
Orders come on standard input, one JSON object a line, and each is answered with one.
"""

from __future__ import annotations

import json
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from slurm_resilience import config
from slurm_resilience.errors import SresError
from slurm_resilience.wire import munge
from slurm_resilience.wire.messages import (
    FRAMES,
    Challenge,
    Hello,
    Message,
    NodeHello,
    Proof,
    Report,
    Welcome,
)
from slurm_resilience.wire.seal import FROM_CLIENT, KEY_BYTES, FrameSeal

ROOTS_PORT = 1000
"""The source port of every connection: the addresses tell them apart."""
SLOTS = 50
"""The nodes beat in so many groups, one after the other, within one beat's time."""
LATE_SECONDS = 0.25
HANDSHAKES_AT_ONCE = 4
HANDSHAKE_TRIES = 20


class Played(NamedTuple):
    """One node's connection."""

    sock: socket.socket
    seal: FrameSeal

    def send(self, body: bytes) -> None:
        self.sock.sendall(FRAMES.frame(self.seal.close(body)))


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("sresctld has closed the connection")
        data += more
    return data


def read(sock: socket.socket) -> Message:
    return FRAMES.unpack(exactly(sock, FRAMES.unpack_length(exactly(sock, 4))))


def connect(name: str, address: str, boot: str) -> Played:
    """Connect as the sresd of this node does, and tell that nothing is wrong with it."""
    settings = config.load()
    sock = socket.socket()
    sock.settimeout(20)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.bind((address, ROOTS_PORT))
    sock.connect((settings.controller.host, settings.controller.port))
    challenge = read(sock)
    assert isinstance(challenge, Challenge), challenge
    key = secrets.token_bytes(KEY_BYTES)
    proof = msgspec.msgpack.encode(Proof(challenge.nonce, "node", name, key))
    credential = munge.encode(proof, settings.wire.munge_socket, only_uid=challenge.uid)
    sock.sendall(FRAMES.pack(Hello(credential, "node", name)))
    welcome = read(sock)
    assert isinstance(welcome, Welcome), welcome
    played = Played(sock, FrameSeal(key, FROM_CLIENT))
    played.send(FRAMES.encode(NodeHello(f"{boot}-{name}", f"machine-{name}", "bench")))
    played.send(FRAMES.encode(Report(full=True)))
    return played


class Player:
    """All nodes, and the thread that lets them beat."""

    def __init__(self, nodes: dict[str, str], beat_seconds: float) -> None:
        self.addresses = nodes
        self.names = list(nodes)
        self.beat_seconds = beat_seconds
        self.played: dict[str, Played] = {}
        self.silent: set[str] = set()
        self.beats = self.late = self.lost = 0
        threading.Thread(target=self._beat, daemon=True).start()

    def open(self, names: list[str], boot: str) -> int:
        """Connect nodes; each beats from then on."""

        def one(name: str) -> None:
            for left in reversed(range(HANDSHAKE_TRIES)):
                try:
                    self.played[name] = connect(name, self.addresses[name], boot)
                    return
                except (OSError, SresError, AssertionError):
                    # munged has more of us waiting than of the sresds of 10,000 machines.
                    if not left:
                        raise
                    time.sleep(1)

        with ThreadPoolExecutor(HANDSHAKES_AT_ONCE) as pool:
            for number, _ in enumerate(pool.map(one, names), start=1):
                if number % 1000 == 0:
                    print(json.dumps({"connected": number}), flush=True)
        return len(self.played)

    def _beat(self) -> None:
        due, number = time.monotonic(), 0
        while True:
            slot = number % SLOTS
            for name in self.names[slot::SLOTS]:
                played = self.played.get(name)
                if played is not None and name not in self.silent:
                    self._beat_once(name, played)
            number, due = number + 1, due + self.beat_seconds / SLOTS
            behind = time.monotonic() - due
            if behind > LATE_SECONDS:
                self.late += 1
                due += behind
            elif behind < 0:
                time.sleep(-behind)

    def _beat_once(self, name: str, played: Played) -> None:
        try:
            played.sock.sendall(played.seal.beat())
            self.beats += 1
        except OSError:
            self.lost += 1
            self.silent.add(name)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked, and return what there is to tell."""
        match order["do"]:
            case "open":
                return {"open": self.open(order["nodes"], order["boot"])}
            case "silence":
                self.silent.update(order["nodes"])
                return {"at": time.time()}
            case "return":
                for name in order["nodes"]:
                    self.played.pop(name).sock.close()
                    self.silent.discard(name)
                return {"open": self.open(order["nodes"], order["boot"])}
            case _:
                said = {"beats": self.beats, "late": self.late, "lost": self.lost}
                self.beats = self.late = self.lost = 0
                return said


def orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def accept(port: int) -> None:
    """Answer probes, as a node's slurmd would: the kernel does, once the port is listened on."""
    listener = socket.create_server(("", port), backlog=1024)
    while True:
        listener.accept()[0].close()


def main() -> None:
    """Obey until the end of standard input."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    incoming = orders()
    first = next(incoming)
    threading.Thread(target=accept, args=(first["probe_port"],), daemon=True).start()
    player = Player(first["addresses"], config.load().agent.beat)
    for order in incoming:
        print(json.dumps(player.obey(order) | {"done": True}), flush=True)


if __name__ == "__main__":
    main()
