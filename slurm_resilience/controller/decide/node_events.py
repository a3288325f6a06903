"""Decide, for one incident: what has happened to its node, and what comes next. Pure.

This module finds the event; which state follows is the table's (`node_lifecycle`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import inf
from typing import Literal

import msgspec

from slurm_resilience.config import Config, RecoveryMode
from slurm_resilience.controller.actions import (
    Action,
    ContinueReplacement,
    MarkNode,
    NoteAnswered,
    NoteKept,
    NotePutBack,
    NoteStale,
    ProbeNode,
    RaiseAlarm,
    ReturnNode,
    StartReplacement,
    Transition,
)
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide import replacing
from slurm_resilience.controller.decide.escalation import after_failure
from slurm_resilience.controller.decide.intake import is_removed
from slurm_resilience.controller.decide.marking import mode_of
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.decide.node_validation import (
    ValidationProgress,
    return_seconds,
    validation_progress,
)
from slurm_resilience.controller.diagnose import (
    NodeDiagnosis,
    has_lost_reason,
    is_kept_by_a_person,
    is_kept_instead,
    is_out_of_service,
    life_of,
    open_findings,
)
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import ACTIONS, REPLACE, RESET, Node
from slurm_resilience.replace.repair_order import BY_PROGRAM, Run

RESUME_AGAIN_SECONDS = 10.0
"""Until a node resume that Slurm does not show is given again."""
MAX_SILENCE_SECONDS = 5.0
"""A node that comes back has beaten within this time."""
OVERDUE_SECONDS = 60.0
"""Past its time limit, until a program that still runs is an alarm: its runner was killed."""
FIRST_WORD_SECONDS = 10.0
"""After a start of sresctld, until each sresd that runs has connected and told its findings."""
SETTLED_SECONDS = 5.0
"""After the time in which each sresd connects to a sresctld that has started, until each has told
its findings and been steady, and the nodes that come back were probed."""
START_SECONDS = 1.0
"""sresctld opens no incident so soon after its start."""
REASON_GONE = "it was resumed, or its reason was taken back, or Slurm forgot both"
PROGRAMS_HAND = "if it did that itself: it must not, sresctld resumes the node after its end"
"""A program has the hands of an administrator: what it does to the node is taken for a person's
answer."""
MOST_DOUBLINGS = 4
"""`replace.backoff` is doubled so often at most, between two starts in which nothing was begun."""
MAX_OUTPUT = 200
"""Characters of the program's last line in a reason."""


def leave_rest(snapshot: ClusterSnapshot) -> Iterator[Transition]:
    """Find the answers of people to whom a node was left."""
    for incident in snapshot.at_rest.values():
        node = snapshot.nodes.get(incident.node)
        if node is None or _is_awaited(snapshot, incident.node):
            continue
        is_kept = is_kept_by_a_person(node, snapshot.site.slurm_users)
        is_requested = bool(node.requested_action) and is_out_of_service(node)
        if incident.state is NodeState.QUARANTINED:
            if is_kept_instead(node, incident.action, snapshot.site.slurm_users):
                yield _move(incident, NodeEvent.TAKEN_OVER, f"kept out by a person: {node.reason}")
            elif not is_out_of_service(node):
                text = f"{node.state}: {REASON_GONE}"
                yield _move(incident, NodeEvent.RELEASED, text)
        elif not (is_kept or is_requested or has_lost_reason(node)):
            text = f"{node.state}: no person keeps the node any more"
            yield _move(incident, NodeEvent.RELEASED, text)


def answers_of_keepers(snapshot: ClusterSnapshot) -> Iterator[NoteKept | NoteAnswered]:
    """Find the people who keep a node that has no incident, and those who put it back.

    What was found on the node meanwhile is answered by that, as at the end of an incident.
    """
    known, kept = {*snapshot.incidents, *snapshot.at_rest}, snapshot.memory.kept
    for name, node in notable(snapshot.nodes).items():
        is_out = is_out_of_service(node)
        if not (is_out or name in kept) or (not is_out and _is_awaited(snapshot, name)):
            continue
        is_free = is_out and name not in known
        is_persons = is_kept_by_a_person(node, snapshot.site.slurm_users)
        is_kept = is_free and (is_persons or (name in kept and has_lost_reason(node)))
        agent = snapshot.agents.get(name)
        if name in kept and not is_out and agent is not None:
            # First: what is cut off after the next note would never be written.
            yield NoteAnswered(name, agent.faults_of_boot())
        if is_kept != (name in kept):
            yield NoteKept(name, is_kept)


