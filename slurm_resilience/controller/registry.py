"""Connected: each node's sresd and each job's supervisors, and what their connections tell.

The wire's thread writes here, and the cycle reads a frozen view. Nothing is decided here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.controller.calm.agent_views import (
    AgentFacts,
    AgentPresence,
    AgentView,
    AgentViews,
    view_of,
)
from slurm_resilience.controller.journal.records import KnownAgent, Supervised
from slurm_resilience.model import FAULTY, Finding, Job
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    Beat,
    Goodbye,
    Message,
    NodeAnswer,
    NodeHello,
    Report,
)
from slurm_resilience.wire.server import Client

MAX_FINDINGS = 500
"""Kept per node; a flood of different findings must not eat the controller's memory. Faults always
find a place: the oldest finding that is only watched makes room for one."""
MAX_DRIVERS, MAX_DRIVER_CHARACTERS = 8, 100
"""More of a node's drivers is not kept."""
RETURN_SECONDS = 30.0
"""A supervisor may be without a connection this long, also after a start of sresctld.

It tries again after at most 2 s, and each try takes at most 2 s: that is seven tries, for a slow
munged or many that return at once. A longer time would help nothing, and would leave a job whose
supervisor was killed without Slurm's own handling for longer."""


MAX_GAP_SECONDS = 4.0
"""Between two messages of a node that beats without a break."""
BREAK_SECONDS = 1.5
"""Without a message of any node for longer, sresctld may have been cut off meanwhile."""


class Silences(NamedTuple):
    """The agents that have not spoken for longer than usual."""

    late: tuple[str, ...]
    """They have missed a beat, and are not silent yet; the latest first."""
    next_in: float
    """Seconds until the first of them is silent, or until one may be that is not late yet."""
    newest: float
    """Seconds since the last one fell silent; infinite: there is none that is new."""


class _Tables(NamedTuple):
    """By node, the values that each round copies and each beat changes: tables of plain values
    are copied and looked through in a fraction of the time that as many objects take."""

    heard_at: dict[str, float]
    """The last sign of life (monotonic)."""
    facts: dict[str, AgentFacts]


class _Agent:
    __slots__ = ("_findings", "_name", "_tables", "_verdicts", "connection", "facts")

    def __init__(self, name: str, tables: _Tables, now: float) -> None:
        self.connection: Client | None = None
        self._name, self._tables = name, tables
        tables.heard_at[name] = now
        self.facts = tables.facts[name] = AgentFacts(steady_since=now)
        """All that is known of it, but its last sign of life. Each change makes a new object: a
        round looks for those."""
        self._findings: dict[tuple[str, str, str], Finding] = {}
        self._verdicts: dict[str, str] = {}

    def note(self, **facts: Any) -> None:
        """Change some of the facts."""
        self.facts = msgspec.structs.replace(self.facts, **facts)
        self._tables.facts[self._name] = self.facts

    def hear(self, now: float) -> None:
        """Note a sign of life (monotonic)."""
        heard_at = self._tables.heard_at
        if now - heard_at[self._name] > MAX_GAP_SECONDS:
            self.note(steady_since=now)
        heard_at[self._name] = now
        presence = self.facts.presence
        if presence is not AgentPresence.CONNECTED and presence is not AgentPresence.STOPPED:
            self.note(presence=AgentPresence.CONNECTED)

    def forget_findings(self) -> None:
        """Forget what was found: another boot or machine speaks now."""
        self._findings.clear()
        self._show()

    def _show(self) -> None:
        unjudged = [check for check, verdict in self._verdicts.items() if verdict == "unjudged"]
        judged = [check for check, verdict in self._verdicts.items() if verdict != "unjudged"]
        findings = tuple(self._findings.values())
        self.note(findings=findings, unjudged=tuple(unjudged), judged=tuple(judged))

    def take(self, report: Report) -> None:
        """Take in what the node's checks and kernel log say."""
        self.note(checked=report.checked, reported=self.facts.reported or report.full)
        if report.full:
            self._findings.clear()
            self._verdicts.clear()
        for key in report.cleared:
            self._findings.pop(key, None)
        for result in report.results:
            self._verdicts[result.check] = result.verdict
            keys = {finding.key for finding in result.findings}
            if result.verdict != "unjudged":
                # What a check no longer says no longer holds; an unjudged check says nothing.
                outdated = [k for k in self._findings if k[0] == result.check and k not in keys]
                for key in outdated:
                    del self._findings[key]
        of_checks = [finding for result in report.results for finding in result.findings]
        for finding in (*of_checks, *report.findings):
            if finding.key in self._findings or self._has_room(finding):
                self._findings[finding.key] = finding
        self._show()

    def _has_room(self, finding: Finding) -> bool:
        if len(self._findings) < MAX_FINDINGS:
            return True
        watched = (key for key, old in self._findings.items() if old.severity not in FAULTY)
        oldest = next(watched, None)
        if finding.severity not in FAULTY or oldest is None:
            return False
        del self._findings[oldest]
        return True


