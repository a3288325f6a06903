"""See parameters that come after `s.track`, or go: a process that takes a lost rank's place builds
the model without them, or with them, and the training ends at the first fault. And see hooks that
come once more whenever the function is called."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from slurm_resilience.training.compat import hooks_on, versions

log = logging.getLogger("sres.training")

FROZEN_LOOKS = 16
"""Updates before which frozen weights are looked at; then at each time after as many."""
LOOKS = 20
"""Looks at all parameters in one world: what swaps parameters in each step would cost one each."""


class HookCount:
    """Hooks on the tracked modules, when the first update of each world begins."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._hooks = 0

    def grown(self, modules: Sequence[nn.Module]) -> str:
        """Count them. Returns a line if the same modules have more than in the world before.

        Args:
            modules: those that are tracked.
        """
        before, seen = self._hooks, self._modules
        self._modules, self._hooks = list(modules), sum(map(hooks_on, modules))
        same = len(seen) == len(modules) and all(map(operator.is_, seen, modules))
        if not same or self._hooks <= before:
            return ""
        return (
            f"hooks on the model are registered anew whenever the function is called ({before}, "
            f"now {self._hooks}), and each acts once more after every fault. Register them where "
            "the model is built, or remove them in a `finally`"
        )


def warn_of_untracked(module: nn.Module, names: Sequence[str]) -> None:
    """Warn of a module that is wrapped to be trained, and is not tracked.

    Args:
        module: the module.
        names: those of its parameters that are not.
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    log.warning(
        "s.ddp(%s): it trains %s%s, not tracked: a replaced rank begins with new ones. Track "
        "every model that trains, and its optimizer: s.track(model=…, opt=…, other=…, other_opt=…)",
        type(module).__name__,
        ", ".join(names[:3]),
        more,
    )


class FrozenWeights:
    """Parameters that no peer sends, and that nothing may change.

    Args:
        parameters: by path.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = dict(parameters)
        self._versions = versions(list(self._parameters.values()))
        self._turn = 0

    def changed(self) -> list[str]:
        """Return the paths of those that were written to, once; now and then, it is looked."""
        turn, self._turn = self._turn, self._turn + 1
        if turn >= FROZEN_LOOKS and turn % FROZEN_LOOKS:
            return []
        now = versions(list(self._parameters.values()))
        before = zip(self._parameters.items(), self._versions, now, strict=True)
        found = [path for (path, one), a, b in before if a != b and not one.requires_grad]
        if found:
            self._parameters, self._versions = {}, []
        return found


class LateAdditions:
    """To what is tracked, in one world."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self.hooks = HookCount()
        self.enter({}, {}, {}, listen=False)

    def enter(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        modules: Mapping[str, nn.Module],
        frozen: Mapping[str, torch.Tensor],
        *,
        listen: bool,
    ) -> None:
        """Begin a new world.

        Args:
            optimizers: name → tracked.
            modules: the same.
            frozen: path → parameter that no peer sends.
            listen: have torch tell when a module is given something.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._groups = {name: len(one.param_groups) for name, one in optimizers.items()}
        self._optimizers, self._modules = optimizers, modules
        self._parts = {id(part) for module in modules.values() for part in module.modules()}
        self._shapes = _shapes(modules) if listen else {}
        self._looks, self._due = LOOKS, False
        self._frozen = FrozenWeights(frozen) if frozen else None
        if listen:
            self._handles = [
                register_module_parameter_registration_hook(self._registered),
                register_module_module_registration_hook(self._registered),
            ]

    def _registered(self, module: nn.Module, name: str, thing: object) -> None:
        if id(module) in self._parts:
            self._due = True

    def found(self) -> list[str]:
        """Return in lines what came since the last look, and what went."""
        lines = []
        if self._frozen is not None and (changed := self._frozen.changed()):
            lines.append(
                f"{_some(changed)}: frozen, and changed. With trainable_only=True frozen weights "
                "are never sent: a replaced rank has not got the change, and the training ends at "
                "the first fault. Leave trainable_only out where they change"
            )
        for name, groups in self._groups.items():
            if (count := len(self._optimizers[name].param_groups)) != groups:
                self._groups[name] = count
                lines.append(_groups_line(name, came=count > groups))
        if self._due and self._looks:
            self._due, self._looks = False, self._looks - 1
            before, self._shapes = self._shapes, _shapes(self._modules)
            if new := [path for path in self._shapes if self._shapes[path] != before.get(path)]:
                lines.append(
                    f"{_some(new)} came after s.track: a replaced rank has not got "
                    "it, and the training ends at the first fault. Build it at the start, frozen "
                    "if it trains later (requires_grad_(False))"
                )
            elif gone := [path for path in before if path not in self._shapes]:
                lines.append(
                    f"{_some(gone)} went after s.track, or shares the weights of another parameter "
                    "since: a replaced rank still has it, and the training ends at the first "
                    "fault. Tie weights, and leave layers out, where the model is built"
                )
        return lines


def _groups_line(name: str, *, came: bool) -> str:
    if came:
        return (
            f"{name} was given parameters after s.track (add_param_group): a replaced rank "
            "has not got them, and the training ends at the first fault. Give all groups "
            "at the start, those that train later frozen (requires_grad_(False))"
        )
    return (
        f"{name} lost groups of parameters after s.track: a replaced rank still has them, and the "
        "training ends at the first fault. Keep them, and freeze what is to train no more "
        "(requires_grad_(False))"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _shapes(modules: Mapping[str, nn.Module]) -> dict[str, torch.Size]:
    return {
        f"{name}.{path}": parameter.shape
        for name, module in modules.items()
        for path, parameter in module.named_parameters()
    }
