"""Decide, for faulty nodes: which are marked, which are too many at once, and which a person asked
for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slurm_resilience.config import Config
from slurm_resilience.controller.actions import MarkNode, OpenRequested, RaiseAlarm, ShrinkJob
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import Job, Node

AT_ONCE_SECONDS = 120.0
"""Faults found by us within this time count as one event for the ceiling."""


def marks(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> tuple[list[MarkNode], list[RaiseAlarm]]:
    """Return the nodes to mark now, and an alarm for those that a ceiling protects."""
    faulty = [
        diagnosis
        for diagnosis in diagnoses.values()
        if diagnosis.kind in ("dead", "sick") and _may_be_marked(snapshot, diagnosis)
    ]
    if not faulty:
        return [], []
    if config.recovery.mode == "none":
        return [], [
            RaiseAlarm(f"none-{d.node}-{d.kind}", f"{d.reason}; recovery.mode is none", d.node)
            for d in faulty
        ]
    ceiling = ceiling_of(snapshot, config)
    marked_before = _marked_lately(snapshot)
    decided: list[MarkNode] = []
    alarms: list[RaiseAlarm] = []
    # Nodes that Slurm has had DOWN for long come last: they must not keep a node that dies now from
    # being marked.
    for already_down in (False, True):
        group = [d for d in faulty if snapshot.nodes[d.node].is_down is already_down]
        before = marked_before + len(decided)
        if len(group) + before <= ceiling:
            dying = frozenset(d.node for d in group if d.kind == "dead")
            decided += [_mark(snapshot, snapshot.nodes[d.node], d, dying) for d in group]
            continue
        names = ",".join(sorted(d.node for d in group))
        text = (
            f"{len(group)} nodes found faulty within {AT_ONCE_SECONDS:.0f} s ({names}), {before} "
            f"marked before; more than {ceiling} at once looks like our fault or the network's: "
            "none is marked"
        )
        alarms.append(RaiseAlarm(f"blast-radius-{names}", text))
    return decided, alarms


def ceiling_of(snapshot: ClusterSnapshot, config: Config) -> int:
    """Return the number of nodes that sresctld may find faulty at once."""
    share = int(len(snapshot.nodes) * config.detect.max_faulty_percent / 100)
    return max(config.detect.max_faulty_nodes, share)


def _marked_lately(snapshot: ClusterSnapshot) -> int:
    return sum(
        incident.kind in ("dead", "sick")
        and incident.state.is_marked
        and snapshot.now - incident.times.opened < AT_ONCE_SECONDS
        for incident in snapshot.incidents.values()
    )


def _may_be_marked(snapshot: ClusterSnapshot, diagnosis: NodeDiagnosis) -> bool:
    incident = snapshot.incidents.get(diagnosis.node)
    node = snapshot.nodes[diagnosis.node]
    if incident is None:
        # A node that was left to a person stays so; if it dies, its jobs are freed all the same.
        is_left = node.name in snapshot.at_rest
        return not is_left or (diagnosis.kind == "dead" and node.has_work and not node.is_down)
    if incident.state is NodeState.SUSPECT:
        return True
    # A node that died while its jobs were still ending. During its replacement silence is normal.
    return diagnosis.kind == "dead" and incident.state.waits_for_repair and node.has_work


def _mark(
    snapshot: ClusterSnapshot, node: Node, diagnosis: NodeDiagnosis, dying: frozenset[str]
) -> MarkNode:
    # Without an action its present reason stays, and no incident is opened.
    action = "" if node.name in snapshot.at_rest else diagnosis.action
    if diagnosis.kind == "sick":
        return MarkNode(node.name, "sick", "fail", action, diagnosis.reason)
    shrink: list[ShrinkJob] = []
    requeued: list[int] = []
    for job in _supervised_on(snapshot, node.name):
        # All that die together in one change: some Slurms allow no second one.
        keep = tuple(name for name in job.nodes if name not in dying)
        survives = keep and not (job.is_batch and job.batch_host in dying)
        if survives and can_shrink(snapshot, job, node.name):
            shrink.append(ShrinkJob(job.id, keep))
        elif job.is_batch and job.requeue:
            requeued.append(job.id)
    return MarkNode(
        node.name, "dead", "down", action, diagnosis.reason, tuple(shrink), tuple(requeued)
    )


def can_shrink(snapshot: ClusterSnapshot, job: Job, node: str) -> bool:
    """Tell whether this node may be swapped for another inside the job.

    Not with GRES anywhere (Slurm cannot grow such a job, and leaves the helper in COMPLETING for
    ever), not when it runs the batch script, and not the only node.
    """
    has_gres = bool(job.gres) or any(
        snapshot.nodes[name].gres for name in job.nodes if name in snapshot.nodes
    )
    return (
        snapshot.site.permits_expansion
        and not has_gres
        and len(job.nodes) >= 2
        and not (job.is_batch and job.batch_host == node)
    )


def _supervised_on(snapshot: ClusterSnapshot, node: str) -> list[Job]:
    return [
        job
        for job in snapshot.jobs.values()
        if job.id in snapshot.supervised and node in job.nodes and job.state == "RUNNING"
    ]


def requests(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> Iterator[OpenRequested | RaiseAlarm]:
    """Open an incident for each node that a person asked to have replaced or rebooted."""
    for diagnosis in diagnoses.values():
        if diagnosis.kind != "requested" or diagnosis.node in snapshot.incidents:
            continue
        node = snapshot.nodes[diagnosis.node]
        last = snapshot.at_rest.get(node.name)
        if (
            last is not None
            and last.state is NodeState.QUARANTINED
            and last.reason_at == node.reason_at
        ):
            continue  # the same request, tried and given up: a person's turn
        if config.recovery.mode == "none":
            text = f"{diagnosis.reason}; recovery.mode is none: nothing is done"
            yield RaiseAlarm(f"none-{node.name}-{node.reason_at}", text, node.name)
            continue
        yield OpenRequested(node.name, diagnosis.action, diagnosis.reason)