class Registry:
    """Every connection of a node or a supervisor. Each method may be called from any thread."""

    def __init__(self, clock: Clock, break_seconds: float = BREAK_SECONDS) -> None:
        self._clock = clock
        self._break_seconds = break_seconds
        self._lock = threading.Lock()
        self._agents: dict[str, _Agent] = {}
        self._tables = _Tables({}, {})
        self._supervisors: dict[int, list[Client]] = {}
        self._heard_at = self._hearing_since = clock.monotonic()
        self.wake = threading.Event()
        """Set when the cycle should look at once."""

    # -- the wire's thread --------------------------------------------------------------------

    def opened(self, connection: Client) -> None:
        """Note a new connection. A node's newer one replaces its older one."""
        with self._lock:
            if connection.role == "node":
                now = self._clock.monotonic()
                agent = self._agent_of(connection.subject, now)
                if agent.connection is not None:
                    # A node that was cut off comes back on a new connection.
                    agent.connection.close()
                agent.connection, connection.kept = connection, agent
                self._hear(now)
                self._tables.heard_at[connection.subject] = now
                agent.note(steady_since=now, reported=False, checked=False)
                if agent.facts.presence is not AgentPresence.EXPECTED:
                    agent.note(presence=AgentPresence.CONNECTED)
            elif connection.role == "job":
                self._supervisors.setdefault(int(connection.subject), []).append(connection)

    def closed(self, connection: Client) -> None:
        """Note the end of a connection."""
        with self._lock:
            if connection.role == "node":
                agent = self._agents.get(connection.subject)
                if agent is not None and agent.connection is connection:
                    agent.connection = None
                    if agent.facts.presence is AgentPresence.CONNECTED:
                        agent.note(presence=AgentPresence.LOST)
                    if agent.facts.presence is not AgentPresence.STOPPED:
                        self.wake.set()
            elif connection.role == "job":
                remaining = self._supervisors.get(int(connection.subject), [])
                if connection in remaining:
                    remaining.remove(connection)
                if not remaining:
                    self._supervisors.pop(int(connection.subject), None)

    def take(self, connection: Client, message: Message) -> None:
        """Take in what a node's sresd says."""
        with self._lock:
            agent = self._agents.get(connection.subject)
            if agent is None or agent.connection is not connection:
                return  # an older connection of a node that has a newer one
            now = self._clock.monotonic()
            self._hear(now)
            agent.hear(now)
            if isinstance(message, Beat | NodeAnswer):
                return
            if isinstance(message, NodeHello):
                identity = (message.boot_id, message.instance)
                if identity != (agent.facts.boot_id, agent.facts.instance):
                    agent.forget_findings()
                    agent.note(boot_id=message.boot_id, instance=message.instance)
                known = (text[:MAX_DRIVER_CHARACTERS] for text in message.drivers[:MAX_DRIVERS])
                agent.note(drivers=tuple(known))
            elif isinstance(message, Report):
                agent.take(message)
            elif isinstance(message, Goodbye):
                agent.note(presence=AgentPresence.STOPPED)
                return
            self.wake.set()

    def beaten(self, connections: Sequence[Client]) -> None:
        """Note that the sresds of these nodes are alive."""
        with self._lock:
            now, connected = self._clock.monotonic(), AgentPresence.CONNECTED
            self._hear(now)
            heard_at = self._tables.heard_at
            for connection in connections:
                agent = connection.kept
                if not isinstance(agent, _Agent) or agent.connection is not connection:
                    continue
                # Nearly always so, 13,000 times a second.
                node = connection.subject
                if now - heard_at[node] < MAX_GAP_SECONDS and agent.facts.presence is connected:
                    heard_at[node] = now
                else:
                    agent.hear(now)

    def _agent_of(self, node: str, now: float) -> _Agent:
        """Return a node's agent, which is new where the node has none."""
        if node not in self._agents:
            self._agents[node] = _Agent(node, self._tables, now)
        return self._agents[node]

    def _hear(self, now: float) -> None:
        """Note that some node was heard."""
        if now - self._heard_at > self._break_seconds:
            self._hearing_since = now
        self._heard_at = now

    # -- the cycle ----------------------------------------------------------------------------

    def hearing_since(self) -> float:
        """Return since when (monotonic) some node was heard without a break, up to the last one."""
        with self._lock:
            return self._hearing_since

    def expect(self, known: KnownAgent) -> None:
        """Expect a node that the journal knows to speak."""
        with self._lock:
            agent = self._agent_of(known.node, self._clock.monotonic())
            agent.note(boot_id=known.boot_id, instance=known.instance, drivers=known.drivers)

    def forget(self, node: str) -> None:
        """Forget a node that Slurm does not know any more, and end its connection.

        Its sresd comes back, and is let in when Slurm knows the node again: with its boot and with
        all that its checks found.
        """
        with self._lock:
            agent = self._agents.pop(node, None)
            for table in self._tables:
                table.pop(node, None)
            connection = agent.connection if agent is not None else None
            if agent is not None:
                agent.connection = None  # what still comes on it counts no more
        if connection is not None:
            connection.close()

    def agents(self) -> AgentViews:
        """Return every agent as it is now."""
        with self._lock:
            heard_at, facts = self._tables
            return AgentViews(facts.copy(), heard_at.copy(), self._clock.monotonic())

    def agent(self, node: str) -> AgentView | None:
        """Return one node's agent as it is now; None: it has none."""
        with self._lock:
            agent = self._agents.get(node)
            if agent is None:
                return None
            heard_at = self._tables.heard_at[node]
            return view_of(node, agent.facts, heard_at, self._clock.monotonic())

    def silences(self, late_after: float, silent_after: float, new_for: float) -> Silences:
        """Return which agents are late or have newly fallen silent, without those that were
        stopped. Asked several times a second.

        Args:
            late_after: seconds without a word after which an agent is late.
            silent_after: the same until it is silent.
            new_for: seconds for which a silence is new.
        """
        with self._lock:
            now = self._clock.monotonic()
            latest = now - late_after
            # Nearly always there is none, and the cluster may be large.
            heard_at, facts = self._tables
            behind = [(name, at) for name, at in heard_at.items() if at < latest]
            ages = {
                name: now - at
                for name, at in behind
                if facts[name].presence is not AgentPresence.STOPPED
            }
        late = {name: age for name, age in ages.items() if age <= silent_after}
        silent = [age for age in ages.values() if silent_after < age < new_for]
        return Silences(
            tuple(sorted(late, key=late.__getitem__, reverse=True)),
            silent_after - max(late.values(), default=0.0),
            min(silent, default=math.inf) - silent_after,
        )

    def agent_connection(self, node: str) -> Client | None:
        """Return the connection of a node's sresd; None: it has none."""
        with self._lock:
            agent = self._agents.get(node)
            return agent.connection if agent is not None else None

    def supervisors(self, job: int) -> list[Client]:
        """Return a job's supervisors that are connected now."""
        with self._lock:
            return list(self._supervisors.get(job, []))


