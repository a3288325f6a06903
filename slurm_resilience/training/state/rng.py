"""Read and write this process's random states: torch (CPU, current CUDA device), numpy, random."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch


def read() -> dict[str, Any]:
    """Read all of them, by library: numpy's only if something imported it, CUDA's only if in use.

    Called once a step.
    """
    found: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "random": random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = numpy.random.get_state(legacy=False)
    return found


def write(states: dict[str, Any]) -> None:
    """Set what `read` returned; leave out what this process does not use."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(states["numpy"])


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
