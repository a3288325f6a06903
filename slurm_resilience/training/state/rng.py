"""Random states of this process: torch (CPU, and the current CUDA device), numpy, random."""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from typing import Any

import torch

_WORDS = 625 * 4
"""Bytes of a Mersenne twister: 624 words, and the place in them."""
_seen: tuple[bytes, Any] = (b"", None)
"""numpy's words when its state was read, and that state."""


def read() -> dict[str, Any]:
    """All of them, by library; numpy's only if something imported it, CUDA's only if it is used.

    Called once a step, when the processor's caches hold other things: then about 30 µs.
    """
    found: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "random": random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = _numpy_state(numpy.random)
    return found


def _numpy_state(library: Any) -> Any:
    """``numpy.random.get_state()``, which takes 40 µs in a step; 2 µs when nothing was drawn."""
    global _seen
    generator: Any = getattr(library, "get_bit_generator", lambda: None)()
    if type(generator) is not library.MT19937:
        return library.get_state(legacy=False)
    words = ctypes.string_at(generator.ctypes.state_address, _WORDS)
    before, state = _seen
    # A normal number that is held back (state[3]) is handed out without moving the words.
    if state is None or state[3] or words != before:
        state = library.get_state()
        _seen = (words, state)
    return state


def write(states: dict[str, Any]) -> None:
    """Set what `read` gave; what this process does not use is left out."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(states["numpy"])


def pack(states: dict[str, Any]) -> dict[str, Any]:
    """With bytes in place of tensors and of `random`'s 625 numbers."""
    packed = {
        name: bytes(value.numpy()) if isinstance(value, torch.Tensor) else value
        for name, value in states.items()
    }
    version, numbers, gauss = states["random"]
    packed["random"] = (version, array("I", numbers).tobytes(), gauss)
    return packed


def unpack(packed: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `pack`."""
    states = {
        name: torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if isinstance(value, bytes)
        else value
        for name, value in packed.items()
    }
    version, numbers, gauss = packed["random"]
    states["random"] = (version, tuple(array("I", numbers)), gauss)
    return states