def is_farewell(message: AttemptEnded) -> bool:
    """Tell whether the supervisor ends with this attempt. (A requeue ends it as well, but the job
    comes back with a supervisor.)"""
    return message.outcome.startswith("stop:")


class _JobSupervisors:
    """The supervisors of one job. It may have several, one after the other or at the same time.

    Nothing tells a supervisor that comes back on a new connection from another one of the same job,
    so they are counted.
    """

    def __init__(self) -> None:
        self.living: set[Client] = set()
        self.ended: set[Client] = set()
        """Connected still, and of no use to the job: each has said farewell, or its run of the job
        is over."""
        self.missing: dict[object, float] = {}
        """Lost without a farewell, oldest first, and when that was seen."""

    def add(self, connection: Client) -> None:
        if connection not in self.living:
            self.living.add(connection)
            if self.missing:
                del self.missing[next(iter(self.missing))]


class SupervisorRoll:
    """The jobs that have a living supervisor, as far as this sresctld has seen. Only the cycle uses
    it; moments are of the monotonic clock."""

    def __init__(self) -> None:
        self._jobs: dict[int, _JobSupervisors] = {}

    def review(
        self,
        supervised: Mapping[int, Supervised],
        jobs: Mapping[int, Job],
        registry: Registry,
        moment: float,
    ) -> frozenset[int]:
        """Take in which supervisors are connected now.

        Args:
            supervised: the jobs that the journal has as supervised.
            jobs: Slurm's jobs.
            registry: the connections.
            moment: now.

        Returns:
            The supervised jobs that no supervisor cares for any more.
        """
        # A job keeps what is known of it between two of its sruns.
        for ended in [job for job in self._jobs if job not in jobs]:
            del self._jobs[ended]
        for job_id in supervised:
            job = jobs.get(job_id)
            if job is None:
                continue
            connected = registry.supervisors(job_id)
            if job.state == "COMPLETING" or job.waits_for_nodes:
                self.run_is_over(job_id, connected)
            else:
                self.look(job_id, connected, moment)
        return frozenset(job for job in supervised if self.is_abandoned(job, moment))

    def began(self, job: int, connection: Client) -> None:
        """Note that a supervisor has announced an attempt."""
        known = self._jobs.setdefault(job, _JobSupervisors())
        known.ended.discard(connection)
        known.add(connection)

    def ended(self, job: int, connection: Client) -> None:
        """Note that a supervisor has said farewell."""
        known = self._jobs.get(job)
        if known is not None:
            known.living.discard(connection)
            known.missing.pop(connection, None)  # it was gone before its farewell was read
            known.ended.add(connection)

    def hear(self, job: int, connection: Client, message: object) -> None:
        """Take in a supervisor's message."""
        if isinstance(message, AttemptStarted):
            self.began(job, connection)
        elif isinstance(message, AttemptEnded) and is_farewell(message):
            self.ended(job, connection)

    def look(self, job: int, connected: Collection[Client], moment: float) -> None:
        """Compare a running job's connections with those that were known.

        Args:
            job: a job that the journal has as supervised.
            connected: its supervisors' connections.
            moment: now.
        """
        known = self._jobs.get(job)
        if known is None:
            # We were started again: the job's supervisor must have the time to return.
            known = self._jobs[job] = _JobSupervisors()
            if not connected:
                known.missing[object()] = moment
        present = set(connected)
        for connection in known.living - present:
            known.missing[connection] = moment
        known.living &= present
        known.ended &= present
        for connection in present - known.ended:
            known.add(connection)

    def run_is_over(self, job: int, connected: Collection[Client]) -> None:
        """Count none of a job's supervisors: it ends, or waits for its next run, whose supervisor
        will announce itself.

        Args:
            job: a job that the journal has as supervised.
            connected: its supervisors' connections.
        """
        known = self._jobs.setdefault(job, _JobSupervisors())
        known.living.clear()
        known.missing.clear()
        known.ended = set(connected)

    def is_abandoned(self, job: int, moment: float) -> bool:
        """Tell whether no supervisor of the job lives, and none is to be waited for."""
        known = self._jobs.get(job)
        return known is not None and not (
            known.living
            or any(moment - since <= RETURN_SECONDS for since in known.missing.values())
        )
