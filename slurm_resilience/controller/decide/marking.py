"""Decide, for faulty nodes: which are marked, which are too many at once, and which a person asked
for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import inf
from typing import NamedTuple

from slurm_resilience.config import Config, RecoveryMode
from slurm_resilience.controller.actions import (
    MarkNode,
    OpenCameBack,
    OpenRequested,
    ProbeNode,
    RaiseAlarm,
    ShrinkJob,
)
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide.breaker import SHOWN_NODES
from slurm_resilience.controller.decide.escalation import escalated
from slurm_resilience.controller.decide.jobs import runs_again
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import (
    NOT_RESPONDING,
    REBOOTED,
    NodeDiagnosis,
    current_reason,
    is_out_of_service,
    is_speaking,
)
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import Job, Node

FRESH_SECONDS = 5.0
"""A node that Slurm has in service is set DOWN only by a probe that is no older than this when
Slurm is asked for all nodes."""
FEW_NODES = 8
"""So many can be marked before supervised jobs are moved, without delaying the move."""


_SAYS: Mapping[RecoveryMode, str] = {
    "none": "recovery.mode is none",
    "observe": "recovery.mode is observe: nothing is done, see `sres review`",
}


class Marking(NamedTuple):
    """The marks of one cycle, and what is withheld."""

    marks: tuple[MarkNode, ...] = ()
    alarms: tuple[RaiseAlarm, ...] = ()
    left: frozenset[str] = frozenset()
    """Nodes that are dead, and not marked because that would end jobs which no supervisor keeps
    alive. Supervised jobs must leave them."""
    looks: tuple[ProbeNode, ...] = ()
    """Nodes that would be marked, and whose last probe is too old for that."""


def marks(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> Marking:
    """Return the nodes to mark now, and an alarm for those that are withheld."""
    by_mode = _faulty_by_mode(snapshot, diagnoses, config)
    marking = _chosen(snapshot, config, by_mode["automatic"])
    alone = [
        RaiseAlarm(f"{mode}-{d.node}-{d.kind}", f"{d.reason}; {_SAYS[mode]}", d.node)
        for mode in ("none", "observe")
        for d in by_mode[mode]
    ]
    return marking._replace(alarms=(*marking.alarms, *alone))


def would_mark(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> Marking:
    """Return the marks that nodes with the mode `observe` would get now."""
    return _chosen(snapshot, config, _faulty_by_mode(snapshot, diagnoses, config)["observe"])


def _faulty_by_mode(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> dict[RecoveryMode, list[NodeDiagnosis]]:
    faulty: dict[RecoveryMode, list[NodeDiagnosis]] = {"none": [], "observe": [], "automatic": []}
    for diagnosis in notable(diagnoses).values():
        if diagnosis.kind in ("dead", "sick") and _may_be_marked(snapshot, diagnosis):
            by_now = escalated(snapshot, config, diagnosis)
            faulty[mode_of(snapshot, config, diagnosis.node)].append(by_now)
    return faulty


def mode_of(snapshot: ClusterSnapshot, config: Config, name: str) -> RecoveryMode:
    """Return the mode of a node."""
    node = snapshot.nodes.get(name)
    return config.recovery.mode_of(name, node.partitions if node is not None else ())


def _chosen(snapshot: ClusterSnapshot, config: Config, faulty: list[NodeDiagnosis]) -> Marking:
    """Choose which of these are marked now."""
    if not faulty:
        return Marking()
    jobs_on = _jobs_on(snapshot, {d.node for d in faulty})
    alarms: list[RaiseAlarm] = []
    waiting, moves, others = list[NodeDiagnosis](), list[NodeDiagnosis](), list[NodeDiagnosis]()
    long_down, looks = list[NodeDiagnosis](), list[NodeDiagnosis]()
    for diagnosis in faulty:
        occupants = jobs_on[diagnosis.node]
        if diagnosis.kind == "dead" and _must_wait(snapshot, config, diagnosis, occupants):
            waiting.append(diagnosis)
        elif diagnosis.kind == "dead" and _is_a_move(snapshot, diagnosis, occupants):
            # Part of moving supervised jobs off a node that is proven dead: nothing else suffers.
            (looks if _is_outdated(snapshot, diagnosis) else moves).append(diagnosis)
        elif snapshot.nodes[diagnosis.node].is_down and not _is_counted(snapshot, diagnosis.node):
            long_down.append(diagnosis)
        else:
            others.append(diagnosis)
    if snapshot.memory.breaker.is_tripped:
        empty = [d for d in others if d.kind == "dead" and not jobs_on[d.node]]
        empty = [d for d in empty if not snapshot.nodes[d.node].is_down]
        dead = {d.node for d in faulty if d.kind == "dead"}
        is_needed = bool(moves) or _is_recovering(snapshot, dead)
        # Else Slurm would offer them to the jobs that move. It ends no job, and a node that lives
        # again is given back. Few of them go first, so that none is offered meanwhile.
        others = empty if is_needed else []
        moves, others = (others, moves) if len(others) <= FEW_NODES else (moves, others)
    if long_down:
        allowed, withheld = _of_long_down(snapshot, config, long_down)
        others += allowed
        alarms += withheld
    if waiting:
        alarms.append(_about_waiting(snapshot, config, waiting))
    looks += [d for d in others if _is_outdated(snapshot, d)]
    chosen = [d for d in (*moves, *others) if d not in looks]
    dying = frozenset(d.node for d in chosen if d.kind == "dead")
    return Marking(
        tuple(_mark(snapshot, snapshot.nodes[d.node], d, dying) for d in chosen),
        tuple(alarms),
        frozenset(d.node for d in waiting),
        tuple(ProbeNode(d.node, is_urgent=True) for d in looks),
    )


def _is_outdated(snapshot: ClusterSnapshot, diagnosis: NodeDiagnosis) -> bool:
    """Tell whether a node that is to go DOWN may live again: nothing was heard of it lately.

    A node that was found dead is not probed any more. Minutes later, when the breaker closes or
    Slurm has put it back into service, that says nothing.
    """
    age = snapshot.age_of_last_probe(diagnosis.node)
    goes_down = diagnosis.kind == "dead" and not snapshot.nodes[diagnosis.node].is_down
    return goes_down and age > FRESH_SECONDS


def _jobs_on(snapshot: ClusterSnapshot, names: Collection[str]) -> dict[str, list[Job]]:
    """Return the jobs that hold each of these nodes, those that are ending included."""
    found: dict[str, list[Job]] = {name: [] for name in names}
    for job in snapshot.jobs.values():
        if job.state != "PENDING":
            for name in job.nodes:
                if name in found:
                    found[name].append(job)
    return found


def _must_wait(
    snapshot: ClusterSnapshot, config: Config, diagnosis: NodeDiagnosis, occupants: Collection[Job]
) -> bool:
    """Tell whether DOWN would end a job that no supervisor keeps alive, sooner than Slurm would."""
    node = snapshot.nodes[diagnosis.node]
    if node.is_down:
        return False
    is_unlisted = node.base in ("ALLOCATED", "MIXED") and not occupants
    others = any(_would_end(snapshot, job) for job in occupants)
    # Slurm may reach the node where sresctld does not, and then never sets it DOWN.
    own = config.detect.dead_after_unsupervised
    return (is_unlisted or others) and (not own or diagnosis.silence < own)


def _would_end(snapshot: ClusterSnapshot, job: Job) -> bool:
    """Tell whether the job runs, and no supervisor keeps it alive."""
    return job.state != "COMPLETING" and not _is_supervised(snapshot, job)


def _is_supervised(snapshot: ClusterSnapshot, job: Job) -> bool:
    """Tell whether a supervisor keeps the job alive, or the one beside which it holds nodes."""
    main = job.companion_of[0] if job.companion_of is not None else job.id
    return main in snapshot.supervised


def _is_a_move(
    snapshot: ClusterSnapshot, diagnosis: NodeDiagnosis, occupants: Collection[Job]
) -> bool:
    """Tell whether supervised jobs, and no others, are to be moved off a dead node.

    A job that was requeued already does not begin again before all its dead nodes are DOWN.
    """
    is_needed = any(_is_supervised(snapshot, job) for job in occupants)
    is_harmless = not any(_would_end(snapshot, job) for job in occupants)
    return is_needed and is_harmless and not snapshot.nodes[diagnosis.node].is_down


def _is_recovering(snapshot: ClusterSnapshot, dead: Collection[str]) -> bool:
    """Tell whether a supervised job looks for nodes in exchange, or waits for its next run.

    One that ends by itself, that waits in the queue like any other, or that its owner made smaller
    does not.
    """
    for entry in snapshot.supervised.values():
        job = snapshot.jobs.get(entry.job)
        if job is None:
            continue
        requeue = snapshot.pending_requeues.get(job.id)
        if requeue is not None and not runs_again(job, requeue):
            # Any user may ask for a requeue: it must be one that follows from a node.
            had = {*job.nodes, *entry.nodes}
            if not requeue.wanted or any(_is_faulty(snapshot, dead, name) for name in had):
                return True
        is_short = bool(entry.lost) and len(job.all_nodes) < entry.size
        if job.state == "RUNNING" and is_short and not job.is_stranded:
            return True
        held = {*job.all_nodes, *entry.lost}
        may_run_again = job.state == "COMPLETING" and job.is_batch and job.requeue
        if may_run_again and any(_is_gone(snapshot, dead, name) for name in held):
            return True
    return False


def _is_faulty(snapshot: ClusterSnapshot, dead: Collection[str], name: str) -> bool:
    """Tell whether a job has to leave a node, or has left it."""
    node = snapshot.nodes.get(name)
    return name in dead or node is None or is_out_of_service(node)


def _is_gone(snapshot: ClusterSnapshot, dead: Collection[str], name: str) -> bool:
    node = snapshot.nodes.get(name)
    return name in dead or node is None or node.is_down


def _is_counted(snapshot: ClusterSnapshot, name: str) -> bool:
    """Tell whether the breaker knows the node's fault: it saw the node die."""
    fault = snapshot.memory.faults.get(name)
    return name in snapshot.incidents or (fault is not None and not fault.is_over)


