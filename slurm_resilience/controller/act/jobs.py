"""Act on jobs: shrink, requeue, start, raise their priority, and tell their supervisors."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

from slurm_resilience.clock import Clock
from slurm_resilience.controller.act.reporting import Reporter, user_of
from slurm_resilience.controller.actions import (
    EndPendingRequeue,
    EndStrandedJob,
    KeepPendingRequeue,
    NotifySupervisor,
    RaisePriority,
    RequeueJob,
    ShrinkJob,
    StartPendingJob,
)
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import PendingRequeue
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.registry import Registry
from slurm_resilience.errors import SresError
from slurm_resilience.model import Job
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.wire.messages import Evidence, NodeVerdict
from slurm_resilience.wire.server import Client

log = logging.getLogger("sresctld")

PRIORITY_AGAIN_SECONDS = 0.2
"""Between two looks for a job's request for nodes in exchange."""
REQUEST_TRIES = 2
"""So often nodes that a job lost are put before the queue for it: Slurm may fail to merge them, and
a companion's may turn out to be silent."""
NO_STEPS = ("batch", "extern")
"""Slurm's own. The one of the batch script stays in its books when the script's node is lost."""
STEPS_AGAIN_SECONDS = 5.0
"""Between two looks whether steps of a stranded job run."""
REQUEUE_AGAIN_SECONDS = 5.0
"""Until Slurm is told again to requeue a job that it has not requeued."""
START_AGAIN_SECONDS = 5.0
"""Until a job that was told to start, and is PENDING still, is told again."""
STARTS_AT_ONCE = 3
"""A job is told to start so often before the wait between two tries begins."""

_Loss = tuple[tuple[str, ...], frozenset[str]]
"""The nodes that a job has, and those that it lost."""


