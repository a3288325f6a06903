"""See hooks for gradients (`register_comm_hook` of DDP) that keep state from step to step, as that
of PowerSGD does: errors to be added later, and a count of steps by which ranks agree on what they
exchange."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

from slurm_resilience.training.compat import hook_states
from slurm_resilience.training.content_digest import content_digest


class GradientHooks:
    """Those of the wrappers of one world."""

    def __init__(self) -> None:
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._seen: list[tuple[Any, int]] = []
        """States at the first look, and a digest of each."""
        self._is_trained = False

    def enter(self, *, is_trained: bool) -> None:
        """Begin a world.

        Args:
            is_trained: updates were made before it.
        """
        self._wrappers.clear()
        self._seen, self._is_trained = [], is_trained

    def watch(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Look at the hooks that a wrapper is given."""
        self._wrappers.add(wrapper)

    def look(self) -> None:
        """Note what their states are, a step before `changed`."""
        states = [one for wrapper in self._wrappers for one in hook_states(wrapper)]
        self._seen = [(one, _digest(one)) for one in states]

    def changed(self, tracked: Iterable[Any], kept: Iterable[Any]) -> tuple[str, ...]:
        """Return in lines which have changed since, and are not tracked: those that outlive a
        fault, and those that were made anew after one.

        Args:
            tracked: the objects that are.
            kept: what `s.once` keeps.
        """
        known, seen = {id(one) for one in tracked}, self._seen
        self._seen = []
        items = (one if isinstance(one, list | tuple) else (one,) for one in kept)
        lasting = {id(one) for one in (*chain.from_iterable(items), *_of_the_program())}
        changed = [one for one, before in seen if id(one) not in known and _digest(one) != before]
        lines = [
            f"{type(one).__name__}, the state of DDP's hook for gradients, changes in each step, "
            "outlives a fault, and is not tracked: a replaced rank begins with another one, and "
            "the ranks exchange what does not fit together. Make it beside s.ddp, in the training "
            "function, so that all begin anew"
            if id(one) in lasting
            else f"{type(one).__name__}, the state of DDP's hook for gradients, was made anew "
            "after a fault: what it had kept (errors of gradients) is lost, and the result is not "
            "the same to the last bit"
            for one in changed
            if id(one) in lasting or self._is_trained
        ]
        return tuple(dict.fromkeys(lines))


def _of_the_program() -> list[Any]:
    return list(vars(sys.modules["__main__"]).values())


def _digest(state: Any) -> int:
    slots = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(state, "__dict__", ()), *slots]
    return content_digest({name: getattr(state, name, None) for name in names} or state)
