"""The one door to Slurm: what the rest of the project may ask of it.

Two adapters stand behind it (Slurm's own commands, and pyslurm for reading where it matches), and a
fake for tests; `tests/contract` runs the same tests on each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from threading import Event
from typing import Protocol

import msgspec

from slurm_resilience.model import Job, Node
from slurm_resilience.slurm.companion_job import CompanionRequest, FoundCompanion

SLURMS_REASON = "Slurm's reason: "
"""Stands before the reason for which a request for nodes waits, where only a person changes it."""


class StepInfo(msgspec.Struct, frozen=True):
    """A running job step."""

    job: int
    step: str
    """``0``, ``1``, … or ``batch``, ``extern``."""
    nodes: tuple[str, ...] = ()
    srun_host: str = ""
    srun_pid: int = 0
    tasks: int = 0
    """All tasks that it was started with; 0: not known."""


class ClusterInfo(msgspec.Struct, frozen=True):
    """The part of `scontrol show config` that this project needs."""

    cluster: str
    version: str
    controllers: tuple[str, ...]
    """Addresses of slurmctld, primary first."""
    slurmctld_port: int
    slurm_user_uid: int
    munge_socket: str
    scheduler_parameters: str
    accounting: str
    raw: dict[str, str]

    @property
    def srun_ports(self) -> range:
        """The ports that srun may listen on, where the site says so; empty: any."""
        first, _, last = self.raw.get("SrunPortRange", "").partition("-")
        if not (first.isdecimal() and last.isdecimal()) or int(first) == 0:
            return range(0)
        return range(int(first), int(last) + 1)

    @property
    def permits_expansion(self) -> bool:
        return "permit_job_expansion" in self.scheduler_parameters.split(",")

    @property
    def can_merge(self) -> bool:
        """Nodes of another allocation can be moved into a job. With PrologFlags=contain the other
        one has a step, which Slurm refuses to move."""
        flags = self.raw.get("PrologFlags", "").lower()
        return self.permits_expansion and not {"contain", "x11"} & set(flags.split(","))

    @property
    def slurmd_timeout_seconds(self) -> float:
        """Seconds that a node may be silent before Slurm sets it DOWN. Without an end: infinite."""
        seconds = re.match(r"\d+", self.raw.get("SlurmdTimeout", "300"))
        return float(seconds[0]) or math.inf if seconds else 300.0

    @property
    def slurm_users(self) -> frozenset[str]:
        """SlurmUser, by name and by number: slurmctld writes reasons under one of them."""
        name = self.raw.get("SlurmUser", "").partition("(")[0].strip()
        return frozenset({str(self.slurm_user_uid), name} - {""})

    @property
    def hides_jobs(self) -> bool:
        """Users may not see other users' jobs (PrivateData)."""
        return self._hides("jobs")

    @property
    def hides_nodes(self) -> bool:
        """Users may not see the state of nodes (PrivateData)."""
        return self._hides("nodes")

    def _hides(self, what: str) -> bool:
        hidden = self.raw.get("PrivateData", "").lower().split(",")
        return not {what, "all"}.isdisjoint(word.strip() for word in hidden)

    @property
    def returns_by_itself(self) -> bool:
        """A DOWN node may go into service when its slurmd registers: at 2 for whatever reason it is
        DOWN, at 1 where Slurm itself found that it does not respond."""
        return self.raw.get("ReturnToService", "0").strip() != "0"

    @property
    def requeues_after_grace(self) -> bool:
        """A preempted job that ends within its GraceTime is requeued, where its PreemptMode is
        REQUEUE: so it was seen on 24.11 and 26.05. For 22.05 such a job is over."""
        words = self.version.split(".")[:2]
        return tuple(int(word) for word in words if word.isdecimal()) >= (24, 11)


class SlurmClient(Protocol):
    """The requests that this project makes to Slurm. Each call raises `SlurmUnreachable` when
    slurmctld does not answer, `NotFound` for a node or job that does not exist, `NotPermitted`
    where Slurm says no, and `SlurmError` for any other refusal; then nothing was changed."""

    def nodes(self) -> tuple[Node, ...]:
        """All nodes."""
        ...

    def node(self, name: str) -> Node:
        """One node, read now."""
        ...

    def jobs(self) -> tuple[Job, ...]:
        """Jobs that are not finished."""
        ...

    def job(self, job_id: int) -> Job:
        """One job that is not finished."""
        ...

    def ended_job(self, job_id: int) -> Job:
        """One job, finished or not, as it ended: Slurm remembers it for MinJobAge, with the nodes
        that it had."""
        ...

    def is_preempted(self, job_id: int) -> bool:
        """Tell whether Slurm has begun to preempt a running job: it is told to end, and taken when
        its GraceTime is over."""
        ...

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        """List the running steps of a job."""
        ...

    def info(self) -> ClusterInfo: ...

    def domains(self) -> Mapping[str, str]:
        """Tell the leaf switch or block of each node; empty where Slurm knows no such topology."""
        ...

    def set_node(self, names: Sequence[str], *, state: str = "", reason: str = "") -> None:
        """Set state (`fail`, `down`, `resume`, `power_down_force`, `power_up`, …) and reason of
        nodes."""
        ...

    def set_comment(self, names: Sequence[str], comment: str) -> None: ...

    def reboot(self, name: str, reason: str) -> None:
        """Have Slurm reboot a node by its RebootProgram; it is DOWN afterwards until its resume."""
        ...

    def cancel_reboot(self, name: str) -> None:
        """Take a reboot back that Slurm has not begun."""
        ...

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        """Give all nodes of a running job back but ``keep``."""
        ...

    def requeue(self, job_id: int) -> None: ...

    def start_now(self, job_id: int) -> None:
        """Lift the start time that a requeue put into the future. Only a PENDING job keeps it."""
        ...

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        """Signal a step's tasks; without a signal: end them (SIGKILL)."""
        ...

    def cancel_job(self, job_id: int, name: str = "") -> None:
        """End a job, or take it out of the queue.

        Args:
            job_id: one that is over needs no end.
            name: a job with another name is left alone. A slurmctld that was killed forgets the
                jobs of its last seconds, and gives their numbers to other ones.
        """
        ...

    def allocate_for(self, job: Job, nodes: int, wait: float, stop: Event | None = None) -> int:
        """Get a helper allocation of the caller that is to be merged into ``job``; return its id.

        Waits up to ``wait`` seconds for nodes, or until ``stop`` is set: then there is none.
        """
        ...

    def prefer_requests(
        self, job: Job, nodes: int, companions: Sequence[int] = ()
    ) -> dict[int, int]:
        """Put a job's pending requests, of at most ``nodes`` nodes together, before everything else
        in the queue: those of `allocate_for` it, and companions. Needs an operator's rights.

        Args:
            job: the one that lost nodes.
            nodes: how many.
            companions: those of its companions that may be preferred.

        Returns:
            The requests that hold nodes by now, and the companions that were preferred, each with
            its number of nodes.
        """
        ...

    def merge(self, helper: int, job_id: int, timeout: float = 15.0) -> tuple[str, ...]:
        """Move the helper's nodes into the job; the job's new node list."""
        ...

    def ask_companion(self, request: CompanionRequest) -> int:
        """Queue a request for nodes beside a job's own, for the caller; return its job id."""
        ...

    def companions(self, job: Job) -> tuple[FoundCompanion, ...]:
        """List the companions of a job, pending or running."""
        ...
