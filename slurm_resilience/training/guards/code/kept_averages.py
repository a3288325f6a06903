"""See averages of the weights in variables of the program, and in its objects there: as tensors or
arrays, as one vector or of a single parameter, written to or made anew in each step. They begin
anew when the function is called again after a fault, or in the process that takes a dead one's
place.

What moves in each step a part of the way to the weights is an average, and hardly anything else: a
copy of the weights jumps to them, and one with noise leaves the way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from slurm_resilience.training.compat import has_memory
from slurm_resilience.training.guards.code.program_locals import program_globals, program_locals
from slurm_resilience.training.guards.kept_objects import attributes_of, is_programs
from slurm_resilience.training.state import adapters

LOOKS = 4
"""Updates before which they are looked at; three in a row tell what is an average."""
PARAMETERS = 16
"""So many of a model are compared, and of each `NUMBERS` numbers."""
NUMBERS = 256
LEAST = 4
"""Numbers of what is compared, a single parameter or all of a module: fewer are like too much
else."""
MOST_ITEMS = 4096
DEEP = 2
"""Objects within objects that are looked into."""
MOST_ATTRIBUTES = 256
STRAY_SHARE = 0.02
"""An average leaves the way to the weights by no more than this part of its step, and rounding."""


class _Seen(NamedTuple):
    average: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any]
    rounding: float


_Pair = tuple[Any, torch.Tensor]
_Variable = tuple[CodeType | None, str]
_Reading = dict[tuple[CodeType | None, str, int], _Seen]


class KeptAverages:
    """Those of this process's first updates."""

    def __init__(self) -> None:
        self._readings: list[_Reading] = []
        self._known: set[int] = set()
        self._passed: set[_Variable] = set()
        """Variables that have held what is known: another guard tells of them."""
        self.is_over = False
        """Nothing is looked at any more."""

    def found(
        self, modules: Iterable[nn.Module], kept: Iterable[Any], known: Iterable[int]
    ) -> tuple[str, ...]:
        """Look, at the begin of an update. Returns the names of variables with averages, once.

        Args:
            modules: those that are tracked.
            kept: objects of which another guard tells.
            known: ids of what is tracked, or told of by another guard.
        """
        if self.is_over:
            return ()
        self._known.update(known, map(id, kept))
        self._readings.append(self._read([adapters.unwrap(one) for one in modules]))
        if len(self._readings) < LOOKS - 1:
            return ()
        first, second, third = self._readings[-3:]
        common = first.keys() & second.keys() & third.keys()
        found = {
            key[1]
            for key in common
            if _is_average(first[key], second[key]) and _is_average(second[key], third[key])
        }
        self.is_over = bool(found) or len(self._readings) == LOOKS
        if self.is_over:
            self._readings = []
        return tuple(sorted(found))

    def _read(self, modules: list[nn.Module]) -> _Reading:
        found: _Reading = {}
        likes = [like for module in modules for like in _likes(module)]
        singles = [p for module in modules for p in module.parameters() if p.numel() >= LEAST]
        seen = set[int]()
        for variable, value in self._variables(inspect.currentframe()):
            leaves = _leaves(value)
            if any(id(one) in self._known for one in (value, *leaves)):
                self._passed.add(variable)
            if not leaves or variable in self._passed or id(leaves[0]) in seen:
                continue
            seen.add(id(leaves[0]))
            pairs: list[list[_Pair]] = [_pairs(value, leaves, like) for like in likes]
            if len(leaves) == 1:
                pairs += [[(leaves[0], p)] for p in singles if leaves[0].shape == p.shape]
            for number, each in enumerate(pairs):
                if each:
                    found[(*variable, number)] = _seen(each[:PARAMETERS])
        return found

    def _variables(self, frame: FrameType | None) -> Iterator[tuple[_Variable, Any]]:
        """Yield the program's variables, and the attributes of its own objects there."""
        for code, name, value in program_locals(frame):
            yield from self._within((code, name), value, DEEP)
        for name, value in program_globals(frame):
            yield from self._within((None, name), value, DEEP)

    def _within(
        self, variable: _Variable, value: Any, deep: int
    ) -> Iterator[tuple[_Variable, Any]]:
        yield variable, value
        if not deep or id(value) in self._known or not is_programs(type(value)):
            return
        if issubclass(type(value), nn.Module | type):  # other guards look at what modules hold
            return
        code, name = variable
        for key, one in list(attributes_of(value).items())[:MOST_ATTRIBUTES]:
            yield from self._within((code, f"{name}.{key}"), one, deep - 1)


