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
from slurm_resilience.wire import munge
from slurm_resilience.wire.messages import (
    FRAMES,
    MAX_FRAME_BYTES,
    MAX_UNPROVEN_FRAME_BYTES,
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
PAUSE_FACTOR, MIN_PAUSE_SECONDS = 10.0, 0.002
"""After a user's message, the next one of any of his connections is taken only after a pause: so
many times as long as handling it took, and at least so long. No user keeps the nodes' beats
waiting."""
MAX_SHARE_OF_USER = 0.125
"""The part of this process's file descriptors that one user's connections may take."""
MAX_UNPROVEN_SHARE = 0.125
"""The part of that for one machine's connections that have proven nothing yet."""
LOG_AGAIN_SECONDS = 10.0
"""Between two lines of the log with the same cause: unknown clients must not fill the disk."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A supervisor has nothing to say for days: only this shows that its machine died (after 25 s)."""
MAX_BACKLOG_BYTES = 16 << 20
"""Bytes queued for one client that does not read; past it the connection is cut."""


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
        frame = FRAMES.pack(message)
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

    def opened(self, client: Client) -> None: ...

    def received(self, client: Client, message: Message) -> None: ...

    def closed(self, client: Client) -> None: ...


class Server:
    """Listens until `stop`. One thread, all connections."""

    def __init__(self, handler: Handler, port: int, host: str = "", munge_socket: str = "") -> None:
        self._handler = handler
        self._munge_socket = munge_socket
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_of_user = int((files if files > 0 else 65536) * MAX_SHARE_OF_USER)
        self._max_unproven = max(64, int(self._max_of_user * MAX_UNPROVEN_SHARE))
        self._unproven: Counter[str] = Counter()
        self._connections: Counter[int] = Counter()
        self._next_turn: dict[int, float] = {}
        self._logged: dict[str, tuple[float, int]] = {}
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
        client: Client | None = None
        try:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = await self._prove(reader, writer)
            if client.role == "job":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEPALIVE:
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
            self._handler.opened(client)
            while True:
                message = await _read(reader, MAX_FRAME_BYTES)
                began = self._loop.time()
                self._handler.received(client, message)
                if client.role != "node" and client.uid != 0:
                    await self._take_turns(client.uid, self._loop.time() - began)
                if writer.transport.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, OSError):
            pass  # the client is gone; the cycle judges what that means
        except SresError as error:
            # An unknown client chose parts of this text, and how often it is logged.
            address = writer.get_extra_info("peername") or ("?",)
            name = str(address[0])
            if client is not None:
                name = f"{client.role} {client.subject} (uid {client.uid})"
            self._log(name, f"{name}: {error}")
            with contextlib.suppress(ConnectionError, OSError):
                writer.write(FRAMES.pack(Refused(str(error), error.exit_code)))
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            if client is not None:
                self._leave(client)

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
                client = await self._handshake(reader, writer)
        finally:
            self._unproven[address] -= 1
            if not self._unproven[address]:
                del self._unproven[address]
        if client.role != "node" and client.uid != 0:
            if self._connections[client.uid] >= self._max_of_user:
                raise WireError(f"uid {client.uid} has {self._max_of_user} connections, no more")
            self._connections[client.uid] += 1
        return client

    def _leave(self, client: Client) -> None:
        self._handler.closed(client)
        if client.role != "node" and client.uid != 0:
            self._connections[client.uid] -= 1
            if not self._connections[client.uid]:
                del self._connections[client.uid]
                self._next_turn.pop(client.uid, None)

    async def _take_turns(self, uid: int, took: float) -> None:
        now = self._loop.time()
        turn = max(now, self._next_turn.get(uid, now)) + max(MIN_PAUSE_SECONDS, PAUSE_FACTOR * took)
        self._next_turn[uid] = turn
        await asyncio.sleep(turn - now)

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio tells a failed accept() a thousand times a second, with its traceback."""
        error = context.get("exception")
        if isinstance(error, OSError):
            self._log(str(error), f"{context.get('message')}: {error}")
        else:
            loop.default_exception_handler(context)

    def _log(self, key: str, text: str) -> None:
        """One line, without anything that could play tricks on a terminal, and not too often."""
        now = self._loop.time()
        if len(self._logged) > 1000:
            self._logged.clear()
        at, silent = self._logged.get(key, (-LOG_AGAIN_SECONDS, 0))
        if now - at < LOG_AGAIN_SECONDS:
            self._logged[key] = (at, silent + 1)
            return
        self._logged[key] = (now, 0)
        line = "".join(char if char.isprintable() else "?" for char in text)[:500]
        log.warning("%s%s", line, f" ({silent} more were not written)" if silent else "")

    async def _handshake(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Client:
        nonce = secrets.token_bytes(32)
        writer.write(FRAMES.pack(Challenge(nonce)))
        hello = await _read(reader, MAX_UNPROVEN_FRAME_BYTES)
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
        writer.write(FRAMES.pack(Welcome(credential, peers)))
        return Client(hello.role, hello.subject, identity.uid, address, writer, self._loop)


async def _read(reader: asyncio.StreamReader, limit: int) -> Message:
    length = FRAMES.unpack_length(await reader.readexactly(4), limit)
    return FRAMES.unpack(await reader.readexactly(length))
