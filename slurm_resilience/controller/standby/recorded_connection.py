"""A connection to the journal's database that tells what it has written, by transactions.

Each transaction becomes one record: its statements with their values. Applied in order to a copy
of the same database they give the same rows, since no statement of the journal asks for a time or
for chance. Each record has the next number, which is written in the same transaction: a database
knows by itself how far it has come.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from slurm_resilience.controller.journal.journal_file import read_setting, write_setting
from slurm_resilience.wire.messages import JournalRecord

POSITION, HISTORY = "journal_position", "journal_history"
"""Settings of the journal: the number of the last record, and the name of the history that the
numbers belong to."""
_WRITES = ("INSERT", "UPDATE", "DELETE")


class RecordedConnection(sqlite3.Connection):
    """Writes like any other, and hands each committed record to `on_commit`."""

    on_commit: Callable[[JournalRecord], None] | None = None
    position = 0
    _statements: list[tuple[str, tuple[tuple[Any, ...], ...]]] | None = None

    def begin_with(self, on_commit: Callable[[JournalRecord], None]) -> int:
        """Have what is written from now on numbered and told; return the last number so far."""
        self.position = position_of(self)
        self.on_commit = on_commit
        return self.position

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if self.on_commit is None:
            return super().execute(sql, parameters)
        word = sql.lstrip()[:8].upper()
        if word.startswith("BEGIN"):
            cursor = super().execute(sql, parameters)
            self._statements = []
            return cursor
        if word.startswith("ROLLBACK"):
            self._statements = None
            return super().execute(sql, parameters)
        if word.startswith("COMMIT"):
            return self._commit()
        if not word.startswith(_WRITES):
            return super().execute(sql, parameters)
        return self._write(
            sql,
            (tuple(parameters),),
            lambda: super(RecordedConnection, self).execute(sql, parameters),
        )

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        rows = tuple(tuple(row) for row in parameters)
        if self.on_commit is None or not rows:
            return super().executemany(sql, rows)
        return self._write(
            sql, rows, lambda: super(RecordedConnection, self).executemany(sql, rows)
        )

    def _write(
        self, sql: str, rows: tuple[tuple[Any, ...], ...], run: Callable[[], sqlite3.Cursor]
    ) -> sqlite3.Cursor:
        """Run a statement; outside a transaction it becomes one by itself."""
        if self._statements is not None and self.in_transaction:
            cursor = run()
            self._statements.append((sql, rows))
            return cursor
        super().execute("BEGIN IMMEDIATE")
        try:
            cursor = run()
            self._statements = [(sql, rows)]
            self._commit()
        except BaseException:
            self._statements = None
            if self.in_transaction:
                super().execute("ROLLBACK")
            raise
        return cursor

    def _commit(self) -> sqlite3.Cursor:
        statements, self._statements = self._statements or [], None
        if statements:
            write = (str(self.position + 1), POSITION)
            super().execute("UPDATE settings SET value = ? WHERE name = ?", write)
        cursor = super().execute("COMMIT")
        if statements:
            self.position += 1
            if self.on_commit is not None:
                self.on_commit(JournalRecord(self.position, tuple(statements)))
        return cursor


def open_recorded(path: Path | str) -> sqlite3.Connection:
    """Open a database whose writes can be told, in the journal's manner."""
    return sqlite3.connect(path, isolation_level=None, factory=RecordedConnection)


def position_of(db: sqlite3.Connection) -> int:
    """Return the number of the last record of a journal."""
    return int(read_setting(db, POSITION) or 0)


def history_of(db: sqlite3.Connection) -> str:
    """Return the name of a journal's history; empty: it was never shipped."""
    return read_setting(db, HISTORY)


def begin_history(db: sqlite3.Connection, history: str) -> None:
    """Begin a history where the last one ended: the numbers go on."""
    number = position_of(db)
    write_setting(db, HISTORY, history)
    write_setting(db, POSITION, str(number))


def apply_records(db: sqlite3.Connection, records: Iterable[JournalRecord]) -> int:
    """Apply records to a standby's journal, all or none; returns its position.

    Raises:
        ValueError: one is missing before them.
    """
    position = position_of(db)
    db.execute("BEGIN IMMEDIATE")
    try:
        for record in records:
            if record.number <= position:
                continue  # told twice
            if record.number != position + 1:
                raise ValueError(f"record {record.number} follows {position}")
            for sql, rows in record.statements:
                db.executemany(sql, rows)
            position = record.number
        db.execute("UPDATE settings SET value = ? WHERE name = ?", (str(position), POSITION))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return position
