"""Those to whom the simulated Slurm speaks: its watcher, and the carrier of power orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slurm_resilience.model import Job, Node


class SlurmWatcher(Protocol):
    """Is told of what changes in Slurm, and by whom."""

    def node_set(self, before: Node, after: Node, author: str) -> None:
        """Take in that a node's state or reason was set."""
        ...

    def job_lost(self, job: Job, node: str, author: str) -> None:
        """Take in that a job was ended or made smaller, for a node or by a request."""
        ...

    def job_ended(self, job: Job, has_steps: bool) -> None:
        """Take in that sresctld ends a job for good."""
        ...

    def job_left(self, job: Job, nodes: Sequence[str]) -> None:
        """Take in that a job does not hold these nodes any more."""
        ...

    def job_started(self, job: Job) -> None:
        """Take in that a job runs, for the first time or again."""
        ...

    def job_shrunk(self, job: Job) -> None:
        """Take in that sresctld has a job made smaller."""
        ...

    def job_preferred(self, job: Job, nodes: int) -> None:
        """Take in that sresctld puts a job's requests for so many nodes before the queue."""
        ...

    def companion_preferred(self, job: Job, companion: Job) -> None:
        """Take in that sresctld puts a job before the queue as another one's companion."""
        ...

    def node_serves(self, name: str) -> None:
        """Take in that jobs may start on a node again."""
        ...

    def listing(self) -> None:
        """Take in that sresctld lists all nodes."""
        ...


class PowerOrders(Protocol):
    """Carries out what Slurm is asked to power down, to power up and to reboot."""

    def down(self, node: Node, author: str) -> None:
        """Take POWER_DOWN_FORCE."""
        ...

    def up(self, node: Node, author: str) -> None:
        """Take POWER_UP."""
        ...

    def reboot(self, node: Node, reason: str) -> None:
        """Take a reboot."""
        ...

    def reboot_by(self, author: str, node: Node, *, asap: bool, then: str, reason: str) -> None:
        """Take a person's reboot."""
        ...

    def cancel_reboot(self, node: Node) -> bool:
        """Take a reboot back; false: there is none to take back."""
        ...

    def registered(self, name: str, rebooted: bool) -> None:
        """Take in that a slurmd has registered."""
        ...
