"""See what a program does with its optimizers that a fault would undo, or lose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from slurm_resilience.training.compat import tells_of_steps
from slurm_resilience.training.guards.late_optimizers import are_one, parameters_of
from slurm_resilience.training.guards.rate_watch import RateWatch
from slurm_resilience.training.guards.untracked_parts import UntrackedParts
from slurm_resilience.training.state.describe import local_shard


class OptimizerWatch:
    """Listens to all optimizers of the process in the first updates of a world.

    Args:
        outside: called when one that trains what is tracked steps outside of an update.
    """

    def __init__(self, outside: Callable[[], None]) -> None:
        self._tell_outside = outside
        self.parts = UntrackedParts()
        """Objects that go with an optimizer."""
        self.rates = RateWatch()
        self._stepped: list[torch.optim.Optimizer] = []
        self._handle: Any = None
        self.enter({}, (), listen=False, leads=False, step=-1)

    def enter(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        modules: Sequence[nn.Module],
        *,
        listen: bool,
        leads: bool,
        step: int,
    ) -> None:
        """Begin a new world.

        Args:
            optimizers: name → tracked.
            modules: the same.
            listen: note each optimizer that steps.
            leads: as in `RateWatch.enter`.
            step: the same.
        """
        self.stop()
        self._optimizers, self.modules = optimizers, modules
        self.rates.enter(optimizers, looks=listen, leads=leads, step=step)
        self._inside = False
        self._count = self._before = 0
        """Steps of all optimizers, and those before the update."""
        self.steps_outside = False
        """One that trains what is tracked has stepped outside of an update."""
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameter and gradient, at the end of an update in which no optimizer stepped."""
        if listen:
            self._handle = register_optimizer_step_post_hook(self._note)

    def stop(self) -> None:
        """Listen no more, and forget what was noted."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._stepped.clear()

    def entered(self) -> None:
        """Note that an update is entered."""
        self._inside, self._before = True, self._count

    def left(self) -> None:
        """Note the end of an update: if no optimizer stepped, which gradients there are. One that
        was skipped for infinite gradients, as a gradient scaler does, has none that count."""
        self._inside = False
        if self._handle is None or self._count != self._before:
            return
        found = [
            (parameter, parameter.grad)
            for optimizer in self._optimizers.values()
            for parameter in _parameters(optimizer)
            if parameter.grad is not None
        ]
        total = sum(float(local_shard(gradient).abs().sum()) for _, gradient in found)
        self._left = found if 0 < total < math.inf else []

    def were_kept(self) -> bool:
        """Tell whether an update begins with the gradients that the one before has left, to which
        those of its batch were added."""
        left, self._left = self._left, []
        return any(parameter.grad is gradient for parameter, gradient in left)

    def untracked(self) -> tuple[str, ...]:
        """Return the kinds of those that stepped, have parameters of what is tracked, and are no
        part of an optimizer that is tracked: one may be wrapped in another."""
        trained, tracked = self._trained(), list(self._optimizers.values())
        kinds = [
            type(one).__name__
            for one in self._stepped
            if parameters_of(one) & trained and not any(self._covers(t, one) for t in tracked)
        ]
        return tuple(dict.fromkeys(kinds))

    def _covers(self, tracked: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
        """Tell whether a tracked optimizer trains what another one does: it stepped as well, or one
        is a part of the other, or torch does not tell of its steps."""
        if not parameters_of(tracked) & parameters_of(other):
            return False
        stepped = any(one is tracked for one in self._stepped)
        return stepped or not tells_of_steps(tracked) or are_one(tracked, other)

    def _trained(self) -> set[int]:
        return {id(one) for module in self.modules for one in module.parameters()}

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._count += 1
        if not any(one is optimizer for one in self._stepped):
            self._stepped.append(optimizer)
        if not self._inside and not self.steps_outside:
            trained = self._trained()
            if any(id(one) in trained for one in _parameters(optimizer)):
                self.steps_outside = True
                self._tell_outside()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])
