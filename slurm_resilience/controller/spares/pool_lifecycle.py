"""The life of a pool of spare nodes, and of its reservation in Slurm, as one table. Pure.

`POOL_TABLE` is the only place that says which state follows which event. The journal writes a
pool's state through `next_state` alone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from slurm_resilience.errors import IllegalTransition


class PoolState(enum.StrEnum):
    """The stage that sresctld has reached with a pool's reservation."""

    ABSENT = "absent"
    """Slurm has none of ours."""
    MAKING = "making"
    """Slurm is asked for it, under a name that was written down before."""
    KEPT = "kept"
    """Slurm shows it as we left it."""
    CHANGING = "changing"
    """Slurm is asked to give it other nodes."""
    REMOVING = "removing"
    """Slurm is asked to delete it."""
    HELD = "held"
    """A person has changed or deleted it: sresctld leaves it alone until `sres spares resume`."""


class PoolEvent(enum.StrEnum):
    """An event that moves a pool to a state."""

    MAKE = "make"
    """The reservation is about to be made."""
    MADE = "made"
    """Slurm says that it has made it, or shows it."""
    UNMADE = "unmade"
    """Slurm has refused to make it."""
    CHANGE = "change"
    """Its nodes are about to be changed."""
    CHANGED = "changed"
    """Slurm says that it has done it, or shows the new ones."""
    UNCHANGED = "unchanged"
    """Slurm shows the old ones: it has refused, or was never asked."""
    REMOVE = "remove"
    """It is about to be deleted."""
    REMOVED = "removed"
    """Slurm does not show it any more."""
    UNREMOVED = "unremoved"
    """Slurm has refused to delete it."""
    PERSON = "person"
    """Slurm shows it as we did not leave it, or not at all."""
    RESUMED = "resumed"
    """A person gives it back to sresctld, as Slurm shows it now."""
    FORGOTTEN = "forgotten"
    """A person lets sresctld go on, and Slurm has it no more."""


POOL_TABLE: Mapping[tuple[PoolState, PoolEvent], PoolState] = {
    (PoolState.ABSENT, PoolEvent.MAKE): PoolState.MAKING,
    (PoolState.ABSENT, PoolEvent.MADE): PoolState.KEPT,  # Slurm did it, and its answer was lost
    (PoolState.ABSENT, PoolEvent.PERSON): PoolState.HELD,
    (PoolState.MAKING, PoolEvent.MADE): PoolState.KEPT,
    (PoolState.MAKING, PoolEvent.UNMADE): PoolState.ABSENT,
    (PoolState.MAKING, PoolEvent.PERSON): PoolState.HELD,
    (PoolState.KEPT, PoolEvent.MADE): PoolState.KEPT,  # Slurm has answered, and shows it now
    (PoolState.KEPT, PoolEvent.CHANGE): PoolState.CHANGING,
    (PoolState.KEPT, PoolEvent.CHANGED): PoolState.KEPT,
    (PoolState.KEPT, PoolEvent.REMOVED): PoolState.ABSENT,  # its year is over
    (PoolState.KEPT, PoolEvent.REMOVE): PoolState.REMOVING,
    (PoolState.KEPT, PoolEvent.PERSON): PoolState.HELD,
    (PoolState.CHANGING, PoolEvent.CHANGED): PoolState.KEPT,
    (PoolState.CHANGING, PoolEvent.UNCHANGED): PoolState.KEPT,
    (PoolState.CHANGING, PoolEvent.PERSON): PoolState.HELD,
    (PoolState.REMOVING, PoolEvent.REMOVED): PoolState.ABSENT,
    (PoolState.REMOVING, PoolEvent.UNREMOVED): PoolState.KEPT,
    (PoolState.REMOVING, PoolEvent.PERSON): PoolState.HELD,
    (PoolState.HELD, PoolEvent.RESUMED): PoolState.KEPT,
    (PoolState.HELD, PoolEvent.FORGOTTEN): PoolState.ABSENT,
}


def next_state(state: PoolState, event: PoolEvent) -> PoolState:
    """Return the state that follows.

    Raises:
        IllegalTransition: the table does not have this event in this state.
    """
    after = POOL_TABLE.get((state, event))
    if after is None:
        raise IllegalTransition(f"a pool of spares that is {state} does not know '{event}'")
    return after
