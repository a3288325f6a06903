"""Permissions on the wire: which connection may speak for what, and may send what. Pure.

munge has proven the user before any of this is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from slurm_resilience.errors import NotPermitted, UsageError
from slurm_resilience.model import Job
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    EvidenceRequest,
    Message,
    PauseRequest,
    RequeueRequest,
    Role,
    StatusRequest,
)

MAX_JOB_DIGITS = 10
NEIGHBOURS = 8
"""Other nodes that a node is told of: those it probes when it hears nothing from sresctld."""

Addresses = Mapping[str, tuple[str, int]]
"""Each node's address and slurmd port."""


def job_of(subject: str) -> int:
    """Return the job id that a connection names.

    Raises:
        UsageError: it is none.
    """
    if not (subject.isascii() and subject.isdigit() and len(subject) <= MAX_JOB_DIGITS):
        raise UsageError(f"'{subject}' is not a job id")
    return int(subject)


def check_job(job: Job, uid: int, trusted_uids: Collection[int]) -> None:
    """Let a job's owner speak for it.

    Raises:
        NotPermitted: the job is another user's.
    """
    if uid != job.uid and uid not in trusted_uids:
        raise NotPermitted(f"job {job.id} is not yours")


def check_node(name: str, uid: int, trusted_uids: Collection[int], addresses: Addresses) -> None:
    """Let root and SlurmUser speak for a node that Slurm knows.

    Raises:
        NotPermitted: another user, or no such node.
    """
    if uid not in trusted_uids:
        raise NotPermitted(f"uid {uid} may not speak for a node; sresd runs as root")
    if name not in addresses:
        raise NotPermitted(f"node {name} is not in Slurm's configuration")


def check_address(name: str, address: str, configured: str, resolved: Collection[str]) -> None:
    """Let a node speak from its own address alone. Loopback counts as one machine.

    Args:
        name: the node.
        address: where the connection comes from.
        configured: the node's address in Slurm's configuration, a name or a number.
        resolved: what that name stands for.

    Raises:
        NotPermitted: the connection comes from elsewhere.
    """
    is_loopback = address.startswith("127.") and any(ip.startswith("127.") for ip in resolved)
    if address != configured and address not in resolved and not is_loopback:
        raise NotPermitted(f"{address} is not the address of node {name} ({configured})")


def neighbours_of(name: str, addresses: Addresses) -> tuple[str, ...]:
    """Return slurmd addresses of some other nodes.

    They are spread over the cluster, so that one dead switch does not hold all of them.
    """
    others = [place for node, place in addresses.items() if node != name]
    stride = max(1, len(others) // NEIGHBOURS)
    return tuple(f"{host}:{port}" for host, port in others[::stride][:NEIGHBOURS])


def check_message(role: Role, message: Message) -> None:
    """Let each role send what belongs to it.

    Raises:
        NotPermitted: the message belongs to another role.
    """
    of_everyone = isinstance(message, StatusRequest | PauseRequest)
    of_jobs = isinstance(message, AttemptStarted | AttemptEnded | RequeueRequest | EvidenceRequest)
    if not of_everyone and not (of_jobs and role == "job"):
        raise NotPermitted(f"a {role} may not send a {type(message).__name__}")


def check_pause(uid: int, trusted_uids: Collection[int]) -> None:
    """Let root and SlurmUser pause sresctld.

    Raises:
        NotPermitted: another user asks.
    """
    if uid not in trusted_uids:
        raise NotPermitted("only root and SlurmUser may pause sresctld")
