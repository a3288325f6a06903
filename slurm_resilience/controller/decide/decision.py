"""Decide: what is to be done, and why. Pure: a snapshot and diagnoses in, actions and a sentence
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.controller.actions import (
    Action,
    AskForGift,
    AskForPool,
    ClearLeftOver,
    ContinueReplacement,
    EndPendingRequeue,
    EndStrandedJob,
    KeepPendingRequeue,
    MarkNode,
    Note,
    NoteAnswered,
    NotifySupervisor,
    OpenCameBack,
    OpenRequested,
    ProbeNode,
    RaiseAlarm,
    RaisePriority,
    RenewLabels,
    RequeueJob,
    ReturnNode,
    StartPendingJob,
    StartReplacement,
    TakeLabelsOff,
    Transition,
)
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide import breaker
from slurm_resilience.controller.decide.hints import (
    black_holes,
    failing_sinks,
    leaked_gres,
    near_misses,
    no_room,
    not_begun,
    standby_alarms,
    unheard,
    unprobed,
    wrong_results,
)
from slurm_resilience.controller.decide.intake import take_in
from slurm_resilience.controller.decide.jobs import notifications, priorities, requeues
from slurm_resilience.controller.decide.kill_failed import left_overs
from slurm_resilience.controller.decide.labelling import outdated_labels, stale_labels
from slurm_resilience.controller.decide.marking import came_back, marks, requests, would_mark
from slurm_resilience.controller.decide.node_events import (
    answers_in_a_pause,
    answers_of_keepers,
    leave_rest,
    progress_of_all,
    stale_reasons,
)
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent
from slurm_resilience.controller.decide.observe_only import observe_only
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.spares.gift_plan import gifts, settle_gifts
from slurm_resilience.controller.spares.pool_plan import pools, settle
from slurm_resilience.controller.spares.spares_view import spare_alarms

_SHOWN_NODES, _SHOWN_INCIDENTS = 5, 10
"""The sentence names so many of each."""
_UNTOLD = (
    ProbeNode
    | NotifySupervisor
    | RaiseAlarm
    | RaisePriority
    | RenewLabels
    | TakeLabelsOff
    | KeepPendingRequeue
)
"""The sentence does not tell of these: they change nothing, or follow from what it tells."""


class Decision(msgspec.Struct, frozen=True):
    """The decisions of one cycle."""

    snapshot: ClusterSnapshot
    """The observation, with what was heard taken in."""
    notes: tuple[Note, ...]
    """For the journal; written first, also while paused and in a dry run."""
    actions: tuple[Action, ...]
    sentence: str
    """For the log: what this cycle saw and does."""
    left: frozenset[str] = frozenset()
    """Dead nodes that are not marked, and that supervised jobs must leave all the same."""


def decide(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis], config: Config
) -> Decision:
    """Decide the actions of one cycle.

    Args:
        snapshot: the observation.
        diagnoses: `diagnose`'s answer to it.
        config: limits (`[detect]`, `[recovery]`, `[replace]`).
    """
    snapshot, notes = take_in(snapshot)
    probes = [
        ProbeNode(diagnosis.node) for diagnosis in notable(diagnoses).values() if diagnosis.probe
    ]
    probes += [
        ProbeNode(incident.node)
        for incident in snapshot.incidents.values()
        if incident.state.is_coming_back and incident.node in snapshot.nodes
    ]
    answers = list(leave_rest(snapshot))
    released = {answer.node for answer in answers if answer.event is NodeEvent.RELEASED}
    keepers = list(answers_of_keepers(snapshot))
    released |= {note.node for note in keepers if isinstance(note, NoteAnswered)}
    in_pause = answers_in_a_pause(snapshot, config, diagnoses)
    # What a person has just put back into service is judged anew from the next cycle on.
    judged = diagnoses
    if released:
        judged = {name: found for name, found in diagnoses.items() if name not in released}
    review = breaker.review(snapshot, judged, config)
    moves, given = tuple(settle(snapshot)), tuple(settle_gifts(snapshot))
    notes = (*notes, *keepers, *in_pause, *review.notes, *stale_reasons(snapshot), *moves, *given)
    memory = msgspec.structs.replace(snapshot.memory, faults=review.faults, breaker=review.state)
    snapshot = msgspec.structs.replace(snapshot, memory=memory)
    if snapshot.paused:
        sentence = f"paused ({snapshot.paused}): nothing is done"
        return Decision(snapshot, notes, tuple(probes), sentence)
    at_rest = {name: last for name, last in snapshot.at_rest.items() if name not in released}
    snapshot = msgspec.structs.replace(snapshot, at_rest=at_rest)
    marking = marks(snapshot, judged, config)
    settled = {move.gift.job for move in given}
    # First of all: what a job has left, and is to have again, must be kept before it is free.
    spared = gifts(snapshot, judged, config, marking.marks, settled)
    actions: list[Action] = [*probes, *answers, *spared, *marking.marks, *marking.alarms]
    storm = breaker.alarm(review.state, review.faults)
    actions += [storm] if storm is not None and not _is_without_any(config) else []
    actions += requests(snapshot, diagnoses, config)
    actions += came_back(snapshot, judged, config)
    # Before a node returns: the job that lost it must be first in the queue by then.
    actions += priorities(snapshot)
    moved = frozenset(mark.node for mark in marking.marks if mark.action)
    actions += progress_of_all(snapshot, config, diagnoses, moved)
    actions += notifications(snapshot, diagnoses, marking.left)
    actions += requeues(snapshot)
    actions += near_misses(snapshot)
    actions += leaked_gres(snapshot)
    actions += wrong_results(snapshot)
    actions += black_holes(snapshot)
    actions += failing_sinks(snapshot)
    actions += no_room(snapshot)
    actions += not_begun(snapshot)
    actions += standby_alarms(snapshot)
    actions += spare_alarms(snapshot, config)
    actions += unheard(snapshot, config.detect)
    actions += unprobed(snapshot, diagnoses)
    actions += stale_labels(snapshot)
    actions += outdated_labels(snapshot)
    actions += left_overs(snapshot, config)
    actions += pools(snapshot, diagnoses, config, {move.partition for move in moves})
    would = would_mark(snapshot, judged, config)
    actions += (*marking.looks, *would.looks)
    for observed in observe_only(snapshot, judged, config, would):
        if isinstance(observed, ProbeNode):
            actions.append(observed)
        else:
            notes = (*notes, observed)
    # The next decision rests on these: a slow Slurm takes seconds for each act before them.
    actions.sort(key=lambda action: isinstance(action, ProbeNode) and action.is_urgent)
    sentence = _sentence(snapshot, diagnoses, actions)
    return Decision(snapshot, notes, tuple(actions), sentence, marking.left)


def _is_without_any(config: Config) -> bool:
    """Tell whether no node at all is recovered or observed."""
    recovery = config.recovery
    modes = (recovery.mode, *recovery.partitions.values(), *recovery.nodes.values())
    return set(modes) == {"none"}


def _sentence(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    actions: Sequence[Action],
) -> str:
    faulty = [d for d in notable(diagnoses).values() if d.kind in ("dead", "sick", "suspect")]
    parts = [f"{d.node} {d.kind} ({d.reason})" for d in faulty[:_SHOWN_NODES]]
    if len(faulty) > _SHOWN_NODES:
        parts.append(f"and {len(faulty) - _SHOWN_NODES} more")
    incidents = list(snapshot.incidents.values())[:_SHOWN_INCIDENTS]
    parts += [f"{incident.node} {incident.state}" for incident in incidents]
    changes = [_in_words(action) for action in actions if not isinstance(action, _UNTOLD)]
    parts.append("; ".join(dict.fromkeys(changes)) if changes else "nothing to do")
    return f"{len(snapshot.nodes)} nodes: {', '.join(parts)}"


def _in_words(action: Action) -> str:
    match action:
        case MarkNode():
            return f"mark {action.node} {action.state} {action.action}".rstrip()
        case StartReplacement():
            return f"replace {action.node}"
        case ContinueReplacement():
            return f"{action.node}: {action.what}"
        case ReturnNode():
            return f"resume {action.node}"
        case ClearLeftOver():
            return f"end what jobs left on {action.node}"
        case RequeueJob():
            return f"requeue job {action.job}"
        case EndStrandedJob():
            return f"end job {action.job}"
        case StartPendingJob():
            return f"start job {action.job} now"
        case OpenCameBack():
            return f"{action.node} {action.reason}"
        case OpenRequested():
            return f"{action.action} of {action.node} was asked for"
        case Transition():
            return f"{action.node} {action.event} ({action.reason})"
        case EndPendingRequeue():
            return f"job {action.job} {action.reason}"
        case AskForGift():
            return f"{action.event} gift for job {action.gift.job}: {','.join(action.gift.spares)}"
        case AskForPool():
            return f"{action.event} spares of {action.partition}: {','.join(action.nodes)}"
        case _:
            return type(action).__name__
