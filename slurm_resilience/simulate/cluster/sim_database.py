"""The journal's database in memory: it outlives a killed sresctld, and its disk may be full."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HISTORY = ("DELETE FROM events", "DELETE FROM incidents", "DELETE FROM observed")
WRITES = ("INSERT", "UPDATE", "DELETE", "BEGIN", "COMMIT")


class SimDatabase(sqlite3.Connection):
    """One connection that every sresctld of a run gets in turn."""

    full = False
    """The disk is full: nothing is written."""
    boundary: Callable[[str], None] = staticmethod(lambda _: None)
    """Called before and after each write: sresctld may be killed there."""
    written: Callable[[Any], None] = staticmethod(lambda _: None)
    """Called with the row of each new event."""
    dropped: Callable[[int], None] = staticmethod(lambda _: None)
    """Called with the number of old events, incidents and faults that were dropped."""

    @classmethod
    def make(cls) -> SimDatabase:
        """Make an empty one."""
        return sqlite3.connect(":memory:", isolation_level=None, factory=cls)

    def connect(self, path: Path | str) -> sqlite3.Connection:
        """Open it once more, as after a kill: what was not committed is gone."""
        if self.in_transaction:
            super().execute("ROLLBACK")
        return self

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if not sql.startswith(WRITES):
            return super().execute(sql, parameters)
        self._before(sql)
        cursor = super().execute(sql, parameters)
        if sql.startswith("INSERT INTO events"):
            self.written(parameters)
        if sql.startswith(HISTORY) and cursor.rowcount > 0:
            self.dropped(cursor.rowcount)
        self.boundary(f"after {sql[:40]}")
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        """Write row by row, as SQLite does outside a transaction: a kill may come between two."""
        cursor = self.cursor()
        for row in parameters:
            cursor = self.execute(sql, row)
        return cursor

    def _before(self, sql: str) -> None:
        """Come to the boundary before a write, which a full disk refuses."""
        self.boundary(f"before {sql[:40]}")
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")

    def close(self) -> None:
        return
