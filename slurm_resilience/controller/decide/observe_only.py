"""Decide, for nodes with the mode `observe`: what would be done, and what was done instead. Pure.

The rules are those of every other node (`marking`, `replacing`); only their outcome is written down
and not carried out. `sres review` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.controller.actions import (
    MarkNode,
    NoteObserved,
    ProbeNode,
    StartReplacement,
    Transition,
)
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide import replacing
from slurm_resilience.controller.decide.intake import is_removed
from slurm_resilience.controller.decide.marking import Marking
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.diagnose import NodeDiagnosis, is_a_persons
from slurm_resilience.controller.journal.records import (
    WOULD_REPLACE,
    Incident,
    IncidentTimes,
    NodeSight,
    ObservedFault,
    Remark,
)
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import ACTIONS, REPLACE, RESET, Node

WOULD_MARK, WOULD_RETURN, WOULD_LEAVE = "would-mark", "would-return", "would-leave"
_LAST = (WOULD_REPLACE, WOULD_RETURN, WOULD_LEAVE)
"""After one of these the node's further way would have been another one: it is not guessed."""
MAX_SEEN = 20
"""Changes by people that are kept of one fault."""


def observe_only(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    config: Config,
    would: Marking,
) -> Iterator[NoteObserved | ProbeNode]:
    """Follow the faults of nodes that are only observed.

    Args:
        snapshot: the observation.
        diagnoses: of the snapshot.
        config: the modes, and the limits that hold for every node.
        would: the marks that these nodes would get in this cycle.
    """
    memory = snapshot.memory
    counted = msgspec.structs.replace(memory, starts=memory.would_starts)
    as_if = msgspec.structs.replace(snapshot, memory=counted)
    ceilings = replacing.Ceilings(as_if, config, ())
    marks = {mark.node: mark for mark in would.marks}
    for fault in memory.observed.values():
        yield from _go_on(as_if, diagnoses, config, fault, marks.get(fault.node), ceilings)
    for name, diagnosis in notable(diagnoses).items():
        if name not in memory.observed and _begins(snapshot, config, diagnosis):
            yield _new(snapshot, diagnosis, marks.get(name))


def _begins(snapshot: ClusterSnapshot, config: Config, diagnosis: NodeDiagnosis) -> bool:
    """Tell whether an incident of this node would be opened."""
    if diagnosis.kind not in ("dead", "sick", "requested") or not diagnosis.action:
        return False
    name = diagnosis.node
    mode = config.recovery.mode_of(name, snapshot.nodes[name].partitions)
    return mode == "observe" and name not in snapshot.incidents and name not in snapshot.at_rest


def _new(
    snapshot: ClusterSnapshot, diagnosis: NodeDiagnosis, mark: MarkNode | None
) -> NoteObserved:
    node, kind = snapshot.nodes[diagnosis.node], diagnosis.kind
    found = Remark(snapshot.now, "observed", f"{kind}: {diagnosis.reason}")
    would = tuple(_mark(snapshot, kind, diagnosis.reason, mark))
    fault = ObservedFault(
        0,
        node.name,
        kind,
        mark.action if mark is not None else diagnosis.action,
        diagnosis.reason,
        snapshot.now,
        _sight(snapshot, node),
        would,
    )
    return NoteObserved(fault, (found, *would))


def _go_on(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    config: Config,
    fault: ObservedFault,
    mark: MarkNode | None,
    ceilings: replacing.Ceilings,
) -> Iterator[NoteObserved | ProbeNode]:
    """Find the news of a fault that is known."""
    node, diagnosis = snapshot.nodes.get(fault.node), diagnoses.get(fault.node)
    if node is None or diagnosis is None:
        if is_removed(snapshot, fault.node):
            yield _ended(fault, snapshot.now, "seen-removed", "Slurm does not know it any more")
        return
    if config.recovery.mode_of(node.name, node.partitions) != "observe":
        yield _ended(fault, snapshot.now, "seen-mode", "its recovery.mode is not observe any more")
        return
    would: list[Remark] = []
    if not fault.would_at(WOULD_MARK):
        would += _mark(snapshot, fault.kind, diagnosis.reason, mark)
    elif diagnosis.kind != "held" and not any(fault.would_at(kind) for kind in _LAST):
        for step in _next(snapshot, config, fault, node, ceilings):
            if isinstance(step, ProbeNode):
                yield step
            else:
                would.append(step)
    sight = _sight(snapshot, node)
    seen = list(_changes(snapshot, fault.sight, sight, node))[: MAX_SEEN - len(fault.then)]
    ended = 0.0
    if _is_well(snapshot, node, diagnosis):
        ended = snapshot.now
        text = f"in service, and nothing is found on it, {ended - fault.began:.0f} s after"
        seen.append(Remark(ended, "seen-well", text))
    if would or seen or sight != fault.sight:
        changed = msgspec.structs.replace(
            fault,
            sight=sight,
            would=(*fault.would, *would),
            then=(*fault.then, *seen),
            ended=ended,
        )
        yield NoteObserved(changed, (*would, *seen))


