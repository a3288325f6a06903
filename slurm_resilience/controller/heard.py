"""Messages from the wire, as data for the cycle."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from slurm_resilience.controller.journal import KnownAgent
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    BreakerReset,
    PauseRequest,
    RequeueRequest,
)
from slurm_resilience.wire.server import Client


class InboxMessage(msgspec.Struct, frozen=True):
    """A message of a supervisor or an administrator, for the cycle."""

    connection: Client
    job: int
    message: AttemptStarted | AttemptEnded | RequeueRequest | PauseRequest | BreakerReset


class Heard(msgspec.Struct, frozen=True):
    """Messages from the wire, and what the journal knew of the senders."""

    messages: tuple[InboxMessage, ...] = ()
    abandoned: frozenset[int] = frozenset()
    """Supervised jobs that no supervisor cares for any more."""
    known_agents: Mapping[str, KnownAgent] = {}
    """The agents that the journal expects to speak."""
