"""The journal's file: its tables, and how it is opened, read and written."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from slurm_resilience.errors import SresError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
  id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, node TEXT NOT NULL DEFAULT '',
  job INTEGER NOT NULL DEFAULT 0, incident INTEGER NOT NULL DEFAULT 0, text TEXT NOT NULL,
  data TEXT NOT NULL DEFAULT '{}');
CREATE INDEX IF NOT EXISTS events_node ON events (node, id);
CREATE TABLE IF NOT EXISTS incidents (
  id INTEGER PRIMARY KEY, node TEXT NOT NULL, state TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS incidents_state ON incidents (state);
CREATE INDEX IF NOT EXISTS incidents_node ON incidents (node, id);
CREATE TABLE IF NOT EXISTS supervised (job INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pending_requeues (job INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS agents (node TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_kind ON events (kind, at);
CREATE INDEX IF NOT EXISTS events_job ON events (job, id) WHERE job > 0;
CREATE INDEX IF NOT EXISTS events_incident ON events (incident, id) WHERE incident > 0;
CREATE TABLE IF NOT EXISTS answered (
  node TEXT NOT NULL, boot TEXT NOT NULL, name TEXT NOT NULL, subject TEXT NOT NULL,
  code TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (node, boot, name, subject, code));
CREATE TABLE IF NOT EXISTS kept (node TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS stale_reasons (node TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS missing (node TEXT PRIMARY KEY, since REAL NOT NULL);
CREATE TABLE IF NOT EXISTS faults (node TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS observed (
  id INTEGER PRIMARY KEY, node TEXT NOT NULL, ended REAL NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS observed_ended ON observed (ended);
CREATE TABLE IF NOT EXISTS spare_pools (partition TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spare_gifts (job INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
SCHEMA_VERSION = 2
"""Written into the file; a file with another number is refused."""


def open_database(path: Path | str) -> sqlite3.Connection:
    """Open a database in which each statement is a transaction, but for those that begin one."""
    return sqlite3.connect(path, isolation_level=None)


def open_journal(
    path: Path | str, connect: Callable[[Path | str], sqlite3.Connection]
) -> sqlite3.Connection:
    """Open the journal's file, or make it.

    Raises:
        SresError: the file cannot be opened, or another version of sresctld wrote it.
    """
    try:
        if str(path) != ":memory:":
            Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        db = connect(path)
        # WAL + NORMAL: a killed process loses nothing; a killed machine at most the last event.
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise SresError(
                f"the journal {path} has version {version}, and this sresctld reads version "
                f"{SCHEMA_VERSION}: install the sresctld that wrote it, or move the file away "
                "(sresctld then starts with an empty journal, and is not paused)"
            )
        db.executescript(_SCHEMA)
        if version != SCHEMA_VERSION:
            # Else opening writes nothing, so that the past can be read while the disk is full.
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    except (sqlite3.Error, OSError) as error:
        raise SresError(f"the journal {path} cannot be opened: {error}") from None
    return db


@contextlib.contextmanager
def together(db: sqlite3.Connection) -> Iterator[None]:
    """Write all of it, or nothing: a state never stands without its event."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # A full disk may have ended it already.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def read_setting(db: sqlite3.Connection, name: str) -> str:
    """Return a setting; empty: it was never written."""
    row = db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
    return str(row[0]) if row else ""


def write_setting(db: sqlite3.Connection, name: str, value: str) -> None:
    """Write a setting."""
    db.execute(
        "INSERT INTO settings (name, value) VALUES (?, ?)"
        " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        (name, value),
    )


def put_body(db: sqlite3.Connection, table: str, key: int | str, body: object) -> None:
    """Write a record in the place of the one with the same key."""
    db.execute(
        f"INSERT OR REPLACE INTO {table} VALUES (?, ?)",
        (key, msgspec.json.encode(body).decode()),
    )
