"""Read and write this process's random states: torch (CPU, current CUDA device), numpy, random."""

from __future__ import annotations

import logging
import pickle
import random
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import torch

from slurm_resilience.training.times_set import TIMES_SET

log = logging.getLogger("sres.training")

MAY_HAVE_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
"""False: this build of torch has none, so no step need ask whether it is in use."""
ALWAYS = "torch", "cuda"
"""Libraries whose state is read at each mark: that is quick, and torch's own samplers draw the
order of an epoch from it, once."""
CLOSELY = 20
"""Marks of each world at which every state is read. Another library that was not drawn from by then
is quiet."""
QUIET_MARKS = 16
"""Between two looks at a quiet library's state."""


class MarkedStates:
    """The states at the last mark.

    To read all takes longer than all else of a mark: Python's alone are 625 objects. Most programs
    draw from it at each step, or never. So what is quiet is looked at now and then; from its first
    draw on it is read at each mark. A rollback that finds a first draw since the last look goes
    back to that look, and says so: those draws come once more. Ranks that draw alike do so
    afterwards too.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._drawn: dict[str, Callable[[], Any]] = {}
        """Libraries that are not quiet, and what reads their states."""
        self._close = CLOSELY
        """Marks at which everything is still read."""
        self._age = 0
        """Marks since the last look at what is quiet."""

    def begin(self) -> None:
        """Mark the beginning of a world: another state than before is no draw."""
        TIMES_SET.add()
        self._states = read()
        drawn = [name for name in self._states if name in (*ALWAYS, *self._drawn)]
        self._drawn = {name: _READERS[name] for name in drawn}
        self._close, self._age = CLOSELY, 0

    def mark(self) -> None:
        """Remember the states now."""
        self._age += 1
        for name, read_one in self._drawn.items():
            self._states[name] = read_one()
        if self._close or self._age == QUIET_MARKS:
            self._close, self._age = max(0, self._close - 1), 0
            quiet = read(but=self._drawn)
            self._drawn |= {name: _READERS[name] for name in self._differ(quiet)}
            self._states |= quiet

    def rollback(self) -> None:
        """Go back to the mark."""
        late = self._differ(read(but=self._drawn))
        if late and self._age:
            log.warning(
                "the first random numbers of %s were drawn in this step, or up to %d steps before: "
                "they come once more",
                ", ".join(late),
                self._age,
            )
        self._drawn |= {name: _READERS[name] for name in late}
        write(self._states)

    def _differ(self, states: dict[str, Any]) -> list[str]:
        known = self._states
        return [name for name in states if name in known and not _equal(states[name], known[name])]


def _in_use() -> list[str]:
    """Return the libraries that have states: numpy only if something imported it, CUDA only if in
    use."""
    names = ["torch", "random"]
    if MAY_HAVE_CUDA and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        names.append("cuda")
    if "numpy" in sys.modules:
        names.append("numpy")
    return names


_READERS: dict[str, Callable[[], Any]] = {
    "torch": torch.default_generator.get_state,
    "random": random.getstate,
    "cuda": torch.cuda.get_rng_state,
    "numpy": lambda: sys.modules["numpy"].random.get_state(legacy=False),
}


def read(but: Iterable[str] = ()) -> dict[str, Any]:
    """Read all of them, by library: numpy's only if something imported it, CUDA's only if in use.

    Args:
        but: libraries that are left out.
    """
    return {name: _READERS[name]() for name in _in_use() if name not in but}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other if isinstance(one, tuple) else pickle.dumps(one) == pickle.dumps(other)


def write(states: dict[str, Any]) -> None:
    """Set what `read` returned; leave out what this process does not use."""
    TIMES_SET.add()
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(states["numpy"])


def seed(number: int) -> None:
    """Begin all of them anew, from a number of 64 bits."""
    TIMES_SET.add()
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


class RandomStates:
    """This process's random states, as something that is saved and loaded."""

    goes_to_new_ranks = True
    """Each rank has its own; one more than there were goes on like the first, as one that a peer
    heals."""

    def state_dict(self) -> dict[str, Any]:
        return pack(read())

    def load_state_dict(self, packed: dict[str, Any]) -> None:
        write(unpack(packed))
