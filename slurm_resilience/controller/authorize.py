"""Permissions on the wire: which connection may speak for what, and may send what. Pure.

munge has proven the user before any of this is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from slurm_resilience.errors import NotPermitted, UsageError
from slurm_resilience.model import Job
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    BreakerReset,
    EvidenceRequest,
    LeftNode,
    Message,
    NodeAnswer,
    NodeQuestion,
    PauseRequest,
    RequeueRequest,
    ResizeRequest,
    Role,
    SparesResume,
    StatusRequest,
    WrongResults,
)

MAX_JOB_DIGITS = 10
NEIGHBOURS = 8
"""Other nodes that a node is told of: those it probes when it hears nothing from sresctld."""

MAX_SAME_NAMES = 10_000
"""Nodes that one question may name."""


class NodePlace(NamedTuple):
    """The place of a node, as Slurm has it."""

    address: str
    """NodeAddr: a name or a number."""
    port: int
    """slurmd's."""
    hostname: str = ""
    """NodeHostName, where it is known."""


Addresses = Mapping[str, NodePlace]


def job_of(subject: str) -> int:
    """Return the job id that a connection names.

    Raises:
        UsageError: it is none.
    """
    if not (subject.isascii() and subject.isdigit() and len(subject) <= MAX_JOB_DIGITS):
        raise UsageError(f"'{subject[:100]}' is not a job id")
    return int(subject)


def no_such_job(job_id: int) -> NotPermitted:
    """Return the refusal of a job that is none, or none that the asking user may know of."""
    return NotPermitted(f"job {job_id} does not exist or has ended")


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


def check_address(name: str, address: str, place: NodePlace, resolved: Collection[str]) -> None:
    """Let a node speak from one of its own addresses alone. Loopback counts as one machine.

    Args:
        name: the node.
        address: the connection's other end.
        place: Slurm's address and host name of the node.
        resolved: what these stand for, in all families.

    Raises:
        NotPermitted: the connection comes from elsewhere.
    """
    is_same_machine = is_loopback(address) and any(is_loopback(own) for own in resolved)
    if address != place.address and address not in resolved and not is_same_machine:
        names = " or ".join(dict.fromkeys(n for n in (place.address, place.hostname) if n))
        raise NotPermitted(f"{address} is not the address of node {name} ({names})")


def is_loopback(address: str) -> bool:
    """Tell whether an address is this machine's own, of either family."""
    return address.startswith("127.") or address == "::1"


def neighbours_of(name: str, addresses: Addresses) -> tuple[str, ...]:
    """Return slurmd addresses of some other nodes.

    They are spread over the cluster, so that one dead switch does not hold all of them.
    """
    others = [place for node, place in addresses.items() if node != name]
    stride = max(1, len(others) // NEIGHBOURS)
    return tuple(_host_and_port(place) for place in others[::stride][:NEIGHBOURS])


def _host_and_port(place: NodePlace) -> str:
    host = f"[{place.address}]" if ":" in place.address else place.address
    return f"{host}:{place.port}"


def check_message(role: Role, message: Message) -> None:
    """Let each role send what belongs to it.

    Raises:
        NotPermitted: the message belongs to another role.
    """
    of_everyone = isinstance(
        message,
        StatusRequest | PauseRequest | BreakerReset | SparesResume | NodeQuestion | ResizeRequest,
    )
    of_jobs = isinstance(
        message,
        AttemptStarted
        | AttemptEnded
        | RequeueRequest
        | EvidenceRequest
        | WrongResults
        | LeftNode
        | NodeAnswer,
    )
    if not of_everyone and not (of_jobs and role == "job"):
        raise NotPermitted(f"a {role} may not send a {type(message).__name__}")


def asked_nodes(names: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes that a question names, each once.

    Raises:
        UsageError: they are more than any cluster's.
    """
    asked = tuple(dict.fromkeys(names))
    if len(asked) > MAX_SAME_NAMES:
        raise UsageError(f"{len(asked)} nodes in one question are too many")
    return asked


def check_requeue(job: Job) -> None:
    """Let jobs be requeued that Slurm can requeue.

    Raises:
        NotPermitted: it is no batch job, or has Requeue=0.
    """
    if not job.may_be_requeued:
        kind = "has Requeue=0" if job.is_batch else "is no batch job"
        raise NotPermitted(f"job {job.id} {kind}: Slurm does not requeue it")


def check_administrator(uid: int, trusted_uids: Collection[int], what: str) -> None:
    """Let root and SlurmUser do what is theirs.

    Args:
        uid: the asking user.
        trusted_uids: root and SlurmUser.
        what: the thing that is asked for: "pause sresctld".

    Raises:
        NotPermitted: another user asks.
    """
    if uid not in trusted_uids:
        raise NotPermitted(f"only root and SlurmUser may {what}")
