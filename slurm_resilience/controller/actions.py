"""The acts of sresctld, as data. Each action is safe to give twice; `act` looks again before it
touches Slurm. Pure.

A note goes into the journal and changes nothing else; an action changes something outside. An
outcome is what an act reports of a node: the journal turns it into the node's next state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from slurm_resilience.controller.decide.node_lifecycle import NodeEvent
from slurm_resilience.controller.journal.records import (
    NO_FACTS,
    BreakerState,
    Fault,
    FindingOfBoot,
    IncidentFacts,
    KnownAgent,
    ObservedFault,
    PendingRequeue,
    Remark,
    Supervised,
)
from slurm_resilience.controller.spares.gift_lifecycle import GiftEvent
from slurm_resilience.controller.spares.pool_lifecycle import PoolEvent
from slurm_resilience.controller.spares.pool_records import Gift, MoveGift, MovePool


class ProbeNode(msgspec.Struct, frozen=True, tag=True):
    node: str
    is_urgent: bool = False
    """At once, however often it was probed before."""


class ShrinkJob(msgspec.Struct, frozen=True):
    """Shrink a job so that it survives the marking of one of its nodes."""

    job: int
    keep: tuple[str, ...]


class MarkNode(msgspec.Struct, frozen=True, tag=True):
    """Take a node out of service: jobs first, then its state and reason, then tell supervisors."""

    node: str
    kind: Literal["dead", "sick"]
    state: Literal["fail", "down"]
    action: str
    """The reason to set. Empty: the present reason stays, and no incident is opened."""
    reason: str
    shrink: tuple[ShrinkJob, ...] = ()
    requeued: tuple[int, ...] = ()
    """Jobs that Slurm will requeue when the node goes down: to be started at once."""


class OpenRequested(msgspec.Struct, frozen=True, tag=True):
    """Open an incident for a node whose reason asks for an action."""

    node: str
    action: str
    reason: str
    kind: str = "requested"
    """By a person; `dead` or `sick`: it is our own mark, whose incident has ended."""
    mark_reason_at: str = ""


class OpenCameBack(msgspec.Struct, frozen=True, tag=True):
    """Open an incident for a node that Slurm alone set DOWN, and that lives again."""

    node: str
    reason: str


class NotifySupervisor(msgspec.Struct, frozen=True, tag=True):
    """Let the supervisors of a job know about one of its nodes."""

    job: int
    node: str
    kind: Literal["suspect", "dead", "sick", "requested"]
    action: str
    reason: str
    incident: int
    since: float = 0.0
    """Monotonic seconds: the begin of a silence, which tells one suspicion from the next."""


class StartReplacement(msgspec.Struct, frozen=True, tag=True):
    node: str
    incident: int


class ContinueReplacement(msgspec.Struct, frozen=True, tag=True):
    """Do the next act of a repair that has begun."""

    node: str
    incident: int
    what: str
    """In words, for the journal."""


class Transition(msgspec.Struct, frozen=True, tag=True):
    """Tell the journal what has happened to a node, with the reason."""

    node: str
    incident: int
    event: NodeEvent
    reason: str
    next_try: float = 0.0
    action: str = ""
    """The action that the incident asks for from now on, since the one before did not help. Empty:
    the same."""
    is_unbegun: bool = False
    """In the attempt that is over nothing was begun."""
    is_end_unknown: bool = False
    """The attempt that is over left no exit code."""


class ReturnNode(msgspec.Struct, frozen=True, tag=True):
    """Give the node back to Slurm (node resume)."""

    node: str
    incident: int


class TakeLabelsOff(msgspec.Struct, frozen=True, tag=True):
    """Take sresctld's labels off the Comment of a node that has no incident."""

    node: str


class RenewLabels(msgspec.Struct, frozen=True, tag=True):
    """Write the labels of a node's incident once more: they are others by now."""

    node: str
    incident: int


class RaiseAlarm(msgspec.Struct, frozen=True, tag=True):
    """Tell people something that they should know; once for each key."""

    key: str
    text: str
    node: str = ""
    job: int = 0
    incident: int = 0
    remember: bool = False
    """Keep with the incident that it was raised: not again after a restart."""


class ClearLeftOver(msgspec.Struct, frozen=True, tag=True):
    """Have a node's sresd end what jobs left behind there, and give the node back."""

    node: str


class RequeueJob(msgspec.Struct, frozen=True, tag=True):
    job: int
    reason: str


class EndStrandedJob(msgspec.Struct, frozen=True, tag=True):
    """End a job that has neither script nor supervisor any more, once none of its steps runs."""

    job: int
    reason: str


class RaisePriority(msgspec.Struct, frozen=True, tag=True):
    """Put a job's requests for nodes before the queue, for as many as it lost: those for an
    exchange, or companions."""

    job: int
    nodes: int
    """The number that it lost."""
    companions: tuple[int, ...] = ()
    """Its companions that wait for nodes."""


class StartPendingJob(msgspec.Struct, frozen=True, tag=True):
    job: int


class KeepPendingRequeue(msgspec.Struct, frozen=True, tag=True):
    """Follow a requeued job until it runs again."""

    pending_requeue: PendingRequeue


class EndPendingRequeue(msgspec.Struct, frozen=True, tag=True):
    job: int
    reason: str


class AskForPool(msgspec.Struct, frozen=True, tag=True):
    """Ask Slurm to make, change or delete the reservation of a pool of spares."""

    partition: str
    event: PoolEvent
    """`MAKE`, `CHANGE` or `REMOVE`."""
    name: str
    nodes: tuple[str, ...] = ()
    is_begun: bool = False
    """It stands in the journal already."""


class AskForGift(msgspec.Struct, frozen=True, tag=True):
    """Ask Slurm to make the reservation of a gift, tell its job of it, or delete it."""

    gift: Gift
    event: GiftEvent
    """`MAKE`, `OFFERED` or `END`."""
    text: str
    is_begun: bool = False
    """It stands in the journal already."""
    is_taken: bool = False


Action = (
    ProbeNode
    | MarkNode
    | OpenRequested
    | OpenCameBack
    | NotifySupervisor
    | StartReplacement
    | ContinueReplacement
    | Transition
    | ReturnNode
    | TakeLabelsOff
    | RenewLabels
    | RaiseAlarm
    | ClearLeftOver
    | RequeueJob
    | EndStrandedJob
    | RaisePriority
    | StartPendingJob
    | KeepPendingRequeue
    | EndPendingRequeue
    | AskForPool
    | AskForGift
)


class NoteSupervised(msgspec.Struct, frozen=True, tag=True):
    """Keep, or change, what is known of a supervised job."""

    entry: Supervised


class DropSupervised(msgspec.Struct, frozen=True, tag=True):
    """Leave a job to Slurm like any other."""

    job: int


class NoteJob(msgspec.Struct, frozen=True, tag=True):
    """Write what a job's supervisor said."""

    job: int
    kind: str
    text: str
    node: str = ""
    """The node that it is about."""
    uid: int = -1
    """The job's user; -1: not known."""


class NotePause(msgspec.Struct, frozen=True, tag=True):
    """Pause with a reason, or go on with an empty one."""

    reason: str
    uid: int


class NoteAgent(msgspec.Struct, frozen=True, tag=True):
    """Remember that a node's sresd spoke: after a restart of ours its silence means something."""

    agent: KnownAgent


class DropAgent(msgspec.Struct, frozen=True, tag=True):
    """Expect nothing more of a node's sresd."""

    node: str
    is_removed: bool
    """Slurm does not know the node any more; false: its sresd was stopped on purpose."""


class NoteMissing(msgspec.Struct, frozen=True, tag=True):
    """Remember since when (epoch) Slurm has not listed a node; 0: it is listed again."""

    node: str
    since: float


class NoteKept(msgspec.Struct, frozen=True, tag=True):
    """A person keeps a node without an incident out of service, or does so no more."""

    node: str
    is_kept: bool


class NoteStale(msgspec.Struct, frozen=True, tag=True):
    """A node in service has a reason that is over; empty: it has none any more."""

    node: str
    reason: str


class NoteAnswered(msgspec.Struct, frozen=True, tag=True):
    """A person has put a node back into service: what is found on it is answered."""

    node: str
    findings: Mapping[FindingOfBoot, float]
    """Each with the time that it was found (`faults_of_boot`)."""


class NotePutBack(msgspec.Struct, frozen=True, tag=True):
    """A person has put the node of an incident back into service during a pause."""

    node: str
    incident: int
    at: float
    """When that was seen (epoch); 0: the node is out of service once more."""


class DropAnswers(msgspec.Struct, frozen=True, tag=True):
    """Forget that a person answered these findings: they are over, and new when found once more."""

    node: str
    findings: tuple[FindingOfBoot, ...]


class NoteFault(msgspec.Struct, frozen=True, tag=True):
    """Remember a fault, or its end, for the breaker."""

    fault: Fault
    is_forgotten: bool = False
    """It counts no more."""


class NoteBreaker(msgspec.Struct, frozen=True, tag=True):
    """The breaker has tripped, goes on, or is closed."""

    state: BreakerState
    by_uid: int | None = None
    """The administrator who reset it; None: it changed by itself."""


class NoteObserved(msgspec.Struct, frozen=True, tag=True):
    """Remember a fault that is only observed, with its news."""

    fault: ObservedFault
    news: tuple[Remark, ...]


Note = (
    NoteSupervised
    | DropSupervised
    | NoteJob
    | KeepPendingRequeue
    | NotePause
    | NoteAgent
    | DropAgent
    | NoteMissing
    | NoteKept
    | NoteStale
    | NoteAnswered
    | NotePutBack
    | DropAnswers
    | NoteFault
    | NoteBreaker
    | NoteObserved
    | MovePool
    | MoveGift
)


class ActOutcome(msgspec.Struct, frozen=True):
    """The effect of an act on a node, as an event of its incident."""

    incident: int
    event: NodeEvent
    text: str
    facts: IncidentFacts = NO_FACTS
