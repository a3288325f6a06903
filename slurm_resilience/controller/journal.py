"""The journal: all that was seen, decided and done, in SQLite; the only way into the next cycle.

Writing is the cycle's alone (one thread, one process). Reading through `sres` goes over the wire.
A node's state is written by `open_incident` and `apply` alone, which ask the table of
`node_lifecycle` for it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState, step
from slurm_resilience.errors import NotFound, SresError


class MachineIdentity(msgspec.Struct, frozen=True):
    """The machine behind a node's name, and its boot. Empty: not known."""

    boot_id: str = ""
    instance: str = ""

    @property
    def is_known(self) -> bool:
        return bool(self.boot_id or self.instance)


UNKNOWN_MACHINE = MachineIdentity()


class IncidentTimes(msgspec.Struct, frozen=True):
    """When an incident came to each of its stages (epoch); 0: not yet."""

    opened: float
    marked: float = 0.0
    run_started: float = 0.0
    run_ended: float = 0.0
    """The program's end, or the node's return by itself: since then its return is judged."""
    resumed: float = 0.0
    closed: float = 0.0
    put_back: float = 0.0
    """A person put the node back during a pause: what was found until then was answered then."""


class Incident(msgspec.Struct, frozen=True):
    """One trouble of one node, from its detection until the node is back."""

    id: int
    node: str
    kind: str
    """dead, sick, requested."""
    action: str
    """Action:Replace or Action:Reboot."""
    reason: str
    state: NodeState
    times: IncidentTimes
    attempts: int = 0
    next_try: float = 0.0
    before: MachineIdentity = UNKNOWN_MACHINE
    """The machine that is to be replaced."""
    reason_at: str = ""
    """Slurm's time of the reason when the node was resumed or the incident ended: a later one is a
    new request."""
    alarmed: bool = False
    ended_by: NodeEvent | None = None
    mark_reason_at: str = ""
    """Slurm's time of the reason that we set: one of another time is a person's."""
    is_flap: bool = False
    """The node came back by itself: it need not be another boot or machine."""
    evidence: str = ""
    """The directory of what was saved of the node, or why there is nothing; empty: not yet."""


class IncidentFacts(msgspec.Struct, frozen=True):
    """News of an incident that an event brings, beside the new state. None: nothing new."""

    attempts: int | None = None
    next_try: float | None = None
    run_ended: float | None = None
    before: MachineIdentity | None = None
    reason_at: str | None = None
    mark_reason_at: str | None = None
    is_flap: bool | None = None
    output: str = ""
    """The end of what the replacement program printed: kept with the event."""


NO_FACTS = IncidentFacts()


class Supervised(msgspec.Struct, frozen=True):
    """A job whose step is kept alive by a supervisor."""

    job: int
    uid: int
    attempt: int
    nodes: tuple[str, ...]
    """Those of the announced nodes that Slurm was seen to have given to the job."""
    since: float
    size: int = 0
    """The number of nodes that the job may have again after a loss: no more than it once held."""
    restarts: int = 0
    """The number of requeues of the job when this was said, or when it was last followed."""
    unseen: tuple[str, ...] = ()
    """Announced nodes that Slurm has not shown as the job's. They count for nothing."""
    lost: tuple[str, ...] = ()
    """Nodes that left the job because they were faulty."""


class KnownAgent(msgspec.Struct, frozen=True):
    """A node whose sresd has spoken to us: its silence after a restart of ours means something."""

    node: str
    boot_id: str
    instance: str


class PendingRequeue(msgspec.Struct, frozen=True):
    """A job that is requeued, and followed until it runs again."""

    job: int
    reason: str
    wanted: bool
    """sresctld must requeue it; false: Slurm does so by itself."""
    restarts_before: int
    since: float
    pending_since: float = 0.0
    """When it was first seen PENDING."""


FindingOfBoot = tuple[str, str, str, str]
"""A boot id, and the key of a finding: check, subject, code."""


class Fault(msgspec.Struct, frozen=True):
    """A node's last fault, as the breaker counts it."""

    node: str
    cause: str
    """The health check that found it, with its code; empty: the node is dead."""
    partitions: tuple[str, ...]
    began: float
    is_over: bool = False
    waits_for_pause: bool = False
    """The node was not marked, and sresctld is paused."""


