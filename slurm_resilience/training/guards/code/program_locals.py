"""Read the local variables of the functions of the program that are under way."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

HOLDERS = 3
"""References to a copy of a frame's variables that the program has not asked for: the frame's, our
own, and one of the question."""
_PACKAGE = __name__.partition(".")[0]


def program_locals(frame: FrameType | None) -> Iterator[tuple[CodeType, str, Any]]:
    """Yield code, name and value of the variables in the frames of the program that called, up to
    the training function.

    Args:
        frame: the caller's.
    """
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    while frame is not None and not _is_ours(frame):
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # else these are the module's own
            values = frame.f_locals
            for name, value in list(values.items()):
                yield frame.f_code, name, value
            # Before Python 3.13 the frame keeps this copy, and all it holds; and `locals()` is it.
            if type(values) is dict and sys.getrefcount(values) <= HOLDERS:
                values.clear()
        frame = frame.f_back


def program_globals(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the global variables of the program's modules that have called, up to
    the training function.

    Args:
        frame: the caller's.
    """
    for names in program_modules(frame):
        yield from list(names.items())


def program_modules(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield the global variables of the program's modules that have called, up to the training
    function.

    Args:
        frame: the caller's.
    """
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    seen = set()
    while frame is not None and not _is_ours(frame):
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            yield frame.f_globals
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] == _PACKAGE
