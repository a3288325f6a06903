"""Random states of this process: torch (CPU, and the current CUDA device), numpy, random."""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Callable
from typing import Any

import torch

_WORDS = 625 * 4
"""Bytes of a Mersenne twister: 624 words, and the place in them."""


class _Twister:
    """A twister's state, which costs 20 µs to read in a step, and 3 µs to see that nothing was
    drawn since: its words are compared where they lie."""

    def __init__(self, owner: Any, address: int) -> None:
        self.owner = owner  # holds them
        self._words = memoryview((ctypes.c_ubyte * _WORDS).from_address(address))
        self._seen: tuple[bytes, Any] | None = None
        self._state: Any = None

    def state(self, extra: Any, read: Callable[[], Any]) -> Any:
        """What ``read`` gives; ``extra`` is what belongs to the state and lies elsewhere."""
        now = self._words.tobytes(), extra
        if now != self._seen:
            self._state, self._seen = read(), now
        return self._state


def _of_random() -> _Twister | None:
    """Python's own; None where its words do not lie where they are looked for."""
    inside: Any = random._inst
    address = id(inside) + object.__basicsize__
    if (
        sys.implementation.name != "cpython"
        or type(inside).__basicsize__ < object.__basicsize__ + _WORDS
    ):
        return None
    *words, place = inside.getstate()[1]
    known = array("I", [place, *words]).tobytes()
    return _Twister(inside, address) if ctypes.string_at(address, _WORDS) == known else None


_python = _of_random()
_numpy: _Twister | None = None


def read() -> dict[str, Any]:
    """All of them, by library; numpy's only if something imported it, CUDA's only if it is used.

    Called once a step, when the processor's caches hold other things: then about 25 µs.
    """
    found: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "random": _random_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = _numpy_state(numpy.random)
    return found


def _random_state() -> Any:
    if _python is None:
        return random.getstate()
    return _python.state(_python.owner.gauss_next, random.getstate)


def _numpy_state(library: Any) -> Any:
    global _numpy
    generator: Any = getattr(library, "get_bit_generator", lambda: None)()
    if _numpy is None or generator is not _numpy.owner:
        if type(generator) is not library.MT19937:
            return library.get_state(legacy=False)
        _numpy = _Twister(generator, generator.ctypes.state_address)
    state = _numpy.state(None, library.get_state)
    # A normal number that is held back (state[3]) is handed out without moving the words.
    return library.get_state() if state[3] else state


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
