"""See variables that count the steps of the training function, and that something is computed from
(`0.99 ** n`): local ones begin anew when the function is called again after a fault. So do those in
an object that it makes (`self.step`); one that outlives a fault counts a repeated step twice."""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Collection, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from slurm_resilience.training.guards.code.own_loops import OwnLoops
from slurm_resilience.training.guards.code.program_locals import program_globals, program_locals
from slurm_resilience.training.guards.kept_objects import attributes_of, is_programs

LOOKS = 4
"""Updates before which they are looked at; three in a row tell what counts."""
SAME_SHARE = 1e-6
"""Two differences, or two ratios, are the same up to this part of them."""
_JUMPS = {*dis.hasjrel, *dis.hasjabs}

MOST_ATTRIBUTES = 256


class _Number(NamedTuple):
    value: float
    used_as: str
    """Its name where it is used."""
    codes: tuple[CodeType, ...]
    """Functions that may use it."""


_Reading = dict[tuple[CodeType | None, str], _Number]


class LocalCounts:
    """Those of this process's first updates. A whole number that counts is told where a power of it
    is taken, or a part of it (`n / 1000`): a remainder, an average or a printed number is for a
    log, or for the batches of one update. A fraction is told that is made of itself, by the same
    difference or ratio."""

    def __init__(self) -> None:
        self._readings: list[_Reading] = []
        self.loops = OwnLoops()
        self.is_over = False
        """Nothing is looked at any more."""

    def counted(self, *, asked_step: bool, kept: Collection[int] = ()) -> tuple[str, ...]:
        """Look, at the begin of an update. Returns the names of those that count, once.

        Args:
            asked_step: the program has asked for its step, and they may follow from that.
            kept: ids of objects of which another guard tells.
        """
        if self.is_over:
            return ()
        self._readings.append(_read(inspect.currentframe(), kept))
        if len(self._readings) < LOOKS - 1:
            return ()
        first, second, third = self._readings[-3:]
        common = first.keys() & second.keys() & third.keys()
        found = {
            key[1]
            for key in common
            if _goes_on(first[key].value, second[key].value, third[key].value)
            and _is_used(third[key])
        }
        self.is_over = bool(found) or asked_step or len(self._readings) == LOOKS
        if self.is_over:
            self._readings = []
        return () if asked_step else tuple(sorted(found))


def _read(frame: FrameType | None, kept: Collection[int]) -> _Reading:
    """Return the numbers in the frames of the program that called, and in its objects there."""
    found, seen = dict[tuple[CodeType | None, str], _Number](), set(kept)
    local = list(program_locals(frame))
    stack = tuple(dict.fromkeys(code for code, _, _ in local))
    for code, name, value in local:
        if type(value) in (int, float):
            found[code, name] = _Number(value, name, (code,))
    variables = [*local, *((None, name, value) for name, value in program_globals(frame))]
    for place, name, value in variables:
        if id(value) in seen or not _may_hold(type(value)):
            continue
        seen.add(id(value))
        codes = (*stack, *_methods(type(value)))
        for key, one in list(attributes_of(value).items())[:MOST_ATTRIBUTES]:
            if type(one) in (int, float):
                found[place, f"{name}.{key}"] = _Number(one, key, codes)
    return found


def _may_hold(kind: type) -> bool:
    """Tell whether an object is the program's own; of modules and optimizers, others tell."""
    libraries = (nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, type)
    return is_programs(kind) and not issubclass(kind, libraries)


def _methods(kind: type) -> Iterator[CodeType]:
    for each in kind.__mro__:
        if is_programs(each):
            yield from (f.__code__ for f in vars(each).values() if type(f) is FunctionType)


def _goes_on(a: float, b: float, c: float) -> bool:
    """Tell whether a number counts over three looks."""
    if not type(a) is type(b) is type(c) or a == b or b == c:
        return False
    if math.isclose(b - a, c - b, rel_tol=SAME_SHARE):
        return a < b or type(a) is float
    is_ratio = type(a) is float and a != 0
    return is_ratio and math.isclose(b * b, a * c, rel_tol=SAME_SHARE)


def _is_used(number: _Number) -> bool:
    wanted = "itself" if type(number.value) is float else "computed"
    return any(wanted in uses(code, number.used_as) for code in number.codes)


def uses(code: CodeType, name: str) -> set[str]:
    """Return what a function makes of a variable, or of an attribute. Pure.

    Args:
        code: of the function.
        name: of the variable, or the attribute.

    Returns:
        ``computed``: a power of it, or a part; ``itself``: its next value.
    """
    instructions = list(dis.get_instructions(code))
    return {
        use
        for at, one in enumerate(instructions)
        if one.opname.startswith("LOAD_") and _last(one.argval) == name
        for use in _followed(instructions[at + 1 :], name)
    }


def _last(loaded: Any) -> Any:
    """Return the variable on top of the stack: an instruction may load two."""
    return loaded[-1] if isinstance(loaded, tuple) and loaded else loaded


def _followed(instructions: list[dis.Instruction], name: str) -> Iterator[str]:
    """Yield the uses of what lies on top of the stack, and of what is computed from it."""
    above = 0
    """Values on top of it."""
    for at, one in enumerate(instructions):
        following = instructions[at + 1 : at + 2]
        if one.opname == "SWAP" and any(map(_stores_attribute, following)):
            one, above = following[0], 1  # `self.n *= 2`
        if above == 1 and _stores_attribute(one):
            if one.argval == name:
                yield "itself"
            return
        if one.opname == "BINARY_OP" and above < 2:
            kind = one.argrepr.rstrip("=")
            if kind == "**" or (kind == "/" and above == 1):
                yield "computed"
            if kind in ("%", "//") or (kind == "/" and above == 0):
                return
            above = 0
        elif above == 0 and one.opname.startswith("STORE_") and one.argval == name:
            yield "itself"
            return
        elif above == 0 and not one.opname.startswith(("LOAD_", "UNARY_", "CACHE")):
            return  # it is an argument, is compared, printed or kept under another name
        else:
            above += dis.stack_effect(one.opcode, one.arg, jump=False)
            if above < 0 or one.opcode in _JUMPS:
                return


def _stores_attribute(one: dis.Instruction) -> bool:
    return one.opname == "STORE_ATTR"
