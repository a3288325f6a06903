"""Seal frames: a tag on each, made with the key of one connection. Pure.

munge proves identities once, at the start. The tag keeps them proven: a program between the two
sides can pass frames on, but cannot make, change, repeat or leave out any.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from slurm_resilience.errors import WireError
from slurm_resilience.wire.messages import Welcome

KEY_BYTES = 32
TAG_BYTES = 16
FROM_CLIENT, FROM_SERVER, _WELCOME = b"sres client", b"sres server", b"sres welcome"
"""Uses of a key: a frame of one direction is none of the other."""


class FrameSeal:
    """Tags for the frames of one direction, in their order."""

    def __init__(self, key: bytes, use: bytes) -> None:
        own_key = hashlib.blake2b(use, key=key).digest()
        self._keyed = hashlib.blake2b(key=own_key, digest_size=TAG_BYTES)
        """Before the first byte: every tag begins with it."""
        self._number = 0

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


def welcome(key: bytes, peers: tuple[str, ...]) -> Welcome:
    """Return the welcome that only a reader of the caller's credential can make."""
    return Welcome(FrameSeal(key, _WELCOME).tag(msgspec.msgpack.encode(peers)), peers)


def is_proof(answer: Welcome, key: bytes) -> bool:
    """Tell whether a welcome was made with the key that we sent."""
    return hmac.compare_digest(answer.proof, welcome(key, answer.peers).proof)