class Notifier:
    """Tells each supervisor each thing once."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # By the connection itself: an id() comes again when a connection is gone.
        self._told: WeakKeyDictionary[Client, set[tuple[str, int, str, float]]] = (
            WeakKeyDictionary()
        )

    def tell(self, job: int, verdict: NodeVerdict) -> None:
        for connection in self._registry.supervisors(job):
            told = self._told.setdefault(connection, set())
            key = (verdict.node, verdict.incident, verdict.verdict, verdict.at)
            if key not in told:
                told.add(key)
                connection.send(Evidence((verdict,)))

    def hears(self, job: int) -> bool:
        """Tell whether a supervisor of the job is connected."""
        return bool(self._registry.supervisors(job))

    def tell_all(self, snapshot: ClusterSnapshot, verdict: NodeVerdict) -> None:
        """Tell the supervisors of every job whose step runs on the node."""
        for job, entry in snapshot.supervised.items():
            if verdict.node in entry.nodes:
                self.tell(job, verdict)


class JobActs:
    """The acts on jobs."""

    def __init__(
        self,
        client: SlurmClient,
        journal: Journal,
        reporter: Reporter,
        notifier: Notifier,
        clock: Clock,
    ) -> None:
        self._client = client
        self._journal = journal
        self._reporter = reporter
        self._notifier = notifier
        self._clock = clock
        self._raised_at: dict[int, float] = {}
        self._requeued_at: dict[int, float] = {}
        self._steps_read_at: dict[int, float] = {}
        self._given: dict[int, tuple[_Loss, dict[int, int]]] = {}
        """By job: the loss, and the requests that were put before the queue for it."""
        """By job: its nodes, and the requests that got nodes while it had these."""
        self._started_at: dict[int, list[float]] = {}

    def notify(self, snapshot: ClusterSnapshot, action: NotifySupervisor) -> None:
        self._notifier.tell(
            action.job,
            NodeVerdict(
                action.node,
                action.kind,
                action.reason,
                action.action,
                action.incident,
                action.since,
            ),
        )

    def shrink(self, change: ShrinkJob, node: str, incident: int) -> tuple[str, ...]:
        """Take a dead node out of a job, or have the job followed while Slurm requeues it.

        Args:
            change: the job, and the nodes that it keeps.
            node: the dead node.
            incident: its incident; 0: none.

        Returns:
            All nodes that the job has left by this, others that died with it among them.
        """
        text = f"node {node} taken out of job {change.job}"
        job = self._client.job(change.job)
        if job.state == "RUNNING" and set(change.keep) == set(job.nodes):
            text = f"{text}, together with others that died"
            self._event("taken-out", text, job, node, incident)
            return ()
        if job.state != "RUNNING" or not set(change.keep) < set(job.nodes):
            # Shrinking a job that is PENDING again would tell it which nodes to wait for.
            log.info("job %d is %s on other nodes now: not shrunk", job.id, job.state)
            return ()
        try:
            self._client.shrink(change.job, change.keep)
            self._event("taken-out", text, job, node, incident)
        except SresError as error:
            # Then Slurm's own rule decides: the job shrinks (--no-kill) or is requeued.
            log.warning("%s: not possible: %s", text, error)
            text = f"{text}: {error}"
            self._event("failed", text, job, node, incident)
            if job.is_batch and job.requeue:
                self.follow_dead_node(job, node)
            return ()
        return tuple(name for name in job.nodes if name not in change.keep)

    def follow_dead_node(self, job: Job, node: str) -> None:
        """Follow a job that Slurm requeues because one of its nodes died."""
        reason, now = f"node {node} died", self._clock.now()
        self._journal.put_pending_requeue(PendingRequeue(job.id, reason, False, job.restarts, now))

    def requeue(self, snapshot: ClusterSnapshot, action: RequeueJob) -> None:
        job = self._client.job(action.job)
        if job.state != "RUNNING" or job.restarts != snapshot.jobs[action.job].restarts:
            return
        now = self._clock.monotonic()
        if now - self._requeued_at.get(job.id, -REQUEUE_AGAIN_SECONDS) < REQUEUE_AGAIN_SECONDS:
            return
        self._requeued_at[job.id] = now
        self._event("requeue", action.reason, job)
        self._client.requeue(action.job)

    def end_stranded(self, snapshot: ClusterSnapshot, action: EndStrandedJob) -> None:
        """End a job that can start nothing any more, unless something of it still runs.

        What runs may write: a step of its own or of a companion, or what a person runs in it.
        """
        now = self._clock.monotonic()
        if now - self._steps_read_at.get(action.job, -STEPS_AGAIN_SECONDS) < STEPS_AGAIN_SECONDS:
            return
        self._steps_read_at[action.job] = now
        beside = [
            other.id
            for other in snapshot.jobs.values()
            if other.companion_of == (action.job, snapshot.jobs[action.job].restarts)
        ]
        for number in (action.job, *beside):
            if any(step.step not in NO_STEPS for step in self._client.steps(number)):
                return
        job = self._client.job(action.job)
        is_the_same = job.restarts == snapshot.jobs[action.job].restarts
        if is_the_same and job.is_stranded and not self._notifier.hears(job.id):
            self._event("job-ended", action.reason, job)
            self._client.cancel_job(job.id)

    def raise_priority(self, snapshot: ClusterSnapshot, action: RaisePriority) -> None:
        """Put a job's requests for nodes before the queue, as far as none was used otherwise.

        A request that got its nodes is merged at once, and then the job has other nodes. One that
        is not was perhaps no request but a job of the user's under its name. Of a companion that
        cannot be told, so each one counts.
        """
        now, job = self._clock.monotonic(), snapshot.jobs[action.job]
        if now - self._raised_at.get(job.id, -PRIORITY_AGAIN_SECONDS) < PRIORITY_AGAIN_SECONDS:
            return
        self._raised_at[job.id] = now
        loss = (job.nodes, frozenset(snapshot.supervised[job.id].lost))
        known, used = self._given.get(job.id, (loss, {}))
        if known != loss:
            used = {}
        companions = [number for number in action.companions if number not in used]
        may_grow = snapshot.site.permits_expansion and not job.gres
        if sum(used.values()) < action.nodes * REQUEST_TRIES and (may_grow or companions):
            used = used | self._client.prefer_requests(job, action.nodes, companions)
        self._given[job.id] = (loss, used)

    def start(self, snapshot: ClusterSnapshot, action: StartPendingJob) -> None:
        tries = self._started_at.setdefault(action.job, [])
        now = self._clock.monotonic()
        if len(tries) >= STARTS_AT_ONCE and now - tries[-1] < START_AGAIN_SECONDS:
            return
        tries.append(now)
        self._client.start_now(action.job)

    def keep_pending_requeue(self, snapshot: ClusterSnapshot, action: KeepPendingRequeue) -> None:
        entry = action.pending_requeue
        self._journal.put_pending_requeue(entry)
        if entry.job not in snapshot.pending_requeues and not entry.wanted:
            text = f"Slurm requeued it: {entry.reason}"
            self._reporter.event("requeue", text, job=entry.job, **user_of(snapshot, entry.job))

    def end_pending_requeue(self, snapshot: ClusterSnapshot, action: EndPendingRequeue) -> None:
        self._journal.drop_pending_requeue(action.job)
        self._started_at.pop(action.job, None)
        self._requeued_at.pop(action.job, None)
        user = user_of(snapshot, action.job)
        self._reporter.event("requeued", action.reason, job=action.job, **user)

    def _event(self, kind: str, text: str, job: Job, node: str = "", incident: int = 0) -> None:
        self._reporter.event(kind, text, node=node, job=job.id, incident=incident, uid=job.uid)