def stale_reasons(snapshot: ClusterSnapshot) -> Iterator[NoteStale]:
    """Find the reasons that nodes in service have, and those that a person gave once more."""
    for name, node in notable(snapshot.nodes).items():
        if node.reason_unclear or not (node.reason or node.stale_reason):
            continue
        if node.is_being_rebooted:
            continue  # it may be in service yet, and its reason that of the reboot
        stale = node.reason
        if is_out_of_service(node):
            stale = "" if node.reason == node.stale_reason else node.stale_reason
        if stale != node.stale_reason:
            yield NoteStale(name, stale)


def answers_in_a_pause(
    snapshot: ClusterSnapshot, config: Config, diagnoses: Mapping[str, NodeDiagnosis]
) -> Iterator[NoteAnswered | NotePutBack]:
    """Find the people who put a node with an incident back into service during a pause.

    Its incident ends after the pause. What is found on it until now is answered by them, and what
    comes later is news.
    """
    of_rest = {move.node for move in leave_rest(snapshot) if move.event is NodeEvent.RELEASED}
    for incident in (*snapshot.incidents.values(), *snapshot.at_rest.values()):
        if not (snapshot.paused or incident.times.put_back):
            continue
        name = incident.node
        is_back = name in of_rest or _is_released(snapshot, config, incident, diagnoses.get(name))
        if incident.times.put_back and not is_back:
            yield NotePutBack(name, incident.id, 0.0)
        elif is_back and not incident.times.put_back and _has_been_heard(snapshot, name):
            agent = snapshot.agents.get(name)
            # First: what is cut off after the next note would never be written.
            yield NoteAnswered(name, agent.faults_of_boot() if agent is not None else {})
            yield NotePutBack(name, incident.id, snapshot.now)


def _is_released(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, diagnosis: NodeDiagnosis | None
) -> bool:
    return incident.node in snapshot.incidents and any(
        isinstance(action, Transition) and action.event is NodeEvent.RELEASED
        for action in progress(snapshot, config, incident, diagnosis)
    )


def progress_of_all(
    snapshot: ClusterSnapshot,
    config: Config,
    diagnoses: Mapping[str, NodeDiagnosis],
    moved: Collection[str] = (),
) -> Iterator[Action]:
    """Find the progress of open incidents, oldest first: replacements take turns.

    Args:
        snapshot: the observation.
        config: limits (`[recovery]`, `[replace]`).
        diagnoses: of the snapshot.
        moved: nodes that are marked in this round: they go on in the next.
    """
    incidents = sorted(snapshot.incidents.values(), key=lambda incident: incident.id)
    ceilings = replacing.Ceilings(snapshot, config, incidents)
    refused: dict[str, None] = {}
    for incident in incidents:
        if incident.node in moved:
            continue
        mode = mode_of(snapshot, config, incident.node)
        if mode != "automatic":
            yield from _stopped(snapshot, config, incident, diagnoses.get(incident.node), mode)
            continue
        for action in progress(snapshot, config, incident, diagnoses.get(incident.node)):
            is_look = isinstance(action, ProbeNode) and action.is_urgent
            is_start = is_look or isinstance(action, StartReplacement)
            if is_start and not ceilings.take(incident):
                refused[incident.node] = None
                if is_look:
                    # Its turn has not come: no more looks than for any other silent node.
                    yield ProbeNode(incident.node)
            elif not (incident.node in refused and replacing.is_about_waiting(action)):
                yield action
    yield from ceilings.alarm(refused)


