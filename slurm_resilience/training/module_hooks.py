"""The hooks that a session puts on modules: to see the waiting, and to place a drill's fault."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slurm_resilience.training import inject
from slurm_resilience.training.compat import has_memory
from slurm_resilience.training.watch import Watch, listen


class ModuleHooks:
    """Those of one process.

    Args:
        point: lets a drill strike in a phase.
    """

    def __init__(self, point: Callable[[inject.Phase], None]) -> None:
        self._point = point
        self._stop_listening: list[Callable[[], None]] = []
        self._armed: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def listen(self, watch: Watch, module: nn.Module) -> None:
        """Mark where a module's backward waits for others, until the world is left."""
        self._stop_listening.append(listen(watch, module))

    def stop_listening(self) -> None:
        """Take the marks off the wrappers of a world that is left."""
        for stop in self._stop_listening:
            stop()
        self._stop_listening = []

    def arm_backward(self, objects: Iterable[Any]) -> None:
        """Make the backward of modules a place for a drill's fault, under DDP or not: of those that
        are tracked, and of those that DDP wraps. (A Lightning module's own forward is never called,
        that of its net is.)"""
        for module in objects:
            if isinstance(module, nn.Module) and module not in self._armed and inject.armed():
                # No method: a copy.deepcopy of the module would copy this object, too.
                module.register_forward_hook(lambda *call: self._strike_at(call[-1]))
                self._armed.add(module)

    def _strike_at(self, output: Any) -> None:
        """Let a fault strike where the gradient of an output comes. (A module's own hook of its
        backward would be an error inside of `torch.func`.)"""
        for tensor in _tensors(output):
            if tensor.requires_grad and has_memory(tensor):
                tensor.register_hook(lambda _: self._point("backward"))  # type: ignore[no-untyped-call]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for one in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(one)
