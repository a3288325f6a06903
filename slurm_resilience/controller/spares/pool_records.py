"""The records of spare nodes in the journal, as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from slurm_resilience.controller.spares.pool_lifecycle import PoolEvent, PoolState


class SparePool(msgspec.Struct, frozen=True):
    """The pool of one partition, and the reservation in which Slurm keeps its nodes."""

    partition: str
    state: PoolState = PoolState.ABSENT
    name: str = ""
    """The reservation's. It was written down before Slurm heard of it, and no other has it."""
    nodes: tuple[str, ...] = ()
    """As Slurm showed them last, and sresctld had asked for them."""
    wanted: tuple[str, ...] = ()
    """As Slurm was asked for them last."""
    terms: str = ""
    """All else that Slurm showed of it when it was made; another text is a person's change."""
    why: str = ""
    """The reason for which it is held, or of Slurm's refusal."""
    refused_at: float = 0.0
    """When (epoch) Slurm refused the last request; 0: it did not."""


class MovePool(msgspec.Struct, frozen=True, tag=True):
    """Tell the journal what has happened to a pool, with the reason."""

    partition: str
    event: PoolEvent
    text: str
    nodes: tuple[str, ...] = ()
    """As Slurm shows them, or is about to be asked for them."""
    terms: str = ""
    name: str = ""
    """The name of a reservation that is about to be made."""


def after_move(pool: SparePool, move: MovePool, state: PoolState, now: float) -> SparePool:
    """Return a pool's record after an event.

    Args:
        pool: the record before.
        move: the event, with what Slurm shows or is asked for.
        state: the state that follows.
        now: the time (epoch).
    """
    nodes = move.nodes
    match move.event:
        case PoolEvent.MAKE:
            return SparePool(pool.partition, state, move.name, wanted=nodes)
        case PoolEvent.MADE | PoolEvent.RESUMED:
            return SparePool(pool.partition, state, pool.name, nodes, nodes, move.terms)
        case PoolEvent.CHANGE:
            return msgspec.structs.replace(pool, state=state, wanted=nodes, why="", refused_at=0.0)
        case PoolEvent.CHANGED:
            return msgspec.structs.replace(pool, state=state, nodes=nodes, wanted=nodes)
        case PoolEvent.UNCHANGED | PoolEvent.UNMADE | PoolEvent.UNREMOVED:
            return msgspec.structs.replace(pool, state=state, why=move.text, refused_at=now)
        case PoolEvent.REMOVED | PoolEvent.FORGOTTEN:
            return SparePool(pool.partition, state)
        case _:
            return msgspec.structs.replace(pool, state=state, why=move.text)


class SpareMemory(msgspec.Struct, frozen=True):
    """The pools that sresctld has, or has had a moment ago."""

    pools: Mapping[str, SparePool] = {}
    """By partition."""

    @property
    def is_any_kept(self) -> bool:
        """Tell whether Slurm has, or may have, a reservation of ours."""
        return any(pool.state is not PoolState.ABSENT for pool in self.pools.values())


NO_SPARES = SpareMemory()