def _ended(fault: ObservedFault, now: float, kind: str, text: str) -> NoteObserved:
    last = Remark(now, kind, text)
    changed = msgspec.structs.replace(fault, then=(*fault.then, last), ended=now)
    return NoteObserved(changed, (last,))


def _mark(
    snapshot: ClusterSnapshot, kind: str, reason: str, mark: MarkNode | None
) -> Iterator[Remark]:
    if mark is not None:
        jobs = [f"job {change.job} without it" for change in mark.shrink]
        jobs += [f"job {number} requeued" for number in mark.requeued]
        more = f"; {', '.join(jobs)}" if jobs else ""
        text = f"would set {mark.state}, {mark.action}: {mark.reason}{more}"
        yield Remark(snapshot.now, WOULD_MARK, text)
    elif kind == "requested":
        yield Remark(snapshot.now, WOULD_MARK, f"would take the request: {reason}")


def _next(
    snapshot: ClusterSnapshot,
    config: Config,
    fault: ObservedFault,
    node: Node,
    ceilings: replacing.Ceilings,
) -> Iterator[Remark | ProbeNode]:
    """Find the next act on a node that would have been marked."""
    if fault.kind != "dead" and node.has_work:
        return  # its jobs would end first; those of a dead node would have ended with the mark
    if not snapshot.site.can_repair(fault.action):
        return
    times = IncidentTimes(fault.began, marked=fault.would_at(WOULD_MARK))
    as_if = Incident(0, fault.node, fault.kind, fault.action, fault.reason, NodeState.EMPTY, times)
    for action in replacing.start_or_return(snapshot, config, as_if, node):
        match action:
            case ProbeNode():
                yield ProbeNode(action.node)
            case StartReplacement() if ceilings.take(as_if):
                verb = ACTIONS.get(fault.action, ACTIONS[REPLACE])[0]
                text = f"would start the replacement program: {verb} {node.name}"
                if fault.action == RESET:
                    text = f"would have its sresd reset the GPUs of {node.name}"
                yield Remark(snapshot.now, WOULD_REPLACE, text)
            case Transition(event=NodeEvent.CAME_BACK):
                text = f"would look at it and give it back: {action.reason}"
                yield Remark(snapshot.now, WOULD_RETURN, text)
            case Transition(event=NodeEvent.GAVE_UP):
                text = f"would leave it to a person: {action.reason}"
                yield Remark(snapshot.now, WOULD_LEAVE, text)
            case _:
                pass


def _sight(snapshot: ClusterSnapshot, node: Node) -> NodeSight:
    agent = snapshot.agents.get(node.name)
    boot_id, instance = (agent.boot_id, agent.instance) if agent else ("", "")
    return NodeSight(node.is_available, node.reason, node.reason_by, boot_id, instance)


def _changes(
    snapshot: ClusterSnapshot, before: NodeSight, sight: NodeSight, node: Node
) -> Iterator[Remark]:
    """Find what people, or Slurm, did to the node since it was seen last."""
    now = snapshot.now
    if before.instance and sight.instance not in ("", before.instance):
        yield Remark(now, "seen-machine", f"another machine answers: {sight.instance}")
    elif before.boot_id and sight.boot_id not in ("", before.boot_id):
        yield Remark(now, "seen-boot", "it was booted again")
    if sight.reason and (sight.reason, sight.reason_by) != (before.reason, before.reason_by):
        is_persons = is_a_persons(node, snapshot.site.slurm_users)
        kind = "seen-set-aside" if is_persons else "seen-slurm"
        by = (node.reason_by or "an unknown user") if is_persons else "Slurm"
        yield Remark(now, kind, f"{by} set {node.state}: {node.reason}")
    if sight.is_available and not before.is_available:
        yield Remark(now, "seen-in-service", f"it was put back into service: {node.state}")


def _is_well(snapshot: ClusterSnapshot, node: Node, diagnosis: NodeDiagnosis) -> bool:
    """Tell whether the node is in service, and its sresd has said that nothing is wrong."""
    if not node.is_available or diagnosis.kind not in ("healthy", "unknown"):
        return False
    agent = snapshot.agents.get(node.name)
    if agent is None or agent.was_stopped:
        return node.is_responding
    return diagnosis.kind == "healthy" and agent.is_heard and agent.reported
