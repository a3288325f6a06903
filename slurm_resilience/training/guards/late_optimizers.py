"""See an optimizer that is made in the middle of a training, and trains in the place of one that is
tracked, or beside it. What it has gathered is lost whenever the function makes it anew."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from slurm_resilience.training.compat import tells_of_steps

DEPTH = 3
"""Wrappers around an optimizer that are looked into."""


class LateOptimizer:
    """One that is not tracked, until it has stepped.

    Args:
        optimizer: made late.
        tracked: those that are tracked.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, tracked: Sequence[torch.optim.Optimizer]
    ) -> None:
        self.kind = type(optimizer).__name__
        self._optimizer = weakref.ref(optimizer)
        self._steps = self._others_steps = 0
        others = [one for one in tracked if parameters_of(one) & parameters_of(optimizer)]
        self._may_be_inside = any(
            are_one(one, optimizer) or not tells_of_steps(one) for one in others
        )
        self._handles = [optimizer.register_step_post_hook(self._stepped)]
        self._handles += [
            one.register_step_post_hook(self._other_stepped)
            for one in others
            if tells_of_steps(one)
        ]

    @property
    def is_judged(self) -> bool:
        """True once it has stepped, or is gone."""
        return self._steps > 0 or self._optimizer() is None

    @property
    def trains_alone(self) -> bool:
        """True if no tracked optimizer, which it may be a part of, has stepped with it."""
        return self._steps > 0 and not self._others_steps and not self._may_be_inside

    def wait_on(self) -> None:
        """Begin anew before another update in which it may step."""
        self._others_steps = 0

    def stop(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()

    def _stepped(self, *_: Any) -> None:
        self._steps += 1

    def _other_stepped(self, *_: Any) -> None:
        self._others_steps += 1


def parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer has."""
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


def are_one(first: Any, second: Any) -> bool:
    """Tell whether one of two optimizers may be a part of the other, so that one step is both's."""
    return (
        first.state is second.state
        or first.param_groups is second.param_groups
        or _holds(first, second, DEPTH)
        or _holds(second, first, DEPTH)
    )


def _holds(outer: Any, inner: Any, depth: int) -> bool:
    if outer is inner:
        return True
    if not depth or not hasattr(outer, "__dict__"):
        return False
    values = (one for value in vars(outer).values() for one in _items(value))
    optimizers = (one for one in values if isinstance(one, torch.optim.Optimizer))
    return any(_holds(one, inner, depth - 1) for one in optimizers)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)
