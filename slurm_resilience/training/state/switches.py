"""Turn on again what a block turned off for a while, when a fault took it out meanwhile: train mode
in an evaluation, `requires_grad` of a GAN's other half, gradients as such. The default dtype, which
is changed while a model is loaded, is set back with them.

A picture is taken once a world, so that a step costs nothing. What was off then and is on now
stays on: a loop that unfreezes a layer later means it.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        self._trained = {
            f"{name}.{path}": parameter
            for name, module in modules.items()
            for path, parameter in module.named_parameters()
            if parameter.requires_grad
        }

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


def _parts(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    return (part for module in modules for part in module.modules())
