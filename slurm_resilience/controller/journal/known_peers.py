"""The tables that remember jobs and agents: all that sresctld must hear of again."""

from __future__ import annotations

import sqlite3

import msgspec

from slurm_resilience.controller.journal.journal_file import put_body
from slurm_resilience.controller.journal.records import KnownAgent, PendingRequeue, Supervised


class KnownPeers:
    """The tables of supervised jobs, of requeues that are followed, and of agents."""

    _db: sqlite3.Connection
    _agents: dict[str, KnownAgent] | None

    def put_supervised(self, entry: Supervised) -> None:
        put_body(self._db, "supervised", entry.job, entry)

    def supervised(self) -> dict[int, Supervised]:
        rows = self._db.execute("SELECT body FROM supervised").fetchall()
        entries = [msgspec.json.decode(row[0], type=Supervised) for row in rows]
        return {entry.job: entry for entry in entries}

    def drop_supervised(self, job: int) -> None:
        self._db.execute("DELETE FROM supervised WHERE job = ?", (job,))

    def put_pending_requeue(self, entry: PendingRequeue) -> None:
        put_body(self._db, "pending_requeues", entry.job, entry)

    def pending_requeues(self) -> dict[int, PendingRequeue]:
        rows = self._db.execute("SELECT body FROM pending_requeues").fetchall()
        entries = [msgspec.json.decode(row[0], type=PendingRequeue) for row in rows]
        return {entry.job: entry for entry in entries}

    def drop_pending_requeue(self, job: int) -> None:
        self._db.execute("DELETE FROM pending_requeues WHERE job = ?", (job,))

    def put_agent(self, entry: KnownAgent) -> None:
        put_body(self._db, "agents", entry.node, entry)
        self._known_agents()[entry.node] = entry

    def agents(self) -> dict[str, KnownAgent]:
        """Return every agent that is expected to speak."""
        return dict(self._known_agents())

    def drop_agent(self, node: str) -> None:
        self._db.execute("DELETE FROM agents WHERE node = ?", (node,))
        self._known_agents().pop(node, None)

    def _known_agents(self) -> dict[str, KnownAgent]:
        """Return the table, read once: every cycle asks for it, and it has a row a node."""
        if self._agents is None:
            rows = self._db.execute("SELECT body FROM agents").fetchall()
            entries = [msgspec.json.decode(row[0], type=KnownAgent) for row in rows]
            self._agents = {entry.node: entry for entry in entries}
        return self._agents
