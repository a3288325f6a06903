"""Slurm through pyslurm, for reading nodes and jobs; the rest goes through Slurm's commands.

The only file that imports pyslurm. It follows Slurm's major version exactly, and libslurm ends the
process where it cannot read slurm.conf, so it is imported only after the commands have worked and
the versions agree.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import Any

from slurm_resilience.clock import stamp_of
from slurm_resilience.errors import MissingTool, SlurmError, SlurmUnreachable, UsageError
from slurm_resilience.model import Job, Node
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import ClusterInfo, StepInfo
from slurm_resilience.slurm.companion_job import (
    CompanionRequest,
    FoundCompanion,
    companion_of,
)
from slurm_resilience.slurm.hostlists import expand
from slurm_resilience.slurm.parse import node_state

# What squeue lists when it is not told which states: all that is not over.
_OVER = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
SHARING_SAYS_NOTHING = (26, 5)
"""From this release on, the sharing of all jobs is NO; another field has the exclusive ones."""
UNREADABLE_GRES = "unreadable"
"""Stands for GRES that pyslurm cannot take apart: there is some, so no node is ever swapped."""


class PyslurmClient:
    """`SlurmClient` that reads all nodes and all jobs in this process, and asks ``cli`` the rest.

    One node or one job is read by the commands: they are looked at again before something is done
    to them, and that look should not share a fault with the first one.
    """

    def __init__(self, cli: CliClient, version: str) -> None:
        """
        Args:
            cli: the client for everything but `nodes` and `jobs`.
            version: Slurm's version, as slurmctld says.

        Raises:
            MissingTool: pyslurm is not installed, or was built for another Slurm.
        """
        self._cli = cli
        self._pyslurm = _load(version)
        # libslurm's connections and errno are the process's.
        self._lock = threading.Lock()

    def nodes(self) -> tuple[Node, ...]:
        return tuple(_node(node) for node in self._read(self._pyslurm.Nodes.load))

    def jobs(self) -> tuple[Job, ...]:
        jobs = (_job(job) for job in self._read(self._pyslurm.Jobs.load))
        return tuple(job for job in jobs if job.state not in _OVER)

    def node(self, name: str) -> Node:
        return self._cli.node(name)

    def job(self, job_id: int) -> Job:
        return self._cli.job(job_id)

    def ended_job(self, job_id: int) -> Job:
        return self._cli.ended_job(job_id)

    def is_preempted(self, job_id: int) -> bool:
        return self._cli.is_preempted(job_id)

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        return self._cli.steps(job_id)

    def info(self) -> ClusterInfo:
        return self._cli.info()

    def set_node(self, names: Sequence[str], *, state: str = "", reason: str = "") -> None:
        self._cli.set_node(names, state=state, reason=reason)

    def set_comment(self, names: Sequence[str], comment: str) -> None:
        self._cli.set_comment(names, comment)

    def reboot(self, name: str, reason: str) -> None:
        self._cli.reboot(name, reason)

    def domains(self) -> Mapping[str, str]:
        return self._cli.domains()

    def cancel_reboot(self, name: str) -> None:
        self._cli.cancel_reboot(name)

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        self._cli.shrink(job_id, keep)

    def requeue(self, job_id: int) -> None:
        self._cli.requeue(job_id)

    def start_now(self, job_id: int) -> None:
        self._cli.start_now(job_id)

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        self._cli.cancel_step(job_id, step, signal)

    def cancel_job(self, job_id: int, name: str = "") -> None:
        self._cli.cancel_job(job_id, name)

    def allocate_for(self, job: Job, nodes: int, wait: float, stop: Event | None = None) -> int:
        return self._cli.allocate_for(job, nodes, wait, stop)

    def prefer_requests(
        self, job: Job, nodes: int, companions: Sequence[int] = ()
    ) -> dict[int, int]:
        return self._cli.prefer_requests(job, nodes, companions)

    def ask_companion(self, request: CompanionRequest) -> int:
        return self._cli.ask_companion(request)

    def companions(self, job: Job) -> tuple[FoundCompanion, ...]:
        return self._cli.companions(job)

    def merge(self, helper: int, job_id: int, timeout: float = 15.0) -> tuple[str, ...]:
        return self._cli.merge(helper, job_id, timeout)

    def _read(self, load: Callable[[], Any]) -> list[Any]:
        """All that ``load`` finds."""
        with self._lock:
            try:
                return list(load().values())
            except self._pyslurm.RPCError as error:
                text = f"pyslurm: {error}"
                reached = _is_refusal(str(error))
                raise SlurmError(text) if reached else SlurmUnreachable(text) from None


def installed_version() -> str:
    """pyslurm's version without importing it; empty when it is not installed."""
    try:
        return importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def matches(pyslurm: str, slurm: str) -> bool:
    """Tell whether ``22.5.3`` and ``22.05.8`` are made for each other."""

    return len(_release(pyslurm)) == 2 and _release(pyslurm) == _release(slurm)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in version.split(".")[:2] if word.isdecimal())


