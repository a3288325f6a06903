"""Act on nodes: probe and mark them, open their incidents, and apply what has happened to them."""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import Mapping
from typing import Literal

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.controller.act.jobs import JobActs, Notifier
from slurm_resilience.controller.act.repair import RepairActs
from slurm_resilience.controller.act.reporting import Reporter
from slurm_resilience.controller.actions import (
    ActOutcome,
    MarkNode,
    OpenCameBack,
    OpenRequested,
    ProbeNode,
    RenewLabels,
    TakeLabelsOff,
    Transition,
)
from slurm_resilience.controller.decide.labelling import labels_for
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, SideAct, step
from slurm_resilience.controller.diagnose import (
    is_kept_instead,
    is_out_of_service,
    open_findings,
    persons_reason,
)
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import Incident, IncidentFacts, MachineIdentity
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.probe import Prober
from slurm_resilience.errors import SresError
from slurm_resilience.model import REPLACE, Node
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.node_labels import own_text, with_labels
from slurm_resilience.wire.messages import NodeVerdict

log = logging.getLogger("sresctld")

_FAILURES = frozenset({NodeEvent.GAVE_UP, NodeEvent.REPLACEMENT_FAILED, NodeEvent.GONE_AGAIN})
_LEFT_BY_A_JOB = frozenset({"IDLE", "MIXED"})
"""A node's state when a job has left it."""
WRITE_AGAIN_SECONDS = 60.0
"""Until labels that Slurm did not take are written or taken off once more."""


