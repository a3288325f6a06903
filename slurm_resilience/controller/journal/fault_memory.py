"""The tables that remember faults: those of each node, the answers of people, and the breaker."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

import msgspec

from slurm_resilience.controller.journal.event_table import write_event
from slurm_resilience.controller.journal.journal_file import (
    put_body,
    read_setting,
    together,
    write_setting,
)
from slurm_resilience.controller.journal.records import (
    CLOSED_BREAKER,
    BreakerState,
    Fault,
    FindingOfBoot,
    ObservedFault,
    Remark,
)


class FaultMemory:
    """The tables of faults and of what people answered."""

    _db: sqlite3.Connection

    def acknowledge(self, node: str, findings: Mapping[FindingOfBoot, float]) -> None:
        """Remember that a person answered these findings: they take the node out no more."""
        self._db.executemany(
            "INSERT OR REPLACE INTO answered VALUES (?, ?, ?, ?, ?, ?)",
            [(node, *found, at) for found, at in findings.items()],
        )

    def acknowledged(self) -> dict[str, dict[FindingOfBoot, float]]:
        """Return the findings that a person answered, by node."""
        found: dict[str, dict[FindingOfBoot, float]] = {}
        for node, *rest in self._db.execute("SELECT * FROM answered").fetchall():
            boot, check, subject, code, at = rest
            found.setdefault(str(node), {})[(boot, check, subject, code)] = at
        return found

    def drop_answers(self, node: str, findings: Iterable[FindingOfBoot]) -> None:
        """Forget that a person answered these findings: they are over."""
        self._db.executemany(
            "DELETE FROM answered"
            " WHERE node = ? AND boot = ? AND name = ? AND subject = ? AND code = ?",
            [(node, *found) for found in findings],
        )

    def keep(self, node: str, is_kept: bool) -> None:
        """Write whether a person keeps a node without an incident out of service."""
        verb = (
            "INSERT OR IGNORE INTO kept VALUES (?)"
            if is_kept
            else "DELETE FROM kept WHERE node = ?"
        )
        self._db.execute(verb, (node,))

    def kept(self) -> frozenset[str]:
        rows = self._db.execute("SELECT node FROM kept").fetchall()
        return frozenset(str(node) for (node,) in rows)

    def put_stale_reason(self, node: str, reason: str) -> None:
        """Write the reason that a node in service has; empty: none."""
        if reason:
            self._db.execute("INSERT OR REPLACE INTO stale_reasons VALUES (?, ?)", (node, reason))
        else:
            self._db.execute("DELETE FROM stale_reasons WHERE node = ?", (node,))

    def stale_reasons(self) -> dict[str, str]:
        rows = self._db.execute("SELECT node, reason FROM stale_reasons").fetchall()
        return {str(node): str(reason) for node, reason in rows}

    def forget_boots(self, node: str, boot: str) -> None:
        """Drop what was acknowledged in other boots of a node."""
        self._db.execute("DELETE FROM answered WHERE node = ? AND boot != ?", (node, boot))

    def put_fault(self, fault: Fault) -> None:
        put_body(self._db, "faults", fault.node, fault)

    def faults(self) -> dict[str, Fault]:
        rows = self._db.execute("SELECT body FROM faults").fetchall()
        entries = [msgspec.json.decode(row[0], type=Fault) for row in rows]
        return {entry.node: entry for entry in entries}

    def drop_fault(self, node: str) -> None:
        self._db.execute("DELETE FROM faults WHERE node = ?", (node,))

    def put_observed(self, fault: ObservedFault, news: Iterable[Remark] = ()) -> None:
        """Write a fault that is only observed, with its news as events. One without an id is new,
        and gets the next."""
        with together(self._db):
            if not fault.id:
                cursor = self._db.execute(
                    "INSERT INTO observed (node, ended, body) VALUES (?, 0, '{}')", (fault.node,)
                )
                fault = msgspec.structs.replace(fault, id=int(cursor.lastrowid or 0))
            self._db.execute(
                "UPDATE observed SET ended = ?, body = ? WHERE id = ?",
                (fault.ended, msgspec.json.encode(fault).decode(), fault.id),
            )
            for remark in news:
                write_event(self._db, remark.at, remark.kind, remark.text, node=fault.node)

    def observed(
        self, *, open_only: bool = False, limit: int = 1000, before: int = 0
    ) -> list[ObservedFault]:
        """Return faults that are or were only observed, newest first.

        Args:
            open_only: all that are not over; else the last ``limit`` of all.
            limit: of how many.
            before: only those with a lower id; 0: all.
        """
        which = "ended = 0" if open_only else "1"
        rows = self._db.execute(
            f"SELECT body FROM observed WHERE {which} AND (? = 0 OR id < ?)"
            " ORDER BY id DESC LIMIT ?",
            (before, before, -1 if open_only else limit),
        ).fetchall()
        return [msgspec.json.decode(row[0], type=ObservedFault) for row in rows]

    def put_missing(self, node: str, since: float) -> None:
        """Write since when (epoch) a node has not been listed; 0: it is."""
        if since:
            self._db.execute("INSERT OR REPLACE INTO missing VALUES (?, ?)", (node, since))
        else:
            self._db.execute("DELETE FROM missing WHERE node = ?", (node,))

    def missing(self) -> dict[str, float]:
        rows = self._db.execute("SELECT node, since FROM missing").fetchall()
        return {str(node): float(since) for node, since in rows}

    def put_breaker(self, state: BreakerState) -> None:
        write_setting(self._db, "breaker", msgspec.json.encode(state).decode())

    def breaker(self) -> BreakerState:
        text = read_setting(self._db, "breaker")
        return msgspec.json.decode(text, type=BreakerState) if text else CLOSED_BREAKER
