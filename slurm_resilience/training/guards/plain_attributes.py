"""See state that is kept where it is not healed: a number or a tensor in an attribute of a module
that is no buffer, a number in one of an optimizer, and the buffers of a module that is not tracked.
A repeated step changes it twice, and a replaced rank begins anew."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from slurm_resilience.training.compat import versions
from slurm_resilience.training.state.adapters import has_own_state

LOOKS = 4
"""At the beginning, and before the first three updates: what an update changes is seen in the last
three alone."""
SAME_SHARE = 1e-6
"""Two differences, or two ratios, are the same up to this part of them."""


class _Seen(NamedTuple):
    thing: Any
    number: float
    """The number, or how often the tensor was written to."""


_Reading = dict[str, _Seen]


class PlainAttributes:
    """Those of what this process tracks, in its first steps. What counts up from one
    step to the next, twice, is told; what is only set anew may be for the log. So is a fraction
    that twice changes by the same difference, or ratio: a temperature that cools."""

    def __init__(self) -> None:
        self._holders: dict[str, nn.Module | torch.optim.Optimizer] = {}
        self._readings: list[_Reading] = []
        self._told: set[str] = set()
        self._has_begun = False

    def begin(
        self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        """Begin with what is tracked as it is, the first time that this is called.

        Args:
            modules: by name.
            optimizers: the same.
        """
        if self._has_begun:
            return
        self._has_begun = True
        self._holders = {
            f"{name}.{path}" if path else name: part
            for name, module in modules.items()
            for path, part in module.named_modules()
            if type(part).get_extra_state is nn.Module.get_extra_state
        }
        self._holders |= {name: one for name, one in optimizers.items() if not has_own_state(one)}
        self._readings = [self._read()]

    @property
    def is_over(self) -> bool:
        """True where none is looked at any more."""
        return self._has_begun and not self._readings

    def counted(self, *, asked_step: bool) -> tuple[str, ...]:
        """Look a step later. Returns the names of those that count; each is told once.

        Args:
            asked_step: the program has asked for its step; a fraction may follow from that.
        """
        if not self._readings:
            return ()
        self._readings.append(self._read())
        if len(self._readings) < 3:
            return ()
        first, second, third = self._readings[-3:]
        found = {
            name
            for name in first.keys() & second.keys() & third.keys()
            if _goes_on(first[name], second[name], third[name], asked_step=asked_step)
        }
        new, self._told = found - self._told, self._told | found
        if len(self._readings) == LOOKS:
            self._readings, self._holders = [], {}
        return tuple(sorted(new))

    def _read(self) -> _Reading:
        found = {}
        for path, holder in self._holders.items():
            # A module of torch's own keeps its state in buffers; its options are fractions.
            is_own = not type(holder).__module__.startswith("torch.")
            is_module = isinstance(holder, nn.Module)  # an optimizer's tensors are told otherwise
            for name, value in vars(holder).items():
                if type(value) is float or (is_own and type(value) is int):
                    found[f"{path}.{name}"] = _Seen(type(value), value)
                elif is_own and is_module and _is_plain(value):
                    found[f"{path}.{name}"] = _Seen(value, versions([value])[0])
        return found


class UntrackedBuffers:
    """Those of modules that are not tracked (a loss with a running centre, a queue of features),
    that were there when it was looked."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._changing: dict[tuple[int, str], _Seen] = {}
        """Number of a module, and name of a buffer that has changed from each look to the next."""
        self._looks = 0

    def look(
        self,
        everything: Iterable[Any],
        modules: Iterable[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        """Find them.

        Args:
            everything: objects of this process.
            modules: those that are tracked, or told of otherwise.
            optimizers: those that are tracked.
        """
        parts = [part for module in modules for part in module.modules()]
        known = {id(part) for part in parts}
        # What a compiler makes of a module, or of an optimizer's step, holds the same tensors.
        held = {id(buffer) for part in parts for buffer in part.buffers(recurse=False)}
        held |= {
            id(one) for opt in optimizers for state in opt.state.values() for one in _all(state)
        }
        held |= {id(one) for opt in optimizers for group in opt.param_groups for one in _all(group)}
        self._modules = [
            one
            for one in everything
            if issubclass(type(one), nn.Module)
            and id(one) not in known
            and any(id(buffer) not in held for buffer in one.buffers(recurse=False))
        ]
        self._changing, self._looks = self._read(), 1

    @property
    def is_over(self) -> bool:
        """True where none is looked at any more."""
        return not self._modules

    def changed(self) -> tuple[str, ...]:
        """Look a step later. Returns, at the second look from then, those that changed twice."""
        if not self._modules:
            return ()
        self._looks += 1
        now = self._read()
        self._changing = {
            key: now[key]
            for key, before in self._changing.items()
            if key in now and _differs(before, now[key])
        }
        if self._looks < 3 and self._changing:
            return ()
        names = [
            f"{type(self._modules[number]).__name__}.{name}" for number, name in self._changing
        ]
        self._modules, self._changing = [], {}
        return tuple(dict.fromkeys(names))

    def _read(self) -> dict[tuple[int, str], _Seen]:
        return {
            (number, name): _Seen(buffer, versions([buffer])[0])
            for number, module in enumerate(self._modules)
            for name, buffer in module.named_buffers(recurse=False)
            if not buffer.is_inference()
        }


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and not value.is_inference()


def _all(values: Any) -> Iterable[Any]:
    return values.values() if isinstance(values, Mapping) else ()


def _differs(before: _Seen, now: _Seen) -> bool:
    return before.thing is not now.thing or before.number != now.number


def _goes_on(first: _Seen, second: _Seen, third: _Seen, *, asked_step: bool) -> bool:
    """Tell whether something counts over three looks."""
    if not first.thing is second.thing is third.thing:
        return False
    a, b, c = first.number, second.number, third.number
    if first.thing is not float:
        return a < b < c
    if asked_step or a == b or b == c or not all(map(math.isfinite, (a, b, c))):
        return False
    return math.isclose(b - a, c - b, rel_tol=SAME_SHARE) or math.isclose(
        b * b, a * c, rel_tol=SAME_SHARE
    )