class NodeActs:
    """The acts on nodes, but for their repair."""

    def __init__(
        self,
        client: SlurmClient,
        journal: Journal,
        reporter: Reporter,
        prober: Prober,
        notifier: Notifier,
        jobs: JobActs,
        repair: RepairActs,
        clock: Clock,
    ) -> None:
        self._client = client
        self._journal = journal
        self._reporter = reporter
        self._prober = prober
        self._notifier = notifier
        self._jobs = jobs
        self._written: dict[tuple[str, str], float] = {}
        """When (monotonic) a node's labels were written in a cycle of their own."""
        self._repair = repair
        self._clock = clock
        self._taken_out: tuple[ClusterSnapshot | None, frozenset[str]] = (None, frozenset())
        """The nodes that jobs have left by acts of one cycle, with its observation."""

    def probe(self, snapshot: ClusterSnapshot, action: ProbeNode) -> None:
        self._probe(snapshot, action.node, action.is_urgent)

    def _probe(self, snapshot: ClusterSnapshot, name: str, is_urgent: bool) -> None:
        node, agent = snapshot.nodes[name], snapshot.agents.get(name)
        # Silence from before the other nodes were heard again counts no more.
        since = max(snapshot.heard.since, agent.heard_at if agent is not None else -math.inf)
        self._prober.request(name, node.address, node.port, since, is_urgent)

    def mark(self, snapshot: ClusterSnapshot, action: MarkNode) -> None:
        """Take a node out of service, unless it has changed since it was observed."""
        seen = snapshot.nodes[action.node]
        if action.kind == "dead":
            # Nothing waits for it: a machine that lives answers before Slurm does.
            self._probe(snapshot, seen.name, is_urgent=True)
        node = self._client.node(action.node)
        if not self._is_as_seen(snapshot, node, seen):
            reason = node.reason or "no reason"
            log.info("%s changed to %s (%s) meanwhile: not marked", node.name, node.state, reason)
            return
        goes_down = action.kind == "dead" and not node.is_down
        life = self._repair.lives_again(snapshot, node.name) if goes_down else ""
        if life:
            log.info("%s: %s meanwhile: not marked", node.name, life)
            return
        incident = self._incident_for(snapshot, action) if action.action else None
        number = incident.id if incident else 0
        for job_id in action.requeued:
            self._jobs.follow_dead_node(snapshot.jobs[job_id], node.name)
            text, job = f"{node.name}: {action.reason}", snapshot.jobs[job_id]
            self._reporter.event(
                "requeue", text, node=node.name, job=job_id, incident=number, uid=job.uid
            )
        # What was found stands in "detected", where this incident begins with it.
        is_new = incident is not None and action.node not in snapshot.incidents
        cause = "" if is_new else f": {action.reason}"
        reason = action.action or persons_reason(node, snapshot.site.slurm_users)
        text = f"state={action.state} reason={reason}{cause}"
        is_closed_first = bool(action.action) and action.state == "down" and node.is_available
        if is_closed_first:
            # Else Slurm starts a waiting job on it in these very milliseconds (or as soon as it has
            # left the job that is made smaller), and DOWN ends that job.
            text = f"state=fail, then {text}"
            self._reporter.event("marking", text, node=node.name, incident=number)
            self._client.set_node([node.name], state="fail", reason=reason)
        else:
            self._reporter.event("marking", text, node=node.name, incident=number)
        kind: Literal["dead", "sick"] = "dead" if action.state == "down" else "sick"
        verdict = NodeVerdict(node.name, kind, action.reason, action.action, number)
        try:
            self._set_aside(snapshot, action, node, incident, reason, is_closed_first)
        except sqlite3.Error:
            # The disk is full by now, and nothing is done until it is not: a job that has lost the
            # node would hang for as long.
            if incident is not None:
                self._notifier.tell_all(snapshot, verdict)
            raise
        if incident is None:
            return
        # At once, not with the next cycle: each second here is a second of every survivor.
        self._notifier.tell_all(snapshot, verdict)
        self._label(node, self._journal.incident(incident.id))
        # Now, while what happened is at the end of its logs, and nothing waits for the answer.
        self._repair.evidence.begin(incident)

    def _is_as_seen(self, snapshot: ClusterSnapshot, node: Node, seen: Node) -> bool:
        """Tell whether a node has not changed since it was observed, but for a job that it left by
        an act of this same cycle: nodes that die together leave a job in one change."""
        observed, emptied = self._taken_out
        if observed is not snapshot or node.name not in emptied:
            return (node.reason, node.base, node.flags) == (seen.reason, seen.base, seen.flags)
        has_one_job_less = node.base in (seen.base, *_LEFT_BY_A_JOB)
        flags = node.flags - {"COMPLETING"}
        return has_one_job_less and (node.reason, flags) == (seen.reason, seen.flags)

    def _set_aside(
        self,
        snapshot: ClusterSnapshot,
        action: MarkNode,
        node: Node,
        incident: Incident | None,
        reason: str,
        is_closed_first: bool,
    ) -> None:
        """Take a node out of its jobs and out of service.

        Args:
            snapshot: the observation.
            action: the decision.
            node: the node as it was before.
            incident: its incident, if it has one.
            reason: for Slurm.
            is_closed_first: it was set FAIL a moment ago, so that no job comes to it.
        """
        for change in action.shrink:
            gone = self._jobs.shrink(change, node.name, incident.id if incident else 0)
            observed, emptied = self._taken_out
            already = emptied if observed is snapshot else frozenset()
            self._taken_out = (snapshot, already.union(gone))
        text = f"Slurm has taken it; the node was {node.state}"
        against = self._against_down(snapshot, node.name) if is_closed_first else ""
        if against:
            text = f"{text}; not DOWN: {against}"
        else:
            self._client.set_node([node.name], state=action.state, reason=reason)
        if incident is None:
            self._reporter.event("marked", text, node=node.name)
            return
        facts = IncidentFacts(mark_reason_at=self._secure(snapshot, action))
        self._reporter.report(ActOutcome(incident.id, NodeEvent.MARKED, text, facts))

    def _against_down(self, snapshot: ClusterSnapshot, name: str) -> str:
        """Return what has come up since a node was looked at, and speaks against setting it DOWN;
        empty: nothing."""
        if self._has_newcomer(snapshot, snapshot.nodes[name]):
            return "that would end a job that came to it in the last moment"
        life = self._repair.lives_again(snapshot, name)
        return f"{life} again" if life else ""

    def _has_newcomer(self, snapshot: ClusterSnapshot, seen: Node) -> bool:
        """Tell whether a job that no supervisor keeps alive has come to a node since it was seen.

        A node that was full may have changed hands: one job ended, and the next began. No job comes
        once Slurm offers the node to none.
        """
        if not seen.has_work:
            return self._client.node(seen.name).has_work
        before = {job.id for job in snapshot.jobs.values() if seen.name in job.nodes}
        return any(
            seen.name in job.nodes
            and job.state == "RUNNING"
            and job.id not in before
            and job.id not in snapshot.supervised
            for job in self._client.jobs()
        )

    def _secure(self, snapshot: ClusterSnapshot, action: MarkNode) -> str:
        """Keep jobs off a node that was marked; return Slurm's time of our reason."""
        if action.state == "down" and snapshot.site.returns_by_itself:
            # Slurm would put it into service as soon as its slurmd registers, sound or not.
            self._client.set_node([action.node], state="fail", reason=action.action)
        shown = self._client.node(action.node)
        return shown.reason_at if shown.reason == action.action else ""

    def _incident_for(self, snapshot: ClusterSnapshot, action: MarkNode) -> Incident:
        known = snapshot.incidents.get(action.node)
        if known is not None:
            return known
        return self._journal.open_incident(
            action.node,
            NodeEvent.DETECTED,
            action.kind,
            action.action,
            action.reason,
            self._clock.now(),
            _machine_of(snapshot, action.node),
        )

    def open_requested(self, snapshot: ClusterSnapshot, action: OpenRequested) -> None:
        """Open an incident for a person's request, and tell the supervisors concerned."""
        incident = self._journal.open_incident(
            action.node,
            NodeEvent.REQUESTED,
            action.kind,
            action.action,
            action.reason,
            self._clock.now(),
            _machine_of(snapshot, action.node),
            action.mark_reason_at,
        )
        is_down = snapshot.nodes[action.node].is_down
        kind: Literal["dead", "requested"] = "dead" if is_down else "requested"
        verdict = NodeVerdict(action.node, kind, action.reason, action.action, incident.id)
        self._notifier.tell_all(snapshot, verdict)
        self._label(snapshot.nodes[action.node], incident)
        self._repair.evidence.begin(incident)

    def open_came_back(self, snapshot: ClusterSnapshot, action: OpenCameBack) -> None:
        """Open an incident for a node that is to be given back."""
        self._journal.open_incident(
            action.node,
            NodeEvent.CAME_BACK,
            "dead",
            REPLACE,
            action.reason,
            self._clock.now(),
            _machine_of(snapshot, action.node),
        )

    def apply(self, snapshot: ClusterSnapshot, action: Transition) -> None:
        """Apply what has happened to a node, with what the table says besides."""
        incident = self._journal.incident(action.incident)
        transition = step(incident.state, action.event)
        node, run = snapshot.nodes.get(action.node), snapshot.repairs.runs.get(incident.id)
        for side_act in transition.acts:
            self._do(side_act, incident)
        ends = incident.state.is_under_way and not transition.state.is_under_way
        is_answer = action.event is NodeEvent.RELEASED and not incident.times.put_back
        if is_answer and incident.ended_by is not NodeEvent.REMOVED:
            self._acknowledge(snapshot, action.node)
        is_mark = action.event is NodeEvent.MARKED and node is not None
        if action.event in _FAILURES and node is not None and not is_out_of_service(node):
            node = self._keep_out(node, incident)
            is_mark = True
        if action.action:
            node, is_mark = self._ask_instead(snapshot, incident, action.action), True
            if node is None:
                return
        if run is not None and run.wrote_reason:
            is_mark = node is not None  # the Reason's time is another one by now
        facts = IncidentFacts(
            action=action.action or None,
            next_try=action.next_try,
            run_ended=(run.ended_at or None) if run else None,
            mark_reason_at=node.reason_at if node is not None and is_mark else None,
            is_flap=True if action.event is NodeEvent.CAME_BACK else None,
            is_unbegun=action.is_unbegun,
            is_end_unknown=action.is_end_unknown,
            reason_at=(node.reason_at if node else "") if ends else None,
            output=run.output if run and run.state != "running" else "",
        )
        if node is not None:
            # First, so that the event which ends an incident is the last of it.
            self._label(node, msgspec.structs.replace(incident, state=transition.state), snapshot)
        self._reporter.report(ActOutcome(incident.id, action.event, action.reason, facts))
        level = logging.ERROR if action.event is NodeEvent.GAVE_UP else logging.INFO
        log.log(
            level, "%s: incident %d %s: %s", action.node, incident.id, action.event, action.reason
        )

    def _keep_out(self, node: Node, incident: Incident) -> Node:
        """Take a node out of service again that was given back, and that failed to come back.

        Else it would be taken for resumed by a person, and get jobs as soon as it answers.
        """
        now = self._client.node(node.name)
        if is_out_of_service(now) or "MAINTENANCE" in now.flags:
            return now  # a person's maintenance reservation keeps jobs off it
        self._reporter.event(
            "marking",
            f"state=fail reason={incident.action}: it did not come back",
            node=node.name,
            incident=incident.id,
        )
        self._client.set_node([node.name], state="fail", reason=incident.action)
        return self._client.node(node.name)

    def _ask_instead(
        self, snapshot: ClusterSnapshot, incident: Incident, action: str
    ) -> Node | None:
        """Ask for another repair of a node, where one did not help; None: a person has answered."""
        node = self._client.node(incident.node)
        is_answered = node.requested_action not in (incident.action, action)
        if is_answered and node.reason and not node.requested_action:
            # Slurm may have added to it, as it does where a person reboots the node by Slurm.
            is_answered = is_kept_instead(node, incident.action, snapshot.site.slurm_users)
        if is_answered or not is_out_of_service(node):
            log.info("%s is %s now (%s): not asked anew", node.name, node.state, node.reason)
            return None
        if node.requested_action != action:
            text = f"reason={action}: {incident.action} did not help"
            self._reporter.event("marking", text, node=node.name, incident=incident.id)
            self._client.set_node([node.name], reason=action)
        return self._client.node(incident.node)

    def _acknowledge(self, snapshot: ClusterSnapshot, name: str) -> None:
        """Take what is found on a node for answered: a person put it back into service."""
        agent = snapshot.agents.get(name)
        if agent is not None:
            self._journal.acknowledge(name, agent.faults_of_boot())

    def _do(self, side_act: SideAct, incident: Incident) -> None:
        match side_act:
            case SideAct.STOP_PROGRAM:
                self._repair.stop(incident)
            case SideAct.FORGET_PROBES:
                self._prober.forget(incident.node)

    def take_labels_off(self, snapshot: ClusterSnapshot, action: TakeLabelsOff) -> None:
        """Take the labels off a node that has no incident."""
        self._write_again(snapshot, action.node, {})

    def renew_labels(self, snapshot: ClusterSnapshot, action: RenewLabels) -> None:
        """Write the labels of an incident as it is now: this cycle may have changed its state."""
        incident = self._journal.incident(action.incident)
        labels = labels_for(incident, open_findings(snapshot, action.node))
        self._write_again(snapshot, action.node, labels)

    def _write_again(self, snapshot: ClusterSnapshot, name: str, labels: Mapping[str, str]) -> None:
        """Write labels that Slurm does not show, but not in each cycle."""
        key, now = (name, str(labels)), self._clock.monotonic()
        recent = now - WRITE_AGAIN_SECONDS
        self._written = {known: at for known, at in self._written.items() if at > recent}
        if key not in self._written:
            self._written[key] = now
            self._write_labels(snapshot.nodes[name], labels)

    def _label(
        self, node: Node, incident: Incident, snapshot: ClusterSnapshot | None = None
    ) -> None:
        """Write the labels of an incident's state where `scontrol show node` shows them.

        Args:
            node: the node as it was seen.
            incident: with the state that it has from now on.
            snapshot: the observation; None: what is found on the node is the incident's own.
        """
        found = open_findings(snapshot, node.name) if snapshot is not None else ()
        self._write_labels(node, labels_for(incident, found))

    def _write_labels(self, seen: Node, labels: Mapping[str, str]) -> None:
        if with_labels(seen.comment, labels) == seen.comment:
            return
        try:
            # Once more: a person may have written a text of his own there.
            comment = self._client.node(seen.name).comment
            wanted = with_labels(comment, labels)
            if wanted == comment:
                return
            text = wanted.removeprefix(own_text(comment)).strip() or "its labels are taken off"
            # Not of the incident: its story ends with what became of the node.
            self._reporter.event("labelled", text, node=seen.name)
            self._client.set_comment([seen.name], wanted)
        except SresError as error:
            log.warning("%s: its comment could not be set: %s", seen.name, error)


def _machine_of(snapshot: ClusterSnapshot, node: str) -> MachineIdentity:
    agent = snapshot.agents.get(node)
    return MachineIdentity(agent.boot_id, agent.instance) if agent else MachineIdentity()
