"""Observe: one frozen picture of Slurm, the agents, the journal and the runs; or `Blind`.

Nothing goes into the journal here: what was heard is in the picture, for `decide` to judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.config import ReplaceSettings
from slurm_resilience.controller.calm.agent_views import AgentView
from slurm_resilience.controller.heard import Heard
from slurm_resilience.controller.inbox import Inbox
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import (
    NO_MEMORY,
    Incident,
    JournalMemory,
    PendingRequeue,
    Supervised,
)
from slurm_resilience.controller.probe import Prober, ProbeResult
from slurm_resilience.controller.registry import Registry, SupervisorRoll
from slurm_resilience.controller.standby.act_gate import StandbyFacts
from slurm_resilience.errors import SresError
from slurm_resilience.model import REBOOT, RESET, Job, Node
from slurm_resilience.replace.repair_order import RepairOrder, Run, Verb
from slurm_resilience.replace.replacers import Replacers, program_only
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.companion_job import with_companions
from slurm_resilience.slurm.reservations import Reservation, ReservationClient


class SiteFacts(msgspec.Struct, frozen=True):
    """Facts that are not of nodes and jobs: sresctld's age, its configuration, Slurm's."""

    uptime: float = 0.0
    """Seconds since sresctld started to listen."""
    can_replace: bool = False
    """Something that replaces nodes is configured."""
    can_reboot: bool = False
    """Nodes can be rebooted, also where they cannot be replaced."""
    can_reset: bool = False
    """GPUs are reset, where a finding asks for it."""
    permits_expansion: bool = False
    slurmd_timeout: float = 300.0
    """Seconds that Slurm waits for a silent node before its jobs end (SlurmdTimeout)."""
    slurm_users: frozenset[str] = frozenset({"root", "slurm"})
    """Users as whom Slurm's daemons write reasons."""
    returns_by_itself: bool = False
    """Slurm puts a DOWN node into service when its slurmd registers (ReturnToService)."""
    flap_window: float = 3600.0
    recurrence_window: float = 604800.0
    domains: Mapping[str, str] = {}
    """The leaf switch or block of each node, where Slurm's topology has them."""
    failing_sinks: tuple[tuple[str, str], ...] = ()
    """Names of sinks that take no events, each with the reason."""
    reservations: tuple[Reservation, ...] | None = None
    """Slurm's, where there are spares; None: they were not read, and spares stay as they are."""
    standby: StandbyFacts | None = None
    """None: there is one controller only."""
    picture_age: float = 0.0
    """Seconds since Slurm was first asked for what the observation shows."""

    def can_repair(self, action: str) -> bool:
        """Tell whether such an action can be done without a person."""
        if action == RESET:
            return self.can_reset
        return self.can_replace or (action == REBOOT and self.can_reboot)


class Repairs(msgspec.Struct, frozen=True):
    """The repairs that run, or have just ended."""

    runs: Mapping[int, Run] = {}
    """By incident id: the latest try."""
    stopped: frozenset[str] = frozenset()
    """Nodes whose repair was stopped for a person, and has not ended yet: one of the last hour, or
    any one where the next repair is due."""
    no_room: str = ""
    """The disk's lack, for which no repair is begun; empty: there is room."""


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """Everything one cycle decides from."""

    now: float
    """Seconds since the epoch."""
    moment: float
    """The same as a moment of the monotonic clock; probes and beats are compared with it."""
    nodes: Mapping[str, Node]
    jobs: Mapping[int, Job]
    site: SiteFacts = SiteFacts()
    agents: Mapping[str, AgentView] = {}
    probes: Mapping[str, tuple[ProbeResult, ...]] = {}
    incidents: Mapping[str, Incident] = {}
    """The open incident of each node that has one."""
    at_rest: Mapping[str, Incident] = {}
    """The last incident of each node that was left to a person: quarantined or held."""
    memory: JournalMemory = NO_MEMORY
    """Finds of earlier cycles, as far as they still count."""
    repairs: Repairs = Repairs()
    supervised: Mapping[int, Supervised] = {}
    pending_requeues: Mapping[int, PendingRequeue] = {}
    paused: str = ""
    heard: Heard = Heard()

    def age_of_last_probe(self, node: str) -> float:
        """Return by how many seconds a node's last probe is older than Slurm's picture; infinite:
        there was none.

        A slurmctld that takes seconds for each answer shows what is as old by the time of the
        decision. Compared with that time, a probe would never be fresh.
        """
        probes = self.probes.get(node)
        age = self.moment - probes[-1].ended if probes else math.inf
        return age - self.site.picture_age


class Blind(msgspec.Struct, frozen=True):
    """Slurm could not be read: no node is judged, nothing is done."""

    reason: str


def _none() -> None:
    """There is no standby."""


class Sources(NamedTuple):
    """The places that a snapshot is read from."""

    client: SlurmClient
    registry: Registry
    roll: SupervisorRoll
    inbox: Inbox
    prober: Prober
    journal: Journal
    clock: Clock
    state_dir: Path
    """sresctld's own directory (runs of repairs)."""
    replacers: Replacers = program_only(ReplaceSettings())
    """They say how repairs stand."""
    repair_seconds: float = ReplaceSettings().timeout
    """The time limit of a repair."""
    reservations: ReservationClient | None = None
    """Reads them; None: no job is given nodes."""
    has_pools: bool = False
    """The configuration has pools of spares."""
    standby: Callable[[], StandbyFacts | None] = _none


