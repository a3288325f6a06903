"""Messages from the wire, as data for the cycle."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import msgspec

from slurm_resilience.controller.journal.records import KnownAgent
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    BreakerReset,
    LeftNode,
    PauseRequest,
    RequeueRequest,
    ResizeRequest,
    SparesResume,
    WrongResults,
)
from slurm_resilience.wire.server import Client

MAX_OTHER_NODES = 100
"""Announced nodes that the last cycle did not see in Slurm's configuration: they may be new there.
"""
MAX_NODES_UNSEEN = 10_000
"""The same before the first cycle, which sees none."""
MAX_NAME_CHARACTERS, MAX_TEXT_CHARACTERS = 255, 4096
"""More of a node's name, and of another text, is not kept."""

OfJob = AttemptStarted | AttemptEnded | RequeueRequest | WrongResults | LeftNode


class InboxMessage(msgspec.Struct, frozen=True):
    """A message of a supervisor or an administrator, for the cycle."""

    connection: Client
    job: int
    message: OfJob | PauseRequest | BreakerReset | SparesResume | ResizeRequest


class Heard(msgspec.Struct, frozen=True):
    """Messages from the wire, and what the journal knew of the senders."""

    messages: tuple[InboxMessage, ...] = ()
    abandoned: frozenset[int] = frozenset()
    """Supervised jobs that no supervisor cares for any more."""
    known_agents: Mapping[str, KnownAgent] = {}
    """The agents that the journal expects to speak."""
    since: float = 0.0
    """Some node was heard without a break since this moment (monotonic), up to the last message."""
    sighted_since: float = -inf
    """sresctld was blind last, or started, at this moment (monotonic)."""


def without_ballast(message: OfJob, names: Mapping[str, str]) -> OfJob:
    """Return a message with no more in it than a cycle may use: it may have to wait for one.

    Any user's program can send it, as large as a frame may be, and while Slurm cannot be read many
    of them wait.

    Args:
        message: as it came.
        names: the nodes that the last cycle saw, each by its own name: with these the message takes
            no memory for names.
    """
    if isinstance(message, AttemptEnded):
        return msgspec.structs.replace(message, outcome=message.outcome[:MAX_TEXT_CHARACTERS])
    if isinstance(message, RequeueRequest):
        return msgspec.structs.replace(message, reason=message.reason[:MAX_TEXT_CHARACTERS])
    if isinstance(message, WrongResults):
        text = message.text[:MAX_TEXT_CHARACTERS]
        return WrongResults(message.node[:MAX_NAME_CHARACTERS], text)
    if isinstance(message, LeftNode):
        text = message.text[:MAX_TEXT_CHARACTERS]
        return LeftNode(message.node[:MAX_NAME_CHARACTERS], text, message.goes_on)
    nodes, others = [], 0
    for name in dict.fromkeys(message.nodes):
        if name in names:
            nodes.append(names[name])
        elif others < (MAX_OTHER_NODES if names else MAX_NODES_UNSEEN):
            nodes.append(name[:MAX_NAME_CHARACTERS])
            others += 1
    step = message.step[:MAX_NAME_CHARACTERS]
    return msgspec.structs.replace(message, nodes=tuple(nodes), step=step)
