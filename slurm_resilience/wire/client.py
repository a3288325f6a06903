"""A blocking connection to sresctld, for sresd, the supervisor and `sres`."""

from __future__ import annotations

import errno
import os
import random
import secrets
import select
import socket
from typing import Any

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import AuthError, NotFound, NotPermitted, SresError, WireError
from slurm_resilience.wire import munge
from slurm_resilience.wire.messages import (
    FRAMES,
    PROTOCOL,
    Beat,
    Challenge,
    Hello,
    Message,
    Proof,
    Refused,
    Role,
    Welcome,
    other_protocol,
)
from slurm_resilience.wire.seal import FROM_CLIENT, FROM_SERVER, KEY_BYTES, FrameSeal, is_proof

UNACKED_MILLISECONDS = 3000
"""Milliseconds after which bytes that the other machine has not acknowledged end the connection."""
ROOTS_PORTS = range(600, 1024)
"""Source ports that no user can have: sresctld keeps places for these connections."""
ROOTS_PORT_TRIES = 16

_ERRORS: dict[int, type[SresError]] = {
    error.exit_code: error for error in (NotFound, NotPermitted, AuthError)
}


class Connection:
    """One proven connection. Not thread safe: one thread sends and receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._out: FrameSeal | None = None
        self._in: FrameSeal | None = None
        self.welcome = Welcome(b"")

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        role: Role,
        subject: str = "",
        *,
        munge_socket: str = "",
        trusted_uids: frozenset[int] = frozenset({0}),
        timeout: float = 5.0,
    ) -> Connection:
        """Connect, prove our identity, and have sresctld prove its own.

        Args:
            host: name or address of sresctld.
            port: its TCP port.
            role: `node`, `job` or `query`.
            subject: the node's name or the job id.
            munge_socket: munged's socket; empty: the default.
            trusted_uids: users whose credential may stand for sresctld (root, SlurmUser).
            timeout: seconds for the whole handshake.

        Raises:
            WireError: no program answers at that address.
            AuthError: munge does not prove one of the two sides.
            NotPermitted: sresctld refused the role or the subject.
        """
        try:
            sock = _connected(host, port, timeout)
        except (OSError, UnicodeError) as error:  # the latter: a name that none could have
            raise WireError(f"sresctld does not answer at {host}:{port}: {error}") from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A pulled cable says nothing: without this, sends succeed into the buffer for minutes.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_MILLISECONDS)
            self = cls(sock)
            deadline = SYSTEM_CLOCK.monotonic() + timeout
            challenge = self._expect(Challenge, deadline)
            if challenge.protocol != PROTOCOL:
                raise WireError(f"{host}:{port}: {other_protocol(challenge.protocol)}")
            if challenge.uid not in trusted_uids | {os.geteuid()}:
                raise AuthError(f"{host}:{port} is not sresctld: it runs as uid {challenge.uid}")
            key = secrets.token_bytes(KEY_BYTES)
            # For that user alone: what cannot read the key can neither answer nor speak for us.
            proof = msgspec.msgpack.encode(Proof(challenge.nonce, role, subject, key))
            credential = munge.encode(proof, munge_socket, only_uid=challenge.uid)
            self.send(Hello(credential, role, subject))
            self.welcome = self._expect(Welcome, deadline)
            if not is_proof(self.welcome, key):
                raise AuthError(f"{host}:{port} is not sresctld: it could not read our credential")
            self._out, self._in = FrameSeal(key, FROM_CLIENT), FrameSeal(key, FROM_SERVER)
            return self
        except BaseException:
            sock.close()
            raise

    def fileno(self) -> int:
        """Return the file descriptor, for select()."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            WireError: the connection is gone, or the other side does not take it in time.
        """
        body = FRAMES.encode(message)
        self._send(FRAMES.frame(self._out.close(body) if self._out else body))

    def beat(self, number: int) -> None:
        """Send a sign of life: a light one, where sresctld takes such.

        Args:
            number: of this beat, where they have numbers.

        Raises:
            WireError: as in `send`.
        """
        if self.welcome.light_beats and self._out is not None:
            self._send(self._out.beat())
        else:
            self.send(Beat(number))

    def _send(self, frame: bytes) -> None:
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise WireError(f"the connection to sresctld is lost: {error}") from None

    def receive(self, timeout: float) -> Message | None:
        """Return the next message, or None when none came within ``timeout`` seconds.

        Raises:
            WireError: the connection is gone.
        """
        deadline = SYSTEM_CLOCK.monotonic() + timeout
        while True:
            message = self._take()
            if message is not None:
                return message
            remaining = deadline - SYSTEM_CLOCK.monotonic()
            try:
                if not self._is_readable(max(0.0, remaining)):
                    return None
                data = self._sock.recv(65536)
            except (OSError, ValueError) as error:
                raise WireError(f"the connection to sresctld is lost: {error}") from None
            if not data:
                raise WireError("the connection to sresctld is lost: closed by the other side")
            self._buffer += data

    def _is_readable(self, seconds: float) -> bool:
        # Not select(), which knows no number above 1023: a supervisor inherits its user's files.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def ask(self, message: Message, timeout: float = 10.0) -> Message:
        """Send a request and wait for the next message.

        Raises:
            WireError: no answer in time, or the connection is gone.
            SresError: the request was refused.
        """
        self.send(message)
        answer = self.receive(timeout)
        if answer is None:
            raise WireError(f"sresctld did not answer within {timeout:g} s")
        if isinstance(answer, Refused):
            raise _ERRORS.get(answer.code, WireError)(answer.reason)
        return answer

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> Message | None:
        if len(self._buffer) < 4:
            return None
        length = FRAMES.unpack_length(bytes(self._buffer[:4]))
        if len(self._buffer) < 4 + length:
            return None
        body = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        return FRAMES.unpack(self._in.open(body) if self._in else body)

    def _expect(self, kind: type[Any], deadline: float) -> Any:
        message = self.receive(max(0.0, deadline - SYSTEM_CLOCK.monotonic()))
        if isinstance(message, Refused):
            raise _ERRORS.get(message.code, WireError)(f"sresctld refused: {message.reason}")
        if not isinstance(message, kind):
            answer = type(message).__name__ if message is not None else "nothing"
            raise WireError(f"sresctld sent {answer} where a {kind.__name__} was expected")
        return message


def _connected(host: str, port: int, timeout: float) -> socket.socket:
    """Connect; as root from a port that no user can have, where one is to be had."""
    if os.geteuid() != 0:
        return socket.create_connection((host, port), timeout=timeout)
    failure = OSError(f"{host} has no address")
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return _connected_as_root(family, kind, address, timeout)
        except OSError as error:
            failure = error
    raise failure


def _connected_as_root(family: int, kind: int, address: Any, timeout: float) -> socket.socket:
    ports = [*filter(_is_free_of_services, random.sample(ROOTS_PORTS, ROOTS_PORT_TRIES)), 0]
    for own in ports:
        sock = socket.socket(family, kind)
        try:
            sock.settimeout(timeout)
            # Else each port could be used once a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", own))
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            is_taken = error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
            if own == 0 or not is_taken:
                raise
    raise AssertionError("the last port is any")


def _is_free_of_services(port: int) -> bool:
    """Tell whether no daemon of this machine may want to listen there."""
    try:
        socket.getservbyport(port, "tcp")
    except OSError:
        return True
    return False
