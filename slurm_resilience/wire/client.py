"""A blocking connection to sresctld, for sresd, the supervisor and `sres`."""

from __future__ import annotations

import os
import secrets
import select
import socket
from typing import Any

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import AuthError, NotPermitted, SresError, WireError
from slurm_resilience.wire import munge
from slurm_resilience.wire.messages import (
    FRAMES,
    PROTOCOL,
    Challenge,
    Hello,
    Message,
    Proof,
    Refused,
    Role,
    Welcome,
)

UNACKED_MILLISECONDS = 3000
"""Milliseconds after which bytes that the other machine has not acknowledged end the connection."""

_ERRORS: dict[int, type[SresError]] = {6: NotPermitted, 7: AuthError}


class Connection:
    """One proven connection. Not thread safe: one thread sends and receives."""

    def __init__(self, sock: socket.socket, welcome: Welcome) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self.welcome = welcome

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
            sock = socket.create_connection((host, port), timeout=timeout)
        except OSError as error:
            raise WireError(f"sresctld does not answer at {host}:{port}: {error}") from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A pulled cable says nothing: without this, sends succeed into the buffer for minutes.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_MILLISECONDS)
            self = cls(sock, Welcome(b""))
            deadline = SYSTEM_CLOCK.monotonic() + timeout
            challenge = self._expect(Challenge, deadline)
            nonce = secrets.token_bytes(32)
            proof = msgspec.msgpack.encode(Proof(challenge.nonce, role, subject))
            credential = munge.encode(proof, munge_socket)
            self.send(Hello(credential, role, subject, nonce, PROTOCOL))
            self.welcome = self._expect(Welcome, deadline)
            identity = munge.decode(self.welcome.credential, munge_socket)
            answered = msgspec.msgpack.decode(identity.payload, type=Proof)
            own_uid = os.geteuid()
            if answered.nonce != nonce or identity.uid not in trusted_uids | {own_uid}:
                raise AuthError(
                    f"{host}:{port} is not sresctld: it proved to be uid {identity.uid}"
                )
            return self
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            sock.close()
            raise AuthError(f"{host}:{port} sent a proof that is not ours") from None
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
        try:
            self._sock.sendall(FRAMES.pack(message))
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
                ready, _, _ = select.select([self._sock], [], [], max(0.0, remaining))
                if not ready:
                    return None
                data = self._sock.recv(65536)
            except (OSError, ValueError) as error:
                raise WireError(f"the connection to sresctld is lost: {error}") from None
            if not data:
                raise WireError("the connection to sresctld is lost: closed by the other side")
            self._buffer += data

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
        return FRAMES.unpack(body)

    def _expect(self, kind: type[Any], deadline: float) -> Any:
        message = self.receive(max(0.0, deadline - SYSTEM_CLOCK.monotonic()))
        if isinstance(message, Refused):
            raise _ERRORS.get(message.code, WireError)(f"sresctld refused: {message.reason}")
        if not isinstance(message, kind):
            answer = type(message).__name__ if message is not None else "nothing"
            raise WireError(f"sresctld sent {answer} where a {kind.__name__} was expected")
        return message
