"""sresctld's side of the wire: an asyncio server in a thread of its own.

It proves who speaks and hands messages on; what they mean is the controller's. Callbacks run in the
server's thread and must be quick (they put things on the board and wake the cycle).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import secrets
import socket
import threading
from collections import Counter
from typing import Any, Protocol

import msgspec

from slurm_resilience.errors import SresError, WireError
from slurm_resilience.wire import frames, munge
from slurm_resilience.wire.messages import (
    PROTOCOL,
    Challenge,
    Hello,
    Message,
    Proof,
    Refused,
    Role,
    Welcome,
)

log = logging.getLogger("sresctld.wire")

HANDSHAKE_SECONDS = 5.0
READ_AHEAD_BYTES = 64 << 10
"""Bytes read of a connection before they are asked for."""
SHARE = 10.0
LEAST_PAUSE_SECONDS = 0.002
"""A user's messages are taken with pauses of this many times what handling them took, and of at
least this many seconds, over all of his connections: no user keeps the nodes' beats waiting."""
PER_USER_SHARE = 0.125
"""The part of this process's file descriptors that one user's connections may take."""
UNPROVEN_SHARE = 0.125
"""The part of that which one machine's connections may take that have proven nothing yet."""
SAY_AGAIN_SECONDS = 10.0
"""Seconds between two lines of the log on what strangers did, and on what the loop met."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A supervisor has nothing to say for days: only this shows that its machine died (after 25 s)."""
MAX_BACKLOG_BYTES = 16 << 20
"""Bytes queued for one peer that does not read; past it the connection is cut."""


class Client:
    """A proven connection: who it is, and a way to send to it from any thread."""

    def __init__(
        self,
        role: Role,
        subject: str,
        uid: int,
        address: str,
        writer: asyncio.StreamWriter,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.role = role
        self.subject = subject
        self.uid = uid
        self.address = address
        self._writer = writer
        self._loop = loop

    def send(self, message: Message) -> None:
        """Queue a message; who is gone or does not read is cut off, never waited for."""
        frame = frames.pack(message)
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._write, frame)

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._writer.close)

    def _write(self, frame: bytes) -> None:
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            transport.abort()
            return
        self._writer.write(frame)


class Handler(Protocol):
    """The controller's side of the connections."""

    def authorize(self, hello: Hello, uid: int, address: str) -> tuple[str, ...]:
        """Peers for the welcome; raises an SresError (its text is sent) when not allowed."""
        ...

    def opened(self, peer: Client) -> None: ...

    def received(self, peer: Client, message: Message) -> None: ...

    def closed(self, peer: Client) -> None: ...


