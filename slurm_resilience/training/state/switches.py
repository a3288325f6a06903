"""Turn on again what a block turned off for a while, when a fault took it out meanwhile: train mode
in an evaluation, `requires_grad` of a GAN's other half, gradients as such. The default dtype, which
is changed while a model is loaded, is set back with them.

A picture is taken once a world, so that a step costs nothing. What was off then and is on now
stays on: a loop that unfreezes a layer later means it. A new process turns on what its peer has on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Switches:
    """Picture of what is on at this moment.

    Args:
        objects: name → what is tracked; only modules are looked at.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        modules = {name: one for name, one in objects.items() if isinstance(one, nn.Module)}
        self.thawed: tuple[str, ...] = ()
        """Parameters that a fault had left frozen."""
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._training = [part for part in _parts(modules.values()) if part.training]
        self._trained = {name: one for name, one in _parameters(modules) if one.requires_grad}

    def on_again(self) -> tuple[str, ...]:
        """Turn on again what was on; note, and return, the parameters that were frozen since."""
        # In this thread, which is the block's. `with torch.no_grad()` needs it only where a block
        # is interrupted as it is left.
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._dtype)
        for part in self._training:
            # Not train(True): that would reach parts that are to stay in eval mode.
            part.training = True
        frozen = {name: one for name, one in self._trained.items() if not one.requires_grad}
        for parameter in frozen.values():
            parameter.requires_grad_(True)
        self.thawed = tuple(frozen)
        return self.thawed


def read_switches(modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Return the names of the parameters that take gradients, and of the parts in train mode.

    Args:
        modules: name → tracked.
    """
    return {
        "requires_grad": tuple(name for name, one in _parameters(modules) if one.requires_grad),
        "training": tuple(name for name, part in _named_parts(modules) if part.training),
    }


def write_switches(modules: Mapping[str, nn.Module], on: Mapping[str, Collection[str]]) -> None:
    """Turn on what is on at a peer, and off what is off there: a layer that was unfrozen since this
    process's model was built.

    Args:
        modules: name → tracked.
        on: as `read_switches` gives it.
    """
    trained, training = set(on["requires_grad"]), set(on["training"])
    for name, parameter in _parameters(modules):
        parameter.requires_grad_(name in trained)
    for name, part in _named_parts(modules):
        part.training = name in training


def _parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in modules.items():
        yield from module.named_parameters(prefix=name)


def _named_parts(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in modules.items():
        yield from module.named_modules(prefix=name)


def _parts(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    return (part for module in modules for part in module.modules())
