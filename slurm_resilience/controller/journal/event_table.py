"""The journal's events: one line each of what was seen, decided and done."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from slurm_resilience.controller.decide.node_lifecycle import NodeEvent
from slurm_resilience.controller.journal.records import (
    LEFT_OVER_REMAINS,
    PUT_BACK,
    USERS_WORDS,
    EventFilter,
    UsersWord,
)


def write_event(
    db: sqlite3.Connection,
    at: float,
    kind: str,
    text: str,
    *,
    node: str = "",
    job: int = 0,
    incident: int = 0,
    **data: Any,
) -> None:
    """Write one event that changes no state."""
    db.execute(
        "INSERT INTO events (at, kind, node, job, incident, text, data) VALUES (?,?,?,?,?,?,?)",
        (at, kind, node, job, incident, text, json.dumps(data, default=str)),
    )


IS_BEGUN = "json_extract(data, '$.unbegun') IS NULL"
"""The condition for an event of a start in which something was begun."""


def forget_start(db: sqlite3.Connection, incident: int) -> None:
    """Have an incident's last start count for nothing: nothing was begun."""
    db.execute(
        "UPDATE events SET data = json_set(data, '$.unbegun', 1) WHERE id ="
        " (SELECT max(id) FROM events WHERE incident = ? AND incident > 0 AND kind = ?)",
        (incident, NodeEvent.REPLACING),
    )


class EventTable:
    """The table of events."""

    _db: sqlite3.Connection

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
        """Write one event that changes no state."""
        write_event(self._db, at, kind, text, node=node, job=job, incident=incident, **data)

    def events(self, node: str = "", limit: int = 100, after: int = 0) -> list[dict[str, Any]]:
        """Return events, newest first, of one node or of all."""
        # Not `(? = '' OR node = ?)`: that would read the whole table for a node without events.
        where = "node = ? AND id > ?" if node else "? = '' AND id > ?"
        return self._events(where, (node, after), limit)

    def find_events(self, which: EventFilter, limit: int, before: int = 0) -> list[dict[str, Any]]:
        """Return the events that a filter leaves, newest first.

        Args:
            which: the filter.
            limit: of how many.
            before: only those with a lower id; 0: all.
        """
        where, values = ["1"], list[Any]()
        for column, wanted in (("node", which.nodes), ("kind", which.kinds)):
            if wanted:
                where.append(f"{column} IN ({','.join('?' for _ in wanted)})")
                values += wanted
        for column, number in (("job", which.job), ("incident", which.incident)):
            if number:
                where.append(f"{column} = ? AND {column} > 0")  # as the index has it
                values.append(number)
        if which.since:
            where.append("at >= ?")
            values.append(which.since)
        if before:
            where.append("id < ?")
            values.append(before)
        return self._events(" AND ".join(where), values, limit)

    def events_after(self, number: int, kinds: Sequence[str], limit: int) -> list[dict[str, Any]]:
        """Return events with a higher id, oldest first: of these kinds; without one, all."""
        where = f"id > ? AND kind IN ({','.join('?' for _ in kinds)})" if kinds else "id > ?"
        return self._events(where, (number, *kinds), limit, "ASC")

    def newest_event(self) -> int:
        """Return the id of the newest event; 0: there is none."""
        (number,) = self._db.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
        return int(number)

    def newest(self) -> float:
        """Return when (epoch) the last event was written; 0: there is none."""
        row = self._db.execute("SELECT at FROM events ORDER BY id DESC LIMIT 1").fetchone()
        return float(row[0]) if row else 0.0

    def _events(
        self, where: str, values: Sequence[Any], limit: int, order: str = "DESC"
    ) -> list[dict[str, Any]]:
        rows = self._db.execute(
            "SELECT id, at, kind, node, job, incident, text, data FROM events"
            f" WHERE {where} ORDER BY id {order} LIMIT ?",
            (*values, limit),
        ).fetchall()
        names = ("id", "at", "kind", "node", "job", "incident", "text")
        return [
            dict(zip(names, row[:7], strict=True)) | {"data": json.loads(row[7])} for row in rows
        ]

    # -- counted over a window -----------------------------------------------------------------

    def flaps(self, since: float) -> dict[str, int]:
        """Return how often each node came back by itself since then (epoch)."""
        rows = self._db.execute(
            "SELECT node, count(*) FROM events WHERE kind = ? AND at > ? GROUP BY node",
            (NodeEvent.CAME_BACK, since),
        ).fetchall()
        return {str(node): int(number) for node, number in rows}

    def users_words(self, since: float) -> dict[str, tuple[UsersWord, ...]]:
        """Return what users' programs told of each node since then (epoch)."""
        rows = self._db.execute(
            "SELECT node, kind, job, json_extract(data, '$.uid'), at FROM events"
            " WHERE kind IN (?, ?, ?) AND at > ? ORDER BY id",
            (*USERS_WORDS, since),
        ).fetchall()
        found: dict[str, tuple[UsersWord, ...]] = {}
        for node, kind, job, uid, at in rows:
            note = UsersWord(str(kind), int(job), int(uid), float(at))
            found[str(node)] = (*found.get(str(node), ()), note)
        return found

    def alarms(self, since: float) -> frozenset[str]:
        """Return the keys of the alarms that were raised since then (epoch)."""
        rows = self._db.execute(
            "SELECT json_extract(data, '$.key') FROM events WHERE kind = 'alarm' AND at > ?",
            (since,),
        ).fetchall()
        return frozenset(str(key) for (key,) in rows if key)

    def released(self, since: float) -> dict[str, float]:
        """Return when (epoch) a person last took each node back since then."""
        rows = self._db.execute(
            "SELECT node, max(at) FROM events WHERE kind IN (?, ?) AND at > ? GROUP BY node",
            (NodeEvent.RELEASED, PUT_BACK, since),
        ).fetchall()
        return {str(node): float(at) for node, at in rows}

    def starts(
        self, since: float, kind: str = NodeEvent.REPLACING
    ) -> tuple[tuple[float, str], ...]:
        """Return when (epoch) and for which node a replacement program was started since then, or
        would have been."""
        rows = self._db.execute(
            f"SELECT at, node FROM events WHERE kind = ? AND at > ? AND {IS_BEGUN} ORDER BY at",
            (kind, since),
        ).fetchall()
        return tuple((float(at), str(node)) for at, node in rows)

    def deaths(self, since: float) -> tuple[tuple[float, str], ...]:
        """Return when (epoch) and for which node an incident of a death was opened since then."""
        rows = self._db.execute(
            "SELECT at, node FROM events WHERE kind = ? AND at > ? AND text LIKE 'dead:%'",
            (NodeEvent.DETECTED, since),
        ).fetchall()
        return tuple((float(at), str(node)) for at, node in rows)

    def left_overs(self, since: float) -> dict[str, tuple[int, float]]:
        """Return how often, and when last, processes of a node could not be ended since then."""
        rows = self._db.execute(
            "SELECT node, count(*), max(at) FROM events WHERE kind = ? AND at > ? GROUP BY node",
            (LEFT_OVER_REMAINS, since),
        ).fetchall()
        return {str(node): (int(number), float(last)) for node, number, last in rows}
