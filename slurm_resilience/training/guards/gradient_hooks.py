"""See hooks for gradients (`register_comm_hook` of DDP) that keep state from step to step, as that
of PowerSGD does: errors to be added later, and a count of steps by which ranks agree on what they
exchange."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
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

    def enter(self) -> None:
        """Begin a world."""
        self._wrappers.clear()
        self._seen = []

    def watch(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Look at the hooks that a wrapper is given."""
        self._wrappers.add(wrapper)

    def look(self) -> None:
        """Note what their states are, a step before `changed`."""
        states = [one for wrapper in self._wrappers for one in hook_states(wrapper)]
        self._seen = [(one, _digest(one)) for one in states]

    def changed(self, tracked: Iterable[Any]) -> tuple[str, ...]:
        """Return the types of those that have changed since, and are not tracked."""
        known = {id(one) for one in tracked}
        seen, self._seen = self._seen, []
        kinds = [
            type(one).__name__
            for one, before in seen
            if id(one) not in known and _digest(one) != before
        ]
        return tuple(dict.fromkeys(kinds))


def _digest(state: Any) -> int:
    slots = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(state, "__dict__", ()), *slots]
    return content_digest({name: getattr(state, name, None) for name in names} or state)
