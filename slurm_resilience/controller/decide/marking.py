"""Decide: what is to be done, and why. Pure: world and verdicts in, actions and a sentence out."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.controller.actions import (
    Action,
    EndPendingRequeue,
    MarkNode,
    NotifySupervisor,
    OpenRequested,
    ProbeNode,
    RaiseAlarm,
    RaisePriority,
    RequeueJob,
    ReturnNode,
    ShrinkJob,
    StartPendingJob,
    StartReplacement,
    Transition,
)
from slurm_resilience.controller.decide.jobs import preferences, requeues, tells
from slurm_resilience.controller.decide.node_lifecycle import progress
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import Job, Node

_TAKEN = re.compile(r":[1-9]\d*(?:\(|,|$)")
"""A count above zero in GresUsed, e.g. ``gpu:h100:2(IDX:0-1)``."""
AT_ONCE = 120.0
"""Seconds: faults found by us within this time count as one event for the blast radius."""


class Decision(msgspec.Struct, frozen=True):
    actions: tuple[Action, ...]
    sentence: str
    """What this cycle saw and does, for the log."""


def decide(world: ClusterSnapshot, verdicts: dict[str, NodeDiagnosis], config: Config) -> Decision:
    """Actions for one cycle.

    Args:
        world: the observation.
        verdicts: `diagnose`'s answer to it.
        config: limits (`[detect]`, `[recovery]`, `[replace]`).
    """
    watching = [ProbeNode(v.node) for v in verdicts.values() if v.probe]
    watching += [
        ProbeNode(i.node) for i in world.incidents.values() if i.state in ("returning", "resumed")
    ]
    if world.paused:
        return Decision(tuple(watching), f"paused ({world.paused}): nothing is done")
    actions: list[Action] = [*watching]
    marks, withheld = _marks(world, verdicts, config)
    actions += marks
    actions += withheld
    actions += _adoptions(world, verdicts, config)
    for incident in world.incidents.values():
        actions += progress(world, config, incident, verdicts.get(incident.node))
    actions += tells(world, verdicts)
    actions += requeues(world)
    actions += preferences(world)
    actions += _near_misses(world)
    actions += _leaks(world)
    return Decision(tuple(actions), _sentence(world, verdicts, actions))


def _marks(
    world: ClusterSnapshot, verdicts: dict[str, NodeDiagnosis], config: Config
) -> tuple[list[MarkNode], list[RaiseAlarm]]:
    found = [
        v for v in verdicts.values() if v.kind in ("dead", "sick") and _may_be_marked(world, v)
    ]
    if not found:
        return [], []
    if config.recovery.mode == "none":
        return [], [
            RaiseAlarm(f"none-{v.node}-{v.kind}", f"{v.reason}; recovery.mode is none", v.node)
            for v in found
        ]
    recent = [
        i
        for i in world.incidents.values()
        if i.kind in ("dead", "sick") and world.now - i.opened < AT_ONCE and i.state != "open"
    ]
    limit = max(
        config.detect.max_faulty_nodes,
        int(len(world.nodes) * config.detect.max_faulty_percent / 100),
    )
    marks: list[MarkNode] = []
    alarms: list[RaiseAlarm] = []
    # Nodes that Slurm has had DOWN for long come last: they must not keep a node that dies now from
    # being marked.
    for already_down in (False, True):
        group = [v for v in found if world.nodes[v.node].is_down is already_down]
        before = len(recent) + len(marks)
        if len(group) + before <= limit:
            dying = frozenset(v.node for v in group if v.kind == "dead")
            marks += [_mark(world, world.nodes[v.node], v, dying) for v in group]
            continue
        names = ",".join(sorted(v.node for v in group))
        text = (
            f"{len(group)} nodes found faulty within {AT_ONCE:.0f} s ({names}), {before} "
            f"marked before; more than {limit} at once looks like our fault or the network's: "
            "none is marked"
        )
        alarms.append(RaiseAlarm(f"blast-radius-{names}", text))
    return marks, alarms


def _may_be_marked(world: ClusterSnapshot, verdict: NodeDiagnosis) -> bool:
    incident = world.incidents.get(verdict.node)
    if incident is None or incident.state == "open":
        return True
    # A node that died while its jobs were still ending. During its replacement silence is normal.
    node = world.nodes[verdict.node]
    return verdict.kind == "dead" and incident.state == "marked" and node.has_work


def _mark(
    world: ClusterSnapshot, node: Node, verdict: NodeDiagnosis, dying: frozenset[str]
) -> MarkNode:
    if verdict.kind == "sick":
        return MarkNode(node.name, "sick", "fail", verdict.action, verdict.reason)
    take_out: list[ShrinkJob] = []
    chase: list[int] = []
    for job in _supervised_on(world, node.name):
        # All that die together in one change: some Slurms allow no second one.
        keep = tuple(name for name in job.nodes if name not in dying)
        stays = keep and not (job.is_batch and job.batch_host in dying)
        if stays and can_take_out(world, job, node.name):
            take_out.append(ShrinkJob(job.id, keep))
        elif job.is_batch and job.requeue:
            chase.append(job.id)
    return MarkNode(
        node.name,
        "dead",
        "down",
        verdict.action,
        verdict.reason,
        tuple(take_out),
        tuple(chase),
    )


def can_take_out(world: ClusterSnapshot, job: Job, node: str) -> bool:
    """May this node be swapped for another inside the job? Not with GRES anywhere (Slurm cannot
    grow such a job, and leaves the helper in COMPLETING for ever), not when it runs the batch
    script, and not the only node."""
    has_gres = bool(job.gres) or any(
        world.nodes[name].gres for name in job.nodes if name in world.nodes
    )
    return (
        world.permits_expansion
        and not has_gres
        and len(job.nodes) >= 2
        and not (job.is_batch and job.batch_host == node)
    )


def _supervised_on(world: ClusterSnapshot, node: str) -> list[Job]:
    return [
        job
        for job in world.jobs.values()
        if job.id in world.supervised and node in job.nodes and job.state == "RUNNING"
    ]


def _adoptions(
    world: ClusterSnapshot, verdicts: dict[str, NodeDiagnosis], config: Config
) -> Iterator[OpenRequested | RaiseAlarm]:
    for verdict in verdicts.values():
        if verdict.kind != "requested" or verdict.node in world.incidents:
            continue
        node = world.nodes[verdict.node]
        given_up = world.gave_up.get(node.name)
        if given_up is not None and given_up.reason_at == node.reason_at:
            continue  # the same request, tried and given up: a person's turn
        if config.recovery.mode == "none":
            text = f"{verdict.reason}; recovery.mode is none: nothing is done"
            yield RaiseAlarm(f"none-{node.name}-{node.reason_at}", text, node.name)
            continue
        yield OpenRequested(node.name, verdict.action, verdict.reason)


def _near_misses(world: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    for node in world.nodes.values():
        # Slurm 24.11 leaves the reason of a node that was resumed.
        if node.near_miss and not node.is_available:
            text = (
                f"reason {node.reason!r} (set by {node.reason_by or 'somebody'}) is not "
                f"{node.near_miss!r}: nothing is done; write exactly {node.near_miss}"
            )
            yield RaiseAlarm(f"near-{node.name}-{node.reason_at}-{node.reason}", text, node.name)


def _leaks(world: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    """Slurm 22.05 may leave GPUs taken on a node that runs nothing (a node that went down while a
    requeued job was COMPLETING): jobs then wait for them for ever."""
    for node in world.nodes.values():
        if node.base == "IDLE" and not node.has_work and _TAKEN.search(node.gres_used):
            text = (
                f"idle, but Slurm counts {node.gres_used} as used: jobs will wait for ever; "
                "`scontrol reconfigure` heals it"
            )
            yield RaiseAlarm(f"leak-{node.name}-{node.gres_used}", text, node.name)


def _sentence(
    world: ClusterSnapshot, verdicts: dict[str, NodeDiagnosis], actions: list[Action]
) -> str:
    parts = [f"{len(world.nodes)} nodes"]
    bad = [v for v in verdicts.values() if v.kind in ("dead", "sick", "suspect")]
    parts += [f"{v.node} {v.kind} ({v.reason})" for v in bad[:5]]
    if len(bad) > 5:
        parts.append(f"and {len(bad) - 5} more")
    parts += [f"{i.node} {i.state}" for i in list(world.incidents.values())[:10]]
    done = [
        _words(action)
        for action in actions
        if not isinstance(action, ProbeNode | NotifySupervisor | RaiseAlarm | RaisePriority)
    ]
    parts.append("; ".join(dict.fromkeys(done)) if done else "nothing to do")
    return ": ".join([parts[0], ", ".join(parts[1:])])


def _words(action: Action) -> str:
    match action:
        case MarkNode():
            return f"mark {action.node} {action.state} {action.action}".rstrip()
        case StartReplacement():
            return f"replace {action.node}"
        case ReturnNode():
            return f"resume {action.node}"
        case RequeueJob():
            return f"requeue job {action.job}"
        case StartPendingJob():
            return f"start job {action.job} now"
        case OpenRequested():
            return f"{action.action} of {action.node} was asked for"
        case Transition():
            return f"{action.node} {action.state} ({action.reason})"
        case EndPendingRequeue():
            return f"job {action.job} {action.reason}"
        case _:
            return type(action).__name__
