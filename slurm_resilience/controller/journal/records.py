"""The records of the journal, as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.spares.pool_records import NO_SPARES, SpareMemory


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
    run_lost: float = 0.0
    """An attempt was found to be over, and left no exit code."""


class Incident(msgspec.Struct, frozen=True):
    """One trouble of one node, from its detection until the node is back."""

    id: int
    node: str
    kind: str
    """dead, sick, requested."""
    action: str
    """Action:Replace, Action:Reboot or Action:Reset."""
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
    unbegun: tuple[int, ...] = ()
    """The attempts in which nothing was begun: they count for nothing."""
    carried_out: int = 0
    """The last attempt whose start was carried out. Without its run's directory, which a person may
    remove, its end is unknown; an attempt that was only written down here was never begun."""
    evidence: str = ""
    """The directory of what was saved of the node, or why there is nothing; empty: not yet."""

    @property
    def tries(self) -> int:
        """The attempts in which something was begun."""
        return self.attempts - len(self.unbegun)

    @property
    def is_end_unknown(self) -> bool:
        """The last attempt left no exit code: the node may be repaired all the same."""
        return 0.0 < self.times.run_started <= self.times.run_lost

    @property
    def is_unbegun(self) -> bool:
        """Nothing was begun in the last attempt."""
        return self.attempts in self.unbegun


class IncidentFacts(msgspec.Struct, frozen=True):
    """News of an incident that an event brings, beside the new state. None: nothing new."""

    attempts: int | None = None
    action: str | None = None
    next_try: float | None = None
    run_ended: float | None = None
    before: MachineIdentity | None = None
    reason_at: str | None = None
    mark_reason_at: str | None = None
    is_flap: bool | None = None
    is_unbegun: bool = False
    """In the attempt that is over nothing was begun."""
    is_end_unknown: bool = False
    """The attempt that is over left no exit code."""
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
    drivers: tuple[str, ...] = ()


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
    domain: str = ""
    """Its leaf switch or block; empty: not known."""
    drivers: tuple[str, ...] = ()
    """Its drivers that most nodes did not have in this version when it failed."""


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


class ProvenDate(msgspec.Struct, frozen=True):
    """The machine's date, as it was seen last."""

    seen: float
    steady: float
    """Seconds for which it has gone on by itself."""


class EventFilter(msgspec.Struct, frozen=True):
    """The events to read. What is empty or 0 leaves all of them."""

    nodes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    job: int = 0
    incident: int = 0
    since: float = 0.0


class UsersWord(msgspec.Struct, frozen=True):
    """The word of a user's program about a node, as an event of that kind."""

    kind: str
    job: int
    uid: int
    at: float
    """When (epoch)."""


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

    spares: SpareMemory = NO_SPARES
    users_words: Mapping[str, tuple[UsersWord, ...]] = {}
    """Words of users' programs about each node, within `USERS_WORDS_SECONDS`."""


NO_MEMORY = JournalMemory()

WRONG_RESULTS = "wrong-results"
"""The kind of event of a training's word that a rank on the node had other parameters."""
LEFT_OUT = "left-out"
"""The kind of event of a job's word that it has left a node on which its attempts ended."""
EATS_ATTEMPTS = "eats-attempts"
"""The kind of event of its word that it has gone on without that node since."""
USERS_WORDS = (WRONG_RESULTS, LEFT_OUT, EATS_ATTEMPTS)
USERS_WORDS_SECONDS = 7 * 86_400.0

LEFT_OVER_REMAINS = "left-over-remains"
"""The kind of event of processes that could not be ended."""

WOULD_REPLACE = "would-replace"
"""The kind of event that `observe` writes in the place of `replacing`."""
