"""sresctld's side of the wire: an asyncio server in a thread of its own.

It proves who speaks and hands messages on; what they mean is the controller's. Callbacks run in the
server's thread and must be quick (they put things on the board and wake the cycle).

Users are bounded in everything (`limits`). Connections from ports that no user can have are taken
for those of nodes and of root until munge says so: they have places and threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from slurm_resilience.errors import SresError, WireError
from slurm_resilience.wire import limits, munge, seal
from slurm_resilience.wire.limits import Rate, Sender, UserLimits
from slurm_resilience.wire.messages import (
    FRAMES,
    PROTOCOL,
    Challenge,
    Hello,
    Message,
    Proof,
    other_protocol,
)
from slurm_resilience.wire.node_reader import NodeReader
from slurm_resilience.wire.served_connection import (
    NODES_CHUNK_BYTES,
    Client,
    Hold,
    ServedConnection,
)

__all__ = ["Client", "Handler", "NotKnownYet", "NotServedHere", "Server"]

log = logging.getLogger("sresctld.wire")

HANDSHAKE_SECONDS = 5.0
FRAME_SECONDS = 10.0
"""A message that a user's program has begun must be there after this long, or twice that."""
UNREAD_SECONDS = 30.0
"""An answer must have been read after this long."""
MAX_UNPROVEN_OF_ADDRESS, MAX_UNPROVEN = 256, 1024
"""Connections that have proven nothing yet, of one machine and of all: with one more, the oldest is
closed. Those from root's ports are not counted."""
NEW_A_SECOND, NEW_AT_ONCE = 100.0, 300.0
"""Connections that one machine's users may open; one more is closed at once."""
USERS_SOCKET_BUFFER_BYTES = 64 << 10
"""Memory of the kernel's for each direction of a user's connection."""
ACCEPTED_AT_ONCE = 64
PRIVILEGED_PORTS = 1024
"""Below it a port belongs to root."""
LOG_AGAIN_SECONDS = 10.0
"""Between two lines of the log with the same cause: unknown clients must not fill the disk."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A supervisor has nothing to say for days: only this shows that its machine died (after 25 s)."""


class NotKnownYet(SresError):
    """The subject of a hello must be looked up first, which may take a while."""


class NotServedHere(WireError):
    """Another sresctld serves this connection: many look for it, and none is worth a line."""


class Handler(Protocol):
    """The controller's side of the connections."""

    def authorize(self, hello: Hello, uid: int, address: str) -> tuple[str, ...]:
        """Peers for the welcome; raises an SresError (its text is sent) when not allowed.

        Quick, but for nodes, whose names may have to be resolved.

        Raises:
            NotKnownYet: call `look_up` first.
        """
        ...

    def look_up(self, hello: Hello, uid: int) -> None:
        """Find out what `authorize` does not know."""
        ...

    def opened(self, client: Client) -> None: ...

    def received(self, client: Client, message: Message) -> None: ...

    def closed(self, client: Client) -> None: ...


