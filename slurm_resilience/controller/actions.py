"""What sresctld can do, as data. Each action is safe to give twice; `act` looks again before it
touches Slurm.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from slurm_resilience.controller.record import Chase


class Probe(msgspec.Struct, frozen=True, tag=True):
    node: str


class TakeOut(msgspec.Struct, frozen=True):
    """Shrink a job so that it survives the marking of one of its nodes."""

    job: int
    keep: tuple[str, ...]


class Mark(msgspec.Struct, frozen=True, tag=True):
    """Take a node out of service: jobs first, then its state and reason, then tell supervisors."""

    node: str
    kind: str
    state: Literal["fail", "down"]
    action: str
    """The reason to set; empty: the present one is a person's, and stays."""
    reason: str
    take_out: tuple[TakeOut, ...] = ()
    chase: tuple[int, ...] = ()
    """Jobs that Slurm will requeue when the node goes down: to be started at once."""


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """Open an incident for a node that somebody else marked."""

    node: str
    action: str
    reason: str


class Tell(msgspec.Struct, frozen=True, tag=True):
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


class Advance(msgspec.Struct, frozen=True, tag=True):
    """Move an incident to another state, with the reason."""

    node: str
    incident: int
    state: Literal["marked", "returning", "closed", "cancelled", "gave_up"]
    reason: str
    next_try: float = 0.0
    stop_run: bool = False


class Return(msgspec.Struct, frozen=True, tag=True):
    """Give the node back to Slurm (node resume)."""

    node: str
    incident: int


class Alarm(msgspec.Struct, frozen=True, tag=True):
    """Something a person should know; said once for each key."""

    key: str
    text: str
    node: str = ""
    job: int = 0
    incident: int = 0


class Requeue(msgspec.Struct, frozen=True, tag=True):
    job: int
    reason: str


class Prefer(msgspec.Struct, frozen=True, tag=True):
    """A job waits for nodes in exchange for those it lost: it comes before the queue."""

    job: int
    nodes: int
    """How many it lost."""


class StartNow(msgspec.Struct, frozen=True, tag=True):
    job: int


class KeepChasing(msgspec.Struct, frozen=True, tag=True):
    chase: Chase


class EndChase(msgspec.Struct, frozen=True, tag=True):
    job: int
    reason: str


Action = (
    Probe
    | Mark
    | Adopt
    | Tell
    | StartReplacement
    | Advance
    | Return
    | Alarm
    | Requeue
    | Prefer
    | StartNow
    | KeepChasing
    | EndChase
)
