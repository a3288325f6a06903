"""Refuse functions that cannot be a block, before any rank begins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_resilience.errors import UsageError


def refuse(function: Callable[..., Any]) -> None:
    """Refuse what returns before it has trained, and methods.

    Args:
        function: what `resilient` decorates.

    Raises:
        UsageError: it is such a function.
    """
    name = getattr(function, "__qualname__", repr(function))
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(kind(function) for kind in kinds):
        raise UsageError(
            f"resilient({name}): an async function, or one with `yield`, returns before it has "
            "trained: make it a plain function"
        )
    if next(iter(_parameters(function)), "") == "self":
        raise UsageError(
            f"resilient({name}): the session is the first argument, and would be `self` of a "
            "method: decorate a function that calls the method"
        )


def refuse_call(function: Callable[..., Any], args: Sequence[Any], more: Mapping[str, Any]) -> None:
    """Refuse arguments that do not fit: the failed call would look like a fault of the block.

    Args:
        function: the block.
        args: what it was called with; it gets the session in front of them.
        more: by keyword.

    Raises:
        UsageError: they do not fit.
    """
    try:
        inspect.signature(function).bind(None, *args, **more)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(f"{name}(): {error}; its first argument is the session") from None
    except ValueError:
        return  # its arguments are not known


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []
