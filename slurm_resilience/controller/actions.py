"""What sresctld can do, as data. Each action is safe to give twice; `act` looks again before it
touches Slurm.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from slurm_resilience.controller.journal import PendingRequeue


class ProbeNode(msgspec.Struct, frozen=True, tag=True):
    node: str


class ShrinkJob(msgspec.Struct, frozen=True):
    """Shrink a job so that it survives the marking of one of its nodes."""

    job: int
    keep: tuple[str, ...]


class MarkNode(msgspec.Struct, frozen=True, tag=True):
    """Take a node out of service: jobs first, then its state and reason, then tell supervisors."""

    node: str
    kind: str
    state: Literal["fail", "down"]
    action: str
    """The reason to set; empty: the present one is a person's, and stays."""
    reason: str
    take_out: tuple[ShrinkJob, ...] = ()
    chase: tuple[int, ...] = ()
    """Jobs that Slurm will requeue when the node goes down: to be started at once."""


class OpenRequested(msgspec.Struct, frozen=True, tag=True):
    """Open an incident for a node that somebody else marked."""

    node: str
    action: str
    reason: str


class NotifySupervisor(msgspec.Struct, frozen=True, tag=True):
    """Let the supervisors of a job know about one of its nodes."""

    job: int
    node: str
    kind: Literal["dead", "sick", "requested"]
    action: str
    reason: str
    incident: int


class StartReplacement(msgspec.Struct, frozen=True, tag=True):
    node: str
    incident: int


class Transition(msgspec.Struct, frozen=True, tag=True):
    """Move an incident to another state, with the reason."""

    node: str
    incident: int
    state: Literal["marked", "returning", "closed", "cancelled", "gave_up"]
    reason: str
    next_try: float = 0.0
    stop_run: bool = False


class ReturnNode(msgspec.Struct, frozen=True, tag=True):
    """Give the node back to Slurm (node resume)."""

    node: str
    incident: int


class RaiseAlarm(msgspec.Struct, frozen=True, tag=True):
    """Something a person should know; said once for each key."""

    key: str
    text: str
    node: str = ""
    job: int = 0
    incident: int = 0


class RequeueJob(msgspec.Struct, frozen=True, tag=True):
    job: int
    reason: str


class RaisePriority(msgspec.Struct, frozen=True, tag=True):
    """A job waits for nodes in exchange for those it lost: it comes before the queue."""

    job: int
    nodes: int
    """How many it lost."""


class StartPendingJob(msgspec.Struct, frozen=True, tag=True):
    job: int


class KeepPendingRequeue(msgspec.Struct, frozen=True, tag=True):
    chase: PendingRequeue


class EndPendingRequeue(msgspec.Struct, frozen=True, tag=True):
    job: int
    reason: str


Action = (
    ProbeNode
    | MarkNode
    | OpenRequested
    | NotifySupervisor
    | StartReplacement
    | Transition
    | ReturnNode
    | RaiseAlarm
    | RequeueJob
    | RaisePriority
    | StartPendingJob
    | KeepPendingRequeue
    | EndPendingRequeue
)