def _load(version: str) -> Any:
    found = installed_version()
    if not found:
        raise MissingTool("pyslurm is not installed")
    if not matches(found, version):
        raise MissingTool(f"pyslurm {found} was made for another Slurm than {version}")
    if _release(version) >= SHARING_SAYS_NOTHING:
        # It would take every job for an exclusive one.
        raise MissingTool(f"pyslurm {found} does not tell which jobs share their nodes")
    try:
        return importlib.import_module("pyslurm")
    except ImportError as error:
        raise MissingTool(f"pyslurm {found} cannot be imported: {error}") from None


def _is_refusal(text: str) -> bool:
    return "Invalid user id" in text or "Access" in text


def _node(node: Any) -> Node:
    base, flags = node_state(str(node.state or ""))
    reason = node.reason or ""
    return Node(
        name=node.name,
        base=base,
        flags=flags,
        reason=reason,
        reason_by=_user(node) if reason else "",
        reason_at=_moment(node.reason_time) if reason else "",
        address=node.address or "",
        hostname=node.hostname or "",
        port=node.slurmd_port or 6818,
        gres=_gres(node, "configured_gres"),
        gres_used=_gres(node, "allocated_gres"),
        cpus=node.total_cpus or 0,
        cpus_alloc=node.allocated_cpus or 0,
        memory=node.real_memory or 0,
        boot_time=_moment(node.boot_time),
        comment=node.comment or "",
        partitions=tuple(node.partitions or ()),
        features=tuple(node.available_features or ()),
    )


def _job(job: Any) -> Job:
    companion = companion_of(job.id, job.name or "")
    return Job(
        id=job.id,
        uid=job.user_id,
        state=job.state,
        nodes=_nodes(job.allocated_nodes) if job.state != "PENDING" else (),
        num_nodes=job.num_nodes or 0,
        batch_host=(job.batch_host or "") if job.is_batch_job and job.state != "PENDING" else "",
        is_batch=bool(job.is_batch_job),
        requeue=bool(job.is_requeueable),
        restarts=job.requeue_count or 0,
        exclusive=job.resource_sharing in ("NO", "EXCLUSIVE"),
        gres=_gres(job, "gres_per_node"),
        partition=job.partition or "",
        account=job.account or "",
        qos=job.qos or "",
        reservation=job.reservation or "",
        companion_of=(companion.job, companion.restarts) if companion is not None else None,
        companion_supervisor=companion.supervisor if companion is not None else 0,
        is_lent=companion is not None and companion.lent,
    )


def _nodes(hostlist: str | None) -> tuple[str, ...]:
    try:
        return expand(hostlist) if hostlist else ()
    except UsageError as error:
        raise SlurmError(f"pyslurm: {error}") from None


def _gres(thing: Any, name: str) -> str:
    """``gpu:2``. pyslurm fails on some that Slurm accepts (``--gres=gpu``, without a count)."""
    try:
        found = getattr(thing, name)
    except Exception:
        return UNREADABLE_GRES
    return ",".join(f"{kind}:{_count(count)}" for kind, count in (found or {}).items())


def _count(count: Any) -> Any:
    return count.get("count", 0) if isinstance(count, dict) else count


def _user(node: Any) -> str:
    try:
        return str(node.reason_user or "")
    except Exception:
        return ""  # a user id without a name on this machine


def _moment(seconds: int | None) -> str:
    """As scontrol prints it, so that a reason's time means the same from both clients."""
    return stamp_of(seconds) if seconds else ""