def _of_long_down(
    snapshot: ClusterSnapshot, config: Config, group: list[NodeDiagnosis]
) -> tuple[list[NodeDiagnosis], list[RaiseAlarm]]:
    """Let a few nodes be marked that Slurm had DOWN before we saw them, or none of many.

    They are kept apart: a rack that was off for weeks must not keep a node that dies now from being
    marked.
    """
    limit = config.breaker.nodes_at_once
    # Those that are back in service already count as well.
    lately = {
        name for at, name in snapshot.memory.deaths if snapshot.now - at < config.breaker.window
    }
    if snapshot.memory.breaker.is_tripped or len(lately | {d.node for d in group}) > limit:
        names = sorted(d.node for d in group)
        shown = ",".join(names[:SHOWN_NODES])
        text = (
            f"{len(names)} nodes that Slurm has DOWN are dead ({shown}"
            f"{', …' if len(names) > SHOWN_NODES else ''}); that is more than {limit} at once, or "
            "the breaker is tripped: none of them is marked"
        )
        return [], [RaiseAlarm("long-down", text)]
    return group, []


def _about_waiting(
    snapshot: ClusterSnapshot, config: Config, waiting: list[NodeDiagnosis]
) -> RaiseAlarm:
    names = sorted(d.node for d in waiting)
    shown = ",".join(names[:SHOWN_NODES])
    own, slurms = config.detect.dead_after_unsupervised, snapshot.site.slurmd_timeout
    if own:
        end = f"they are marked after {own:.0f} s of silence"
    elif slurms < inf:
        end = f"they are marked when Slurm sets them DOWN (SlurmdTimeout={slurms:.0f})"
    else:
        end = "Slurm never would (SlurmdTimeout=0)"
    text = (
        f"{len(names)} dead nodes have jobs without auto-resume ({shown}"
        f"{', …' if len(names) > SHOWN_NODES else ''}), which end when the node is DOWN: {end}"
    )
    return RaiseAlarm("dead-with-jobs", text)


