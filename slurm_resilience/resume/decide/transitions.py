"""Lifecycles: an enum of states, and one table of the changes that are allowed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from slurm_resilience.errors import IllegalTransition

StateT = TypeVar("StateT", bound=Enum)


def advance(
    table: Mapping[StateT, frozenset[StateT]], current: StateT, following: StateT
) -> StateT:
    """Return the state that follows.

    Args:
        table: the states that may follow each state.
        current: the state now.
        following: the state to go to.

    Raises:
        IllegalTransition: the table does not have it.
    """
    if following not in table[current]:
        raise IllegalTransition(f"{type(current).__name__}: {current.value} → {following.value}")
    return following
