"""The journal: what was seen, decided and done, in SQLite. The only way back into the next cycle.

Writing is the cycle's alone (one thread, one process). Reading through `sres` goes over the wire.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any, Literal

import msgspec

from slurm_resilience.errors import SresError

IncidentState = Literal[
    "open",  # found, not marked yet
    "marked",  # Slurm shows the reason; waiting until no job is left
    "replacing",  # the program runs
    "returning",  # the program ended well; waiting for the node
    "resumed",  # state=resume was given; waiting for Slurm to show it available
    "closed",
    "cancelled",  # an administrator took the reason away
    "gave_up",  # the program failed too often, or the node never came back
]
OPEN_STATES: frozenset[IncidentState] = frozenset(
    {"open", "marked", "replacing", "returning", "resumed"}
)


class Incident(msgspec.Struct, frozen=True):
    """One trouble of one node, from its detection until the node is back."""

    id: int
    node: str
    kind: str
    """dead, sick, requested."""
    action: str
    """Action:Replace or Action:Reboot."""
    reason: str
    state: IncidentState
    opened: float
    marked: float = 0.0
    run_started: float = 0.0
    run_ended: float = 0.0
    resumed: float = 0.0
    closed: float = 0.0
    attempts: int = 0
    next_try: float = 0.0
    boot_before: str = ""
    instance_before: str = ""
    reason_at: str = ""
    """Slurm's time of the reason when the node was resumed or given up: a later one is a new
    request."""
    alarmed: bool = False


class Supervised(msgspec.Struct, frozen=True):
    """A job whose step is kept alive by a supervisor."""

    job: int
    uid: int
    attempt: int
    nodes: tuple[str, ...]
    since: float
    size: int = 0
    """How many of these nodes the job really held when this was said."""
    restarts: int = 0
    """How often the job had been requeued when this was said, or when it was last followed."""


class KnownAgent(msgspec.Struct, frozen=True):
    """A node whose sresd has spoken to us: its silence after a restart of ours means something."""

    node: str
    boot_id: str
    instance: str


class PendingRequeue(msgspec.Struct, frozen=True):
    """A job to be requeued (``wanted``) and started at once (``started`` is false until then)."""

    job: int
    reason: str
    wanted: bool
    restarts_before: int
    since: float
    pending_since: float = 0.0
    """When it was first seen PENDING."""


_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
  id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, node TEXT NOT NULL DEFAULT '',
  job INTEGER NOT NULL DEFAULT 0, incident INTEGER NOT NULL DEFAULT 0, text TEXT NOT NULL,
  data TEXT NOT NULL DEFAULT '{}');
CREATE INDEX IF NOT EXISTS events_node ON events (node, id);
CREATE TABLE IF NOT EXISTS incidents (
  id INTEGER PRIMARY KEY, node TEXT NOT NULL, state TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS incidents_state ON incidents (state);
CREATE TABLE IF NOT EXISTS supervised (job INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS chases (job INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS agents (node TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_VERSION = 1


class Journal:
    """The journal's file."""

    def __init__(self, path: Path | str) -> None:
        """
        Raises:
            SresError: the file cannot be opened, or a newer version wrote it.
        """
        self._number_after = 0
        try:
            if str(path) != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            self._db = sqlite3.connect(path, isolation_level=None)
            # WAL + NORMAL: a killed process loses nothing; a killed machine at most the last event.
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > _VERSION:
                raise SresError(
                    f"{path} was written by a newer version; install that one, or move the file"
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_VERSION}")
        except (sqlite3.Error, OSError) as error:
            raise SresError(f"the journal {path} cannot be opened: {error}") from None

    def close(self) -> None:
        self._db.close()

    def event(
        self,
        at: float,
        kind: str,
        text: str,
        *,
        node: str = "",
        job: int = 0,
        incident: int = 0,
        **data: Any,
    ) -> None:
        """Write one event."""
        self._db.execute(
            "INSERT INTO events (at, kind, node, job, incident, text, data) VALUES (?,?,?,?,?,?,?)",
            (at, kind, node, job, incident, text, json.dumps(data, default=str)),
        )

    def prune(self, before: float) -> None:
        """Drop events older than ``before`` (epoch)."""
        self._db.execute("DELETE FROM events WHERE at < ?", (before,))

    def events(self, node: str = "", limit: int = 100, after: int = 0) -> list[dict[str, Any]]:
        """Newest events first, of one node or of all."""
        # Not `(? = '' OR node = ?)`: that would read the whole table for a node without events.
        where = "node = ? AND id > ?" if node else "? = '' AND id > ?"
        rows = self._db.execute(
            "SELECT id, at, kind, node, job, incident, text, data FROM events"
            f" WHERE {where} ORDER BY id DESC LIMIT ?",
            (node, after, limit),
        ).fetchall()
        names = ("id", "at", "kind", "node", "job", "incident", "text")
        return [
            dict(zip(names, row[:7], strict=True)) | {"data": json.loads(row[7])} for row in rows
        ]

    def number_after(self, number: int) -> None:
        """The next incident's id is above ``number``."""
        self._number_after = number

    def open_incident(
        self, node: str, kind: str, action: str, reason: str, at: float, **known: Any
    ) -> Incident:
        """A new incident with the next id."""
        cursor = self._db.execute(
            "INSERT INTO incidents (id, node, state, body)"
            " SELECT max(ifnull(max(id), 0), ?) + 1, ?, 'open', '{}' FROM incidents",
            (self._number_after, node),
        )
        incident = Incident(
            int(cursor.lastrowid or 0), node, kind, action, reason, "open", at, **known
        )
        self.save(incident)
        return incident

    def save(self, incident: Incident) -> None:
        self._db.execute(
            "UPDATE incidents SET state = ?, body = ? WHERE id = ?",
            (incident.state, msgspec.json.encode(incident).decode(), incident.id),
        )

    def incidents(self, *, open_only: bool = True, limit: int = 1000) -> list[Incident]:
        """Incidents, newest first."""
        marks = ",".join("?" for _ in OPEN_STATES)
        where = f"WHERE state IN ({marks})" if open_only else ""
        rows = self._db.execute(
            f"SELECT body FROM incidents {where} ORDER BY id DESC LIMIT ?",
            (*(sorted(OPEN_STATES) if open_only else ()), limit),
        ).fetchall()
        return [msgspec.json.decode(row[0], type=Incident) for row in rows if row[0] != "{}"]

    def gave_up(self) -> list[Incident]:
        """The last incident of each node, where it was given up."""
        rows = self._db.execute(
            "SELECT body FROM incidents WHERE state = 'gave_up' AND id IN"
            " (SELECT max(id) FROM incidents GROUP BY node)"
        ).fetchall()
        return [msgspec.json.decode(row[0], type=Incident) for row in rows]

    def settled(self) -> dict[str, float]:
        """When each node's last incident ended: what was seen before is dealt with."""
        rows = self._db.execute(
            "SELECT node, max(json_extract(body, '$.closed')) FROM incidents"
            " WHERE state IN ('closed', 'cancelled') GROUP BY node"
        ).fetchall()
        return {str(node): float(closed or 0.0) for node, closed in rows}

    def put_supervised(self, entry: Supervised) -> None:
        self._put("supervised", entry.job, entry)

    def supervised(self) -> dict[int, Supervised]:
        rows = self._db.execute("SELECT body FROM supervised").fetchall()
        entries = [msgspec.json.decode(row[0], type=Supervised) for row in rows]
        return {entry.job: entry for entry in entries}

    def drop_supervised(self, job: int) -> None:
        self._db.execute("DELETE FROM supervised WHERE job = ?", (job,))

    def put_chase(self, entry: PendingRequeue) -> None:
        self._put("chases", entry.job, entry)

    def chases(self) -> dict[int, PendingRequeue]:
        rows = self._db.execute("SELECT body FROM chases").fetchall()
        entries = [msgspec.json.decode(row[0], type=PendingRequeue) for row in rows]
        return {entry.job: entry for entry in entries}

    def drop_chase(self, job: int) -> None:
        self._db.execute("DELETE FROM chases WHERE job = ?", (job,))

    def put_agent(self, entry: KnownAgent) -> None:
        self._put("agents", entry.node, entry)

    def agents(self) -> dict[str, KnownAgent]:
        rows = self._db.execute("SELECT body FROM agents").fetchall()
        entries = [msgspec.json.decode(row[0], type=KnownAgent) for row in rows]
        return {entry.node: entry for entry in entries}

    def drop_agent(self, node: str) -> None:
        self._db.execute("DELETE FROM agents WHERE node = ?", (node,))

    @property
    def paused(self) -> str:
        """Why nobody may be acted upon; empty: not paused."""
        row = self._db.execute("SELECT value FROM settings WHERE name = 'paused'").fetchone()
        return str(row[0]) if row else ""

    def pause(self, reason: str) -> None:
        """Pause with a reason, or go on with an empty one."""
        self._db.execute(
            "INSERT INTO settings (name, value) VALUES ('paused', ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (reason,),
        )

    def _put(self, table: str, key: int | str, body: object) -> None:
        self._db.execute(
            f"INSERT OR REPLACE INTO {table} VALUES (?, ?)",
            (key, msgspec.json.encode(body).decode()),
        )
