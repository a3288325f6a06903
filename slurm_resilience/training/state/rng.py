"""Random states of this process: torch (CPU, and the current CUDA device), numpy, random."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch


def read() -> dict[str, Any]:
    """All of them, by library; numpy's only if something imported it, CUDA's only if it is used.

    About 25 µs, of which numpy takes 20.
    """
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = numpy.random.get_state()
    return found


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
