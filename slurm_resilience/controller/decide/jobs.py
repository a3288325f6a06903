"""Decide, for jobs: which are requeued and started, and which supervisors are told. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import msgspec

from slurm_resilience.controller.actions import (
    Action,
    EndPendingRequeue,
    EndStrandedJob,
    KeepPendingRequeue,
    NotifySupervisor,
    RaiseAlarm,
    RaisePriority,
    RequeueJob,
    StartPendingJob,
)
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.journal.records import PendingRequeue
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import Job

FOLLOW_SECONDS = 600.0
"""A requeued job is followed this long, until it runs."""


def requeues(snapshot: ClusterSnapshot) -> Iterator[Action]:
    """Requeue jobs without a batch script, and follow requeued jobs until they run."""
    for job in snapshot.jobs.values():
        if job.is_zombie and job.companion_of is not None:
            continue  # its supervisor gives it up
        if job.is_zombie and job.id not in snapshot.pending_requeues:
            if job.is_stranded:
                yield from _stranded(snapshot, job)
                continue
            reason = _loss_of_batch_host(snapshot, job)
            yield KeepPendingRequeue(
                PendingRequeue(job.id, reason, True, job.restarts, snapshot.now)
            )
            yield RequeueJob(job.id, reason)
    yield from _requeued_by_slurm(snapshot)
    for pending_requeue in snapshot.pending_requeues.values():
        yield from _follow(snapshot, pending_requeue)


def _stranded(snapshot: ClusterSnapshot, job: Job) -> Iterator[RaiseAlarm | EndStrandedJob]:
    """Tell of a job without a batch script that may not be requeued, and end it if it is ours.

    It is when it had a supervisor, which died with the script: its batch host was lost to a fault,
    and no supervisor has been heard for so long that none is waited for. An act looks whether a
    step still runs: survivors may train on.
    """
    reason = _loss_of_batch_host(snapshot, job)
    text = f"job {job.id} has lost its batch script, and may not be requeued; {reason}"
    yield RaiseAlarm(f"zombie-{job.id}-{job.restarts}", text, job=job.id)
    if _was_ours(snapshot, job) and not _may_have_supervisor(snapshot, job):
        text = f"{reason}; it may not be requeued (--no-requeue), and none of its steps runs"
        yield EndStrandedJob(job.id, text)


def _was_ours(snapshot: ClusterSnapshot, job: Job) -> bool:
    """Tell whether this run of a job had a supervisor, and its batch host was lost to a fault."""
    entry = snapshot.supervised.get(job.id)
    if entry is None or entry.restarts != job.restarts:
        return False
    return job.batch_host in entry.lost


def _may_have_supervisor(snapshot: ClusterSnapshot, job: Job) -> bool:
    """Tell whether a supervisor lives, or was heard so lately that it may come back."""
    return job.id not in snapshot.heard.abandoned


def _loss_of_batch_host(snapshot: ClusterSnapshot, job: Job) -> str:
    """Return why the batch host of a job is gone: the fault, where it is known."""
    incident = snapshot.incidents.get(job.batch_host)
    if incident is None:
        return f"its batch host {job.batch_host} is gone"
    return f"{job.batch_host}: {incident.reason}"


def _requeued_by_slurm(snapshot: ClusterSnapshot) -> Iterator[KeepPendingRequeue]:
    """Follow supervised jobs that Slurm requeued because a person set one of their nodes DOWN.

    `sres node replace --force` does that. A requeue that was asked for keeps Slurm's two minutes.
    """
    for entry in snapshot.supervised.values():
        job = snapshot.jobs.get(entry.job)
        if job is None or job.id in snapshot.pending_requeues:
            continue
        if not (job.is_batch and job.requeue):
            continue
        down = [n for n in entry.nodes if n in snapshot.nodes and snapshot.nodes[n].is_down]
        is_ending = job.state == "COMPLETING" or job.waits_for_nodes
        if down and is_ending and job.restarts > entry.restarts:
            reason = f"node {down[0]} went down"
            yield KeepPendingRequeue(
                PendingRequeue(job.id, reason, False, entry.restarts, snapshot.now)
            )


def runs_again(job: Job, requeue: PendingRequeue) -> bool:
    """Tell whether a requeued job has come to its next run."""
    return job.state == "RUNNING" and job.restarts > requeue.restarts_before


def _follow(snapshot: ClusterSnapshot, pending_requeue: PendingRequeue) -> Iterator[Action]:
    """Bring a requeued job to its next run, or leave it after `FOLLOW_SECONDS`."""
    job = snapshot.jobs.get(pending_requeue.job)
    since = snapshot.now - pending_requeue.since
    if job is None:
        yield EndPendingRequeue(pending_requeue.job, "the job is gone")
    elif runs_again(job, pending_requeue):
        yield EndPendingRequeue(job.id, f"runs again {since:.1f} s after")
    elif _runs_on(snapshot, pending_requeue, job):
        yield EndPendingRequeue(job.id, "was not requeued: Slurm left it running without the node")
    elif since > FOLLOW_SECONDS:
        # Also one that is PENDING: it may start, and waits for nodes like any other.
        text = f"not seen running within {FOLLOW_SECONDS:.0f} s: {job.state}"
        yield EndPendingRequeue(job.id, text)
    elif job.state == "PENDING":
        # Only now: given while the job is COMPLETING it is lost (and returns 0).
        if not pending_requeue.pending_since:
            yield KeepPendingRequeue(
                msgspec.structs.replace(pending_requeue, pending_since=snapshot.now)
            )
        elif int(snapshot.now) > int(pending_requeue.pending_since):
            # And not within the second in which it ended: slurmd would take the new credential for
            # the one just revoked (it compares whole seconds), and Slurm would fail the job.
            yield StartPendingJob(job.id)
    elif job.state == "RUNNING" and (pending_requeue.wanted or job.is_zombie):
        yield RequeueJob(job.id, pending_requeue.reason)


def _runs_on(snapshot: ClusterSnapshot, requeue: PendingRequeue, job: Job) -> bool:
    """Tell whether a job that Slurm was to requeue runs on, on nodes without a fault.

    A job with `--no-kill` becomes smaller instead. It must not count as one that is recovering.
    """
    if requeue.wanted or job.state != "RUNNING" or job.is_zombie:
        return False
    return not any(
        name in snapshot.incidents or name not in snapshot.nodes or snapshot.nodes[name].is_down
        for name in job.nodes
    )


def priorities(snapshot: ClusterSnapshot) -> Iterator[RaisePriority]:
    """Raise the priority of supervised jobs that have fewer nodes than their step had: of their
    requests for an exchange, or, where Slurm cannot grow them, of their companions.

    Their remaining nodes are idle while they wait. Only nodes that they lost to a fault count, and
    none gets back more than it had: a user cannot bring that about to jump the queue.
    """
    for entry in snapshot.supervised.values():
        job = snapshot.jobs.get(entry.job)
        if job is None or job.state != "RUNNING" or job.restarts != entry.restarts:
            continue
        missing = min(len(entry.lost), entry.size - len(job.all_nodes))
        if not job.nodes or missing <= 0:
            continue
        companions = _waiting_companions(snapshot, job, missing)
        if companions or (snapshot.site.permits_expansion and not job.gres):
            yield RaisePriority(job.id, missing, companions)


def _waiting_companions(snapshot: ClusterSnapshot, job: Job, missing: int) -> tuple[int, ...]:
    """Return the companions of a job that wait for no more nodes than it lacks, but for those by
    which an elastic step grows: these do not stand in for what it lost.

    By their names, which any user may give: those of other users and of earlier runs are none.
    """
    return tuple(
        other.id
        for other in snapshot.jobs.values()
        if other.companion_of == (job.id, job.restarts)
        and (other.uid, other.state) == (job.uid, "PENDING")
        and not other.is_lent
        and 0 < other.num_nodes <= missing
    )


def notifications(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    left: Collection[str] = (),
) -> Iterator[NotifySupervisor]:
    """Tell supervisors of nodes that are marked or DOWN, those that every job must leave; and of
    nodes that have just fallen silent, without which a training may go on until they are back.

    Args:
        snapshot: the observation.
        diagnoses: of the snapshot.
        left: dead nodes that stay unmarked for the sake of other jobs.
    """
    for name in left:
        for entry in snapshot.supervised.values():
            if name in entry.nodes:
                dead = diagnoses[name]
                yield NotifySupervisor(entry.job, name, "dead", dead.action, dead.reason, 0)
    for incident in snapshot.incidents.values():
        node, diagnosis = snapshot.nodes.get(incident.node), diagnoses.get(incident.node)
        if node is None or diagnosis is None or diagnosis.kind != "requested":
            continue
        kind: Literal["dead", "sick", "requested"] = "requested"
        if node.is_down or incident.kind == "dead":
            kind = "dead"
        elif incident.kind == "sick":
            kind = "sick"
        for entry in snapshot.supervised.values():
            if node.name in entry.nodes:
                yield NotifySupervisor(
                    entry.job, node.name, kind, incident.action, incident.reason, incident.id
                )
    yield from _suspected(snapshot, diagnoses)
    yield from _down_without_us(snapshot, diagnoses)


def _suspected(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis]
) -> Iterator[NotifySupervisor]:
    for entry in snapshot.supervised.values():
        for name in entry.nodes:
            diagnosis, agent = diagnoses.get(name), snapshot.agents.get(name)
            if diagnosis is not None and diagnosis.kind == "suspect" and agent is not None:
                yield NotifySupervisor(
                    entry.job, name, "suspect", "", diagnosis.reason, 0, agent.heard_at
                )


def _down_without_us(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis]
) -> Iterator[NotifySupervisor]:
    """Tell of nodes that are DOWN without an open incident.

    A step that lives on does not hear of it once the node has left the job.
    """
    for entry in snapshot.supervised.values():
        for name in entry.nodes:
            node, diagnosis = snapshot.nodes.get(name), diagnoses.get(name)
            if node is None or diagnosis is None or name in snapshot.incidents:
                continue
            last = snapshot.at_rest.get(name)
            is_quarantined = last is not None and last.state is NodeState.QUARANTINED
            is_left = diagnosis.kind in ("held", "down") or is_quarantined
            if node.is_down and is_left:
                text = f"it is down; {diagnosis.reason}"
                yield NotifySupervisor(entry.job, name, "dead", "", text, 0)