def repair_order(state_dir: Path, incident: Incident, seconds: float) -> RepairOrder:
    """Return the order of an incident's latest try to repair its node."""
    directory = state_dir / "runs" / f"{incident.id}-{incident.attempts}"
    verbs: Mapping[str, Verb] = {REBOOT: "reboot", RESET: "reset"}
    verb = verbs.get(incident.action, "replace")
    was_begun = 0 < incident.attempts == incident.carried_out
    return RepairOrder(directory, verb, incident.node, incident.action, seconds, was_begun)


def _repairs(
    sources: Sources,
    incidents: Mapping[str, Incident],
    memory: JournalMemory,
    nodes: Mapping[str, Node],
    now: float,
) -> Repairs:
    replacers, seconds = sources.replacers, sources.repair_seconds
    runs = {
        incident.id: replacers.status(
            repair_order(sources.state_dir, incident, seconds), nodes.get(incident.node), now
        )
        for incident in incidents.values()
        if incident.state.is_running_program
    }
    stopped = set()
    due = {
        incident.node
        for incident in incidents.values()
        if incident.state.waits_for_repair and incident.next_try <= now
    }
    for name in due | {name for _, name in memory.starts}:
        known, node = incidents.get(name), nodes.get(name)
        if node is None or (known is not None and known.state.is_running_program):
            continue
        for last in sources.journal.incidents_of(name, 2):
            order = repair_order(sources.state_dir, last, seconds)
            if last.attempts and replacers.is_unfinished(order, node, now):
                stopped.add(name)
    return Repairs(runs, frozenset(stopped), replacers.lack_of_room(sources.state_dir))


def _reservations(client: ReservationClient) -> tuple[Reservation, ...] | None:
    try:
        return client.reservations()
    except SresError:
        return None  # of all that is decided only the spares need them


def last_run(state_dir: Path) -> int:
    """Return the highest incident that has a run's directory, or one of evidence. A new journal
    must not number from 1 again: an old run would be taken for the new incident's, and the program
    not be started."""
    numbers = [path.name.partition("-")[0] for path in (state_dir / "runs").glob("*-*")]
    numbers += [path.name for path in (state_dir / "evidence").glob("*")]
    return max((int(text) for text in numbers if text.isascii() and text.isdigit()), default=0)


def observe(sources: Sources, site: SiteFacts) -> ClusterSnapshot | Blind:
    """Read everything that one cycle decides from.

    Args:
        sources: where to read.
        site: what does not change from cycle to cycle, and sresctld's age.
    """
    asked = sources.clock.monotonic()
    try:
        nodes = sources.client.nodes()
        jobs = with_companions({job.id: job for job in sources.client.jobs()})
    except SresError as error:
        return Blind(str(error))
    if not nodes:
        return Blind("Slurm listed no node at all")
    sources.inbox.know(nodes, jobs)
    journal, clock = sources.journal, sources.clock
    incidents = {incident.node: incident for incident in journal.incidents()}
    now, moment = clock.now(), clock.monotonic()
    supervised = journal.supervised()
    abandoned = sources.roll.review(supervised, jobs, sources.registry, moment)
    # The inbox last: Slurm's picture is older than what waits in it. A supervisor also says
    # farewell when its job is requeued, which the next picture shows.
    messages = sources.inbox.take()
    for heard in messages:
        sources.roll.hear(heard.job, heard.connection, heard.message)
    stale = journal.stale_reasons()
    by_name = {node.name: node for node in nodes}
    by_name |= {
        name: msgspec.structs.replace(by_name[name], stale_reason=reason)
        for name, reason in stale.items()
        if name in by_name
    }
    by_name |= {
        name: msgspec.structs.replace(by_name[name], has_suspended_job=True)
        for job in jobs.values()
        if job.state == "SUSPENDED"
        for name in job.nodes
        # On a node that is DOWN Slurm has ended what there was of it.
        if name in by_name and not by_name[name].is_down
    }
    memory = journal.memory(now, site.flap_window, site.recurrence_window)
    # A supervised job that is requeued may be given nodes, too.
    needs = sources.has_pools or memory.spares.is_any_kept or bool(supervised)
    if sources.reservations is not None and needs:
        site = msgspec.structs.replace(site, reservations=_reservations(sources.reservations))
    site = msgspec.structs.replace(site, standby=sources.standby(), picture_age=moment - asked)
    return ClusterSnapshot(
        now=now,
        moment=moment,
        nodes=by_name,
        jobs=jobs,
        site=site,
        agents=sources.registry.agents(),
        probes=sources.prober.results(),
        incidents=incidents,
        at_rest={incident.node: incident for incident in journal.at_rest()},
        memory=memory,
        repairs=_repairs(sources, incidents, memory, by_name, now),
        supervised=supervised,
        pending_requeues=journal.pending_requeues(),
        paused=journal.paused,
        heard=Heard(messages, abandoned, journal.agents(), sources.registry.hearing_since()),
    )
