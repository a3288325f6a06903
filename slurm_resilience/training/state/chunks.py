"""How a part's bytes are cut into messages, and shared among several sources. Pure.

Both ends cut alike, from the sizes alone. A big tensor is cut into slices that are sent from, and
received into, its own storage; what is small is packed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DIRECT_BYTES = 1 << 20
"""Slices of this size and above go without packing. One message costs about as much as copying
this much."""


class Piece(NamedTuple):
    """Bytes [start, stop) of one tensor."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Chunk(NamedTuple):
    """One message."""

    pieces: tuple[Piece, ...]
    packed: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(piece.size for piece in self.pieces)


def cut(sizes: Sequence[int], bucket_bytes: int) -> tuple[Chunk, ...]:
    """Cut tensors into messages.

    Args:
        sizes: bytes of each tensor.
        bucket_bytes: greatest size of a message, at least 1.
    """
    least = min(DIRECT_BYTES, bucket_bytes)
    found: list[Chunk] = []
    pack: list[Piece] = []
    packed = 0
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            if size - start >= least:
                piece = Piece(number, start, min(size, start + bucket_bytes))
                found.append(Chunk((piece,), packed=False))
            else:
                piece = Piece(number, start, min(size, start + bucket_bytes - packed))
                pack.append(piece)
                packed += piece.size
                if packed == bucket_bytes:
                    found.append(Chunk(tuple(pack), packed=True))
                    pack, packed = [], 0
            start = piece.stop
    if pack:
        found.append(Chunk(tuple(pack), packed=True))
    return tuple(found)


def share(chunks: Sequence[Chunk], shares: int) -> tuple[int, ...]:
    """Which share each chunk belongs to: always to the one that has the fewest bytes so far, so
    that shares differ by at most one chunk."""
    loads = [0] * shares
    found = []
    for chunk in chunks:
        lightest = loads.index(min(loads))
        loads[lightest] += chunk.size
        found.append(lightest)
    return tuple(found)
