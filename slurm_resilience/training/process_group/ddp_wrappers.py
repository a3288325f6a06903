"""DDP wrappers of one world: those that the program makes itself, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
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
        self._unwatch: dict[int, Callable[[], None]] = {}
        """Id of a parameter that was frozen when it was wrapped → ends the watch over it."""
        self.late: dict[str, Wrapper] = {}
        """Names of those that have a gradient since, which their wrapper does not exchange."""

    def listen(self) -> None:
        """Note those that are made from now on."""
        self._listening = register_module_module_registration_hook(self._note)

    def leave(self) -> list[nn.Module]:
        """Note no more; return those that are alive."""
        if self._listening is not None:
            self._listening.remove()
        for unwatch in self._unwatch.values():
            unwatch()
        self._unwatch.clear()
        self._ready = []
        return list(self._alive)

    def sent_buffers(self) -> set[int]:
        """Return the ids of the buffers that each forward takes from rank 0."""
        return {
            id(buffer)
            for one in self._alive
            if isinstance(one, Wrapper) and compat.sends_buffers(one)
            for buffer in one.module.buffers()
        }

    def unreduced(self) -> Wrapper | None:
        """Return one that has not exchanged all gradients of its last backward."""
        if self._ready is None:
            if self.late:
                return next(iter(self.late.values()))
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

    def _note(self, module: nn.Module, _name: str, inside: nn.Module | None) -> None:
        if isinstance(module, Wrapper):
            self._alive.add(module)
            self._ready = None
            if inside is not None:
                self._watch_frozen(module, inside)

    def _watch_frozen(self, wrapper: Wrapper, inside: nn.Module) -> None:
        """Watch the parameters that this wrapper will not exchange. A wrapper that is made anew
        when they are unfrozen takes the place of the one before."""
        for name, parameter in inside.named_parameters():
            if (unwatch := self._unwatch.pop(id(parameter), None)) is not None:
                unwatch()
            if _may_train_later(parameter):
                came = self._late_gradient(weakref.ref(wrapper), name)
                self._unwatch[id(parameter)] = compat.watch_frozen(parameter, came)

    def _late_gradient(self, made: weakref.ref[Wrapper], name: str) -> Callable[[], None]:
        def came() -> None:
            wrapper = made()
            # Without an exchange of its own, the program or s.microbatches adds up all gradients.
            if wrapper is not None and wrapper.require_backward_grad_sync:
                self.late[name], self._ready = wrapper, None

        return came


def _may_train_later(parameter: torch.Tensor) -> bool:
    is_float = parameter.is_floating_point() or parameter.is_complex()
    return is_float and not parameter.requires_grad and not parameter.is_inference()
