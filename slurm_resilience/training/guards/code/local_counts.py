"""See local variables of the training function that count its steps, and that something is computed
from (`0.99 ** n`): they begin anew when the function is called again after a fault."""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from slurm_resilience.training.guards.code.own_loops import OwnLoops
from slurm_resilience.training.guards.code.program_locals import program_locals

LOOKS = 4
"""Updates before which they are looked at; three in a row tell what counts."""
SAME_SHARE = 1e-6
"""Two differences, or two ratios, are the same up to this part of them."""
_JUMPS = {*dis.hasjrel, *dis.hasjabs}

_Reading = dict[tuple[CodeType, str], float]


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

    def counted(self, *, asked_step: bool) -> tuple[str, ...]:
        """Look, at the begin of an update. Returns the names of those that count, once.

        Args:
            asked_step: the program has asked for its step, and they may follow from that.
        """
        if self.is_over:
            return ()
        self._readings.append(_read(inspect.currentframe()))
        if len(self._readings) < LOOKS - 1:
            return ()
        first, second, third = self._readings[-3:]
        common = first.keys() & second.keys() & third.keys()
        found = {
            name
            for code, name in common
            if _goes_on(first[code, name], second[code, name], third[code, name])
            and _is_used(third[code, name], uses(code, name))
        }
        self.is_over = bool(found) or asked_step or len(self._readings) == LOOKS
        if self.is_over:
            self._readings = []
        return () if asked_step else tuple(sorted(found))


def _read(frame: FrameType | None) -> _Reading:
    """Return the numbers in the frames of the program that called."""
    return {
        (code, name): value
        for code, name, value in program_locals(frame)
        if type(value) in (int, float)
    }


def _goes_on(a: float, b: float, c: float) -> bool:
    """Tell whether a number counts over three looks."""
    if not type(a) is type(b) is type(c) or a == b or b == c:
        return False
    if math.isclose(b - a, c - b, rel_tol=SAME_SHARE):
        return a < b or type(a) is float
    is_ratio = type(a) is float and a != 0
    return is_ratio and math.isclose(b * b, a * c, rel_tol=SAME_SHARE)


def _is_used(number: float, used: set[str]) -> bool:
    return ("itself" if type(number) is float else "computed") in used


def uses(code: CodeType, name: str) -> set[str]:
    """Return what a function makes of a variable. Pure.

    Args:
        code: of the function.
        name: of the variable.

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
    for one in instructions:
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