class BreakerState(msgspec.Struct, frozen=True):
    """The breaker: tripped, it stops automatic actions because too many nodes failed together."""

    tripped_at: float = 0.0
    """0: it is closed."""
    storm_at: float = 0.0
    """When too many nodes were faulty for the last time."""
    text: str = ""
    """The limit that was exceeded, in words."""
    reset_at: float = 0.0
    """When a person reset it: faults from before count no more."""

    @property
    def is_tripped(self) -> bool:
        return self.tripped_at > 0


CLOSED_BREAKER = BreakerState()
HOUR_SECONDS = 3600.0
PUT_BACK = "put-back"
"""The event of a person's resume of a node that has no incident."""


class Remark(msgspec.Struct, frozen=True):
    """One line on a fault that is only observed, and when it came about (epoch)."""

    at: float
    kind: str
    text: str


class NodeSight(msgspec.Struct, frozen=True):
    """The parts of a node that people change, as they were seen last."""

    is_available: bool = True
    reason: str = ""
    reason_by: str = ""
    boot_id: str = ""
    instance: str = ""


class ObservedFault(msgspec.Struct, frozen=True):
    """A fault, or a request, of a node with the mode `observe`: what sresctld would have done, and
    what was done instead."""

    id: int
    node: str
    kind: str
    """dead, sick, requested."""
    action: str
    reason: str
    began: float
    sight: NodeSight
    would: tuple[Remark, ...] = ()
    then: tuple[Remark, ...] = ()
    ended: float = 0.0
    """When the node was in service and sound again; 0: it is not."""

    def would_at(self, kind: str) -> float:
        """Return when it would have done this (epoch); 0: not yet."""
        return next((remark.at for remark in self.would if remark.kind == kind), 0.0)


class Repair(msgspec.Struct, frozen=True):
    """A machine that was given to the replacement program for a fault that sresctld found."""

    node: str
    incident: int
    action: str
    instance: str
    """The machine, by its serial number or instance id; empty: not known."""


class NamedModes(msgspec.Struct, frozen=True):
    """Names with a recovery mode of their own that Slurm had when sresctld started."""

    nodes: tuple[str, ...] = ()
    partitions: Mapping[str, tuple[str, ...]] = {}
    """Each with its nodes."""


class EventFilter(msgspec.Struct, frozen=True):
    """The events to read. What is empty or 0 leaves all of them."""

    nodes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    job: int = 0
    incident: int = 0
    since: float = 0.0


class JournalMemory(msgspec.Struct, frozen=True):
    """The memory of the diagnosis, the ceilings and the breaker."""

    acknowledged: Mapping[str, Mapping[FindingOfBoot, float]] = {}
    """Findings of each node that a person has answered, each with the boot and the time that it
    was found in: seconds of that boot, or by the node's date."""
    kept: frozenset[str] = frozenset()
    """Nodes without an incident that a person keeps out of service."""
    flaps: Mapping[str, int] = {}
    """Returns of each node by itself, counted within `recovery.flap_window`."""
    starts: tuple[tuple[float, str], ...] = ()
    """Replacement programs started within the last hour: when (epoch), and the node."""
    faults: Mapping[str, Fault] = {}
    """The last fault of each node, for the breaker."""
    missing: Mapping[str, float] = {}
    """Nodes that Slurm does not list, since when (epoch)."""
    breaker: BreakerState = CLOSED_BREAKER
    observed: Mapping[str, ObservedFault] = {}
    """The fault of each node with the mode `observe` that is not over."""
    left_overs: Mapping[str, tuple[int, float]] = {}
    """Nodes on which processes could not be ended within the last hour: how often, when last."""
    repairs: tuple[Repair, ...] = ()
    """Repairs within `recovery.recurrence_window`, over all incidents."""
    would_starts: tuple[tuple[float, str], ...] = ()
    """The same as `starts`, for programs that would have been started."""
    released: Mapping[str, float] = {}
    """Nodes that a person put back into service within the last hour, each with the time (epoch) of
    the last such word."""
    deaths: tuple[tuple[float, str], ...] = ()
    """Nodes that were found dead, and marked for it, within the last hour, and when (epoch)."""


