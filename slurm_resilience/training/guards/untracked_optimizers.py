"""See an optimizer that trains what is tracked, and is not tracked itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from slurm_resilience.training.guards.untracked_parts import UntrackedParts


class UntrackedOptimizers:
    """Listens to all optimizers of the process, for the first updates of a world."""

    def __init__(self) -> None:
        self.parts = UntrackedParts()
        """Objects that go with an optimizer."""
        self._stepped: list[torch.optim.Optimizer] = []
        self._handle: Any = None

    def listen(self) -> None:
        """Note each optimizer that steps from now on."""
        self.stop()
        self._handle = register_optimizer_step_post_hook(self._note)

    def stop(self) -> None:
        """Listen no more, and forget what was noted."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._stepped.clear()

    def found(
        self, modules: Iterable[nn.Module], tracked: Iterable[torch.optim.Optimizer]
    ) -> tuple[str, ...]:
        """Return the kinds of those that stepped, have parameters of these modules, and share none
        with an optimizer that is tracked: one may be wrapped in another.

        Args:
            modules: those that are tracked.
            tracked: the optimizers that are.
        """
        trained = {id(one) for module in modules for one in module.parameters()}
        known = {number for one in tracked for number in _parameters(one)}
        kinds = [
            type(one).__name__
            for one in self._stepped
            if (mine := _parameters(one)) & trained and not mine & known
        ]
        return tuple(dict.fromkeys(kinds))

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not any(one is optimizer for one in self._stepped):
            self._stepped.append(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}
