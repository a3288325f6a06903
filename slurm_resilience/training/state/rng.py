"""Read and write this process's random states: torch (CPU, current CUDA device), numpy, random."""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from typing import Any

import torch

PLACE = 624
"""numpy's Mersenne twister: so many words of 32 bits, and then the place in them."""
_WORDS = ctypes.c_uint32 * (PLACE + 1)
Ends = tuple[memoryview, ...]
"""The first and the last of them in a generator's own memory; empty: they cannot be looked at."""
MAY_HAVE_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
"""False: this build of torch has none, so no step need ask whether it is in use."""


def _ends(words: Any) -> Ends:
    view = memoryview(words).cast("B")
    return view[:16], view[-16:]


class _NumpyState:
    """numpy's state, read in full from the first draw on: that takes 30 µs, and 1 µs to see that
    nothing was drawn yet, by a few of the generator's words: any draw moves the place in them, or
    makes all of them anew. Where they lie is part of numpy's interface.

    Later the words do not tell enough: a normal number that is held back is not among them, and a
    program that seeds anew at each step comes to the same words with one held back or without.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._ends: Ends = ()
        """Empty too when something was drawn."""
        self._seen = b""
        self._state: Any = None

    def read(self, library: Any) -> Any:
        """Return `numpy.random.get_state`'s answer.

        Args:
            library: the module numpy.
        """
        generator = library.random.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._ends = generator, _numpys_ends(library, generator)
            self._state = None
        if not self._ends:
            return library.random.get_state(legacy=False)
        known, now = self._state, b"".join(self._ends)
        if known is not None and now == self._seen:
            return known
        found = library.random.get_state(legacy=False)
        if known is not None or found["has_gauss"]:
            self._ends = ()
        self._state, self._seen = found, now
        return found

    def forget(self) -> None:
        """Begin anew: the generator was given another state."""
        self._generator = None


def _numpys_ends(library: Any, generator: Any) -> Ends:
    if type(generator) is not library.random.MT19937:
        return ()
    words = _WORDS.from_address(generator.ctypes.state_address)
    state = generator.state["state"]
    return _ends(words) if list(words) == [*state["key"].tolist(), state["pos"]] else ()


_numpy = _NumpyState()


def read() -> dict[str, Any]:
    """Read all of them, by library: numpy's only if something imported it, CUDA's only if in use.

    Called once a step.
    """
    found: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "random": random.getstate(),
    }
    if MAY_HAVE_CUDA and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = _numpy.read(numpy)
    return found


def write(states: dict[str, Any]) -> None:
    """Set what `read` returned; leave out what this process does not use."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(states["numpy"])
        _numpy.forget()


def seed(number: int) -> None:
    """Begin all of them anew, from a number of 64 bits."""
    torch.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number & 0xFFFFFFFF)


def pack(states: dict[str, Any]) -> dict[str, Any]:
    """Put bytes in place of tensors and of the 625 numbers of `random`."""
    packed = {
        name: bytes(value.numpy()) if isinstance(value, torch.Tensor) else value
        for name, value in states.items()
    }
    version, numbers, gauss = states["random"]
    packed["random"] = (version, array("I", numbers).tobytes(), gauss)
    return packed


def unpack(packed: dict[str, Any]) -> dict[str, Any]:
    """Undo `pack`."""
    states = {
        name: torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if isinstance(value, bytes)
        else value
        for name, value in packed.items()
    }
    version, numbers, gauss = packed["random"]
    states["random"] = (version, tuple(array("I", numbers)), gauss)
    return states
