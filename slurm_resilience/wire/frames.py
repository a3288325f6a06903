"""Frames: a 4-byte big-endian length, then a msgpack body. Pure."""

from __future__ import annotations

import struct

import msgspec

from slurm_resilience.errors import WireError
from slurm_resilience.wire.messages import Message

MAX_FRAME_BYTES = 8 << 20
"""Bytes. A status of 10,000 nodes is about 3 MB; anything above is not one of ours."""
MAX_UNPROVEN_FRAME_BYTES = 64 << 10
"""Bytes accepted from a client for which munge has not vouched yet."""

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Pack a message into a frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is too large to send")
    return _LENGTH.pack(len(body)) + body


def unpack_length(head: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Bytes of body that follow a 4-byte head.

    Raises:
        WireError: longer than ``limit``.
    """
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise WireError(f"the other side announced a frame of {length} bytes (limit {limit})")
    return int(length)


def unpack(body: bytes) -> Message:
    """Unpack the message of a frame's body.

    Raises:
        WireError: not msgpack, an unknown message, a field of the wrong type.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Bad UTF-8 and deep nesting come through as Python's own errors.
        raise WireError(f"the other side sent something that is not ours: {error}") from None
