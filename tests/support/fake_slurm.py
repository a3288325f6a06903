"""Slurm in memory, for tests: nodes and jobs change as real Slurm's do for the calls we make.

`tests/contract` runs the same tests on this and on a real cluster. Nothing happens behind the
caller's back: jobs start and end when `pass_time` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Event

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.slurm.client import ClusterInfo, StepInfo
from slurm_resilience.slurm.companion_job import CompanionRequest, FoundCompanion, name_of_companion

REQUEUE_DELAY = 120.0
"""Seconds that a requeued job waits (Slurm's cred_expire)."""
_QUESTIONS = frozenset(
    [
        *("nodes", "node", "jobs", "job", "ended_job", "is_preempted", "steps", "info"),
        *("companions", "domains"),
    ]
)
_OUT_OF_SERVICE = frozenset({"DOWN", "DRAIN", "FAIL"})


class _Job:
    def __init__(self, job: Job, no_kill: bool, wants: int) -> None:
        self.job = job
        self.no_kill = no_kill
        self.wants = wants
        self.begins = 0.0
        self.completing = False
        """Its tasks are being ended; `pass_time` finishes that."""
        self.then: str = ""
        """Its state after COMPLETING: PENDING or nothing (gone)."""
        self.how: str = ""
        """The state in which it ends."""
        self.steps: list[StepInfo] = []


class FakeSlurm:
    """`SlurmClient` over two dictionaries."""

    def __init__(
        self,
        nodes: int | Sequence[Node] = 4,
        *,
        version: str = "22.05.8",
        permit_job_expansion: bool = True,
    ) -> None:
        """
        Args:
            nodes: how many (n1, n2, …), or the nodes themselves.
            version: what `info` tells.
            permit_job_expansion: `SchedulerParameters` has it.
        """
        if isinstance(nodes, int):
            nodes = [
                Node(f"n{i}", "IDLE", address=f"192.0.2.{i}", cpus=4, memory=1000)
                for i in range(1, nodes + 1)
            ]
        self._nodes = {node.name: node for node in nodes}
        self._jobs: dict[int, _Job] = {}
        self._over: dict[int, Job] = {}
        self.preempted: set[int] = set()
        """Jobs that it has begun to preempt."""
        """Jobs that have ended; Slurm forgets them after a while."""
        self._companions: list[FoundCompanion] = []
        self._next = 1
        self._version = version
        self._expansion = permit_job_expansion
        self._silent: set[str] = set()
        self.now = 1_000_000.0
        self.unreachable = False
        """True: slurmctld does not answer."""
        self.refusals: dict[str, SresError] = {}
        """By method: raised instead of doing anything."""
        self.before: dict[str, Callable[[], None]] = {}
        """By method: called once before the next call, to change the world behind its back."""
        self.exchanges: dict[int, int] = {}
        """Requests for nodes in exchange that hold nodes now."""
        self.switches: Mapping[str, str] = {}
        self.calls: list[tuple[object, ...]] = []
        """Every call that asks for a change, with its arguments."""

    # -- what a test does ---------------------------------------------------------------------

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
        step: bool = True,
        excluded: tuple[str, ...] = (),
    ) -> int:
        """Submit a job and start it if there are nodes; its id."""
        job = Job(
            self._next,
            uid,
            "PENDING",
            num_nodes=nodes,
            is_batch=batch,
            requeue=requeue and batch,
            exclusive=exclusive,
            gres=gres,
            partition="main",
            excluded_nodes=excluded,
        )
        self._next += 1
        self._jobs[job.id] = _Job(job, no_kill, nodes)
        self._schedule()
        if step and self._jobs[job.id].job.state == "RUNNING":
            self.start_step(job.id)
        return job.id

    def start_step(self, job_id: int, srun_host: str = "", srun_pid: int = 0) -> str:
        """A step over all nodes of the job; its name."""
        entry = self._jobs[job_id]
        name = str(len(entry.steps))
        entry.steps.append(StepInfo(job_id, name, entry.job.nodes, srun_host, srun_pid))
        return name

    def add_step(self, job_id: int, nodes: tuple[str, ...]) -> str:
        """A step over some nodes of the job; its name."""
        entry = self._jobs[job_id]
        name = str(len(entry.steps))
        entry.steps.append(StepInfo(job_id, name, nodes))
        return name

    def power_off(self, name: str) -> None:
        """The node dies. Slurm does not notice."""
        self._silent.add(name)

    def power_on(self, name: str) -> None:
        """It is back, and registers. A DOWN node stays DOWN (ReturnToService=0)."""
        self._silent.discard(name)
        node = self._nodes[name]
        self._nodes[name] = msgspec.structs.replace(node, flags=node.flags - {"NOT_RESPONDING"})

    def suspend(self, job_id: int) -> None:
        """Suspend a running job, as scontrol does; its nodes show no work any more."""
        entry = self._jobs[job_id]
        entry.job = msgspec.structs.replace(entry.job, state="SUSPENDED")

    def put(self, node: Node) -> None:
        """Set a node to anything at all."""
        self._nodes[node.name] = node

    def finish(self, job_id: int) -> None:
        """The job ends by itself."""
        self.end(job_id, "COMPLETED", self._jobs[job_id].job.nodes)

    def end(self, job_id: int, state: str, nodes: tuple[str, ...]) -> None:
        """End a job.

        Args:
            job_id: one that waits, runs or is COMPLETING.
            state: in which it ends.
            nodes: that it had.
        """
        job = self._jobs.pop(job_id).job if job_id in self._jobs else self._over[job_id]
        self._over[job_id] = msgspec.structs.replace(job, state=state, nodes=nodes)
        self._settle()

    def requeue_for_a_person(self, job_id: int) -> None:
        """Requeue a job that was submitted without --requeue: its owner can set that."""
        entry = self._jobs[job_id]
        self._end(entry, "PENDING")
        self._complete(entry)

    def hand_over(self, job_id: int, uid: int) -> None:
        """Make a job another user's."""
        entry = self._jobs[job_id]
        entry.job = msgspec.structs.replace(entry.job, uid=uid)

    def share(self, job_id: int, nodes: tuple[str, ...]) -> None:
        """Start a job on nodes that a suspended one has."""
        entry = self._jobs[job_id]
        entry.job = msgspec.structs.replace(entry.job, state="RUNNING", nodes=nodes)

    def pass_time(self, seconds: float = 1.0) -> None:
        """COMPLETING jobs complete where their nodes answer or are DOWN; due jobs start."""
        self.now += seconds
        for entry in list(self._jobs.values()):
            if entry.completing and not self._waits_for_a_dead_node(entry):
                self._complete(entry)
        self._schedule()

    # -- SlurmClient --------------------------------------------------------------------------

    def nodes(self) -> tuple[Node, ...]:
        self._enter("nodes")
        return tuple(self._nodes.values())

    def node(self, name: str) -> Node:
        self._enter("node")
        if name not in self._nodes:
            raise NotFound(f"Node {name} not found")
        return self._nodes[name]

    def jobs(self) -> tuple[Job, ...]:
        self._enter("jobs")
        return tuple(entry.job for entry in self._jobs.values())

    def job(self, job_id: int) -> Job:
        self._enter("job")
        return self._entry(job_id).job

    def ended_job(self, job_id: int) -> Job:
        self._enter("ended_job")
        if job_id in self._over and job_id not in self._jobs:
            return self._over[job_id]
        return self._entry(job_id).job

    def is_preempted(self, job_id: int) -> bool:
        self._enter("is_preempted")
        return job_id in self.preempted

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        self._enter("steps")
        entry = self._jobs.get(job_id)
        return tuple(entry.steps) if entry else ()

    def info(self) -> ClusterInfo:
        self._enter("info")
        return ClusterInfo(
            cluster="fake",
            version=self._version,
            controllers=("ctl",),
            slurmctld_port=6817,
            slurm_user_uid=0,
            munge_socket="",
            scheduler_parameters="permit_job_expansion" if self._expansion else "",
            accounting="accounting_storage/none",
            raw={},
        )

    def set_node(self, names: Sequence[str], *, state: str = "", reason: str = "") -> None:
        self._enter("set_node", tuple(names), state, reason)
        word = state.upper()
        if word in _OUT_OF_SERVICE and not reason:
            raise SlurmError("You must specify a reason when DOWNING or DRAINING a node")
        for name in names:
            if name not in self._nodes:
                raise NotFound("Invalid node name specified")
            self._set_node(self._nodes[name], word, reason)
        self._settle()

    def domains(self) -> Mapping[str, str]:
        self._enter("domains")
        return self.switches

    def reboot(self, name: str, reason: str) -> None:
        self._enter("reboot", name, reason)
        node = self._find(name)
        flags = node.flags | {"REBOOT_REQUESTED"}
        self._nodes[name] = msgspec.structs.replace(node, flags=flags, reason=reason)

    def cancel_reboot(self, name: str) -> None:
        self._enter("cancel_reboot", name)
        node = self._find(name)
        if "REBOOT_REQUESTED" not in node.flags:
            raise SlurmError("cancel_reboot: No reboot requested")
        flags = node.flags - {"REBOOT_REQUESTED"}
        self._nodes[name] = msgspec.structs.replace(node, flags=flags)

    def _find(self, name: str) -> Node:
        if name not in self._nodes:
            raise NotFound("Invalid node name specified")
        return self._nodes[name]

    def set_comment(self, names: Sequence[str], comment: str) -> None:
        self._enter("set_comment", tuple(names), comment)
        for name in names:
            node = self._nodes.get(name)
            if node is None:
                raise NotFound("Invalid node name specified")
            self._nodes[name] = msgspec.structs.replace(node, comment=comment)

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        self._enter("shrink", job_id, tuple(keep))
        entry = self._entry(job_id)
        if entry.job.state != "RUNNING":
            return  # Slurm takes it for the nodes that the pending job wants
        if not set(keep) <= set(self._nodes):
            raise NotFound("Invalid node name specified")
        if not keep or not set(keep) <= set(entry.job.nodes):
            raise SlurmError("Invalid node list specified")
        self._resize(entry, tuple(name for name in entry.job.nodes if name in set(keep)))

    def requeue(self, job_id: int) -> None:
        self._enter("requeue", job_id)
        entry = self._entry(job_id)
        if not entry.job.is_batch:
            raise SlurmError("Only batch jobs are accepted or processed")
        if not entry.job.requeue:
            raise SlurmError("Requested operation is presently disabled")
        if entry.job.state == "PENDING":
            raise SlurmError("Job is pending execution")
        self._end(entry, "PENDING")

    def start_now(self, job_id: int) -> None:
        self._enter("start_now", job_id)
        entry = self._entry(job_id)
        if entry.job.state == "PENDING":  # while COMPLETING it is accepted, and lost
            entry.begins = self.now

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        self._enter("cancel_step", job_id, step, signal)
        entry = self._jobs.get(job_id)
        if entry is None:
            return  # one that is gone needs no end
        if signal in ("", "KILL", "TERM"):
            entry.steps = [known for known in entry.steps if known.step != step]

    def cancel_job(self, job_id: int, name: str = "") -> None:
        self._enter("cancel_job", job_id)
        entry = self._jobs.get(job_id)
        if entry is None:
            return  # scancel says nothing of a job that is not there
        if name and name != name_of_companion(entry.job):
            return
        if entry.job.state == "PENDING":
            self.end(job_id, "CANCELLED", ())
        else:
            self._end(entry, "", "CANCELLED")

    def forget(self, job_id: int) -> None:
        """Be a slurmctld that was killed right after it took a job: another one gets its number."""
        del self._jobs[job_id]
        self._companions = [known for known in self._companions if known.id != job_id]
        self._next = job_id

    def allocate_for(self, job: Job, nodes: int, wait: float, stop: Event | None = None) -> int:
        self._enter("allocate_for", job.id, nodes)
        self._entry(job.id)
        if len(set(self._idle()) - set(job.excluded_nodes)) < nodes:
            raise SlurmError("salloc: error: Unable to allocate resources: Connection timed out")
        excluded = job.excluded_nodes
        return self.submit(nodes, uid=job.uid, batch=False, step=False, excluded=excluded)

    def prefer_requests(
        self, job: Job, nodes: int, companions: Sequence[int] = ()
    ) -> dict[int, int]:
        self._enter("prefer_requests", job.id, nodes, *companions)
        return self.exchanges | dict.fromkeys(companions, nodes)

    def ask_companion(self, request: CompanionRequest) -> int:
        self._enter("ask_companion", request.job.id, request.nodes)
        self._entry(request.job.id)
        excluded, job = request.job.excluded_nodes, request.job
        number = self.submit(
            request.nodes, uid=job.uid, requeue=False, no_kill=True, step=False, excluded=excluded
        )
        self._companions.append(
            FoundCompanion(number, job.id, job.restarts, request.supervisor, request.lent),
        )
        entry = self._entry(number)
        entry.job = msgspec.structs.replace(
            entry.job,
            companion_of=(job.id, job.restarts),
            companion_supervisor=request.supervisor,
            is_lent=request.lent,
        )
        return number

    def companions(self, job: Job) -> tuple[FoundCompanion, ...]:
        self._enter("companions", job.id)
        return tuple(c for c in self._companions if c.job == job.id and c.id in self._jobs)

    def merge(self, helper: int, job_id: int, timeout: float = 15.0) -> tuple[str, ...]:
        self._enter("merge", helper, job_id)
        giver, taker = self._entry(helper), self._entry(job_id)
        has_gres = any(self._nodes[name].gres for name in (*giver.job.nodes, *taker.job.nodes))
        if has_gres or taker.job.gres or not self._expansion:
            giver.job = msgspec.structs.replace(giver.job, state="COMPLETING")
            raise SlurmError(f"JobId={job_id} has allocated GRES")
        nodes = tuple(name for name in self._nodes if name in {*giver.job.nodes, *taker.job.nodes})
        del self._jobs[helper]
        taker.job = msgspec.structs.replace(taker.job, nodes=nodes, num_nodes=len(nodes))
        self._settle()
        return nodes

    # -- how Slurm goes on --------------------------------------------------------------------

    def _enter(self, method: str, *arguments: object) -> None:
        if method not in _QUESTIONS:
            self.calls.append((method, *arguments))
        change = self.before.pop(method, None)
        if change is not None:
            change()
        if self.unreachable:
            raise SlurmUnreachable("Unable to contact slurm controller (connect failure)")
        if method in self.refusals:
            raise self.refusals[method]

    def _entry(self, job_id: int) -> _Job:
        if job_id not in self._jobs:
            raise NotFound(f"Invalid job id specified: {job_id}")
        return self._jobs[job_id]

    def _set_node(self, node: Node, word: str, reason: str) -> None:
        base, flags = node.base, set(node.flags)
        if word in ("RESUME", "IDLE", "UNDRAIN"):
            if node.base != "DOWN" and not flags & {"DRAIN", "FAIL"}:
                raise SlurmError("Invalid node state specified")
            base, reason = "IDLE", ""
            flags -= {"DRAIN", "FAIL"}
            if node.name in self._silent:
                flags.add("NOT_RESPONDING")
        elif word == "DOWN":
            base = "DOWN"
        elif word in ("DRAIN", "FAIL"):
            flags -= {"DRAIN", "FAIL"}
            flags.add(word)
        elif word:
            raise SlurmError(f"Invalid input: {word}")
        elif base != "DOWN" and not flags & {"DRAIN", "FAIL"}:
            return  # a reason without a state that needs one is not kept
        changed = word not in ("", "RESUME", "IDLE", "UNDRAIN") or bool(reason)
        self._nodes[node.name] = msgspec.structs.replace(
            node,
            base=base,
            flags=frozenset(flags),
            reason=reason,
            reason_by="root" if reason else "",
            reason_at=f"{self.now:.0f}" if reason and changed else "",
        )
        if word == "DOWN":
            self._lost(node.name)

    def _lost(self, name: str) -> None:
        """Apply a DOWN node to the jobs on it."""
        for entry in list(self._jobs.values()):
            if name not in entry.job.nodes:
                continue
            if entry.completing:
                if not self._waits_for_a_dead_node(entry):
                    self._complete(entry)
            elif entry.no_kill and len(entry.job.nodes) > 1:
                # Also when it is the batch host: then the job runs on without its script.
                self._resize(entry, tuple(n for n in entry.job.nodes if n != name))
            else:
                self._end(entry, "PENDING" if entry.job.requeue else "")

    def _resize(self, entry: _Job, nodes: tuple[str, ...]) -> None:
        gone = set(entry.job.nodes) - set(nodes)
        entry.steps = [step for step in entry.steps if not gone & set(step.nodes)]
        entry.job = msgspec.structs.replace(entry.job, nodes=nodes, num_nodes=len(nodes))
        self._settle()

    def _end(self, entry: _Job, then: str, how: str = "NODE_FAIL") -> None:
        entry.completing, entry.then, entry.how, entry.steps = True, then, how, []
        entry.job = msgspec.structs.replace(entry.job, state="COMPLETING")
        self._settle()

    def _complete(self, entry: _Job) -> None:
        entry.completing = False
        if not entry.then:
            self.end(entry.job.id, entry.how, entry.job.nodes)
            return
        entry.begins = self.now + REQUEUE_DELAY
        entry.job = msgspec.structs.replace(
            entry.job,
            state="PENDING",
            nodes=(),
            batch_host="",
            num_nodes=entry.wants,
            restarts=entry.job.restarts + 1,
        )
        self._settle()

    def _waits_for_a_dead_node(self, entry: _Job) -> bool:
        return any(
            name in self._silent and not self._nodes[name].is_down for name in entry.job.nodes
        )

    def _idle(self) -> list[str]:
        return [
            node.name
            for node in self._nodes.values()
            if node.base == "IDLE" and node.is_available and "COMPLETING" not in node.flags
        ]

    def _schedule(self) -> None:
        for entry in self._jobs.values():
            idle = [name for name in self._idle() if name not in entry.job.excluded_nodes]
            due = entry.job.state == "PENDING" and entry.begins <= self.now
            if not due or len(idle) < entry.wants:
                continue
            nodes = tuple(idle[: entry.wants])
            entry.job = msgspec.structs.replace(
                entry.job,
                state="RUNNING",
                nodes=nodes,
                num_nodes=len(nodes),
                batch_host=nodes[0] if entry.job.is_batch else "",
            )
            self._settle()

    def _settle(self) -> None:
        """Node states follow from the jobs on them."""
        for name, node in self._nodes.items():
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
            self._nodes[name] = msgspec.structs.replace(node, base=base, flags=frozenset(flags))
