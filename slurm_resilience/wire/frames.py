"""Frames: a 4-byte big-endian length, then a msgpack body. Pure.

The daemons' wire and the mesh share the framing; each has messages and limits of its own.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from slurm_resilience.errors import WireError

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding: bad UTF-8 and deep nesting come through as Python's own."""

_HEAD = struct.Struct(">I")
M = TypeVar("M")


class FrameCodec(Generic[M]):
    """Frames of one kind of messages."""

    def __init__(self, messages: Any, max_bytes: int) -> None:
        """
        Args:
            messages: the type of all messages: a union of tagged structs.
            max_bytes: of a body, at most.
        """
        self._max_bytes = max_bytes
        self._messages = messages
        self._encoder = msgspec.msgpack.Encoder()

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[M]:
        # When a message is read: making one reads all types, and no supervised step waits for that.
        return msgspec.msgpack.Decoder(self._messages)

    def pack(self, message: M) -> bytes:
        """Return a message as a frame.

        Raises:
            WireError: it is too large.
        """
        return self.frame(self.encode(message))

    def encode(self, message: M) -> bytes:
        """Return a frame's body.

        Raises:
            WireError: it is too large.
        """
        body = self._encoder.encode(message)
        if len(body) > self._max_bytes:
            raise WireError(f"a {type(message).__name__} of {len(body)} bytes is too large to send")
        return body

    @staticmethod
    def frame(body: bytes) -> bytes:
        """Return a body behind its head."""
        return _HEAD.pack(len(body)) + body

    def unpack_length(self, head: bytes | bytearray, limit: int | None = None) -> int:
        """Return the bytes of body that follow a 4-byte head.

        Raises:
            WireError: more than ``limit``; by default, than any message has.
        """
        most = self._max_bytes if limit is None else limit
        (length,) = _HEAD.unpack_from(head)
        if length > most:
            raise WireError(f"the other side announced a frame of {length} bytes (limit {most})")
        return int(length)

    def unpack(self, body: bytes) -> M:
        """Return the message of a frame's body.

        Raises:
            WireError: not msgpack, an unknown message, a field of the wrong type.
        """
        try:
            return self._decoder.decode(body)
        except UNREADABLE as error:
            raise WireError(f"the other side sent something that is not ours: {error}") from None

    def take(self, buffer: bytearray, limit: int) -> M | None:
        """Take the first whole frame off the front of a buffer; None: it is not there yet.

        Raises:
            WireError: as in `unpack_length` and `unpack`.
        """
        if len(buffer) < _HEAD.size:
            return None
        end = _HEAD.size + self.unpack_length(buffer, limit)
        if len(buffer) < end:
            return None
        message = self.unpack(bytes(buffer[_HEAD.size : end]))
        del buffer[:end]
        return message
