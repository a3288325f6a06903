"""One protocol for all that replaces or reboots a node: a program, Slurm's own means, or a package
of a third party.

A replacer is asked three things of an order: to start it (and to go on with it, where `status` says
that an act of its own is due), how it stands, and to stop it. Time limits, tries, and the last look
at the node's life are sresctld's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.model import Node

Verb = Literal["replace", "reboot", "reset"]
BY_PROGRAM = "the program"


class Run(msgspec.Struct, frozen=True):
    """The facts about one try to repair a node."""

    state: Literal["running", "ended", "lost", "unbegun"]
    """``lost``: it is gone without an exit code (the machine was rebooted, or a user killed it);
    ``unbegun``: it is over, and it is certain that nothing was done to the node."""
    rc: int = -1
    """0: the node is on its way back."""
    output: str = ""
    """The last lines it printed, or the cause of its failure."""
    ended_at: float = 0.0
    """When its end was seen."""
    next_act: str = ""
    """The act that is due now, in words; `Replacer.start` does it. Empty: it is waited for."""
    by: str = BY_PROGRAM
    """The replacer, in words."""
    is_followed: bool = True
    """False: another machine began it, and only the node itself shows how it stands."""
    wrote_reason: bool = False
    """The node's Reason, or its time, may have changed by the repair."""


class RunExists(SresError):
    """This run was started before."""


class RepairOrder(msgspec.Struct, frozen=True):
    """One try to repair one node."""

    directory: Path
    """Names the run. A replacer makes it when it starts, and keeps its notes there."""
    verb: Verb
    node: str
    reason: str
    """The node's Reason as long as the repair is under way."""
    seconds: float
    """The time limit."""
    was_begun: bool = False
    """Its start was carried out: where the directory is gone, a person has removed it."""


class Replacer(Protocol):
    """Something that replaces or reboots nodes."""

    def start(self, order: RepairOrder, node: Node, now: float) -> None:
        """Begin an order, or do the act that `status` calls due. Returns at once.

        Args:
            order: names the run, the node and the time limit.
            node: as Slurm shows it now.
            now: seconds since the epoch.

        Raises:
            RunExists: it was started before, and no act is due.
            SresError: it cannot be done now.
        """
        ...

    def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
        """Return the present state of an order, over restarts of sresctld too. Changes nothing.

        Args:
            order: as it was started.
            node: as Slurm shows it; None: this listing lacks it.
            now: seconds since the epoch.
        """
        ...

    def stop(self, order: RepairOrder) -> None:
        """Do nothing more for an order, because a person has answered. Harmless after its end."""
        ...