NO_MEMORY = JournalMemory()

LEFT_OVER_REMAINS = "left-over-remains"
"""The kind of event of processes that could not be ended."""

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
CREATE TABLE IF NOT EXISTS missing (node TEXT PRIMARY KEY, since REAL NOT NULL);
CREATE TABLE IF NOT EXISTS faults (node TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS observed (
  id INTEGER PRIMARY KEY, node TEXT NOT NULL, ended REAL NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS observed_ended ON observed (ended);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
SCHEMA_VERSION = 2
"""Written into the file; a file with another number is refused."""

WOULD_REPLACE = "would-replace"
"""The kind of event that `observe` writes in the place of `replacing`."""

_STAMPS = {
    NodeEvent.MARKED: "marked",
    NodeEvent.REPLACING: "run_started",
    NodeEvent.REPLACED: "run_ended",
    NodeEvent.CAME_BACK: "run_ended",
    NodeEvent.RESUMED: "resumed",
}
"""The field of `IncidentTimes` that an event sets."""


def open_database(path: Path | str) -> sqlite3.Connection:
    """Open a database in which each statement is a transaction, but for those that begin one."""
    return sqlite3.connect(path, isolation_level=None)


class Journal:
    """The journal's file."""

    def __init__(
        self,
        path: Path | str,
        connect: Callable[[Path | str], sqlite3.Connection] = open_database,
    ) -> None:
        """Open the file, or make it.

        Args:
            path: the file.
            connect: opens a database; the simulator has one of its own.

        Raises:
            SresError: the file cannot be opened, or another version of sresctld wrote it.
        """
        self._path = path
        self._number_after = 0
        self._agents: dict[str, KnownAgent] | None = None
        try:
            if str(path) != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            self._db = connect(path)
            # WAL + NORMAL: a killed process loses nothing; a killed machine at most the last event.
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, SCHEMA_VERSION):
                raise SresError(
                    f"the journal {path} has version {version}, and this sresctld reads version "
                    f"{SCHEMA_VERSION}: install the sresctld that wrote it, or move the file away "
                    "(sresctld then starts with an empty journal, and is not paused)"
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        except (sqlite3.Error, OSError) as error:
            raise SresError(f"the journal {path} cannot be opened: {error}") from None

    def close(self) -> None:
        self._db.close()

    # -- events -------------------------------------------------------------------------------

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
        self._db.execute(
            "INSERT INTO events (at, kind, node, job, incident, text, data) VALUES (?,?,?,?,?,?,?)",
            (at, kind, node, job, incident, text, json.dumps(data, default=str)),
        )

    def prune(self, before: float) -> None:
        """Drop events older than ``before`` (epoch), and incidents that ended before it. One that
        left its node to a person stays as long as it is the node's last."""
        states = [state.value for state in NodeState if state.is_under_way]
        marks = ",".join("?" for _ in states)
        self._db.execute("DELETE FROM events WHERE at < ?", (before,))
        self._db.execute(
            f"DELETE FROM incidents WHERE state NOT IN ({marks})"
            " AND json_extract(body, '$.times.closed') < ?"
            " AND (state = ? OR id NOT IN (SELECT max(id) FROM incidents GROUP BY node))",
            (*states, before, NodeState.HEALTHY),
        )
        self._db.execute("DELETE FROM observed WHERE ended > 0 AND ended < ?", (before,))

    def has_incident(self, incident_id: int) -> bool:
        row = self._db.execute("SELECT 1 FROM incidents WHERE id = ?", (incident_id,)).fetchone()
        return row is not None

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

    # -- the life of a node -------------------------------------------------------------------

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
        with self._together():
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
            self.event(at, event, text, node=node, incident=number, state=state.value)
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
        changes: dict[str, Any] = {
            name: value
            for name in (
                "attempts",
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
        changes["times"] = msgspec.structs.replace(incident.times, **stamps)
        changed = msgspec.structs.replace(incident, state=state, **changes)
        data: dict[str, Any] = {"state": state.value}
        if facts.output:
            data["output"] = facts.output
        with self._together():
            self._save(changed)
            self.event(at, event, text, node=changed.node, incident=changed.id, **data)
        return changed

    def note_alarm(self, incident_id: int) -> None:
        """Remember that an incident's alarm was raised."""
        self._save(msgspec.structs.replace(self.incident(incident_id), alarmed=True))

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

    def newest(self) -> float:
        """Return when (epoch) the last event was written; 0: there is none."""
        row = self._db.execute("SELECT at FROM events ORDER BY id DESC LIMIT 1").fetchone()
        return float(row[0]) if row else 0.0

    def set_back(self, now: float, seconds: float) -> None:
        """Let nothing that counts lie in the future, and keep its age.

        Args:
            now: the machine's date (epoch).
            seconds: by so much the journal is ahead of it.
        """
        with self._together():
            self._db.execute("UPDATE events SET at = at - ? WHERE at > ?", (seconds, now))
            self._db.execute("UPDATE missing SET since = since - ?", (seconds,))
            for fault in self.faults().values():
                self.put_fault(msgspec.structs.replace(fault, began=fault.began - seconds))
            breaker = self.breaker()
            self.put_breaker(
                msgspec.structs.replace(breaker, reset_at=max(0.0, breaker.reset_at - seconds))
            )

    # -- what the breaker, the ceilings and the diagnosis remember ----------------------------

    def memory(
        self, now: float, flap_window: float, recurrence_window: float = 0.0
    ) -> JournalMemory:
        """Return what still counts at this moment (epoch)."""
        return JournalMemory(
            self.acknowledged(),
            self.kept(),
            self.flaps(now - flap_window),
            self.starts(now - HOUR_SECONDS),
            self.faults(),
            self.missing(),
            self.breaker(),
            {fault.node: fault for fault in self.observed(open_only=True)},
            self.left_overs(now - HOUR_SECONDS),
            self.repairs(now - recurrence_window),
            self.starts(now - HOUR_SECONDS, WOULD_REPLACE),
            self.released(now - HOUR_SECONDS),
            self.deaths(now - HOUR_SECONDS),
        )

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

    def forget_boots(self, node: str, boot: str) -> None:
        """Drop what was acknowledged in other boots of a node."""
        self._db.execute("DELETE FROM answered WHERE node = ? AND boot != ?", (node, boot))

    def flaps(self, since: float) -> dict[str, int]:
        """Return how often each node came back by itself since then (epoch)."""
        rows = self._db.execute(
            "SELECT node, count(*) FROM events WHERE kind = ? AND at > ? GROUP BY node",
            (NodeEvent.CAME_BACK, since),
        ).fetchall()
        return {str(node): int(number) for node, number in rows}

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
            "SELECT at, node FROM events WHERE kind = ? AND at > ? ORDER BY at", (kind, since)
        ).fetchall()
        return tuple((float(at), str(node)) for at, node in rows)

    def deaths(self, since: float) -> tuple[tuple[float, str], ...]:
        """Return when (epoch) and for which node an incident of a death was opened since then."""
        rows = self._db.execute(
            "SELECT at, node FROM events WHERE kind = ? AND at > ? AND text LIKE 'dead:%'",
            (NodeEvent.DETECTED, since),
        ).fetchall()
        return tuple((float(at), str(node)) for at, node in rows)

    def repairs(self, since: float) -> tuple[Repair, ...]:
        """Return the repairs since then (epoch), each incident's once; no person's requests."""
        rows = self._db.execute(
            "SELECT body FROM incidents WHERE id IN"
            " (SELECT incident FROM events WHERE kind = ? AND at > ?) ORDER BY id",
            (NodeEvent.REPLACING, since),
        ).fetchall()
        incidents = [msgspec.json.decode(row[0], type=Incident) for row in rows]
        return tuple(
            Repair(known.node, known.id, known.action, known.before.instance)
            for known in incidents
            if known.kind != "requested"
        )

    def left_overs(self, since: float) -> dict[str, tuple[int, float]]:
        """Return how often, and when last, processes of a node could not be ended since then."""
        rows = self._db.execute(
            "SELECT node, count(*), max(at) FROM events WHERE kind = ? AND at > ? GROUP BY node",
            (LEFT_OVER_REMAINS, since),
        ).fetchall()
        return {str(node): (int(number), float(last)) for node, number, last in rows}

    def put_fault(self, fault: Fault) -> None:
        self._put("faults", fault.node, fault)

    def faults(self) -> dict[str, Fault]:
        rows = self._db.execute("SELECT body FROM faults").fetchall()
        entries = [msgspec.json.decode(row[0], type=Fault) for row in rows]
        return {entry.node: entry for entry in entries}

    def drop_fault(self, node: str) -> None:
        self._db.execute("DELETE FROM faults WHERE node = ?", (node,))

    def put_observed(self, fault: ObservedFault, news: Iterable[Remark] = ()) -> None:
        """Write a fault that is only observed, with its news as events. One without an id is new,
        and gets the next."""
        with self._together():
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
                self.event(remark.at, remark.kind, remark.text, node=fault.node)

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
        self._set("breaker", msgspec.json.encode(state).decode())

    def breaker(self) -> BreakerState:
        text = self._setting("breaker")
        return msgspec.json.decode(text, type=BreakerState) if text else CLOSED_BREAKER

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

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Write all of it, or nothing: a state never stands without its event."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk may have ended it already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    # -- jobs, agents, pause ------------------------------------------------------------------

    def put_supervised(self, entry: Supervised) -> None:
        self._put("supervised", entry.job, entry)

    def supervised(self) -> dict[int, Supervised]:
        rows = self._db.execute("SELECT body FROM supervised").fetchall()
        entries = [msgspec.json.decode(row[0], type=Supervised) for row in rows]
        return {entry.job: entry for entry in entries}

    def drop_supervised(self, job: int) -> None:
        self._db.execute("DELETE FROM supervised WHERE job = ?", (job,))

    def put_pending_requeue(self, entry: PendingRequeue) -> None:
        self._put("pending_requeues", entry.job, entry)

    def pending_requeues(self) -> dict[int, PendingRequeue]:
        rows = self._db.execute("SELECT body FROM pending_requeues").fetchall()
        entries = [msgspec.json.decode(row[0], type=PendingRequeue) for row in rows]
        return {entry.job: entry for entry in entries}

    def drop_pending_requeue(self, job: int) -> None:
        self._db.execute("DELETE FROM pending_requeues WHERE job = ?", (job,))

    def put_agent(self, entry: KnownAgent) -> None:
        self._put("agents", entry.node, entry)
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

    @property
    def paused(self) -> str:
        """The reason of the pause; empty: sresctld is not paused."""
        return self._setting("paused")

    def pause(self, reason: str) -> None:
        """Pause with a reason, or go on with an empty one."""
        self._set("paused", reason)

    def claim(self, cluster: str) -> None:
        """Keep the name of the cluster that this journal is of.

        Raises:
            SresError: it is another one's.
        """
        known = self._setting("cluster")
        if known not in ("", cluster):
            raise SresError(
                f"the journal {self._path} is of cluster {known}, and Slurm here is cluster "
                f"{cluster}: nodes of the same name would be taken for each other's. Set another "
                "controller.state_dir, or move the journal away (sresctld then starts with an "
                "empty one, and is not paused)"
            )
        if not known and cluster:
            self._set("cluster", cluster)

    def named_modes(self) -> NamedModes:
        """Return the names that had a mode of their own at the last start."""
        text = self._setting("named_modes")
        return msgspec.json.decode(text, type=NamedModes) if text else NamedModes()

    def put_named_modes(self, names: NamedModes) -> None:
        self._set("named_modes", msgspec.json.encode(names).decode())

    def _setting(self, name: str) -> str:
        row = self._db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else ""

    def _set(self, name: str, value: str) -> None:
        self._db.execute(
            "INSERT INTO settings (name, value) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )

    def _put(self, table: str, key: int | str, body: object) -> None:
        self._db.execute(
            f"INSERT OR REPLACE INTO {table} VALUES (?, ?)",
            (key, msgspec.json.encode(body).decode()),
        )
