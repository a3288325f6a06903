"""The cluster as this project sees it: frozen snapshots, in Slurm's terms. Pure.

`Node` and `Job` hold what Slurm reported at one moment; `Finding` and `CheckResult` hold what sresd
reported about one node.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

_NOT_FOR_JOBS = frozenset(
    {"DRAIN", "FAIL", "NOT_RESPONDING", "MAINTENANCE", "POWERED_DOWN", "POWERING_DOWN"}
)
_POWERED_OFF = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "PLANNED_DOWN"})
_REBOOTING = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED"})

REPLACE = "Action:Replace"
REBOOT = "Action:Reboot"
RESET = "Action:Reset"
"""A reset of the GPUs that ask for one."""
ACTIONS = {
    REPLACE: ("replace", "replaced"),
    REBOOT: ("reboot", "rebooted"),
    RESET: ("reset", "reset"),
}
"""Actions that a reason can ask of sresctld, each with its verb and with what the node is then."""

INJECTED_MARK = "(injected)"
"""Ends the text of a finding that a person made for a drill, and so of all that follows from it."""
INJECTED = "injected"
"""The check of a finding that announces a fault for which no check speaks: a crash, a cut cable."""


class Node(msgspec.Struct, frozen=True):
    """One line of `scontrol show node`."""

    name: str
    base: str
    """IDLE, ALLOCATED, MIXED, DOWN, UNKNOWN, FUTURE, ERROR."""
    flags: frozenset[str] = frozenset()
    """DRAIN, FAIL, NOT_RESPONDING, COMPLETING, MAINTENANCE, REBOOT_REQUESTED, POWERED_DOWN, ..."""
    reason: str = ""
    reason_by: str = ""
    """The user who set the reason."""
    reason_at: str = ""
    stale_reason: str = ""
    """The reason that it had while it was in service: 24.11 keeps it at a node resume, and writes
    its own behind it."""
    reason_unclear: bool = False
    """The reason's end could not be told for certain: `reason` may be more or less than it, and
    nothing is done to the node."""
    address: str = ""
    """NodeAddr: a name or a number."""
    hostname: str = ""
    """NodeHostName."""
    port: int = 6818
    gres: str = ""
    """Configured GRES, e.g. ``gpu:2``; empty when there is none."""
    gres_used: str = ""
    cpus: int = 0
    cpus_alloc: int = 0
    memory: int = 0
    """RealMemory in MiB."""
    boot_time: str = ""
    comment: str = ""
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    has_suspended_job: bool = False
    """A job that is suspended has its memory and files here, though Slurm shows the node without
    work. Only a look at the jobs tells."""

    @property
    def is_down(self) -> bool:
        return self.base == "DOWN"

    @property
    def is_fail(self) -> bool:
        """FAIL, whether jobs still run on it (Slurm prints FAILING) or not."""
        return "FAIL" in self.flags

    @property
    def is_drain(self) -> bool:
        return "DRAIN" in self.flags

    @property
    def is_responding(self) -> bool:
        return "NOT_RESPONDING" not in self.flags

    @property
    def has_work(self) -> bool:
        """True while a job runs, completes or is suspended here: the node must not be taken
        away."""
        is_busy = self.base in ("ALLOCATED", "MIXED") or "COMPLETING" in self.flags
        return is_busy or self.has_suspended_job

    @property
    def is_available(self) -> bool:
        """Slurm may start jobs here, now or when the present ones end."""
        is_up = self.base in ("IDLE", "ALLOCATED", "MIXED")
        return is_up and self.flags.isdisjoint(_NOT_FOR_JOBS)

    @property
    def is_only_reserved(self) -> bool:
        """It would be available, but for a maintenance reservation."""
        return (
            not self.is_available
            and msgspec.structs.replace(self, flags=self.flags - {"MAINTENANCE"}).is_available
        )

    @property
    def is_being_rebooted(self) -> bool:
        """Slurm was asked to reboot it, and has not seen it boot."""
        return not self.flags.isdisjoint(_REBOOTING)

    @property
    def is_powered_off_on_purpose(self) -> bool:
        return not self.flags.isdisjoint(_POWERED_OFF)

    @property
    def state(self) -> str:
        """State as text, base and flags, e.g. ``ALLOCATED+FAIL``."""
        return "+".join([self.base, *sorted(self.flags)])

    @property
    def requested_action(self) -> str:
        """`Action:Replace`, `Action:Reboot` or `Action:Reset` when the reason is exactly that, else
        empty."""
        return self.reason if self.reason in ACTIONS and not self.reason_unclear else ""

    @property
    def near_miss(self) -> str:
        """The action that the reason nearly spells (wrong case, blank, trailing dot)."""
        if not self.reason or self.requested_action or self.reason_unclear:
            return ""
        bare = "".join(self.reason.split()).rstrip(".,;!").lower()
        bare = bare.replace("_", ":").replace("=", ":")
        return {action.lower(): action for action in ACTIONS}.get(bare, "")


class Job(msgspec.Struct, frozen=True):
    """One job, as squeue prints it."""

    id: int
    uid: int
    state: str
    """RUNNING, PENDING, COMPLETING, ..."""
    nodes: tuple[str, ...] = ()
    num_nodes: int = 0
    batch_host: str = ""
    is_batch: bool = False
    requeue: bool = False
    restarts: int = 0
    exclusive: bool = False
    gres: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    time_left: str = ""
    work_dir: str = ""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes that an exchange may not bring, besides those that the job itself excludes."""
    companion_of: tuple[int, int] | None = None
    """The job beside which it holds nodes, and that one's restarts, by its own name: any user may
    give his job such a name. None: it is no companion."""
    companion_supervisor: int = 0
    """Process number of the supervisor that asked for it, by the same name."""
    is_lent: bool = False
    """It is a companion by which an elastic step grows, and not in place of lost nodes."""
    companion_nodes: tuple[str, ...] = ()
    """Nodes of its companions; sresctld alone looks for them."""

    @property
    def all_nodes(self) -> tuple[str, ...]:
        """Its own nodes and those of its companions."""
        return (*self.nodes, *self.companion_nodes)

    @property
    def may_be_requeued(self) -> bool:
        """Slurm requeues batch jobs only, and none with Requeue=0."""
        return self.is_batch and self.requeue

    @property
    def seconds_left(self) -> float | None:
        """Return the time until its limit, as squeue showed it (`1-02:03:04`); None: no limit."""
        days, dash, clock = self.time_left.rpartition("-")
        parts = clock.split(":")
        if not all(part.isdecimal() for part in (*parts, *([days] if dash else []))):
            return None
        hours, minutes, seconds = (0, 0, *map(int, parts))[-3:]
        return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)

    @property
    def is_zombie(self) -> bool:
        """RUNNING without its batch script: the batch host was taken out of the allocation."""
        return (
            self.state == "RUNNING"
            and self.is_batch
            and bool(self.batch_host)
            and bool(self.nodes)
            and self.batch_host not in self.nodes
        )

    @property
    def waits_for_nodes(self) -> bool:
        """It is in the queue. EXPEDITING: Slurm itself requeued it for a lost node, without its two
        minutes of waiting (`--requeue=expedite`, from 25.11)."""
        return self.state in ("PENDING", "EXPEDITING")

    @property
    def is_stranded(self) -> bool:
        """A zombie that Slurm may not requeue: it can never start anything again."""
        return self.is_zombie and not self.requeue and self.companion_of is None


