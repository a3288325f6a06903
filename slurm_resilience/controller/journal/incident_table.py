"""The journal's incidents: the life of each node. `open_incident` and `apply` alone write a state,
and ask the table of `node_lifecycle` for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState, step
from slurm_resilience.controller.journal.event_table import IS_BEGUN, forget_start, write_event
from slurm_resilience.controller.journal.journal_file import together
from slurm_resilience.controller.journal.records import (
    NO_FACTS,
    UNKNOWN_MACHINE,
    Incident,
    IncidentFacts,
    IncidentTimes,
    MachineIdentity,
    Repair,
)
from slurm_resilience.errors import NotFound
from slurm_resilience.model import INJECTED_MARK

_STAMPS = {
    NodeEvent.MARKED: "marked",
    NodeEvent.REPLACING: "run_started",
    NodeEvent.REPLACED: "run_ended",
    NodeEvent.CAME_BACK: "run_ended",
    NodeEvent.RESUMED: "resumed",
}
"""The field of `IncidentTimes` that an event sets."""


class IncidentTable:
    """The table of incidents."""

    _db: sqlite3.Connection
    _number_after: int

    def number_after(self, number: int) -> None:
        """Give the next incident an id above ``number``."""
        self._number_after = number

    def open_incident(
        self,
        node: str,
        event: NodeEvent,
        kind: str,
        action: str,
        reason: str,
        at: float,
        before: MachineIdentity = UNKNOWN_MACHINE,
        mark_reason_at: str = "",
    ) -> Incident:
        """Open an incident with the next id, and write its first event.

        Raises:
            IllegalTransition: the node's present state does not allow it.
        """
        state = step(self.state_of(node), event).state
        is_flap = event is NodeEvent.CAME_BACK
        # One that came back, and has no incident, was set DOWN by Slurm alone.
        marked = at if state.is_marked and not is_flap else 0.0
        times = IncidentTimes(at, marked=marked, run_ended=at if is_flap else 0.0)
        with together(self._db):
            cursor = self._db.execute(
                "INSERT INTO incidents (id, node, state, body)"
                " SELECT max(ifnull(max(id), 0), ?) + 1, ?, ?, '{}' FROM incidents",
                (self._number_after, node, state),
            )
            number = int(cursor.lastrowid or 0)
            incident = Incident(
                number,
                node,
                kind,
                action,
                reason,
                state,
                times,
                before=before,
                mark_reason_at=mark_reason_at,
                is_flap=is_flap,
            )
            self._save(incident)
            text = reason if event is NodeEvent.REQUESTED else f"{kind}: {reason}"
            write_event(self._db, at, event, text, node=node, incident=number, state=state.value)
        return incident

    def apply(
        self,
        incident_id: int,
        event: NodeEvent,
        text: str,
        at: float,
        facts: IncidentFacts = NO_FACTS,
    ) -> Incident:
        """Move an incident to the state that the table gives for this event, and write both.

        Args:
            incident_id: the incident, whose state is read anew.
            event: what happened.
            text: the reason, in words.
            at: now (epoch).
            facts: what the event tells besides.

        Raises:
            IllegalTransition: the incident's present state does not know this event.
            NotFound: there is no such incident.
        """
        incident = self.incident(incident_id)
        state = step(incident.state, event).state
        stamps: dict[str, float] = {}
        if event in _STAMPS:
            ended = facts.run_ended if event is NodeEvent.REPLACED else None
            stamps[_STAMPS[event]] = ended or at
        if facts.is_end_unknown:
            stamps["run_lost"] = facts.run_ended or at
        changes: dict[str, Any] = {
            name: value
            for name in (
                "attempts",
                "action",
                "next_try",
                "before",
                "reason_at",
                "mark_reason_at",
                "is_flap",
            )
            if (value := getattr(facts, name)) is not None
        }
        if incident.state.is_under_way and not state.is_under_way:
            stamps["closed"] = at
            changes["ended_by"] = event
        if facts.is_unbegun:
            changes["unbegun"] = (*incident.unbegun, incident.attempts)
        changes["times"] = msgspec.structs.replace(incident.times, **stamps)
        changed = msgspec.structs.replace(incident, state=state, **changes)
        data: dict[str, Any] = {"state": state.value}
        if facts.output:
            data["output"] = facts.output
        with together(self._db):
            self._save(changed)
            if facts.is_unbegun:
                forget_start(self._db, changed.id)
            write_event(self._db, at, event, text, node=changed.node, incident=changed.id, **data)
        return changed

    def note_alarm(self, incident_id: int) -> None:
        """Remember that an incident's alarm was raised."""
        self._save(msgspec.structs.replace(self.incident(incident_id), alarmed=True))

    def note_carried_out(self, incident_id: int) -> None:
        """Remember that the start of an incident's last attempt was carried out."""
        incident = self.incident(incident_id)
        self._save(msgspec.structs.replace(incident, carried_out=incident.attempts))

    def note_put_back(self, incident_id: int, at: float) -> None:
        """Remember when (epoch) a person put the node back during a pause; 0: it is out again."""
        incident = self.incident(incident_id)
        times = msgspec.structs.replace(incident.times, put_back=at)
        self._save(msgspec.structs.replace(incident, times=times))

    def note_evidence(self, incident_id: int, text: str) -> None:
        """Remember where an incident's evidence is, or why there is none."""
        self._save(msgspec.structs.replace(self.incident(incident_id), evidence=text))

    def incident(self, incident_id: int) -> Incident:
        """Read an incident.

        Raises:
            NotFound: there is no such incident.
        """
        row = self._db.execute("SELECT body FROM incidents WHERE id = ?", (incident_id,)).fetchone()
        if row is None:
            raise NotFound(f"the journal has no incident {incident_id}")
        return msgspec.json.decode(row[0], type=Incident)

    def has_incident(self, incident_id: int) -> bool:
        row = self._db.execute("SELECT 1 FROM incidents WHERE id = ?", (incident_id,)).fetchone()
        return row is not None

    def incidents_of(self, node: str, limit: int) -> list[Incident]:
        """Return the last incidents of a node, newest first."""
        rows = self._db.execute(
            "SELECT body FROM incidents WHERE node = ? ORDER BY id DESC LIMIT ?", (node, limit)
        ).fetchall()
        return [msgspec.json.decode(row[0], type=Incident) for row in rows]

    def state_of(self, node: str) -> NodeState:
        """Return the node's state: that of its last incident."""
        row = self._db.execute(
            "SELECT state FROM incidents WHERE node = ? ORDER BY id DESC LIMIT 1", (node,)
        ).fetchone()
        return NodeState(row[0]) if row else NodeState.HEALTHY

    def incidents(self, *, open_only: bool = True, limit: int = 1000) -> list[Incident]:
        """Return incidents, newest first: all that are open, or the last ``limit`` of any state."""
        if open_only:
            return self._incidents_in(state for state in NodeState if state.is_under_way)
        rows = self._db.execute(
            "SELECT body FROM incidents ORDER BY id DESC LIMIT ?", (limit,)
        ).fetchall()
        return [msgspec.json.decode(row[0], type=Incident) for row in rows]

    def find_incidents(
        self, nodes: Sequence[str], *, is_open: bool, limit: int, before: int = 0
    ) -> list[Incident]:
        """Return incidents, newest first.

        Args:
            nodes: only theirs; empty: of all.
            is_open: only those that are under way.
            limit: of how many.
            before: only those with a lower id; 0: all.
        """
        where, values = ["(? = 0 OR id < ?)"], list[Any]((before, before))
        if nodes:
            where.append(f"node IN ({','.join('?' for _ in nodes)})")
            values += nodes
        if is_open:
            states = [state.value for state in NodeState if state.is_under_way]
            where.append(f"state IN ({','.join('?' for _ in states)})")
            values += states
        rows = self._db.execute(
            f"SELECT body FROM incidents WHERE {' AND '.join(where)} ORDER BY id DESC LIMIT ?",
            (*values, limit),
        ).fetchall()
        return [msgspec.json.decode(row[0], type=Incident) for row in rows]

    def at_rest(self) -> list[Incident]:
        """Return the last incident of each node, where it left the node to a person."""
        last = "id IN (SELECT max(id) FROM incidents GROUP BY node)"
        return self._incidents_in((state for state in NodeState if state.is_at_rest), last)

    def repairs(self, since: float) -> tuple[Repair, ...]:
        """Return the repairs since then (epoch), each incident's once; no person's requests, and
        no drills: they say nothing of the machine."""
        rows = self._db.execute(
            "SELECT body FROM incidents WHERE id IN"
            f" (SELECT incident FROM events WHERE kind = ? AND at > ? AND {IS_BEGUN}) ORDER BY id",
            (NodeEvent.REPLACING, since),
        ).fetchall()
        incidents = [msgspec.json.decode(row[0], type=Incident) for row in rows]
        return tuple(
            Repair(known.node, known.id, known.action, known.before.instance)
            for known in incidents
            if known.kind != "requested" and INJECTED_MARK not in known.reason
        )

    def _incidents_in(self, states: Iterator[NodeState], condition: str = "1") -> list[Incident]:
        values = [state.value for state in states]
        marks = ",".join("?" for _ in values)
        rows = self._db.execute(
            f"SELECT body FROM incidents WHERE state IN ({marks}) AND {condition} ORDER BY id DESC",
            values,
        ).fetchall()
        return [msgspec.json.decode(row[0], type=Incident) for row in rows]

    def _save(self, incident: Incident) -> None:
        self._db.execute(
            "UPDATE incidents SET state = ?, body = ? WHERE id = ?",
            (incident.state, msgspec.json.encode(incident).decode(), incident.id),
        )

    def _prune_incidents(self, before: float) -> None:
        states = [state.value for state in NodeState if state.is_under_way]
        marks = ",".join("?" for _ in states)
        self._db.execute(
            f"DELETE FROM incidents WHERE state NOT IN ({marks})"
            " AND json_extract(body, '$.times.closed') < ?"
            " AND (state = ? OR id NOT IN (SELECT max(id) FROM incidents GROUP BY node))",
            (*states, before, NodeState.HEALTHY),
        )
