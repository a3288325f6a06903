"""See what `s.once` keeps, and what changes from step to step without being tracked: a buffer of
experiences, a curriculum, weights of a sampler. It outlives a fault where its process does: a step
that is repeated changes it twice, and a replaced rank begins anew."""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

from slurm_resilience.training.compat import has_memory, versions
from slurm_resilience.training.content_digest import content_digest

LOOKS = 3
"""At the begin, and after the first two updates: what has changed each time is told. What a step
fills, and its update empties, is none. What is made after `s.track` has one look more."""
DEEP = 3
"""Objects within objects that are looked into."""
MOST = 256
"""Values that are looked at."""
_LISTS = (list, deque, set)
_OTHERS = (AveragedModel, torch.optim.Optimizer, LRScheduler, Dataset, torch.Generator, type)
"""Seen by other guards, or no state."""
_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages")
_PACKAGE = __name__.partition(".")[0]


class _Seen(NamedTuple):
    thing: Any
    number: int


_Reading = dict[str, _Seen]


class KeptObjects:
    """Those of this process, in its first steps. Told are numbers that count up, tensors and arrays
    that are written to, and lists that change and hold such; what is set anew, and a list of plain
    numbers or words, may be for a log."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterable[Any]] = tuple
        """Gives what is kept."""
        self._tracked: list[Any] = []
        self._readings: list[_Reading] = []
        self._told: set[int] = set()
        self.is_over = self.has_told = False
        """Nothing is looked at any more; and some were told of."""

    def begin(self, tracked: Iterable[Any]) -> None:
        """Begin a world.

        Args:
            tracked: the objects that are; what they hold is theirs.
        """
        self._tracked, self._readings = list(tracked), []

    def pass_over(self, told: Collection[int]) -> None:
        """Name no tensors of which another guard tells.

        Args:
            told: their ids.
        """
        self._told.update(told)

    def changing(self) -> tuple[str, ...]:
        """Look, at the end of an update. Returns the names of those that change, at the last
        look."""
        if self.is_over:
            return ()
        known = {id(one) for thing in self._tracked for one in (thing, *held(thing))}
        known |= self._told
        self._readings.append(_read(self.source(), known))
        if len(self._readings) < LOOKS:
            return ()
        first, second, third = self._readings[-LOOKS:]
        common = first.keys() & second.keys() & third.keys()
        if len(self._readings) == LOOKS:
            self.is_over = second.keys() <= first.keys()
        else:
            self.is_over, common = True, common - self._readings[0].keys()
        if self.is_over:
            self._readings = []
        changing = tuple(sorted(n for n in common if _goes_on(first[n], second[n], third[n])))
        self.has_told = self.has_told or bool(changing)
        return changing


def _goes_on(first: _Seen, second: _Seen, third: _Seen) -> bool:
    if first.thing is int:
        return first.number < second.number < third.number
    same = first.thing is second.thing is third.thing
    return same and first.number != second.number != third.number


def _read(kept: Iterable[Any], known: set[int]) -> _Reading:
    found: _Reading = {}
    for thing in kept:
        for one in thing if isinstance(thing, list | tuple) else (thing,):
            if len(found) < MOST:
                found.update(_values(one, type(one).__name__, known, DEEP))
        if isinstance(thing, list) and id(thing) not in known:
            found.update(_values(thing, "a list", known, DEEP))
    return found


def _values(one: Any, name: str, known: set[int], deep: int) -> Iterator[tuple[str, _Seen]]:
    """Yield by name what may be state in an object."""
    if type(one) is int:
        yield name, _Seen(int, one)
    elif id(one) in known or isinstance(one, _OTHERS):
        return
    elif isinstance(one, nn.Module):
        for path, parameter in list(one.named_parameters())[:1]:
            yield from _values(parameter, f"{name}.{path}", known, 0)
    elif isinstance(one, torch.Tensor):
        if has_memory(one) and not one.is_inference():
            yield name, _Seen(one, versions([one])[0])
    elif isinstance(one, np.ndarray):
        yield name, _Seen(one, content_digest(one))
    elif isinstance(one, _LISTS):
        some = [item for item in list(one)[:MOST] if id(item) not in known]
        if not one or any(_is_data(item) for item in some):
            yield name, _Seen(one, content_digest([len(one), some[:8], some[-8:]]))
    elif isinstance(one, dict):
        for key, value in list(one.items())[:MOST] if deep else ():
            if isinstance(value, torch.Tensor | np.ndarray):
                yield from _values(value, f"{name}[{key!r}]", known, deep - 1)
    elif deep and is_programs(type(one)):
        for key, value in list(attributes_of(one).items())[:MOST]:
            yield from _values(value, f"{name}.{key}", known, deep - 1)


def _is_data(item: Any) -> bool:
    """Tell whether a list of such is no log."""
    if isinstance(item, list | tuple):
        return any(map(_is_data, item[:8]))
    if isinstance(item, dict):
        return any(map(_is_data, list(item.values())[:8]))
    return isinstance(item, torch.Tensor | np.ndarray) or is_programs(type(item))


def is_programs(kind: type) -> bool:
    """Tell whether the program defines a class, and no library does. What can be read through, a
    source of samples, has a place that `s.loader` knows."""
    module = kind.__module__
    if module.partition(".")[0] == _PACKAGE or hasattr(kind, "__iter__"):
        return False
    if hasattr(kind, "__getitem__") or hasattr(kind, "__next__"):
        return False
    return is_programs_file(getattr(sys.modules.get(module), "__file__", None))


def is_programs_file(file: str | None) -> bool:
    """Tell whether a file is the program's own, and no library's."""
    return file is not None and not any(part in file for part in _LIBRARIES)


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return what an object of the program holds by name."""
    found = getattr(thing, "__dict__", None)
    return found if type(found) is dict else {}


def held(thing: Any) -> Iterator[Any]:
    """Yield what a tracked object holds."""
    if isinstance(thing, nn.Module):
        yield from thing.parameters()
        yield from thing.buffers()
        return
    if isinstance(thing, torch.optim.Optimizer):
        for group in thing.param_groups:
            yield from group["params"]
    for value in () if isinstance(thing, torch.Tensor) else attributes_of(thing).values():
        yield value
        yield from value if isinstance(value, list | tuple) else attributes_of(value).values()
