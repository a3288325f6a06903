"""Slurm as one supervisor asks it: each answer takes time, and may be refused or lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import TypeVar

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable
from slurm_resilience.model import Job, Node
from slurm_resilience.simulate.resume.preemption.preemption_draw import NEWER
from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.resume_state import GIVE_UP_SECONDS
from slurm_resilience.simulate.resume.resume_world import ResumeWorld
from slurm_resilience.simulate.resume.sim_nodes import LentMark
from slurm_resilience.slurm.client import ClusterInfo, StepInfo
from slurm_resilience.slurm.companion_job import CompanionRequest, FoundCompanion

Answer = TypeVar("Answer")
HELPER_BASE = 1000


class SimJobSlurm:
    """`SlurmClient` of one supervisor."""

    def __init__(self, world: ResumeWorld, host: str, pid: int) -> None:
        self._world = world
        self._host, self._pid = host, pid
        self._incarnation = world.supervisor.incarnation
        self.chance_lost = self.chance_refused = 0.0
        self.slowest = 0.3

    # -- how an answer comes ------------------------------------------------------------------

    def _ask(self, answer: Callable[[], Answer]) -> Answer:
        """Have Slurm answer a question."""
        return self._call("", answer)

    def _change(self, name: str, change: Callable[[], Answer]) -> Answer:
        """Have Slurm change something; the answer may be lost while the change is made."""
        return self._call(name, change)

    def _call(self, name: str, call: Callable[[], Answer]) -> Answer:
        world, random = self._world, self._world.random
        world.pass_time(random.uniform(0.005, self.slowest), lambda: False)
        if world.schedule.now < world.books.slurmctld_back:
            world.pass_time(random.choice((0.1, GIVE_UP_SECONDS)), lambda: False)
            if world.schedule.now < world.books.slurmctld_back:
                raise SlurmUnreachable("Unable to contact slurm controller (connect failure)")
        if name:
            world.note(f"Slurm is asked to {name}")
            if self._incarnation != world.supervisor.incarnation:
                world.broken(ResumeRule.ONE_RECOVERY, f"a supervisor of a run before asks: {name}")
            if random.random() < self.chance_refused:
                raise SlurmError(f"{name}: Requested operation is presently disabled")
        lost = random.random()
        if lost < self.chance_lost / 2:
            world.pass_time(GIVE_UP_SECONDS, lambda: False)
            raise SlurmUnreachable(f"{name or 'a question'} got no answer")
        answer = call()
        if lost < self.chance_lost:
            world.pass_time(GIVE_UP_SECONDS, lambda: False)
            raise SlurmUnreachable(f"{name or 'a question'} got no answer")
        return answer

    # -- questions ----------------------------------------------------------------------------

    def nodes(self) -> tuple[Node, ...]:
        return self._ask(lambda: tuple(node.shown for node in self._world.nodes.values()))

    def node(self, name: str) -> Node:
        def answer() -> Node:
            if name not in self._world.nodes:
                raise NotFound(f"Node {name} not found")
            return self._world.nodes[name].shown

        return self._ask(answer)

    def jobs(self) -> tuple[Job, ...]:
        return self._ask(lambda: (self._world.job,))

    def job(self, job_id: int) -> Job:
        def answer() -> Job:
            world = self._world
            if job_id in world.helpers:
                return Job(job_id, world.job.uid, "RUNNING", nodes=world.helpers[job_id])
            companion = world.companions.job(job_id)
            if companion is not None:
                return companion
            if job_id != world.job.id:
                raise NotFound("Invalid job id specified")
            if world.books.job_ended and world.job.state == "GONE":
                raise NotFound("Invalid job id specified")
            return world.shown_job()

        return self._ask(answer)

    def ended_job(self, job_id: int) -> Job:
        def answer() -> Job:
            companion = self._world.companions.job(job_id, over=True)
            if companion is None:
                raise NotFound("Invalid job id specified")
            return companion

        if job_id == self._world.job.id:
            return self.job(job_id)  # what is over, this Slurm has forgotten
        return self._ask(answer)

    def is_preempted(self, job_id: int) -> bool:
        if job_id != self._world.job.id:
            return self._ask(lambda: self._world.companions.is_preempted(job_id))
        preemption = self._world.books.preemption
        if preemption is None:
            return False  # at once, so that the run is the same as ever
        return self._ask(lambda: preemption.is_under_way)

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        def answer() -> tuple[StepInfo, ...]:
            world = self._world
            return tuple(
                StepInfo(
                    job_id,
                    step.name,
                    step.nodes,
                    srun_host=self._host,
                    srun_pid=step.srun.pid,
                    tasks=step.size,
                )
                for step in world.steps.values()
                if step.srun.allocation == job_id
            )

        return self._ask(answer)

    # -- changes ------------------------------------------------------------------------------

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        def change() -> None:
            world = self._world
            if world.job.state != "RUNNING" or not keep or not set(keep) <= set(world.job.nodes):
                raise SlurmError("Invalid node list specified")
            world.shrink(tuple(name for name in world.job.nodes if name in keep))

        self._change(f"shrink the job to {','.join(keep)}", change)

    def requeue(self, job_id: int) -> None:
        asked_at = self._world.schedule.now

        def change() -> None:
            world = self._world
            if not (world.job.is_batch and world.job.requeue):
                raise SlurmError("Requested operation is presently disabled")
            if world.books.preemption is not None:
                world.books.preemption.check_requeue(asked_at)
            world.requeue_asked(asked_at)
            world.end_job("REQUEUED", requeue=True, word="DUE TO JOB REQUEUE")

        self._change("requeue the job", change)

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        def change() -> None:
            known = self._world.steps.get(step)
            if known is None:
                return
            if signal == "TERM":
                self._world.step_life.terminate(known)
            else:
                self._world.step_life.kill(known, "***")

        known = self._world.steps.get(step)
        if known is not None:
            self._world.program.check_order(known)
            known.ordered = signal or "KILL"
        self._change(f"cancel step {step} {signal}".strip(), change)

    def cancel_job(self, job_id: int, name: str = "") -> None:
        def change() -> None:
            self._world.helpers.pop(job_id, None)
            companion = self._world.companions.get(job_id)
            lent = companion.lent if companion is not None else None
            if lent is None or LentMark.RENAMED not in lent.marks:
                self._world.companions.end(job_id, "its supervisor")

        self._world.seen.given_back.add(job_id)
        if self._world.books.growth is not None:
            self._world.books.growth.given_back(job_id)
        self._change(f"cancel job {job_id}", change)

    def allocate_for(self, job: Job, nodes: int, wait: float, stop: Event | None = None) -> int:
        world = self._world
        until = world.schedule.now + wait

        def wanted() -> list[str]:
            return [name for name in world.idle() if name not in job.excluded_nodes]

        def change() -> int:
            idle = wanted()
            if len(idle) < nodes:
                raise SlurmError("salloc: error: Unable to allocate resources: queued and waiting")
            number = HELPER_BASE + world.next_pid()
            world.helpers[number] = tuple(idle[:nodes])
            return number

        def enough() -> bool:
            return (stop is not None and stop.is_set()) or len(wanted()) >= nodes

        world.pass_time(max(0.0, until - world.schedule.now), enough)
        if stop is not None and stop.is_set():
            raise SlurmError("salloc was stopped")
        known = set(world.helpers)
        try:
            return self._change(f"allocate {nodes} nodes", change)
        except SlurmUnreachable:
            for number in set(world.helpers) - known:
                del world.helpers[number]  # salloc withdraws what it has not told of
            raise

    def ask_companion(self, request: CompanionRequest) -> int:
        def change() -> int:
            world = self._world
            if world.job.state != "RUNNING":
                raise SlurmError("Invalid job id specified")
            if not request.lent:
                world.check_taken("a companion is asked for", request.nodes)
            elif world.books.growth is not None:
                world.books.growth.asked(request.nodes)
            return world.companions.add(request)

        number = self._change(f"queue a companion of {request.nodes} nodes", change)
        companion = self._world.companions.get(number)
        if companion is not None and companion.lent is not None:
            companion.lent.marks |= LentMark.ANSWERED
        return number

    def companions(self, job: Job) -> tuple[FoundCompanion, ...]:
        return self._ask(
            lambda: tuple(
                FoundCompanion(c.id, job.id, c.restarts, c.supervisor, c.lent is not None)
                for c in self._world.companions.values()
                if c.lent is None or LentMark.RENAMED not in c.lent.marks
            )
        )

    def merge(self, helper: int, job_id: int, timeout: float = 15.0) -> tuple[str, ...]:
        def change() -> tuple[str, ...]:
            world = self._world
            nodes = world.helpers.get(helper)
            if nodes is None or world.job.state != "RUNNING":
                raise SlurmError(f"nodes did not move into job {job_id}")
            if any(world.nodes[name].shown.gres for name in nodes):
                raise SlurmError(f"JobId={job_id} has allocated GRES")
            del world.helpers[helper]
            world.job = msgspec.structs.replace(world.job, nodes=(*world.job.nodes, *nodes))
            world.check_taken("the job gets another node")
            return world.job.nodes

        return self._change(f"merge job {helper} into job {job_id}", change)

    def info(self) -> ClusterInfo:
        preemption = self._world.books.preemption
        release = preemption.draw.release if preemption is not None else NEWER
        info = ClusterInfo("simulated", release, (), 6817, 64030, "", "", "", {})
        return self._ask(lambda: info)

    # -- what a supervisor never asks: a question or order of this kind ends the run ----------

    def set_node(self, names: Sequence[str], *, state: str = "", reason: str = "") -> None:
        raise NotImplementedError

    def domains(self) -> Mapping[str, str]:
        return {}

    def set_comment(self, names: Sequence[str], comment: str) -> None:
        raise NotImplementedError

    def reboot(self, name: str, reason: str) -> None:
        raise NotImplementedError

    def cancel_reboot(self, name: str) -> None:
        raise NotImplementedError

    def start_now(self, job_id: int) -> None:
        raise NotImplementedError

    def prefer_requests(
        self, job: Job, nodes: int, companions: Sequence[int] = ()
    ) -> dict[int, int]:
        raise NotImplementedError