class Server:
    """Listens until `stop`. One thread, all connections."""

    def __init__(self, handler: Handler, port: int, host: str = "", munge_socket: str = "") -> None:
        self._handler = handler
        self._munge_socket = munge_socket
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_of_user = int((files if files > 0 else 65536) * PER_USER_SHARE)
        self._max_unproven = max(64, int(self._max_of_user * UNPROVEN_SHARE))
        self._unproven: Counter[str] = Counter()
        self._connections: Counter[int] = Counter()
        self._next_turn: dict[int, float] = {}
        self._said: dict[str, tuple[float, int]] = {}
        try:
            self._listener = socket.create_server(
                (host, port), backlog=1024, family=socket.AF_INET, reuse_port=False
            )
        except OSError as error:
            self._loop.close()
            raise WireError(
                f"cannot listen on port {port}: {error}; is another sresctld running? "
                "(controller.port)"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def stop(self) -> None:
        """End every connection and the thread."""

        def end() -> None:
            for task in self._tasks:
                task.cancel()
            self._loop.stop()

        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(end)
            self._thread.join(timeout=5)
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._trouble)
        # As a task: `stop` may come before the first turn of the loop.
        accepting = self._loop.create_task(
            asyncio.start_server(self._accept, sock=self._listener, limit=READ_AHEAD_BYTES)
        )
        try:
            self._loop.run_forever()
        finally:
            accepting.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer: Client | None = None
        try:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = await self._prove(reader, writer)
            if peer.role == "job":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEPALIVE:
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
            self._handler.opened(peer)
            while True:
                message = await _read(reader, frames.MAX_FRAME_BYTES)
                began = self._loop.time()
                self._handler.received(peer, message)
                if peer.role != "node" and peer.uid != 0:
                    await self._take_turns(peer.uid, self._loop.time() - began)
                if writer.transport.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, OSError):
            pass  # gone: what that means is the cycle's to say
        except SresError as error:
            # A stranger chose some of these words, and how often they are said.
            address = writer.get_extra_info("peername") or ("?",)
            who = f"{peer.role} {peer.subject} (uid {peer.uid})" if peer else str(address[0])
            self._say(who, f"{who}: {error}")
            with contextlib.suppress(ConnectionError, OSError):
                writer.write(frames.pack(Refused(str(error), error.exit_code)))
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            if peer is not None:
                self._leave(peer)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Client:
        """Do the handshake, within its time and with a place for this user.

        Raises:
            WireError: too many connections.
        """
        address = str((writer.get_extra_info("peername") or ("?",))[0])
        if self._unproven[address] >= self._max_unproven:
            raise WireError("too many connections at once that have proven nothing yet")
        self._unproven[address] += 1
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                peer = await self._handshake(reader, writer)
        finally:
            self._unproven[address] -= 1
            if not self._unproven[address]:
                del self._unproven[address]
        if peer.role != "node" and peer.uid != 0:
            if self._connections[peer.uid] >= self._max_of_user:
                raise WireError(f"uid {peer.uid} has {self._max_of_user} connections, no more")
            self._connections[peer.uid] += 1
        return peer

    def _leave(self, peer: Client) -> None:
        self._handler.closed(peer)
        if peer.role != "node" and peer.uid != 0:
            self._connections[peer.uid] -= 1
            if not self._connections[peer.uid]:
                del self._connections[peer.uid]
                self._next_turn.pop(peer.uid, None)

    async def _take_turns(self, uid: int, took: float) -> None:
        now = self._loop.time()
        turn = max(now, self._next_turn.get(uid, now)) + max(LEAST_PAUSE_SECONDS, SHARE * took)
        self._next_turn[uid] = turn
        await asyncio.sleep(turn - now)

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio tells a failed accept() a thousand times a second, with its traceback."""
        error = context.get("exception")
        if isinstance(error, OSError):
            self._say(str(error), f"{context.get('message')}: {error}")
        else:
            loop.default_exception_handler(context)

    def _say(self, key: str, text: str) -> None:
        """One line, without anything that could play tricks on a terminal, and not too often."""
        now = self._loop.time()
        if len(self._said) > 1000:
            self._said.clear()
        at, silent = self._said.get(key, (-SAY_AGAIN_SECONDS, 0))
        if now - at < SAY_AGAIN_SECONDS:
            self._said[key] = (at, silent + 1)
            return
        self._said[key] = (now, 0)
        line = "".join(char if char.isprintable() else "?" for char in text)[:500]
        log.warning("%s%s", line, f" ({silent} more were not written)" if silent else "")

    async def _handshake(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Client:
        nonce = secrets.token_bytes(32)
        writer.write(frames.pack(Challenge(nonce)))
        hello = await _read(reader, frames.MAX_UNPROVEN_FRAME_BYTES)
        if not isinstance(hello, Hello):
            raise WireError(f"a {type(hello).__name__} before the hello")
        if hello.protocol != PROTOCOL:
            raise WireError(
                f"protocol {hello.protocol} is spoken there, {PROTOCOL} here: "
                "install the same version on both"
            )
        call = asyncio.get_running_loop().run_in_executor
        identity = await call(None, munge.decode, hello.credential, self._munge_socket)
        try:
            proof = msgspec.msgpack.decode(identity.payload, type=Proof)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise WireError("a credential that was not made for this") from None
        if proof != Proof(nonce, hello.role, hello.subject):
            raise WireError("a credential that was made for another connection")
        address = str(writer.get_extra_info("peername")[0])
        peers = await call(None, self._handler.authorize, hello, identity.uid, address)
        answer = msgspec.msgpack.encode(Proof(hello.nonce))
        credential = await call(None, munge.encode, answer, self._munge_socket)
        writer.write(frames.pack(Welcome(credential, peers)))
        return Client(hello.role, hello.subject, identity.uid, address, writer, self._loop)


async def _read(reader: asyncio.StreamReader, limit: int) -> Message:
    length = frames.unpack_length(await reader.readexactly(4), limit)
    return frames.unpack(await reader.readexactly(length))
