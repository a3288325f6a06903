"""One checksum for a whole state.

Each block of at most 1 MiB gives a 64-bit word: its bytes as integers, each scrambled (times an odd
constant, then folded, so that high bits reach the low half), times fixed odd random weights, summed
modulo 2^64. Blake2b over all words, with each tensor's description and all other values, gives
128 bits.

A single changed bit is always caught: scrambling is a bijection, and an odd number times a
difference that is not 0 is not 0. Other differences within one block go unseen with a chance of
about 2^-32 (multilinear hashing: a difference whose lowest bit is t is missed with 2^-(63-t), and
scrambling leaves t below 32 in all but 2^-32 of cases); each further block that differs multiplies
it. The weights are fixed: this finds faults, not fraud.
"""

from __future__ import annotations

import functools
import hashlib

import msgspec
import torch

from slurm_resilience.training.state.describe import Capture, plain

BLOCK_WORDS = 1 << 17
"""64-bit words in a block: 1 MiB stays in a core's cache."""
DEVICE_BLOCK_WORDS = 1 << 23
"""On an accelerator launches cost more than memory: 64 MiB. Words are still per `BLOCK_WORDS`."""

_SCRAMBLE = 0x1E3779B97F4A7C15


def digest(capture: Capture) -> str:
    """Checksum of a state, equal wherever the state is bit-equal, whatever the device.

    Random states are left out (ranks differ in them rightfully), and so is what is pickled.

    Args:
        capture: the state.

    Returns:
        32 hex digits.
    """
    descriptor = capture.descriptor
    order = sorted(range(len(descriptor.notes)), key=lambda n: descriptor.notes[n].path)
    words = [_words(capture.views[number]) for number in order]
    total = hashlib.blake2b(digest_size=16)
    for number, mine in zip(order, words, strict=True):
        note = descriptor.notes[number]
        # Stride is part of it: the bytes are in that order. The device is not.
        what = (note.path, note.shape, note.stride, note.dtype, note.whole, note.placements)
        total.update(msgspec.msgpack.encode(what))
        total.update(mine.cpu().numpy().tobytes())
    for name in sorted(descriptor.objects):
        total.update(plain(["l", [name, descriptor.objects[name]]]))
    return total.hexdigest()


def by_name(capture: Capture) -> dict[str, int]:
    """Return a 64-bit checksum of each tensor, and of the rest of each tracked object, by name."""
    descriptor = capture.descriptor
    found = {}
    for note, view in zip(descriptor.notes, capture.views, strict=True):
        what = (note.shape, note.stride, note.dtype, note.whole, note.placements)
        words = _words(view).cpu().numpy().tobytes()
        found[note.path] = _number(msgspec.msgpack.encode(what) + words)
    for name, values in descriptor.objects.items():
        found[name] = _number(plain(["l", [name, values]]))
    return found


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    low, high = -(1 << 63), (1 << 63) - 1
    weights = torch.randint(
        low, high, (BLOCK_WORDS,), dtype=torch.int64, generator=generator, device="cpu"
    )
    return (weights | 1).to(device)


def _words(view: torch.Tensor) -> torch.Tensor:
    """Return the words of one tensor's bytes: int64 of shape (blocks,), on its device."""
    rows = 1 if view.device.type == "cpu" else DEVICE_BLOCK_WORDS // BLOCK_WORDS
    step = rows * BLOCK_WORDS * 8
    found = [_block(view[start : start + step]) for start in range(0, view.numel(), step)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")


def _block(part: torch.Tensor) -> torch.Tensor:
    """Words of up to a step of bytes."""
    size = part.numel()
    if size % 8 or part.data_ptr() % 8:
        padded = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=part.device)
        padded[:size] = part
        part = padded
    if part.storage_offset() % 8:
        part = part.clone()
    numbers = part.view(torch.int64)
    scrambled = numbers * _SCRAMBLE
    scrambled ^= scrambled >> 32
    weights = _weights(part.device)
    if numbers.numel() <= BLOCK_WORDS:
        return (scrambled * weights[: numbers.numel()]).sum().reshape(1)
    whole = numbers.numel() // BLOCK_WORDS * BLOCK_WORDS
    found = (scrambled[:whole].view(-1, BLOCK_WORDS) * weights).sum(1)
    if rest := numbers.numel() - whole:
        last = (scrambled[whole:] * weights[:rest]).sum().reshape(1)
        found = torch.cat((found, last))
    return found