class Severity(enum.StrEnum):
    """The action that a finding calls for. Ordered by `SEVERITIES`."""

    NONE = "none"
    MONITOR = "monitor"
    JOB = "job"
    RESET = "reset"
    REBOOT = "reboot"
    REPLACE = "replace"


SEVERITIES: tuple[Severity, ...] = tuple(Severity)
FAULTY = frozenset({Severity.RESET, Severity.REBOOT, Severity.REPLACE})
"""Severities that take the node out of service. A GPU reset needs an idle node too."""


class Finding(msgspec.Struct, frozen=True):
    """Something a check or the kernel log says about one node."""

    check: str
    """Name of the check, e.g. ``xid``, ``filesystem_readonly``."""
    severity: Severity
    text: str
    """One line for people: what was seen, the threshold, the value."""
    at: float
    """When it was seen, seconds since the epoch."""
    subject: str = ""
    """The part concerned: a PCI address, a mount point."""
    code: str = ""
    """E.g. the Xid number."""
    evidence: str = ""
    """The raw line or value."""
    injected: bool = False
    """A program wrote it, not the kernel: a drill, or nothing at all."""
    uptime: float = 0.0
    """Seconds since the node's boot, where its kernel wrote that: they stay the same when the clock
    is set. 0: not known."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Two findings with the same key are the same trouble, seen again."""
        return (self.check, self.subject, self.code)


class CheckResult(msgspec.Struct, frozen=True):
    """One run of one check. ``unjudged`` is neither pass nor fail."""

    check: str
    verdict: Literal["pass", "fail", "unjudged"]
    text: str
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
