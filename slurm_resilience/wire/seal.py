"""Seal frames: a tag on each, made with the key of one connection. Pure.

munge proves identities once, at the start. The tag keeps them proven: a program between the two
sides can pass frames on, but cannot make, change, repeat or leave out any.

A light beat is a frame that has no content, and so nothing to seal: it is one mark that only the
two holders of the key can tell beforehand, another one for each place among the frames. Marks are
made eight at a time, and the receiver compares: 10,000 nodes cost it little.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from slurm_resilience.errors import WireError
from slurm_resilience.wire.frames import FrameCodec
from slurm_resilience.wire.messages import Welcome

KEY_BYTES = 32
TAG_BYTES = 16
MARK_BYTES = 8
"""The size of a light beat. Sealed frames are longer, so none is taken for the other. There is one
try for each connection: it ends with the first mark that is wrong."""
FROM_CLIENT, FROM_SERVER, _WELCOME = b"sres client", b"sres server", b"sres welcome"
"""Uses of a key: a frame of one direction is none of the other."""
_BEATS = b"sres beats"
"""A use within each direction: no mark is part of a tag."""
_BLOCK_BITS = 3
_LAST_OF_BLOCK = (1 << _BLOCK_BITS) - 1
_MARKS = struct.Struct(f"{MARK_BYTES}s" * (1 << _BLOCK_BITS))
_BEAT_HEAD = FrameCodec.frame(bytes(MARK_BYTES))[:-MARK_BYTES]
LIGHT_BEAT_BYTES = len(_BEAT_HEAD) + MARK_BYTES
"""The size of a light beat's frame."""


class FrameSeal:
    """Tags for the frames of one direction, in their order."""

    __slots__ = ("_beats", "_beats_block", "_key", "_keyed", "_number")

    def __init__(self, key: bytes, use: bytes) -> None:
        self._key = hashlib.blake2b(use, key=key).digest()
        self._keyed = hashlib.blake2b(key=self._key, digest_size=TAG_BYTES)
        """Before the first byte: every tag begins with it."""
        self._number = 0
        self._beats = b""
        self._beats_block = -1
        """Light beats for a few places one after the other, and the number of these few."""

    def close(self, body: bytes) -> bytes:
        """Return a frame's body with its tag behind it."""
        return body + self.tag(body)

    def open(self, sealed: bytes) -> bytes:
        """Return the body of a sealed frame.

        Raises:
            WireError: the tag is not that of the next frame.
        """
        body = sealed[:-TAG_BYTES]
        self.check(body, sealed[-TAG_BYTES:])
        return body

    def check(self, body: bytes, tag: bytes) -> None:
        """Check that this is the tag of the next frame.

        Raises:
            WireError: it is not.
        """
        if not hmac.compare_digest(tag, self.tag(body)):
            raise WireError("a frame was changed on its way, or comes from another program")

    def tag(self, body: bytes) -> bytes:
        """Return the tag of the next frame."""
        tag = self._keyed.copy()
        tag.update(self._number.to_bytes(8, "big"))
        tag.update(body)
        self._number += 1
        return tag.digest()

    def beat(self) -> bytes:
        """Return the next frame, with its head: a light beat."""
        beat = self._beats_from(self._number)[:LIGHT_BEAT_BYTES]
        self._number += 1
        return beat

    def are_beats(self, frames: bytes) -> bool:
        """Tell whether the next frames are light beats, and are these, whole; count them if so."""
        number, rest = self._number, frames
        while rest:
            beats = self._beats_from(number)[: len(rest)]
            # Plainly compared: how long that takes tells of a mark that is spent with this one try.
            if not rest.startswith(beats) or len(beats) % LIGHT_BEAT_BYTES:
                return False
            number += len(beats) // LIGHT_BEAT_BYTES
            rest = rest[len(beats) :]
        if number == self._number:
            return False
        self._number = number
        return True

    def _beats_from(self, number: int) -> bytes:
        """Return light beats for this place and some that follow it."""
        if number >> _BLOCK_BITS != self._beats_block:
            self._make_beats(number >> _BLOCK_BITS)
        return self._beats[(number & _LAST_OF_BLOCK) * LIGHT_BEAT_BYTES :]

    def _make_beats(self, block: int) -> None:
        number = block.to_bytes(8, "big")
        marks = hashlib.blake2b(number, key=self._key, person=_BEATS).digest()
        self._beats = _BEAT_HEAD.join((b"", *_MARKS.unpack(marks)))
        self._beats_block = block


def welcome(key: bytes, peers: tuple[str, ...]) -> Welcome:
    """Return the welcome that only a reader of the caller's credential can make."""
    proof = FrameSeal(key, _WELCOME).tag(msgspec.msgpack.encode(peers))
    return Welcome(proof, peers, light_beats=True)


def is_proof(answer: Welcome, key: bytes) -> bool:
    """Tell whether a welcome was made with the key that we sent."""
    return hmac.compare_digest(answer.proof, welcome(key, answer.peers).proof)
