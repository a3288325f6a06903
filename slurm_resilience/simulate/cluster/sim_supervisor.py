"""Simulated supervisors: they announce their jobs' attempts and leave the nodes that they are told
to leave."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from slurm_resilience.model import Job
from slurm_resilience.simulate.cluster.sim_machine import SimClient, WireEnd
from slurm_resilience.simulate.cluster.sim_slurm import SimSlurm
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.wire.messages import AttemptStarted, Evidence, Message, RequeueRequest

LEFT = ("dead", "sick", "requested")
LOOK_SECONDS = 5.0
"""Between two looks whether a job that may not be requeued still has its batch host."""
LOST_SECONDS = 25.0
"""Until sresctld finds the connection of a dead host lost."""
STEP_SECONDS = 60.0
"""A step runs on for so long without its supervisor."""


class SimSupervisors:
    """The supervisors of all supervised jobs."""

    def __init__(
        self,
        schedule: Schedule,
        slurm: SimSlurm,
        endpoint: WireEnd,
        random: Random,
        is_alive: Callable[[str], bool],
    ) -> None:
        self._schedule = schedule
        self._slurm = slurm
        self._endpoint = endpoint
        self._random = random
        self._is_alive = is_alive
        self.jobs: set[int] = set()
        """Jobs with a supervisor, as their owners submitted them."""
        self.announced: set[int] = set()
        """Those that sresctld has been told of."""
        self.asked: set[int] = set()
        """Those that have asked for a requeue in their present run."""
        self.started_at: dict[int, float] = {}
        """When each job's run began."""
        self.ask_for_node: Callable[[Job], None] = lambda _: None
        """Asks Slurm for a node in exchange, where none is idle."""
        self.living: set[int] = set()
        """Jobs whose supervisor runs."""
        self._attempts: dict[int, int] = {}
        self._connections: dict[int, SimClient] = {}

    def job_started(self, job: Job) -> None:
        """Start the supervisor of a job that runs, if it has one."""
        self.started_at[job.id] = self._schedule.now
        self.asked.discard(job.id)
        if job.id in self.jobs:
            self._attempts[job.id] = 0
            self.living.add(job.id)
            if not job.requeue:
                self._schedule.after(LOOK_SECONDS, self._look, job.id)
            self._connections.pop(job.id, None)
            self._schedule.after(self._random.uniform(0.3, 1.5), self._announce, job.id, job.nodes)

    def _look(self, job_id: int) -> None:
        """End the supervisor of a job that lost its batch host.

        Slurm ends the script of a host that left the job and lives. sresctld finds the connection
        lost later.
        """
        job = self._slurm.find_job(job_id)
        if job is None or job.state != "RUNNING":
            self.living.discard(job_id)
        elif job.batch_host in job.nodes and self._is_alive(job.batch_host):
            self._schedule.after(LOOK_SECONDS, self._look, job_id)
        else:
            self.living.discard(job_id)
            connection = self._connections.pop(job_id, None)
            if connection is not None and connection.generation == self._endpoint.generation:
                self._schedule.after(LOST_SECONDS, self._endpoint.closed, connection)
            if set(job.nodes) - {job.batch_host}:
                # Survivors train on.
                self._slurm.start_step(job_id, without=job.batch_host)
                self._schedule.after(STEP_SECONDS, self._slurm.end_steps, job_id)

    def sresctld_started(self) -> None:
        """Have all supervisors connect again."""
        for job_id in self.jobs:
            job = self._slurm.find_job(job_id)
            if job is not None and job.state == "RUNNING":
                self._schedule.after(
                    self._random.uniform(0.2, 3.0), self._announce, job_id, job.nodes
                )

    def _announce(self, job_id: int, nodes: tuple[str, ...]) -> None:
        job = self._slurm.find_job(job_id)
        if job is None or job.state != "RUNNING" or not self._lives(job):
            return
        connection = self._connection(job)
        if connection is None:
            return
        self._attempts[job_id] = self._attempts.get(job_id, 0) + 1
        self.announced.add(job_id)
        message = AttemptStarted(self._attempts[job_id], job.nodes)
        self._endpoint.received(connection, message)

    def _lives(self, job: Job) -> bool:
        """Tell whether it runs: on the batch host."""
        alive = job.requeue or job.id in self.living
        return alive and bool(job.batch_host) and self._is_alive(job.batch_host)

    def _connection(self, job: Job) -> SimClient | None:
        if not self._endpoint.serves:
            return None
        known = self._connections.get(job.id)
        if known is not None and known.generation == self._endpoint.generation:
            return known
        number, generation = job.id, self._endpoint.generation

        def hear(message: Message) -> None:
            if isinstance(message, Evidence):
                self._schedule.after(self._random.uniform(0.1, 1.0), self._leave, number, message)

        connection = SimClient("job", str(number), job.uid, generation, hear)
        self._connections[job.id] = connection
        self._endpoint.opened(connection)
        return connection

    def _leave(self, job_id: int, evidence: Evidence) -> None:
        """Leave the nodes that every job must leave."""
        job = self._slurm.find_job(job_id)
        if job is None or job.state != "RUNNING" or not self._lives(job):
            return
        bad = {v.node for v in evidence.verdicts if v.verdict in LEFT}
        keep = tuple(name for name in job.nodes if name not in bad)
        if len(keep) < len(job.nodes):
            connection = self._connection(job)
            may_change = self._slurm.settings.permits_expansion and not self._slurm.has_gres(job)
            if job.batch_host in bad or not keep or not may_change:
                if connection is not None:
                    self.asked.add(job_id)
                    self._endpoint.received(connection, RequeueRequest("a node must be left"))
                return
            self._slurm.shrink_by_owner(job_id, keep)
        elif not bad:
            return
        self._schedule.after(self._random.uniform(0.5, 3.0), self._refill, job_id)

    def _refill(self, job_id: int) -> None:
        """Take an idle node in exchange, where there is one, and go on."""
        job = self._slurm.find_job(job_id)
        if job is None or job.state != "RUNNING" or not self._lives(job):
            return
        idle = [name for name in self._slurm.idle(job.partition) if name not in job.nodes]
        idle = [name for name in idle if not self._slurm.entries[name].gres]
        may_grow = self._slurm.settings.permits_expansion and not self._slurm.has_gres(job)
        if idle and may_grow:
            self._slurm.grow(job_id, idle[0])
        elif may_grow:
            self.ask_for_node(job)
        self._announce(job_id, ())

    def has_grown(self, job_id: int) -> None:
        """Take in that Slurm has merged the nodes that a job asked for into it."""
        self._announce(job_id, ())
