"""See learning rates that come out otherwise after a fault: set now and then outside of updates, or
by something that counts steps by itself."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch

RATES = 4
"""Groups of parameters whose learning rates are looked at: who sets them sets all."""
LOOKS = 4
"""Updates of each world in which it is found out how the program sets them."""
SET_OUTSIDE = (
    "a learning rate is set outside of s.update(), and not in every step: what was done before a "
    "fault is done again after it, or was done on some ranks alone. Set it inside of "
    "`with s.update():`, before the optimizer's step"
)
COUNTS = (
    "a learning rate changes from step to step, and neither s.step nor anything that is tracked "
    "says how far it is: what counts by itself begins anew after a fault, or on a replaced rank. "
    "Compute it from s.step, or track what sets it (an object with state_dict and load_state_dict)"
)


_RATE = operator.methodcaller("get", "lr")


class _Left(NamedTuple):
    step: int
    rates: list[Any]


class RateWatch:
    """The learning rates of the tracked optimizers. One that is set in every step is set again in
    a step that is repeated, and comes out right, unless it follows from the one before."""

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []
        self._rates: list[Any] = []
        """As the last update has left them."""
        self._left = _Left(-1, [])
        """Those that were set outside of updates in the step in which the last world ended."""
        self.enter({}, looks=False, leads=False, step=-1)

    def enter(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        looks: bool,
        leads: bool,
        step: int,
    ) -> None:
        """Begin a new world, or leave one.

        Args:
            optimizers: name → tracked.
            looks: find out how the program sets them, too.
            leads: this rank tells, for all, of a step that is repeated.
            step: committed steps; -1: an update was broken off.
        """
        if self._groups and (now := self._read()) != self._rates:
            self._left = _Left(step, now)
        every = (group for one in optimizers.values() for group in one.param_groups)
        self._groups = list(islice(every, RATES))
        # Others may change them by what is in their own state.
        self._only_set = all(
            type(one).__module__.startswith("torch.") for one in optimizers.values()
        )
        self._looks, self._leads = looks, leads
        self._step = step
        self._history: list[list[Any]] = []
        self._is_set_always = True
        self._is_changed = False
        self.commit()

    def commit(self) -> None:
        """Note the learning rates that an update has left."""
        self._rates = list(map(_RATE, self._groups))
        if self._looks and len(self._history) <= LOOKS:
            # Objects that the program does not know: so it shows where it sets the same number.
            for group, rate in zip(self._groups, self._rates, strict=True):
                if type(rate) is float:
                    group["lr"] = rate * 1.0
            self._rates = self._read()

    def found(self) -> str:
        """Look at the begin of an update. Returns how rates were set since the last one, if that is
        wrong; else nothing."""
        turn = len(self._history)
        if turn > LOOKS and self._is_set_always:
            return ""
        # One in a tensor is changed in place: it may lie on a device, and is not waited for.
        now = list(map(_RATE, self._groups))
        changed = self._rates != now
        self._is_changed |= changed
        if turn <= LOOKS:
            self._history.append(self._rates)
            self._is_set_always &= any(a is not b for a, b in zip(self._rates, now, strict=True))
        if self._is_changed and not self._is_set_always:
            self._is_changed = False  # of a schedule, the caller tells in better words
            return SET_OUTSIDE
        return ""

    def repeated(self) -> str:
        """Look at the begin of the first update of a world. Returns in a line how a step that this
        process had begun before the fault has set rates now, if that is otherwise."""
        now = self._read()
        if not self._leads or self._step != self._left.step or self._left.rates == now:
            return ""
        return (
            f"a learning rate was set outside of s.update() in step {self._step + 1}, and to "
            f"another number when the step was repeated after a fault ({self._left.rates[0]}, "
            f"then {now[0]}): it follows from the one before, or from a count of the "
            "program's own. Compute it from s.step, or set it inside of `with s.update():`"
        )

    def seems_counted(self) -> bool:
        """Tell, at the last of the first looks, whether the rates have changed in two updates at
        least, and not by the same factor: that follows from the rate before, which is tracked."""
        firsts = [rates[0] for rates in self._history if rates and type(rates[0]) is float]
        if len(self._history) != LOOKS or len(firsts) != LOOKS or not self._only_set:
            return False
        factors = [now / before if before else 0.0 for before, now in pairwise(firsts)]
        factors = [one for one in factors if one != 1]
        return len(factors) > 1 and not all(math.isclose(one, factors[0]) for one in factors)

    def _read(self) -> list[Any]:
        return list(map(_RATE, self._groups))
