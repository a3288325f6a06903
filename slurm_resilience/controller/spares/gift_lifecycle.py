"""The life of a gift: spares that are on their way to one job, as one table. Pure.

A gift is a reservation of its own, over the spares in the pool's: only the jobs of one user that
ask for it by its name can start there, and only one job is told to.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from slurm_resilience.errors import IllegalTransition


class GiftState(enum.StrEnum):
    """The stage that sresctld has reached with a gift."""

    NONE = "none"
    """The job has been given nothing."""
    MAKING = "making"
    """Slurm is asked for its reservation, under a name that was written down before."""
    READY = "ready"
    """Slurm has it, and no job was told of it."""
    OFFERED = "offered"
    """The job, or its request for nodes in exchange, is told to start there."""
    ENDING = "ending"
    """Slurm is asked to delete it: the job has its nodes, or does not take them."""
    OVER = "over"
    """Slurm has it no more, or a person has changed it."""

    @property
    def is_open(self) -> bool:
        """Slurm has its reservation, or may have it."""
        return self not in (GiftState.NONE, GiftState.OVER)


class GiftEvent(enum.StrEnum):
    """An event that moves a gift to a state."""

    MAKE = "make"
    MADE = "made"
    OFFERED = "offered"
    END = "end"
    """It is about to be deleted."""
    ENDED = "ended"
    PERSON = "person"
    """A person has changed its reservation, which is left alone from now on."""


GIFT_TABLE: Mapping[tuple[GiftState, GiftEvent], GiftState] = {
    (GiftState.NONE, GiftEvent.MAKE): GiftState.MAKING,
    (GiftState.OVER, GiftEvent.MAKE): GiftState.MAKING,
    (GiftState.MAKING, GiftEvent.MADE): GiftState.READY,
    (GiftState.MAKING, GiftEvent.END): GiftState.ENDING,
    (GiftState.READY, GiftEvent.OFFERED): GiftState.OFFERED,
    (GiftState.READY, GiftEvent.END): GiftState.ENDING,
    (GiftState.READY, GiftEvent.PERSON): GiftState.OVER,
    (GiftState.OFFERED, GiftEvent.END): GiftState.ENDING,
    (GiftState.OFFERED, GiftEvent.PERSON): GiftState.OVER,
    (GiftState.ENDING, GiftEvent.ENDED): GiftState.OVER,
    (GiftState.ENDING, GiftEvent.PERSON): GiftState.OVER,
}


def next_gift_state(state: GiftState, event: GiftEvent) -> GiftState:
    """Return the state that follows.

    Raises:
        IllegalTransition: the table does not have this event in this state.
    """
    after = GIFT_TABLE.get((state, event))
    if after is None:
        raise IllegalTransition(f"a gift of spares that is {state} does not know '{event}'")
    return after
