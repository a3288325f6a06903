"""Decide, for jobs: whom to requeue and start, and whose supervisors to tell. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from slurm_resilience.controller.actions import (
    Action,
    EndPendingRequeue,
    KeepPendingRequeue,
    NotifySupervisor,
    RaiseAlarm,
    RaisePriority,
    RequeueJob,
    StartPendingJob,
)
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.journal import PendingRequeue
from slurm_resilience.controller.observe import ClusterSnapshot

CHASE_SECONDS = 600.0
"""How long a requeued job is followed until it runs."""


def requeues(world: ClusterSnapshot) -> Iterator[Action]:
    for job in world.jobs.values():
        if job.is_zombie and job.id not in world.chases:
            if not job.requeue:
                text = f"job {job.id} has lost its batch script, and may not be requeued"
                yield RaiseAlarm(f"zombie-{job.id}-{job.restarts}", text, job=job.id)
                continue
            reason = f"its batch host {job.batch_host} is gone"
            yield KeepPendingRequeue(PendingRequeue(job.id, reason, True, job.restarts, world.now))
            yield RequeueJob(job.id, reason)
    yield from _requeued_by_slurm(world)
    for chase in world.chases.values():
        yield from _chase(world, chase)


def _requeued_by_slurm(world: ClusterSnapshot) -> Iterator[KeepPendingRequeue]:
    """Jobs under auto-resume that Slurm requeued because somebody else set one of their nodes DOWN,
    as `sres node replace --force` does. A requeue that was asked for keeps Slurm's two minutes."""
    for entry in world.supervised.values():
        job = world.jobs.get(entry.job)
        if job is None or job.id in world.chases or not (job.is_batch and job.requeue):
            continue
        down = [name for name in entry.nodes if name in world.nodes and world.nodes[name].is_down]
        ends = job.state in ("COMPLETING", "PENDING")
        if down and ends and job.restarts > entry.restarts:
            reason = f"node {down[0]} went down"
            yield KeepPendingRequeue(
                PendingRequeue(job.id, reason, False, entry.restarts, world.now)
            )


def _chase(world: ClusterSnapshot, chase: PendingRequeue) -> Iterator[Action]:
    job = world.jobs.get(chase.job)
    if job is None:
        yield EndPendingRequeue(chase.job, "the job is gone")
    elif job.state == "RUNNING" and job.restarts > chase.restarts_before:
        yield EndPendingRequeue(chase.job, f"runs again {world.now - chase.since:.1f} s after")
    elif world.now - chase.since > CHASE_SECONDS:
        # Also one that is PENDING: it may start, and waits for nodes like any other.
        yield EndPendingRequeue(
            chase.job, f"not seen running within {CHASE_SECONDS:.0f} s: {job.state}"
        )
    elif job.state == "PENDING":
        # Only now: given while the job is COMPLETING it is lost (and returns 0).
        if not chase.pending_since:
            yield KeepPendingRequeue(msgspec.structs.replace(chase, pending_since=world.now))
        elif int(world.now) > int(chase.pending_since):
            # And not within the second in which it ended: slurmd would take the new credential for
            # the one just revoked (it compares whole seconds), and Slurm would fail the job.
            yield StartPendingJob(chase.job)
    elif job.state == "RUNNING" and (chase.wanted or job.is_zombie):
        yield RequeueJob(chase.job, chase.reason)


def preferences(world: ClusterSnapshot) -> Iterator[RaisePriority]:
    """A supervised job that has fewer nodes than its step had waits for others in their place, its
    remaining nodes idle. It gets back no more than it had, so nobody jumps the queue."""
    for entry in world.supervised.values():
        job = world.jobs.get(entry.job)
        if job is None or job.state != "RUNNING" or job.gres or not world.permits_expansion:
            continue
        if 0 < len(job.nodes) < entry.size:
            yield RaisePriority(job.id, entry.size - len(job.nodes))


def tells(world: ClusterSnapshot, verdicts: dict[str, NodeDiagnosis]) -> Iterator[NotifySupervisor]:
    """Only what is marked, or DOWN: a supervisor leaves a node because everybody must."""
    for incident in world.incidents.values():
        node, verdict = world.nodes.get(incident.node), verdicts.get(incident.node)
        if node is None or verdict is None or verdict.kind != "requested":
            continue
        kind: Literal["dead", "sick", "requested"] = "requested"
        if node.is_down or incident.kind == "dead":
            kind = "dead"
        elif incident.kind == "sick":
            kind = "sick"
        for entry in world.supervised.values():
            if node.name in entry.nodes:
                yield NotifySupervisor(
                    entry.job, node.name, kind, incident.action, incident.reason, incident.id
                )
    yield from _down_without_us(world, verdicts)


def _down_without_us(
    world: ClusterSnapshot, verdicts: dict[str, NodeDiagnosis]
) -> Iterator[NotifySupervisor]:
    """Nodes that are DOWN for a person's reason or Slurm's own. A step that lives on does not hear
    of it once the node has left the job."""
    for entry in world.supervised.values():
        for name in entry.nodes:
            node, verdict = world.nodes.get(name), verdicts.get(name)
            if node is None or verdict is None or name in world.incidents:
                continue
            if node.is_down and verdict.kind in ("held", "down"):
                yield NotifySupervisor(
                    entry.job, name, "dead", "", f"it is down; {verdict.reason}", 0
                )