class Server:
    """Listens until `stop`. One thread, all connections."""

    def __init__(
        self,
        handler: Handler,
        port: int,
        host: str = "",
        munge_socket: str = "",
        trusted_uids: frozenset[int] = frozenset({0}),
        beats: Callable[[Sequence[Client]], None] | None = None,
        beat_seconds: float = 0.0,
    ) -> None:
        """
        Args:
            handler: hears of connections and messages.
            port: to listen on; 0: any.
            host: address to listen on; empty: all of this machine's.
            munge_socket: munged's socket; empty: munge's default.
            trusted_uids: users who are not bounded: root and SlurmUser.
            beats: hears which nodes have beaten, of many together; None: the handler hears of each
                beat, as of any other message.
            beat_seconds: between two beats of a node; 0: not known.
        """
        self._handler = handler
        self._munge_socket = munge_socket
        self._trusted_uids = trusted_uids
        self._loop = asyncio.new_event_loop()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limits = UserLimits(files if files > 0 else 65536)
        self._gate = _Gate()
        self._clients: dict[ServedConnection, Client] = {}
        self._unread: dict[ServedConnection, float] = {}
        self._log = _QuietLog()
        self._pools = _Pools()
        self._scratch = memoryview(bytearray(NODES_CHUNK_BYTES))
        self._nodes = NodeReader(self._loop, beats, beat_seconds)
        try:
            self._listener = _listen(host, port)
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
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
        self._listener.close()

    @property
    def connections(self) -> int:
        """The connections that there are, proven or not."""
        return len(self._clients) + len(self._gate.sessions)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # As a task: `stop` may come before the first turn of the loop.
        self._loop.call_soon(self._begin)
        try:
            self._loop.run_forever()
        finally:
            self._loop.remove_reader(self._listener)
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            for session in (*self._clients, *self._gate.sessions):
                session.abort()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._nodes.close()
            self._pools.shutdown()
            self._loop.close()

    def _begin(self) -> None:
        self._loop.add_reader(self._listener, self._accept)
        self._nodes.begin()
        self._loop.call_later(FRAME_SECONDS, self._sweep, {})

    # -- new connections ----------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # No file descriptor is left, say: not a thousand lines a second.
                self._log.line(str(error), f"a connection cannot be accepted: {error}")
                self._loop.remove_reader(self._listener)
                self._loop.call_later(0.1, self._loop.add_reader, self._listener, self._accept)
                return
            address, is_roots = _plain(str(peer[0])), peer[1] < PRIVILEGED_PORTS
            if not is_roots and not self._gate.rate.take(address, self._loop.time()):
                sock.close()
                text = f"users open more than {NEW_A_SECOND:.0f} connections a second"
                self._log.line(f"{address} rate", f"{address}: {text}; the rest is closed")
                continue
            sock.setblocking(False)
            session = ServedConnection(self, self._scratch, address, is_roots)
            task = self._loop.create_task(self._prove(session, sock))
            for oldest in self._gate.enter(session, task):
                oldest.cancel()

    async def _prove(self, session: ServedConnection, sock: socket.socket) -> None:
        """Do the handshake, within its time."""
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not session.is_roots:
                    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                        sock.setsockopt(socket.SOL_SOCKET, option, USERS_SOCKET_BUFFER_BYTES)
                await self._loop.connect_accepted_socket(lambda: session, sock)
                client = await self._handshake(session)
            if client.role == "node":
                self._nodes.add(session, sock, client)
            if client.role == "job":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for keep, value in KEEPALIVE:
                    sock.setsockopt(socket.IPPROTO_TCP, keep, value)
        except (TimeoutError, asyncio.CancelledError, OSError):
            session.abort()
            sock.close()
        except Exception as error:
            self.failed(session, error)
        finally:
            self._gate.leave(session)

    async def _handshake(self, session: ServedConnection) -> Client:
        nonce = secrets.token_bytes(32)
        first = self._gate.first_frame(session)
        session.write(FRAMES.encode(Challenge(nonce, os.geteuid())))
        hello = FRAMES.unpack(await first)
        if not isinstance(hello, Hello):
            raise WireError(f"a {type(hello).__name__} before the hello")
        if hello.protocol != PROTOCOL:
            raise WireError(other_protocol(hello.protocol))
        pool = self._pools.roots if session.is_roots else self._pools.users
        call = self._loop.run_in_executor
        identity = await call(pool, munge.decode, hello.credential, self._munge_socket)
        try:
            proof = msgspec.msgpack.decode(identity.payload, type=Proof)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise WireError("a credential that was not made for this") from None
        if (proof.nonce, proof.role, proof.subject) != (nonce, hello.role, hello.subject):
            raise WireError("a credential that was made for another connection")
        if len(proof.key) != seal.KEY_BYTES:
            raise WireError("a credential without a key")
        sender = Sender(hello.role, hello.subject, identity.uid)
        peers = await self._authorize(hello, identity.uid, session)
        if session.is_closing:
            raise ConnectionError
        is_counted = hello.role != "node" and identity.uid not in self._trusted_uids
        if is_counted:
            self._limits.enter(sender)
        session.write(FRAMES.encode(seal.welcome(proof.key, peers)))
        session.proven(sender, proof.key, is_counted)
        client = self._clients[session] = Client(sender, session.address, session, self._loop)
        self._handler.opened(client)
        session.resume(Hold.HANDSHAKE)
        return client

    async def _authorize(
        self, hello: Hello, uid: int, session: ServedConnection
    ) -> tuple[str, ...]:
        """Ask the handler. What may take long has a thread of its own kind."""
        if hello.role == "node":
            pool = self._pools.roots if session.is_roots else self._pools.users
            return await self._loop.run_in_executor(
                pool, self._handler.authorize, hello, uid, session.address
            )
        try:
            return self._handler.authorize(hello, uid, session.address)
        except NotKnownYet:
            await self._loop.run_in_executor(
                self._pools.look_ups, self._handler.look_up, hello, uid
            )
            return self._handler.authorize(hello, uid, session.address)

    # -- what a session tells -----------------------------------------------------------------

    def received(self, session: ServedConnection, body: bytes) -> None:
        """Hand a message on; a user's next one is taken after a pause."""
        client = self._clients.get(session)
        if client is None:
            session.pause(Hold.HANDSHAKE)
            self._gate.hand_first_frame(session, body)
            return
        if not session.is_counted:
            self._handler.received(client, FRAMES.unpack(body))
            return
        # A supervisor may tell much at once, and its kernel gives a connection up that is not read
        # for 3 s: the wait for a core does not count. A query may wait for the disk, which does.
        clock = time.thread_time if client.role == "job" else self._loop.time
        began = clock()
        self._handler.received(client, FRAMES.unpack(body))
        took = clock() - began
        session.pause(Hold.TURN)
        seconds = self._limits.pause(client.uid, took, self._loop.time())
        self._loop.call_later(seconds, session.resume, Hold.TURN)

    def begins(self, session: ServedConnection, size: int) -> None:
        if session.is_counted and session.sender is not None:
            self._limits.begin(session.sender.uid, size)

    def ended(self, session: ServedConnection, size: int) -> None:
        if session.is_counted and session.sender is not None:
            self._limits.end(session.sender.uid, size)

    def unread(self, session: ServedConnection, waits: bool) -> None:
        if not waits:
            self._unread.pop(session, None)
            return
        self._unread.setdefault(session, self._loop.time())
        if session.is_counted and session.sender is not None:
            uid = session.sender.uid
            total = sum(
                other.unread_bytes
                for other in self._unread
                if other.sender is not None and other.sender.uid == uid
            )
            if total > limits.MAX_UNREAD_OF_USER_BYTES:
                self._log.line(f"uid {uid}", f"uid {uid}: {total} bytes of answers are not read")
                session.abort()

    def failed(self, session: ServedConnection, error: Exception) -> None:
        """Tell the other side why, and end its connection."""
        client = self._clients.get(session)
        # An unknown client chose parts of this text, and how often it is logged.
        name = session.address
        if client is not None:
            name = f"{client.role} {client.subject} (uid {client.uid})"
        if isinstance(error, NotServedHere):
            session.refuse(error)
        elif isinstance(error, SresError):
            self._log.line(name, f"{name}: {error}")
            session.refuse(error)
        else:
            self._log.fault(name, error)
            session.abort()

    def lost(self, session: ServedConnection) -> None:
        self._nodes.remove(session)
        self._unread.pop(session, None)
        self._gate.give_up(session)
        client = self._clients.pop(session, None)
        if client is None:
            return
        if session.is_counted and session.sender is not None:
            self._limits.leave(session.sender)
        self._handler.closed(client)

    def sweep(self, before: dict[ServedConnection, int]) -> dict[ServedConnection, int]:
        """Cut users' programs that do not end what they began, and all that do not read.

        Args:
            before: what the last look returned.

        Returns:
            The connections whose message is half there, and how many they have sent before it.
        """
        unfinished = {
            session: session.frames
            for session in self._clients
            if session.is_counted and session.is_unfinished
        }
        for session, frames in unfinished.items():
            if before.get(session) == frames:
                session.refuse(WireError("a message was begun and not ended in time"))
        now = self._loop.time()
        for session, since in list(self._unread.items()):
            if now - since > UNREAD_SECONDS:
                session.abort()
        return unfinished

    def _sweep(self, before: dict[ServedConnection, int]) -> None:
        self._loop.call_later(FRAME_SECONDS, self._sweep, self.sweep(before))