def _may_be_marked(snapshot: ClusterSnapshot, diagnosis: NodeDiagnosis) -> bool:
    incident = snapshot.incidents.get(diagnosis.node)
    node = snapshot.nodes[diagnosis.node]
    if incident is None:
        # A node that was left to a person stays so; if it dies, its jobs are freed all the same.
        is_left = node.name in snapshot.at_rest
        return not is_left or (diagnosis.kind == "dead" and node.has_work and not node.is_down)
    if incident.state is NodeState.SUSPECT:
        return True
    if not is_out_of_service(node):
        return False  # a person put it back, which is an answer, and a job came to it at once
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
        if survives and (can_shrink(snapshot, job, node.name) or _has_spares(snapshot, job, keep)):
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
    # A listing may lack a node by chance: whether it has GRES is not known then.
    has_gres = has_gres or not snapshot.memory.missing.keys().isdisjoint(job.nodes)
    return (
        snapshot.site.permits_expansion
        and not has_gres
        and len(job.nodes) >= 2
        and not (job.is_batch and job.batch_host == node)
    )


def _has_spares(snapshot: ClusterSnapshot, job: Job, keep: Collection[str]) -> bool:
    """Tell whether the step finds enough nodes among those that the job keeps.

    Then the job never has to grow again, which Slurm refuses with GRES.
    """
    return 0 < snapshot.supervised[job.id].size <= len(keep)


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
    for diagnosis in notable(diagnoses).values():
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
        mode = mode_of(snapshot, config, node.name)
        if mode != "automatic":
            text = f"{diagnosis.reason}; recovery.mode is {mode}: nothing is done"
            yield RaiseAlarm(f"{mode}-{node.name}-{node.reason_at}", text, node.name)
            continue
        is_same = last is not None and last.action == diagnosis.action
        if last is not None and is_same and last.mark_reason_at == node.reason_at != "":
            # Not a person's: it is the reason that we set, by its time.
            text = f"{last.reason}; still marked"
            yield OpenRequested(node.name, diagnosis.action, text, last.kind, last.mark_reason_at)
            continue
        yield OpenRequested(node.name, diagnosis.action, diagnosis.reason)


