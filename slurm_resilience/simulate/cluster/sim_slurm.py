"""Slurm in memory, on the simulated clock: it notices deaths late, as the real one does.

`tests/contract` holds it to the behaviour of real Slurm for the calls that this project makes. What
a call costs in time passes on the schedule, so that the world goes on while sresctld waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import NamedTuple

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable
from slurm_resilience.model import Job, Node
from slurm_resilience.simulate.cluster.slurm_watcher import PowerOrders, SlurmWatcher
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.slurm.client import ClusterInfo, StepInfo
from slurm_resilience.slurm.companion_job import (
    CompanionRequest,
    FoundCompanion,
    name_of_companion,
)

REQUEUE_SECONDS = 120.0
"""A requeued job waits this long (Slurm's cred_expire)."""
COMPLETING_SECONDS = 0.4
"""Time that the tasks of an ending job take on nodes that answer."""
NOT_RESPONDING_SECONDS = 100.0
"""Until slurmctld shows that a slurmd does not answer."""
POWER_SAVING = {
    "SuspendProgram": "/suspend",
    "ResumeProgram": "/resume",
    "RebootProgram": "/reboot",
    "SuspendTime": "99999999 sec",
}
POWER_WORDS = frozenset({"POWER_DOWN_FORCE", "POWER_UP"})
OUT_OF_SERVICE = frozenset({"DOWN", "DRAIN", "FAIL"})
NOT_RESPONDING = "Not responding"
REBOOTED = "Node unexpectedly rebooted"
SLURM = "slurm"
"""The author of what Slurm does by itself."""
SRESCTLD = "root"
"""The author of what sresctld asks for."""


class Settings(NamedTuple):
    """The part of slurm.conf that matters here."""

    slurmd_timeout: float = 300.0
    return_to_service: int = 0
    permits_expansion: bool = True
    version: str = "22.05.8"
    partitions: tuple[str, ...] = ("main",)
    """The first one has all nodes; the others share the nodes among them."""
    gres: str = ""
    """Configured on each second node."""
    of_switch: int = 0
    """Nodes of each leaf switch; 0: there is no topology."""


STOCK = Settings()


class _Entry:
    """A job."""

    def __init__(self, job: Job, no_kill: bool, wants: int, seconds: float) -> None:
        self.job = job
        self.no_kill = no_kill
        self.wants = wants
        self.seconds = seconds
        """Time that it runs, if nothing ends it."""
        self.begins = 0.0
        self.then = ""
        """The state after COMPLETING: PENDING or nothing (gone)."""
        self.steps: list[StepInfo] = []

    @property
    def completing(self) -> bool:
        return self.job.state == "COMPLETING"


class SimSlurm:
    """A `SlurmClient` for sresctld, and the rest of Slurm for the simulated world."""

    def __init__(self, nodes: int, schedule: Schedule, settings: Settings = STOCK) -> None:
        """
        Args:
            nodes: how many: n1, n2, …
            schedule: the simulated time.
            settings: of slurm.conf.
        """
        self.settings = settings
        self._schedule = schedule
        self.entries = {
            f"n{i}": Node(
                f"n{i}",
                "IDLE",
                address=f"192.0.2.{i}",
                cpus=4,
                memory=1000,
                gres=settings.gres if i % 2 else "",
                partitions=_partitions_of(i, settings.partitions),
            )
            for i in range(1, nodes + 1)
        }
        self._jobs: dict[int, _Entry] = {}
        self._next = 1
        self.silent: dict[str, float] = {}
        """Nodes whose slurmd does not answer slurmctld, and since when."""
        self.may_use: Callable[[str, str], bool] = lambda _, __: True
        """Tells whether reservations let a job on a node; it names one, or none."""
        self.hidden: set[str] = set()
        """Nodes that listings leave out."""
        self.away = False
        """True: slurmctld does not answer."""
        self.take_time: Callable[[], None] = lambda: None
        """Called by each request of sresctld: lets the time pass that it takes."""
        self.watcher: SlurmWatcher | None = None
        self.power: PowerOrders | None = None
        """Power saving and reboots, where slurm.conf has the programs."""
        self.read_at: dict[str, float] = {}
        """When sresctld last began to read each node by itself."""
        self.listed_at = 0.0
        """When sresctld last began to list all nodes."""
        self.set_at = 0.0
        """When sresctld last began to set a node."""

    # -- the world ----------------------------------------------------------------------------

    def submit(
        self,
        nodes: int = 2,
        *,
        uid: int = 1000,
        batch: bool = True,
        requeue: bool = True,
        no_kill: bool = False,
        exclusive: bool = True,
        gres: str = "",
        partition: str = "",
        seconds: float = 1e9,
        step: bool = True,
        companion_of: tuple[int, int] | None = None,
        delay: float = 0.0,
    ) -> int:
        """Submit a job and start it if there are nodes, after the delay; its id."""
        job = Job(
            self._next,
            uid,
            "PENDING",
            num_nodes=nodes,
            is_batch=batch,
            requeue=requeue and batch,
            exclusive=exclusive,
            gres=gres,
            partition=partition or self.settings.partitions[0],
            companion_of=companion_of,
        )
        self._next += 1
        entry = self._jobs[job.id] = _Entry(job, no_kill, nodes, seconds)
        if delay:
            entry.begins = self._schedule.now + delay
            self._schedule.at(entry.begins, self._fill)
        self._fill()
        if step and self._jobs[job.id].job.state == "RUNNING":
            self.start_step(job.id)
        return job.id

    @property
    def next_job(self) -> int:
        """The id of the next job."""
        return self._next

    def start_step(
        self, job_id: int, srun_host: str = "", srun_pid: int = 0, without: str = ""
    ) -> str:
        """Start a step over all nodes of the job but one; its name."""
        entry = self._jobs[job_id]
        name = str(len(entry.steps))
        nodes = tuple(node for node in entry.job.nodes if node != without)
        entry.steps.append(StepInfo(job_id, name, nodes, srun_host, srun_pid))
        return name

    def end_steps(self, job_id: int) -> None:
        """End all steps of a job, by themselves."""
        entry = self._jobs.get(job_id)
        if entry is not None:
            entry.steps = []

    def find_job(self, job_id: int) -> Job | None:
        """Return a job as it is now."""
        entry = self._jobs.get(job_id)
        return entry.job if entry else None

    def lacks_nodes(self, job_id: int) -> bool:
        """Tell whether a job was requeued, or has fewer nodes than it was submitted for."""
        entry = self._jobs.get(job_id)
        if entry is None or (entry.completing and not entry.then):
            return False
        return entry.job.state != "RUNNING" or len(entry.job.nodes) < entry.wants

    def nodes_of(self, partition: str) -> list[str]:
        """Return the nodes of a partition."""
        return [node.name for node in self.entries.values() if partition in node.partitions]

    def has_gres(self, job: Job) -> bool:
        """Tell whether a job, or a node of it, has GRES: Slurm cannot make it larger then."""
        return bool(job.gres) or any(self.entries[name].gres for name in job.nodes)

    def jobs_on(self, name: str) -> list[Job]:
        """Return the jobs that run or complete on a node."""
        return [entry.job for entry in self._jobs.values() if name in entry.job.nodes]

    def idle(self, partition: str = "", reservation: str = "") -> list[str]:
        """Return the nodes, of a partition or of all, that take a job now."""
        return [
            node.name
            for node in self.entries.values()
            if node.base == "IDLE"
            and self.may_use(node.name, reservation)
            and node.is_available
            and "COMPLETING" not in node.flags
            and (not partition or partition in node.partitions)
        ]

    def _shareable(self, partition: str) -> list[str]:
        """Return the nodes that take a job which shares its nodes, half full ones first."""
        mixed = [
            node.name
            for node in self.entries.values()
            if node.base == "MIXED"
            and node.is_available
            and "COMPLETING" not in node.flags
            and partition in node.partitions
            and len(self.jobs_on(node.name)) == 1
        ]
        return mixed + self.idle(partition)

    def put_in(self, job_id: int, reservation: str) -> None:
        """Have a job name a reservation, or none."""
        entry = self._entry(job_id)
        entry.job = msgspec.structs.replace(entry.job, reservation=reservation)
        self._fill()

    def grow(self, job_id: int, name: str) -> None:
        """Give a running job an idle node, as a supervisor that merges a helper job does."""
        entry = self._jobs[job_id]
        nodes = (*entry.job.nodes, name)
        entry.job = msgspec.structs.replace(entry.job, nodes=nodes, num_nodes=len(nodes))
        self._settle(name)

    def shrink_by_owner(self, job_id: int, keep: Sequence[str]) -> None:
        """Take nodes out of a job, as its supervisor does."""
        self._resize(self._jobs[job_id], tuple(keep))

    def lose_contact(self, name: str) -> None:
        """Have a node's slurmd not answer slurmctld from now on."""
        if name in self.silent:
            return
        self.silent[name] = self._schedule.now
        self._watch_silence(name)

    def regain_contact(self, name: str) -> None:
        """Have a node's slurmd answer again, without a new registration."""
        self.silent.pop(name, None)
        node = self.entries[name]
        if "NOT_RESPONDING" in node.flags:
            self.register(name, rebooted=False)
        # slurmctld asks again for the end of what has ended meanwhile.
        self._end_completing()

    def register(self, name: str, rebooted: bool) -> None:
        """Take in a slurmd's registration."""
        self.silent.pop(name, None)
        if self.power is not None:
            self.power.registered(name, rebooted)
        node = self.entries[name]
        flags = node.flags - {"NOT_RESPONDING"}
        mode, by_slurm = self.settings.return_to_service, node.reason_by == SLURM
        if node.is_down:
            forgives = mode == 2 or (mode == 1 and by_slurm and node.reason == NOT_RESPONDING)
            if forgives and not flags & {"DRAIN", "FAIL"}:
                self.write(node, "IDLE", flags, "", SLURM)
            elif forgives:
                self.write(node, "IDLE", flags, node.reason, SLURM)
            else:
                self.keep(msgspec.structs.replace(node, flags=flags))
        elif rebooted and mode < 2 and self.jobs_on(name):
            # As at a silence: its own text only where there is none.
            self.write(node, "DOWN", flags, node.reason or REBOOTED, SLURM)
            self._lost(name, SLURM)
        else:
            self.keep(msgspec.structs.replace(node, flags=flags))
            if rebooted:
                for entry in [e for e in self._jobs.values() if name in e.job.nodes]:
                    self._told_lost(entry.job, name, SLURM)
                    self._end(entry, "PENDING" if entry.job.requeue else "")
        self._settle(name)
        self._end_completing()
        self._fill()

    def set_by(
        self, author: str, names: Sequence[str], *, state: str = "", reason: str = ""
    ) -> None:
        """Set nodes as `scontrol update` does.

        Raises:
            SlurmError: Slurm refuses.
        """
        word = state.upper()
        if word in OUT_OF_SERVICE and not reason:
            raise SlurmError("You must specify a reason when DOWNING or DRAINING a node")
        for name in names:
            if name not in self.entries:
                raise NotFound("Invalid node name specified")
            self._set_node(self.entries[name], word, reason, author)
        self._end_completing()
        self._fill()

    def reboot_by(
        self, author: str, name: str, *, asap: bool = False, then: str = "", reason: str = ""
    ) -> None:
        """Reboot a node as a person's `scontrol reboot [ASAP] [nextstate=…] [reason=…]` does; where
        no RebootProgram is set Slurm refuses."""
        if self.power is not None:
            self.power.reboot_by(author, self._find(name), asap=asap, then=then, reason=reason)

    def put(self, node: Node) -> None:
        """Set a node to anything at all."""
        self.keep(node)
        self._settle(node.name)
        self._fill()

    # -- SlurmClient --------------------------------------------------------------------------

    def nodes(self) -> tuple[Node, ...]:
        self.listed_at = self._schedule.now
        self._enter()
        if self.watcher is not None:
            self.watcher.listing()
        if self.hidden:
            return tuple(n for n in self.entries.values() if n.name not in self.hidden)
        return tuple(self.entries.values())

    def node(self, name: str) -> Node:
        self.read_at[name] = self._schedule.now
        self._enter()
        if name not in self.entries:
            raise NotFound(f"Node {name} not found")
        return self.entries[name]

    def jobs(self) -> tuple[Job, ...]:
        self._enter()
        return tuple(entry.job for entry in self._jobs.values())

    def job(self, job_id: int) -> Job:
        self._enter()
        return self._entry(job_id).job

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        self._enter()
        entry = self._jobs.get(job_id)
        return tuple(entry.steps) if entry else ()

    def info(self) -> ClusterInfo:
        self._enter()
        return ClusterInfo(
            cluster="simulated",
            version=self.settings.version,
            controllers=("ctl",),
            slurmctld_port=6817,
            slurm_user_uid=0,
            munge_socket="",
            scheduler_parameters="permit_job_expansion" if self.settings.permits_expansion else "",
            accounting="accounting_storage/none",
            raw={
                "SlurmdTimeout": f"{self.settings.slurmd_timeout:.0f} sec",
                "ReturnToService": str(self.settings.return_to_service),
                "SlurmUser": "slurm(0)",
                **(POWER_SAVING if self.power is not None else {}),
            },
        )

    def set_node(self, names: Sequence[str], *, state: str = "", reason: str = "") -> None:
        self.set_at = self._schedule.now
        self._enter()
        self.set_by(SRESCTLD, names, state=state, reason=reason)

    def set_comment(self, names: Sequence[str], comment: str) -> None:
        self._enter()
        for name in names:
            if name not in self.entries:
                raise NotFound("Invalid node name specified")
            self.keep(msgspec.structs.replace(self.entries[name], comment=comment))

    def domains(self) -> Mapping[str, str]:
        size = self.settings.of_switch  # no time passes: it is read together with the settings
        return {
            name: f"s{place // size}" for place, name in enumerate(self.entries if size else ())
        }

    def reboot(self, name: str, reason: str) -> None:
        self.set_at = self._schedule.now
        self._enter()
        if self.power is None:
            raise SlurmError("RebootProgram is not configured")
        self.power.reboot(self._find(name), reason)

    def cancel_reboot(self, name: str) -> None:
        self._enter()
        if self.power is None or not self.power.cancel_reboot(self._find(name)):
            raise SlurmError("No reboot requested")

    def _find(self, name: str) -> Node:
        if name not in self.entries:
            raise NotFound("Invalid node name specified")
        return self.entries[name]

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        self._enter()
        entry = self._entry(job_id)
        if entry.job.state != "RUNNING":
            return  # Slurm takes it for the nodes that the pending job wants
        if not set(keep) <= set(self.entries):
            raise NotFound("Invalid node name specified")
        if not keep or not set(keep) <= set(entry.job.nodes):
            raise SlurmError("Invalid node list specified")
        if self.watcher is not None:
            self.watcher.job_shrunk(entry.job)
        for name in sorted(set(entry.job.nodes) - set(keep)):
            self._told_lost(entry.job, name, SRESCTLD)
        self._resize(entry, tuple(name for name in entry.job.nodes if name in set(keep)))
        self._fill()

    def requeue(self, job_id: int) -> None:
        self._enter()
        entry = self._entry(job_id)
        if not entry.job.is_batch:
            raise SlurmError("Only batch jobs are accepted or processed")
        if not entry.job.requeue:
            raise SlurmError("Requested operation is presently disabled")
        if entry.job.state == "PENDING":
            raise SlurmError("Job is pending execution")
        self._told_lost(entry.job, "", SRESCTLD)
        self._end(entry, "PENDING")

    def start_now(self, job_id: int) -> None:
        self._enter()
        entry = self._entry(job_id)
        if entry.job.state == "PENDING":  # while COMPLETING it is accepted, and lost
            entry.begins = self._schedule.now
            self._schedule.after(0.1, self._fill)

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        self._enter()
        entry = self._jobs.get(job_id)
        if entry is None:
            return  # one that is gone needs no end
        if signal in ("", "KILL", "TERM"):
            entry.steps = [known for known in entry.steps if known.step != step]

    def cancel_job(self, job_id: int, name: str = "") -> None:
        self._enter()
        entry = self._jobs.get(job_id)
        if entry is None:
            return  # scancel says nothing of a job that is not there
        if name and name != name_of_companion(entry.job):
            return
        if self.watcher is not None:
            self.watcher.job_ended(entry.job, bool(entry.steps))
        if entry.job.state == "PENDING":
            del self._jobs[job_id]
        else:
            self._end(entry, "")

    def allocate_for(self, job: Job, nodes: int, wait: float, stop: Event | None = None) -> int:
        self._enter()
        self._entry(job.id)
        if len(self.idle(job.partition)) < nodes:
            raise SlurmError("salloc: error: Unable to allocate resources: Connection timed out")
        return self.submit(nodes, uid=job.uid, batch=False, step=False)

    def prefer_requests(
        self, job: Job, nodes: int, companions: Sequence[int] = ()
    ) -> dict[int, int]:
        self._enter()
        if self.watcher is not None:
            self.watcher.job_preferred(job, nodes)
            for number in companions:
                self.watcher.companion_preferred(job, self._entry(number).job)
        return dict.fromkeys(companions, nodes)

    # Supervisors alone ask for companions, and `simulate/resume` has a Slurm for them.
    def ask_companion(self, request: CompanionRequest) -> int:
        raise NotImplementedError

    def companions(self, job: Job) -> tuple[FoundCompanion, ...]:
        raise NotImplementedError

    def ended_job(self, job_id: int) -> Job:
        raise NotImplementedError

    def is_preempted(self, job_id: int) -> bool:
        raise NotImplementedError

    def merge(self, helper: int, job_id: int, timeout: float = 15.0) -> tuple[str, ...]:
        self._enter()
        giver, taker = self._entry(helper), self._entry(job_id)
        if taker.job.gres or not self.settings.permits_expansion:
            giver.job = msgspec.structs.replace(giver.job, state="COMPLETING")
            raise SlurmError(f"JobId={job_id} has allocated GRES")
        both = {*giver.job.nodes, *taker.job.nodes}
        nodes = tuple(name for name in self.entries if name in both)
        del self._jobs[helper]
        taker.job = msgspec.structs.replace(taker.job, nodes=nodes, num_nodes=len(nodes))
        for name in nodes:
            self._settle(name)
        return nodes

    # -- for its reservations

    def every_job(self) -> list[Job]:
        """Return all jobs as they are now."""
        return [entry.job for entry in self._jobs.values()]

    def end_by_owner(self, job_id: int) -> None:
        """Take a request for nodes in exchange away, merged or withdrawn."""
        entry = self._jobs.pop(job_id, None)
        for name in entry.job.nodes if entry is not None else ():
            self._settle(name)

    def enter(self) -> None:
        """Begin a request of sresctld."""
        self._enter()

    def fill(self) -> None:
        """Start the jobs that are due and have nodes."""
        self._fill()

    # -- how Slurm goes on --------------------------------------------------------------------

    def _enter(self) -> None:
        self.take_time()
        if self.away:
            raise SlurmUnreachable("Unable to contact slurm controller (connect failure)")

    def _entry(self, job_id: int) -> _Entry:
        if job_id not in self._jobs:
            raise NotFound(f"Invalid job id specified: {job_id}")
        return self._jobs[job_id]

    def keep(self, node: Node) -> None:
        served = self.entries[node.name].is_available
        self.entries[node.name] = node
        if self.watcher is not None and node.is_available and not served:
            self.watcher.node_serves(node.name)

    def write(
        self,
        node: Node,
        base: str,
        flags: frozenset[str],
        reason: str,
        author: str,
    ) -> None:
        """Write a node's state, with a reason of the author's or with the one that it has."""
        by, at = author if reason else "", f"{self._schedule.now:.0f}" if reason else ""
        if author == SLURM and reason == node.reason:
            by, at = node.reason_by, node.reason_at
        after = msgspec.structs.replace(
            node,
            base=base,
            flags=flags,
            reason=reason,
            reason_by=by,
            reason_at=at,
            reason_unclear=node.reason_unclear and reason == node.reason,
        )
        self.keep(after)
        if self.watcher is not None:
            self.watcher.node_set(node, after, author)

    def _set_node(self, node: Node, word: str, reason: str, author: str) -> None:
        if word in POWER_WORDS and self.power is not None:
            order = self.power.up if word == "POWER_UP" else self.power.down
            order(node, author)
            return
        base, flags = node.base, set(node.flags)
        if word in ("RESUME", "IDLE", "UNDRAIN"):
            if node.base != "DOWN" and not flags & {"DRAIN", "FAIL"}:
                raise SlurmError("Invalid node state specified")
            base, reason = "IDLE" if base == "DOWN" else base, ""
            flags -= {"DRAIN", "FAIL"}
            if node.name in self.silent:
                flags.add("NOT_RESPONDING")
                self.silent[node.name] = self._schedule.now
                self._watch_silence(node.name)
        elif word == "DOWN":
            base = "DOWN"
        elif word in ("DRAIN", "FAIL"):
            flags -= {"DRAIN", "FAIL"}
            flags.add(word)
        elif word:
            raise SlurmError(f"Invalid input: {word}")
        elif base != "DOWN" and not flags & {"DRAIN", "FAIL"}:
            return  # a reason without a state that needs one is not kept
        self.write(node, base, frozenset(flags), reason, author)
        if word == "DOWN":
            self._lost(node.name, author)
        if not reason and "POWERED_DOWN" in flags and self.power is not None:
            # In service and powered down: the next job wakes it.
            self.power.up(self.entries[node.name], SLURM)
        self._settle(node.name)

    def _watch_silence(self, name: str) -> None:
        since = self.silent[name]
        self._schedule.after(NOT_RESPONDING_SECONDS, self._does_not_respond, name, since)
        self._schedule.after(self.settings.slurmd_timeout, self._timed_out, name, since)

    def _does_not_respond(self, name: str, since: float) -> None:
        if self.silent.get(name) == since and not self.away:
            node = self.entries[name]
            self.keep(msgspec.structs.replace(node, flags=node.flags | {"NOT_RESPONDING"}))

    def _timed_out(self, name: str, since: float) -> None:
        """Set a node DOWN that has not answered for SlurmdTimeout."""
        if self.silent.get(name) != since:
            return
        if self.away:
            self._schedule.after(10.0, self._timed_out, name, since)
            return
        node = self.entries[name]
        if node.is_down:
            return
        # Slurm writes its own text only where there is none.
        reason = node.reason or NOT_RESPONDING
        self.write(node, "DOWN", node.flags | {"NOT_RESPONDING"}, reason, SLURM)
        self._lost(name, SLURM)
        self._settle(name)
        self._end_completing()

    def _lost(self, name: str, author: str) -> None:
        """Apply a DOWN node to the jobs on it."""
        for entry in list(self._jobs.values()):
            if name not in entry.job.nodes or entry.completing:
                continue
            self._told_lost(entry.job, name, author)
            if entry.no_kill and len(entry.job.nodes) > 1:
                # Also when it is the batch host: then the job runs on without its script.
                self._resize(entry, tuple(n for n in entry.job.nodes if n != name))
            else:
                self._end(entry, "PENDING" if entry.job.requeue else "")

    def _told_lost(self, job: Job, node: str, author: str) -> None:
        if self.watcher is not None:
            self.watcher.job_lost(job, node, author)

    def _resize(self, entry: _Entry, nodes: tuple[str, ...]) -> None:
        gone = set(entry.job.nodes) - set(nodes)
        if self.watcher is not None:
            self.watcher.job_left(entry.job, sorted(gone))
        entry.steps = [step for step in entry.steps if not gone & set(step.nodes)]
        entry.job = msgspec.structs.replace(entry.job, nodes=nodes, num_nodes=len(nodes))
        for name in gone:
            self._settle(name)

    def _finish(self, job_id: int, restarts: int) -> None:
        """End a job that has run its time."""
        entry = self._jobs.get(job_id)
        if entry is not None and entry.job.state == "RUNNING" and entry.job.restarts == restarts:
            self._end(entry, "")

    def _end(self, entry: _Entry, then: str) -> None:
        entry.then, entry.steps = then, []
        entry.job = msgspec.structs.replace(entry.job, state="COMPLETING")
        for name in entry.job.nodes:
            self._settle(name)
        self._schedule.after(COMPLETING_SECONDS, self._end_completing)

    def _end_completing(self) -> None:
        for entry in list(self._jobs.values()):
            if entry.completing and not self._waits_for_a_dead_node(entry):
                self._complete(entry)

    def _complete(self, entry: _Entry) -> None:
        nodes = entry.job.nodes
        if self.watcher is not None:
            self.watcher.job_left(entry.job, nodes)
        if not entry.then:
            del self._jobs[entry.job.id]
        else:
            entry.begins = self._schedule.now + REQUEUE_SECONDS
            entry.job = msgspec.structs.replace(
                entry.job,
                state="PENDING",
                nodes=(),
                batch_host="",
                num_nodes=entry.wants,
                restarts=entry.job.restarts + 1,
            )
            self._schedule.at(entry.begins, self._fill)
        for name in nodes:
            self._settle(name)
        self._fill()

    def _waits_for_a_dead_node(self, entry: _Entry) -> bool:
        return any(
            name in self.silent and not self.entries[name].is_down for name in entry.job.nodes
        )

    def _fill(self) -> None:
        """Start the jobs that are due and have nodes."""
        if self.away:
            return
        for entry in list(self._jobs.values()):
            if entry.job.state != "PENDING" or entry.begins > self._schedule.now:
                continue
            partition = entry.job.partition
            reservation = entry.job.reservation
            is_alone = entry.job.exclusive or reservation
            free = self.idle(partition, reservation) if is_alone else self._shareable(partition)
            if len(free) < entry.wants:
                continue
            nodes = tuple(free[: entry.wants])
            entry.job = msgspec.structs.replace(
                entry.job,
                state="RUNNING",
                nodes=nodes,
                num_nodes=len(nodes),
                batch_host=nodes[0] if entry.job.is_batch else "",
            )
            for name in nodes:
                self._settle(name)
            self._schedule.after(entry.seconds, self._finish, entry.job.id, entry.job.restarts)
            if self.watcher is not None:
                self.watcher.job_started(entry.job)

    def _settle(self, name: str) -> None:
        """Make a node's state follow from the jobs on it."""
        node = self.entries[name]
        here = [entry for entry in self._jobs.values() if name in entry.job.nodes]
        flags = set(node.flags) - {"COMPLETING"}
        if any(entry.completing for entry in here):
            flags.add("COMPLETING")
        base = node.base
        if base in ("IDLE", "ALLOCATED", "MIXED"):
            busy = [entry for entry in here if not entry.completing]
            base = "IDLE" if not busy else "ALLOCATED"
            if busy and not any(entry.job.exclusive for entry in busy):
                base = "MIXED"
        if base != node.base or flags != node.flags:
            self.keep(msgspec.structs.replace(node, base=base, flags=frozenset(flags)))


def _partitions_of(number: int, partitions: tuple[str, ...]) -> tuple[str, ...]:
    """Return the partitions of a node: the one of all, and one of the others."""
    others = partitions[1:]
    return (*partitions[:1], *((others[number % len(others)],) if others else ()))