def _stopped(
    snapshot: ClusterSnapshot,
    config: Config,
    incident: Incident,
    diagnosis: NodeDiagnosis | None,
    mode: RecoveryMode,
) -> Iterator[Action]:
    """Stop where an incident is that was opened before its node got another mode: only what people
    do to the node still counts."""
    for action in progress(snapshot, config, incident, diagnosis):
        if isinstance(action, Transition) and (
            action.event.is_a_persons or action.event in (NodeEvent.RECOVERED, NodeEvent.CLOSED)
        ):
            yield action
            return
    text = (
        f"incident {incident.id} stays {incident.state}: recovery.mode is {mode} now, so a person "
        "must bring the node back"
    )
    yield RaiseAlarm(f"mode-{incident.id}", text, incident.node, incident=incident.id)


def progress(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, diagnosis: NodeDiagnosis | None
) -> Iterator[Action]:
    """Find what has happened to the node of an open incident, and what is to be done next."""
    node = snapshot.nodes.get(incident.node)
    if node is None:
        if is_removed(snapshot, incident.node):
            yield _move(incident, NodeEvent.REMOVED, "Slurm does not know this node any more")
        return
    if node.reason_unclear and incident.state.is_marked:
        # Whatever the reason says, it may be a person's.
        text = f"a reason that cannot be read for certain holds the node: {node.reason}"
        yield _move(incident, NodeEvent.TAKEN_OVER, text)
        return
    is_kept = is_kept_instead(node, incident.action, snapshot.site.slurm_users)
    if incident.state.is_in_repair and is_kept:
        text = f"{node.state}: kept out for {node.reason!r}{_stops(snapshot, incident)}"
        yield _move(incident, NodeEvent.TAKEN_OVER, text)
        return
    match incident.state:
        case NodeState.SUSPECT:
            yield from _from_suspect(snapshot, incident, node, diagnosis)
        case NodeState.SET_ASIDE | NodeState.EMPTY:
            answer = _answer_of_a_person(snapshot, incident, node)
            if answer is not None:
                is_put_back = answer.event is NodeEvent.RELEASED
                if not (is_put_back and _is_awaited(snapshot, incident.node)):
                    yield answer
            else:
                yield from _towards_repair(snapshot, config, incident, node)
        case NodeState.REPAIRING:
            yield from _from_repairing(snapshot, config, incident, node)
        case NodeState.VALIDATING:
            yield from _from_validating(snapshot, config, incident, node)
        case NodeState.RETURNING:
            yield from _from_returning(snapshot, config, incident, node)
        case _:
            return


def _move(incident: Incident, event: NodeEvent, reason: str, next_try: float = 0.0) -> Transition:
    return Transition(incident.node, incident.id, event, reason, next_try)


def _from_suspect(
    snapshot: ClusterSnapshot, incident: Incident, node: Node, diagnosis: NodeDiagnosis | None
) -> Iterator[Action]:
    """sresctld was stopped, or Slurm refused, between the incident's opening and the mark."""
    if node.requested_action:
        yield _move(incident, NodeEvent.MARKED, "Slurm shows the reason")
    elif is_kept_by_a_person(node, snapshot.site.slurm_users):
        yield _move(incident, NodeEvent.TAKEN_OVER, f"not marked; kept by a person: {node.reason}")
    elif not _has_been_heard(snapshot, incident.node):
        return  # we have just started: what the incident began with is neither there nor gone
    elif diagnosis is None or diagnosis.kind not in ("dead", "sick", "suspect"):
        text = diagnosis.reason if diagnosis else "gone"
        yield _move(incident, NodeEvent.RECOVERED, f"not marked; now: {text}")


def _has_been_heard(snapshot: ClusterSnapshot, name: str) -> bool:
    """Tell whether the node has told its findings, or is not waited for any more."""
    agent = snapshot.agents.get(name)
    return agent is None or agent.was_stopped or (agent.is_heard and agent.reported)


def _is_awaited(snapshot: ClusterSnapshot, name: str) -> bool:
    """Tell whether sresctld has just started, and the node has not told its findings yet: a person
    who put it back in between has answered them, and they are not known."""
    has_just_started = snapshot.site.uptime < FIRST_WORD_SECONDS
    return has_just_started and not _has_been_heard(snapshot, name)


