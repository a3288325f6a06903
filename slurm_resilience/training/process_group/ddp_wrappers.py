"""DDP wrappers of one world: those that the program makes itself, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from slurm_resilience.training import compat

Wrapper = nn.parallel.DistributedDataParallel


class DdpWrappers:
    """Notes each one when it is made."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._ready: list[tuple[Callable[[], None], Wrapper]] | None = None
        """The same, with what each step asks of them; None: there are new ones."""
        self._listening: Any = None

    def listen(self) -> None:
        """Note those that are made from now on."""
        self._listening = register_module_module_registration_hook(self._note)

    def leave(self) -> list[nn.Module]:
        """Note no more; return those that are alive."""
        if self._listening is not None:
            self._listening.remove()
        self._ready = []
        return list(self._alive)

    def unreduced(self) -> Wrapper | None:
        """Return one that has not exchanged all gradients of its last backward."""
        if self._ready is None:
            # One whose making failed has no reducer.
            self._ready = [
                (compat.reduction_check(one), one)
                for one in self._alive
                if isinstance(one, Wrapper) and hasattr(one, "reducer")
            ]
        for check, wrapper in self._ready:
            try:
                check()
            except RuntimeError:
                return wrapper
        return None

    def _note(self, module: nn.Module, _name: str, _inside: nn.Module | None) -> None:
        if isinstance(module, Wrapper):
            self._alive.add(module)
            self._ready = None
