"""The records of spare nodes in the journal, as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from slurm_resilience.controller.spares.gift_lifecycle import GiftEvent, GiftState
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


class Gift(msgspec.Struct, frozen=True):
    """Spares for one job that has lost nodes: the last gift that it was made."""

    job: int
    state: GiftState = GiftState.NONE
    name: str = ""
    """The reservation's, as of a pool."""
    uid: int = 0
    restarts: int = 0
    """The job's, when the gift was made."""
    partition: str = ""
    nodes: tuple[str, ...] = ()
    """All of the reservation: for a requeue, also those that the job has and is to have again."""
    spares: tuple[str, ...] = ()
    """The part of them that is the pool's."""
    is_requeue: bool = False
    """The job itself is to start there; else its request for nodes in exchange."""
    terms: str = ""
    since: float = 0.0
    tries: int = 0
    """Gifts in a row that the job did not take, this one included."""


class MoveGift(msgspec.Struct, frozen=True, tag=True):
    """Tell the journal what has happened to a gift, with the reason."""

    gift: Gift
    """As it is known; a new one for `MAKE`."""
    event: GiftEvent
    text: str
    terms: str = ""
    is_taken: bool = False
    """The job has its nodes."""


def after_gift_move(known: Gift, move: MoveGift, state: GiftState, now: float) -> Gift:
    """Return a gift's record after an event.

    Args:
        known: the record before.
        move: the event.
        state: the state that follows.
        now: the time (epoch).
    """
    gift = move.gift if move.event is GiftEvent.MAKE else known
    since = now if move.event is GiftEvent.MAKE else known.since
    tries = 0 if move.is_taken else gift.tries
    terms = move.terms or gift.terms
    return msgspec.structs.replace(gift, state=state, since=since, tries=tries, terms=terms)


class SpareMemory(msgspec.Struct, frozen=True):
    """The pools and gifts that sresctld has, or has had a moment ago."""

    pools: Mapping[str, SparePool] = {}
    """By partition."""
    gifts: Mapping[int, Gift] = {}
    """The last one of each job."""

    @property
    def is_any_kept(self) -> bool:
        """Tell whether Slurm has, or may have, a reservation of ours."""
        has_pool = any(pool.state is not PoolState.ABSENT for pool in self.pools.values())
        return has_pool or any(gift.state.is_open for gift in self.gifts.values())

    @property
    def open_gifts(self) -> tuple[Gift, ...]:
        """The gifts that are on their way."""
        return tuple(gift for gift in self.gifts.values() if gift.state.is_open)


NO_SPARES = SpareMemory()