class _Gate:
    """The connections that have proven nothing yet."""

    def __init__(self) -> None:
        self.sessions: dict[ServedConnection, asyncio.Future[bytes] | None] = {}
        self.rate = Rate(NEW_A_SECOND, NEW_AT_ONCE)
        self._tasks: dict[ServedConnection, asyncio.Task[None]] = {}
        """Those from users' ports, oldest first."""
        self._of_address: defaultdict[str, dict[ServedConnection, None]] = defaultdict(dict)

    def enter(
        self, session: ServedConnection, task: asyncio.Task[None]
    ) -> list[asyncio.Task[None]]:
        """Count a new connection; return the handshakes that must make room for it."""
        self.sessions[session] = None
        if session.is_roots:
            return []
        self._tasks[session] = task
        same = self._of_address[session.address]
        same[session] = None
        oldest = []
        if len(same) > MAX_UNPROVEN_OF_ADDRESS:
            oldest.append(next(iter(same)))
        elif len(self._tasks) > MAX_UNPROVEN:
            oldest.append(next(iter(self._tasks)))
        tasks = [self._tasks[old] for old in oldest]
        for old in oldest:
            self.leave(old)
        return tasks

    def leave(self, session: ServedConnection) -> None:
        """Forget a connection: it is proven, or at its end."""
        self.sessions.pop(session, None)
        self._tasks.pop(session, None)
        same = self._of_address.get(session.address)
        if same is not None:
            same.pop(session, None)
            if not same:
                del self._of_address[session.address]

    def first_frame(self, session: ServedConnection) -> asyncio.Future[bytes]:
        """Return the future body of the first frame."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.sessions[session] = future
        return future

    def hand_first_frame(self, session: ServedConnection, body: bytes) -> None:
        future = self.sessions.get(session)
        if future is not None and not future.done():
            future.set_result(body)

    def give_up(self, session: ServedConnection) -> None:
        """End the handshake of a connection that is gone."""
        future = self.sessions.get(session)
        if future is not None and not future.done():
            future.set_exception(ConnectionError())


class _Pools:
    """Threads for what may take long: one kind never waits for another."""

    def __init__(self) -> None:
        self.roots = ThreadPoolExecutor(8, "handshake")
        self.users = ThreadPoolExecutor(2, "handshake-users")
        self.look_ups = ThreadPoolExecutor(1, "look-up")

    def shutdown(self) -> None:
        for pool in (self.roots, self.users, self.look_ups):
            pool.shutdown(wait=False, cancel_futures=True)


class _QuietLog:
    """Lines whose text, and how often they come, unknown clients choose."""

    def __init__(self) -> None:
        self._logged: dict[str, tuple[float, int]] = {}

    def line(self, key: str, text: str) -> None:
        """Write one line, without anything that could play tricks on a terminal, and not too
        often."""
        silent = self._silent_before(key)
        if silent is not None:
            log.warning("%s%s", _shown(text), _not_written(silent))

    def fault(self, name: str, error: Exception) -> None:
        """Write where our own program failed: a user may have found a message that makes it."""
        silent = self._silent_before(f"fault {type(error).__name__}")
        if silent is not None:
            text = f"{_shown(name)}: a fault of ours{_not_written(silent)}"
            log.error("%s", text, exc_info=error)

    def _silent_before(self, key: str) -> int | None:
        """Return the number of lines left out since the last one of this cause; None: leave this
        one out too."""
        now = asyncio.get_running_loop().time()
        if len(self._logged) > 1000:
            self._logged.clear()
        at, silent = self._logged.get(key, (-LOG_AGAIN_SECONDS, 0))
        if now - at < LOG_AGAIN_SECONDS:
            self._logged[key] = (at, silent + 1)
            return None
        self._logged[key] = (now, 0)
        return silent


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)[:500]


def _not_written(lines: int) -> str:
    return f" ({lines} more were not written)" if lines else ""


def _listen(host: str, port: int) -> socket.socket:
    """Listen; without a host on all addresses, of both families where the kernel has them."""
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), backlog=1024, family=family)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", port), backlog=1024, family=socket.AF_INET6, dualstack_ipv6=True
        )
    else:
        listener = socket.create_server(("", port), backlog=1024)
    listener.setblocking(False)
    return listener


def _plain(address: str) -> str:
    """Return an address as it is written elsewhere: IPv4 without IPv6 around it, no interface."""
    return address.removeprefix("::ffff:").partition("%")[0]
