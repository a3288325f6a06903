"""The table of the pools of spare nodes."""

from __future__ import annotations

import sqlite3

import msgspec

from slurm_resilience.controller.journal.event_table import write_event
from slurm_resilience.controller.journal.journal_file import put_body, together
from slurm_resilience.controller.spares.pool_lifecycle import next_state
from slurm_resilience.controller.spares.pool_records import (
    MovePool,
    SpareMemory,
    SparePool,
    after_move,
)


class SpareTable:
    """The pools, by partition."""

    _db: sqlite3.Connection

    def spares(self) -> SpareMemory:
        """Return all pools."""
        rows = self._db.execute("SELECT body FROM spare_pools ORDER BY partition").fetchall()
        pools = [msgspec.json.decode(row[0], type=SparePool) for row in rows]
        return SpareMemory({pool.partition: pool for pool in pools})

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