def _likes(module: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Yield the parameters that averages may be of: all, or those that train."""
    named = {n: p for n, p in module.named_parameters() if _is_leaf(p)}
    trained = {n: p for n, p in named.items() if p.requires_grad}
    for each in (named, trained) if 0 < len(trained) < len(named) else (named,):
        if sum(p.numel() for p in each.values()) >= LEAST:
            yield each


def _leaves(value: Any) -> list[Any]:
    """Return the tensors, or arrays, of a variable; none where it holds anything else."""
    if type(value) in (list, tuple) and len(value) <= MOST_ITEMS:
        items = list(value)
    elif issubclass(type(value), dict) and len(value) <= MOST_ITEMS:
        items = list(value.values())
    else:
        items = [value]
    return items if all(map(_is_leaf, items)) else []


def _is_leaf(one: Any) -> bool:
    if issubclass(type(one), np.ndarray):  # a lazy object may do anything if asked for its class
        return bool(one.dtype.kind == "f")
    # By type: a tensor of another kind may be sharded, or lie nowhere.
    plain = type(one) in (torch.Tensor, nn.Parameter) and not one.is_meta
    return plain and has_memory(one) and one.is_floating_point()


def _pairs(value: Any, leaves: list[Any], like: dict[str, nn.Parameter]) -> list[_Pair]:
    """Return what may be the averages, each with its parameter; nothing where sizes differ."""
    if isinstance(value, dict):
        chosen: list[_Pair] = [(value[name], one) for name, one in like.items() if name in value]
    elif type(value) in (list, tuple):
        chosen = list(zip(leaves, like.values(), strict=False))
        if len(leaves) == 1:
            return _parts(leaves[0], like)
    else:
        return _parts(value, like)
    alike = len(chosen) == len(like) and all(a.shape == p.shape for a, p in chosen)
    return chosen if alike else []


def _parts(vector: Any, like: dict[str, nn.Parameter]) -> list[_Pair]:
    """Return the parts of one vector of all parameters, each with its own."""
    if vector.ndim != 1 or vector.shape[0] != sum(p.numel() for p in like.values()):
        return []
    at, found = 0, list[_Pair]()
    for one in like.values():
        found.append((vector[at : at + one.numel()], one))
        at += one.numel()
    return found


def _seen(pairs: list[_Pair]) -> _Seen:
    averages = [_numbers(a) for a, _ in pairs]
    # In the same precision: a copy in another one is none the less a copy.
    weights = [_numbers(p).astype(a.dtype) for a, (_, p) in zip(averages, pairs, strict=True)]
    rounding = max(_rounding(a) for a, _ in pairs)
    joined = [np.concatenate(each).astype(np.float64) for each in (averages, weights)]
    return _Seen(joined[0], joined[1], rounding)


def _numbers(one: Any) -> np.ndarray[Any, Any]:
    if isinstance(one, np.ndarray):
        return one.reshape(-1)[:NUMBERS]
    some = one.detach().reshape(-1)[:NUMBERS].cpu()
    array: np.ndarray[Any, Any] = (some.float() if some.dtype == torch.bfloat16 else some).numpy()
    return array.copy()


def _rounding(one: Any) -> float:
    return float((np if isinstance(one, np.ndarray) else torch).finfo(one.dtype).eps)


def _is_average(before: _Seen, now: _Seen) -> bool:
    """Tell whether it has moved from one look to the next a part of the way to the weights, as they
    were before the update or are after it. Pure."""
    if before.average.shape != now.average.shape or not np.isfinite(now.average).all():
        return False
    step = now.average - before.average
    is_copy = any(np.array_equal(now.average, one.weights) for one in (before, now))
    if is_copy or not step.any():
        return False
    # By its own size: what is small beside the weights (a square of gradients) has no more of it.
    rounding = 2 * now.rounding * float(np.linalg.norm(now.average))
    allowed = STRAY_SHARE * float(np.linalg.norm(step)) + rounding
    for way in (now.weights - before.average, before.weights - before.average):
        length = float(way @ way)
        part = float(step @ way) / length if length else 0.0
        if 0 < part < 1 and float(np.linalg.norm(step - part * way)) <= allowed:
            return True
    return False
