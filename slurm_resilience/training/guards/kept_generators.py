"""See random generators of the program's own that are drawn from, and are not tracked."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from slurm_resilience.training.content_digest import content_digest
from slurm_resilience.training.guards.code.program_locals import program_locals
from slurm_resilience.training.state.generators import TrackedGenerator

MOST = 64
"""Generators that are looked at."""
MOST_OBJECTS = 500_000
"""In a process with more, torch's are not looked for: it takes most of a second for a million."""
AT_ONCE = 10_000
"""Objects that are asked at once what they hold."""
_HOLDERS = frozenset((dict, list, tuple))


class _Kept(NamedTuple):
    generator: Any
    state: int
    seed: int
    """Another one later: it is seeded anew, by step say."""


class KeptGenerators:
    """Those of torch and of numpy that were there when it was looked. (Python's own are used by too
    many libraries.)"""

    def __init__(self) -> None:
        self._found: list[_Kept] = []

    def look(self, everything: Sequence[Any], tracked: Iterable[Any]) -> None:
        """Find them.

        Args:
            everything: objects of this process.
            tracked: the objects that are.
        """
        known = {id(one) for one in tracked} | {id(torch.default_generator)}
        kinds: tuple[type, ...] = ()
        if (numpy := sys.modules.get("numpy")) is not None:
            kinds = numpy.random.Generator, numpy.random.RandomState
            known.add(id(numpy.random.get_state.__self__))  # numpy's own
        # It belongs to a wrapper of one world, and is made anew on all ranks with the same seed.
        hooks = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
        if hooks is not None:
            kind = hooks.PowerSGDState
            known |= {id(one.rng) for one in everything if type(one) is kind}
        # Python's memory does not list torch's: they are found in what holds them.
        found = {id(one): one for one in everything if type(one) in kinds}
        few = everything if len(everything) <= MOST_OBJECTS else ()
        holders = (one for one in few if type(one) in _HOLDERS)
        while some := list(islice(holders, AT_ONCE)):
            held = gc.get_referents(*some)
            found |= {id(one): one for one in held if type(one) is torch.Generator}
        # A local variable is held by its frame, which Python's memory does not list either.
        values = (value for _, _, value in program_locals(inspect.currentframe()))
        found |= {id(one): one for one in values if type(one) is torch.Generator}
        mine = (one for number, one in found.items() if number not in known)
        self._found = [_Kept(one, _state(one), _seed(one)) for one in islice(mine, MOST)]

    @property
    def is_over(self) -> bool:
        """True where none is looked at any more."""
        return not self._found

    def drawn(self) -> tuple[str, ...]:
        """Return the kinds of those that were drawn from since; at the first call."""
        found, self._found = self._found, []
        kinds = (
            type(one.generator)
            for one in found
            if _state(one.generator) != one.state and _seed(one.generator) == one.seed
        )
        return tuple(dict.fromkeys(f"{kind.__module__}.{kind.__name__}" for kind in kinds))


def _state(generator: Any) -> int:
    return content_digest(TrackedGenerator(generator).state_dict())


def _seed(generator: Any) -> int:
    return generator.initial_seed() if type(generator) is torch.Generator else 0
