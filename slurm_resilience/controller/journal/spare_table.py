"""The tables of spare nodes: pools, and gifts to jobs."""

from __future__ import annotations

import sqlite3

import msgspec

from slurm_resilience.controller.journal.event_table import write_event
from slurm_resilience.controller.journal.journal_file import put_body, together
from slurm_resilience.controller.spares.gift_lifecycle import next_gift_state
from slurm_resilience.controller.spares.pool_lifecycle import next_state
from slurm_resilience.controller.spares.pool_records import (
    Gift,
    MoveGift,
    MovePool,
    SpareMemory,
    SparePool,
    after_gift_move,
    after_move,
)


class SpareTable:
    """The pools, by partition, and the gifts, by job."""

    _db: sqlite3.Connection

    def spares(self) -> SpareMemory:
        """Return all pools and gifts."""
        rows = self._db.execute("SELECT body FROM spare_pools ORDER BY partition").fetchall()
        pools = [msgspec.json.decode(row[0], type=SparePool) for row in rows]
        rows = self._db.execute("SELECT body FROM spare_gifts ORDER BY job").fetchall()
        gifts = [msgspec.json.decode(row[0], type=Gift) for row in rows]
        return SpareMemory(
            {pool.partition: pool for pool in pools}, {gift.job: gift for gift in gifts}
        )

    def move_pool(self, move: MovePool, now: float) -> SparePool:
        """Take in what has happened to a pool, or is about to.

        Raises:
            IllegalTransition: its present state does not know this event.
        """
        pool = self.spares().pools.get(move.partition) or SparePool(move.partition)
        pool = after_move(pool, move, next_state(pool.state, move.event), now)
        text = f"{move.partition}: {move.event}: {move.text}"
        with together(self._db):
            put_body(self._db, "spare_pools", pool.partition, pool)
            write_event(self._db, now, "spares", text, partition=pool.partition)
        return pool

    def move_gift(self, move: MoveGift, now: float) -> Gift:
        """Take in what has happened to a gift, or is about to.

        Raises:
            IllegalTransition: its present state does not know this event.
        """
        job = move.gift.job
        known = self.spares().gifts.get(job) or Gift(job)
        state = next_gift_state(known.state, move.event)
        gift = after_gift_move(known, move, state, now)
        text = f"{move.event}: {move.text}"
        with together(self._db):
            put_body(self._db, "spare_gifts", job, gift)
            write_event(self._db, now, "spares", text, job=job, nodes=gift.spares, uid=gift.uid)
        return gift

    def drop_gift(self, job: int) -> None:
        """Forget the gift of a job that is gone."""
        self._db.execute("DELETE FROM spare_gifts WHERE job = ?", (job,))