def _answer_of_a_person(
    snapshot: ClusterSnapshot, incident: Incident, node: Node
) -> Transition | None:
    """Return a person's answer to the request, where its reason has gone or was changed."""
    if is_kept_instead(node, incident.action, snapshot.site.slurm_users):
        return _move(incident, NodeEvent.TAKEN_OVER, f"{node.state}: kept out for {node.reason!r}")
    is_slurms = bool(node.reason.strip()) and not node.requested_action
    if is_slurms and is_out_of_service(node):
        return None  # Slurm wrote a reason of its own over ours
    if not node.requested_action or not is_out_of_service(node):
        return _move(incident, NodeEvent.RELEASED, f"{node.state}: {REASON_GONE}")
    if node.requested_action != incident.action:
        text = f"{node.requested_action} was asked for instead"
        return _move(incident, NodeEvent.ASKED_ANEW, text)
    if incident.mark_reason_at not in ("", node.reason_at):
        # The words are those that we had set, and the hand is another one's.
        by = node.reason_by or "an unknown user"
        return _move(incident, NodeEvent.ASKED_ANEW, f"{node.reason} was asked for by {by}")
    return None


def _towards_repair(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    waited = snapshot.now - incident.times.marked
    if node.has_work:
        if incident.state is NodeState.EMPTY:
            yield _move(incident, NodeEvent.OCCUPIED, f"{node.state}: a job is on the node")
        if waited > config.recovery.drain_alarm:
            text = f"jobs have kept this node from its replacement for {waited / 3600:.0f} h"
            key = f"drain-{incident.id}"
            yield RaiseAlarm(key, text, node.name, incident=incident.id, remember=True)
        return
    if not node.requested_action and node.is_being_rebooted:
        return  # by a person: Slurm adds to the reason once more at its end
    if not node.requested_action:
        text = f"Slurm wrote {node.reason!r} over the request"
        state: Literal["fail", "down"] = "down" if node.is_down else "fail"
        kind: Literal["dead", "sick"] = "dead" if node.is_down else "sick"
        yield MarkNode(node.name, kind, state, incident.action, text)
        return
    if incident.state is NodeState.SET_ASIDE:
        yield _move(incident, NodeEvent.EMPTIED, "no job is left on the node")
    if not snapshot.site.can_repair(incident.action):
        text = "no replacement program is configured (replace.program): waiting for a person"
        yield RaiseAlarm(f"program-{incident.id}", text, node.name, incident=incident.id)
        return
    yield from replacing.start_or_return(snapshot, config, incident, node)


def _from_repairing(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    run = snapshot.repairs.runs.get(incident.id)
    has_reason = bool(node.reason) or (run is not None and bool(run.next_act))
    if not (has_reason and is_out_of_service(node)):
        # Node resume takes the reason away, or the state only (24.11), whatever the machine does.
        text = f"{node.state}: {REASON_GONE}{_stops(snapshot, incident)}"
        yield _move(incident, NodeEvent.RELEASED, text)
        return
    if run is None:
        return
    if run.next_act:
        yield ContinueReplacement(node.name, incident.id, run.next_act)
    elif run.state == "running":
        runs_for, limit = snapshot.now - incident.times.run_started, config.replace.timeout
        if runs_for > limit + OVERDUE_SECONDS:
            text = f"{run.by} runs for {runs_for:.0f} s, past its limit of {limit:.0f} s; end it"
            key = f"overdue-{incident.id}-{incident.attempts}"
            yield RaiseAlarm(key, text, node.name, incident=incident.id)
    elif run.state == "ended" and run.rc == 0:
        yield _move(incident, NodeEvent.REPLACED, _success_of(run))
    else:
        is_tried, has_begun = run.state == "ended", run.state != "unbegun"
        failed = _failed(
            snapshot, config, incident, _failure_of(run), is_tried=is_tried, has_begun=has_begun
        )
        yield msgspec.structs.replace(failed, is_end_unknown=run.state == "lost")


def _stops(snapshot: ClusterSnapshot, incident: Incident) -> str:
    """Return what a person's answer ends besides, in words; empty: no program runs."""
    run = snapshot.repairs.runs.get(incident.id)
    if run is None or run.state != "running" or run.by != BY_PROGRAM:
        return ""
    return f"; {BY_PROGRAM} is stopped ({PROGRAMS_HAND})"


def _success_of(run: Run) -> str:
    return f"{run.by}: {run.output}" if not run.is_followed else f"{run.by} ended well"


def _failure_of(run: Run) -> str:
    last_line = (run.output.splitlines()[-1:] or ["it printed nothing"])[0][:MAX_OUTPUT]
    endings = {"lost": "disappeared", "unbegun": "did not start"}
    ending = endings.get(run.state, f"exited {run.rc}")
    doubt = "; the node may be repaired all the same" if run.state == "lost" else ""
    return f"{run.by} {ending}: {last_line}{doubt}"


def _failed(
    snapshot: ClusterSnapshot,
    config: Config,
    incident: Incident,
    cause: str,
    *,
    is_tried: bool = True,
    is_sick: bool = False,
    has_begun: bool = True,
) -> Transition:
    """Find what follows a repair that failed, or that was lost before it had begun.

    Args:
        snapshot: the observation.
        config: limits (`[recovery]`, `[replace]`).
        incident: of the fault.
        cause: of the failure, in words.
        is_tried: the repair had begun.
        is_sick: it ended well, and the node came back with a fault.
        has_begun: false: it is certain that nothing was done to the node.
    """
    if incident.is_flap:
        event = NodeEvent.GONE_AGAIN if incident.times.marked else NodeEvent.JUDGED_ANEW
        return _move(incident, event, cause)
    node = snapshot.nodes.get(incident.node)
    asked = node.requested_action if node is not None else ""
    if asked not in ("", incident.action):
        # By a person, while the repair ran: what was asked for is taken up as it ends.
        text = f"{cause}; {asked} was asked for meanwhile"
        event = NodeEvent.REPLACEMENT_FAILED
        return Transition(
            incident.node, incident.id, event, text, snapshot.now, is_unbegun=not has_begun
        )
    if not has_begun:
        return _not_begun(snapshot, config, incident, cause)
    instead = after_failure(snapshot, config, incident, is_sick=is_sick) if is_tried else ""
    if instead:
        text = f"{cause}; it is {ACTIONS[instead][1]}"
        event = NodeEvent.REPLACEMENT_FAILED
        return Transition(incident.node, incident.id, event, text, snapshot.now, instead)
    if incident.tries >= config.replace.attempts:
        attempts = "one attempt" if incident.tries == 1 else f"{incident.tries} attempts"
        text = f"{cause}; given up after {attempts}, a person must look"
        return _move(incident, NodeEvent.GAVE_UP, text)
    wait = config.replace.backoff * 2 ** max(0, incident.tries - 1)
    text = f"{cause}; again in {wait:.0f} s (attempt {incident.tries} failed)"
    return _move(incident, NodeEvent.REPLACEMENT_FAILED, text, next_try=snapshot.now + wait)


def _not_begun(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, cause: str
) -> Transition:
    """Find what follows where the program could not be started: that says nothing of the node, so
    it is no try. It is tried again, ever more seldom, while an alarm asks for a person."""
    wait = config.replace.backoff * 2 ** min(len(incident.unbegun), MOST_DOUBLINGS)
    text = f"{cause}; nothing was begun, so it counts as no try; again in {wait:.0f} s"
    event, at = NodeEvent.REPLACEMENT_FAILED, snapshot.now + wait
    return Transition(incident.node, incident.id, event, text, at, is_unbegun=True)


def _from_validating(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    timeout = return_seconds(config)
    # It may have come back while sresctld, or slurmctld, was away.
    sighted_for = snapshot.moment - snapshot.heard.sighted_since
    has_looked = sighted_for > config.detect.start_grace + SETTLED_SECONDS
    is_late = has_looked and snapshot.now - incident.times.run_ended > timeout
    if node.is_available or node.is_only_reserved:
        yield from _put_back(snapshot, config, incident, node, is_late=is_late)
        return
    asked = node.requested_action
    if asked not in ("", incident.action):
        # By a person, while the repair ran: it ended well, and is not what was asked for.
        text = f"{asked} was asked for by {node.reason_by or 'an unknown user'} meanwhile"
        yield _move(incident, NodeEvent.ASKED_ANEW, text)
        return
    fault = _fault_on_return(snapshot, config, incident, node)
    is_back = _is_back(snapshot, incident, node)
    progress = validation_progress(snapshot, config, incident)
    if fault:
        yield _failed(snapshot, config, incident, fault, is_sick=True)
    elif is_back and progress is ValidationProgress.OVER:
        yield ReturnNode(node.name, incident.id)
    elif is_back and progress is ValidationProgress.IMPOSSIBLE:
        # Not its machine's fault: another repair would end in the same way.
        text = (
            "it is well, and not given back: recovery.validate is set, and its sresd does not know "
            "that; write it into sres.toml on the node and restart sresd there"
        )
        yield RaiseAlarm(f"unvalidated-{incident.id}", text, node.name, incident=incident.id)
    elif is_late and not is_out_of_service(node):
        # A person resumed it meanwhile: silent, it is judged like any node in service.
        yield _move(incident, NodeEvent.RELEASED, f"{node.state}: {REASON_GONE}")
    elif is_late:
        if is_back and _speaks_for(snapshot, node) < timeout:
            return  # its sresd was started anew, by a person perhaps, and validates it now
        if is_back and progress is ValidationProgress.UNCHECKED:
            yield from _unchecked(incident, timeout)
            return
        if is_back and progress is ValidationProgress.NOT_RUN:
            yield from _unvalidated(incident, timeout)
            return
        cause = f"the node did not come back within {timeout:.0f} s"
        if progress not in (ValidationProgress.OVER, ValidationProgress.UNCHECKED):
            cause += ", and its sresd has not validated it (recovery.validate)"
        yield _failed(snapshot, config, incident, cause)


def _put_back(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node, *, is_late: bool
) -> Iterator[Action]:
    """End the incident of a node that a person (or Slurm) put back during its validation.

    Its sresd may need a moment more: till then its silence is that of the old boot. Later the node
    is judged like any one in service.
    """
    if _is_awaited(snapshot, node.name) and not is_late:
        return
    if snapshot.site.uptime < FIRST_WORD_SECONDS and open_findings(snapshot, node.name):
        text = f"{node.state}: put back by a person, as sresctld had just started"
        yield _move(incident, NodeEvent.RELEASED, text)
        return
    is_silent = life_of(snapshot, config.detect, node).kind in ("suspect", "dead")
    if not is_silent:
        yield _move(incident, NodeEvent.CLOSED, "back in service")
    elif is_late:
        text = f"{node.state}: the node was put back into service, and its sresd is silent"
        yield _move(incident, NodeEvent.RELEASED, text)


def _unchecked(incident: Incident, timeout: float) -> Iterator[Action]:
    """Leave a node to a person that answers and that nothing has looked at: not its machine's
    fault, so another repair would end in the same way."""
    text = (
        f"it answers, and within {timeout:.0f} s its sresd has not said that each health check has "
        "run once: it is not given back, a person must look (`sres node logs "
        f"{incident.node}`; an sresd of an older release never says it)"
    )
    yield RaiseAlarm(f"unchecked-{incident.id}", text, incident.node, incident=incident.id)
    yield _move(incident, NodeEvent.GAVE_UP, text)


def _unvalidated(incident: Incident, timeout: float) -> Iterator[Action]:
    """Leave a node to a person whose validation has not begun: one that began has its own limit,
    and is over. Another repair would end in the same way."""
    text = (
        f"it answers, and within {timeout:.0f} s its sresd could not run recovery.validate: it is "
        f"not given back, a person must look (`sres node logs {incident.node}`)"
    )
    yield RaiseAlarm(f"unvalidated-{incident.id}", text, incident.node, incident=incident.id)
    yield _move(incident, NodeEvent.GAVE_UP, text)


def _speaks_for(snapshot: ClusterSnapshot, node: Node) -> float:
    """Return the seconds for which the node's sresd has been connected without a break."""
    agent = snapshot.agents.get(node.name)
    return agent.steady if agent is not None else inf


def _fault_on_return(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> str:
    """Return why a node that answers again must not go back into service; empty: nothing is known
    against it."""
    if _is_another(snapshot, incident):
        found = open_findings(snapshot, node.name)
        if found:
            return f"the node came back sick: {found[0].check}: {found[0].text}"
    life = life_of(snapshot, config.detect, node)
    if incident.is_flap and life.kind == "dead":
        return f"the node was lost again: {life.reason}"
    return ""


def _is_another(snapshot: ClusterSnapshot, incident: Incident) -> bool:
    """Tell whether the sresd that speaks is of another boot or machine than the one that was to be
    replaced. A node that came back by itself, or whose GPUs were reset, may be the same."""
    agent = snapshot.agents.get(incident.node)
    if agent is None or not agent.is_heard:
        return False
    known = incident.before
    is_the_old_one = known.is_known and (agent.boot_id, agent.instance) == (
        known.boot_id,
        known.instance,
    )
    is_the_same_well = incident.is_flap or incident.action == RESET
    return is_the_same_well or not is_the_old_one


def _is_back(snapshot: ClusterSnapshot, incident: Incident, node: Node) -> bool:
    """Tell whether its sresd speaks from another boot or machine and has said that nothing is wrong
    there, and slurmd answers."""
    agent, before = snapshot.agents.get(node.name), incident.before
    if agent is not None and agent.is_heard:
        speaks = agent.is_connected and agent.silence < MAX_SILENCE_SECONDS
        has_told = agent.reported and agent.steady >= replacing.STEADY_SECONDS
        if not (speaks and has_told and _is_another(snapshot, incident)):
            return False
    elif before.is_known:
        return False
    elapsed = snapshot.now - incident.times.run_ended
    later_probes = [
        probe
        for probe in snapshot.probes.get(node.name, ())
        if snapshot.moment - probe.started <= elapsed
    ]
    return bool(later_probes) and later_probes[-1].answer == "answered"


def _after(snapshot: ClusterSnapshot, incident: Incident) -> str:
    """Return the time that an incident took, in words; empty: it is not known. The machine's date
    may have been set between the end of the sresctld that opened it and the start of this one."""
    seconds = snapshot.now - incident.times.opened
    # After a date in the future this sresctld begins at the last event, which may be the opening.
    is_own = 0.0 <= seconds < snapshot.site.uptime - START_SECONDS
    return f" after {seconds:.1f} s" if is_own else ""


def _from_returning(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    since_resume = snapshot.now - incident.times.resumed
    # A maintenance reservation keeps jobs off a node that has come back all the same. What is found
    # on it from now on is news.
    if node.is_available or node.is_only_reserved:
        verb = ACTIONS.get(incident.action, ACTIONS[REPLACE])[1]
        verb = "returned by itself" if incident.is_flap else verb
        text = f"{verb} and back in service{_after(snapshot, incident)}"
        if node.is_only_reserved:
            text = f"{text}, in a maintenance reservation"
        yield _move(incident, NodeEvent.CLOSED, text)
    elif node.requested_action and incident.reason_at not in ("", node.reason_at):
        by = node.reason_by or "an unknown user"
        yield _move(incident, NodeEvent.ASKED_ANEW, f"{node.reason} was asked for again by {by}")
    elif node.requested_action and since_resume > RESUME_AGAIN_SECONDS:
        yield ReturnNode(node.name, incident.id)
    elif since_resume > config.replace.return_timeout:
        if "MAINTENANCE" in node.flags and not is_out_of_service(node):
            text = f"{node.state}: it was given back, and is judged anew after its reservation"
            yield _move(incident, NodeEvent.CLOSED, text)
            return
        yield _failed(snapshot, config, incident, f"after its resume the node is {node.state}")