def came_back(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> Iterator[OpenCameBack | RaiseAlarm]:
    """Find nodes that live again, and that Slurm set DOWN itself because they did not answer.

    sresctld saw them die and did not mark them: the breaker was tripped, or their jobs had no
    supervisor. Where Slurm does not put such nodes back (ReturnToService=0), no one else would.
    """
    if snapshot.site.returns_by_itself:
        return
    for name, fault in snapshot.memory.faults.items():
        node, diagnosis = snapshot.nodes.get(name), diagnoses.get(name)
        known = name in snapshot.incidents or name in snapshot.at_rest
        if node is None or known or fault.cause or mode_of(snapshot, config, name) != "automatic":
            continue
        is_slurms = node.is_down and current_reason(node).strip(" :") in (NOT_RESPONDING, REBOOTED)
        is_slurms = is_slurms and node.reason_by in snapshot.site.slurm_users
        is_well = diagnosis is not None and diagnosis.kind == "down"
        if not (is_slurms and is_well and is_speaking(snapshot, config.detect, name)):
            continue
        text = "it lives again, and Slurm alone had set it DOWN"
        flaps = snapshot.memory.flaps.get(name, 0)
        if flaps >= config.recovery.max_flaps and not snapshot.memory.breaker.is_tripped:
            minutes = config.recovery.flap_window / 60
            text = (
                f"{text}; it came and went {flaps + 1} times within {minutes:.0f} min: look at it"
            )
            yield RaiseAlarm(f"flaps-{name}", text, name)
        else:
            yield OpenCameBack(name, text)
