"""Measure processors, memory and a link for a fraction of a second, by the standard library alone.

The figures are worth comparing with others of the same probe only. Both loads leave Python's lock,
so that one thread for each processor loads all of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

from slurm_resilience.clock import SYSTEM_CLOCK

LOAD_SECONDS = 0.2
"""The time for one measure of processors or memory."""
HASHED_BYTES = 1 << 20
COPIED_BYTES = 16 << 20
"""Beyond a processor's own caches."""
MOST_COPIERS = 16
"""A few processors fill the memory's bandwidth, and each copier takes twice its bytes."""
LINK_SECONDS = 0.15
CHUNK_BYTES = 64 << 10
SOCKET_BYTES = 1 << 20
CONNECT_SECONDS = 10.0
"""The partner's program may start so much later."""
_RATE = struct.Struct("!d")


def compute_rate(threads: int) -> float:
    """Return the rate at which the processors compute a hash, GB/s, all together."""
    block = bytes(HASHED_BYTES)
    return _rate(threads, [partial(_hash, block)] * threads, HASHED_BYTES)


def memory_rate(threads: int) -> float:
    """Return the rate at which the processors copy memory, GB/s, all together."""
    threads = min(threads, MOST_COPIERS)
    pairs = [
        (ctypes.create_string_buffer(COPIED_BYTES), ctypes.create_string_buffer(COPIED_BYTES))
        for _ in range(threads)
    ]
    copies = [partial(ctypes.memmove, to, source, COPIED_BYTES) for to, source in pairs]
    for copy in copies:
        copy()  # the kernel hands out the pages now
    return _rate(threads, copies, COPIED_BYTES)


def _hash(block: bytes) -> None:
    hashlib.sha256(block).digest()


def _rate(threads: int, loads: Sequence[Callable[[], object]], size: int) -> float:
    begun = SYSTEM_CLOCK.monotonic()

    def repeat(load: Callable[[], object]) -> tuple[int, float]:
        count = 0
        while (took := SYSTEM_CLOCK.monotonic() - begun) < LOAD_SECONDS:
            load()
            count += 1
        return count, took

    with ThreadPoolExecutor(threads) as pool:
        ended = list(pool.map(repeat, loads))
    took = SYSTEM_CLOCK.monotonic() - begun
    return size * sum(count for count, _ in ended) / took / 1e9


def machine_serial() -> str:
    """Return what tells this machine from others; empty: not known."""
    for path in ("/sys/class/dmi/id/product_uuid", "/etc/machine-id"):
        try:
            text = Path(path).read_text("utf-8", "replace").strip()
        except OSError:
            continue
        if text:
            return text
    return ""


def processor_model() -> str:
    """Return the processors' model and number: machines with the same are compared."""
    model = "processors"
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = " ".join(value.split())
            break
    return f"{os.cpu_count() or 1} x {model}"


def serve_link(port: int, token: bytes) -> float:
    """Wait for the partner, and return the slower of both directions, GB/s.

    Raises:
        OSError: it did not come.
    """
    with socket.create_server(("", port)) as server:
        server.settimeout(CONNECT_SECONDS)
        deadline = SYSTEM_CLOCK.monotonic() + CONNECT_SECONDS
        while True:
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise TimeoutError("the partner did not come")
            connection, _ = server.accept()
            with connection:
                connection.settimeout(CONNECT_SECONDS)
                # Anyone may connect to a port: only the partner has the token.
                if _exactly(connection, len(token)) != token:
                    continue
                own = _receive(connection)
                connection.sendall(_RATE.pack(own))
                _send(connection)
                return min(own, _told_rate(connection))


def call_link(address: str, port: int, token: bytes) -> float:
    """Call the partner, and return what `serve_link` returns there."""
    with _connected(address, port) as connection:
        connection.settimeout(CONNECT_SECONDS)
        connection.sendall(token)
        _send(connection)
        other = _told_rate(connection)
        own = _receive(connection)
        connection.sendall(_RATE.pack(own))
        return min(own, other)


def _told_rate(connection: socket.socket) -> float:
    """Return the rate that the partner has received."""
    (rate,) = _RATE.unpack(_exactly(connection, _RATE.size))
    return float(rate)


def _connected(address: str, port: int) -> socket.socket:
    deadline = SYSTEM_CLOCK.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        except ConnectionRefusedError:
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise
            SYSTEM_CLOCK.wait(Event(), 0.05)


def _send(connection: socket.socket) -> None:
    """Send for some time: chunks, each behind a byte that says that it follows."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    chunk = b"\x01" + bytes(CHUNK_BYTES - 1)
    deadline = SYSTEM_CLOCK.monotonic() + LINK_SECONDS
    while SYSTEM_CLOCK.monotonic() < deadline:
        connection.sendall(chunk)
    connection.sendall(b"\x00" + bytes(CHUNK_BYTES - 1))


def _receive(connection: socket.socket) -> float:
    """Return the rate at which chunks come in, GB/s."""
    size, begun = 0, SYSTEM_CLOCK.monotonic()
    while _exactly(connection, CHUNK_BYTES)[:1] == b"\x01":
        size += CHUNK_BYTES
    return size / (SYSTEM_CLOCK.monotonic() - begun) / 1e9


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = connection.recv(min(left, CHUNK_BYTES))
        if not part:
            raise ConnectionError("the partner has gone")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
