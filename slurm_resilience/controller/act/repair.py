"""Act on a node's repair: start and stop the replacement program, and give the node back."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.controller.act.evidence_collector import EvidenceCollector
from slurm_resilience.controller.act.reporting import Reporter
from slurm_resilience.controller.actions import (
    ActOutcome,
    ContinueReplacement,
    ReturnNode,
    StartReplacement,
)
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent
from slurm_resilience.controller.decide.replacing import is_still_asked_for
from slurm_resilience.controller.diagnose import is_kept_instead, is_speaking, open_findings
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import Incident, IncidentFacts, MachineIdentity
from slurm_resilience.controller.observe import ClusterSnapshot, repair_order
from slurm_resilience.controller.probe import Prober, ProbeResult
from slurm_resilience.controller.registry import Registry
from slurm_resilience.model import ACTIONS, REPLACE, Node
from slurm_resilience.replace.repair_order import RepairOrder, RunExists
from slurm_resilience.replace.replacers import PROGRAM, Replacers
from slurm_resilience.slurm.client import SlurmClient

log = logging.getLogger("sresctld")

EARLIER_INCIDENTS = 20
"""Incidents of a node whose runs may not have ended yet."""
LAST_LOOK_SECONDS = 1.0
"""A look at a node's life is the last one before its replacement for this long."""


class RepairActs:
    """The acts that have a node replaced or rebooted, and give it back."""

    def __init__(
        self,
        client: SlurmClient,
        journal: Journal,
        reporter: Reporter,
        registry: Registry,
        prober: Prober,
        clock: Clock,
        config: Config,
        state_dir: Path,
        evidence: EvidenceCollector,
        replacers: Replacers,
    ) -> None:
        self._client = client
        self._journal = journal
        self._reporter = reporter
        self._registry = registry
        self._prober = prober
        self._clock = clock
        self._config = config
        self._settings = config.replace
        self._state_dir = state_dir
        self.evidence = evidence
        self._replacers = replacers

    def start(self, snapshot: ClusterSnapshot, action: StartReplacement) -> None:
        """Start the replacement program, unless anything has changed: work has come to the node, a
        person has answered, or the node lives again."""
        incident = snapshot.incidents[action.node]
        node = self._node_to_repair(snapshot, action.node)
        if node is None:
            return
        if not self.evidence.is_settled(self._journal.incident(incident.id)):
            log.debug("%s: its replacement waits for its evidence", node.name)
            return
        if self._lives(snapshot, incident, node):
            return
        looked = self._clock.monotonic()
        earlier = self._earlier_run(incident, node)
        if earlier is not None:
            log.info("%s: the run %s has not ended: its replacement waits", node.name, earlier)
            return
        # Once more: a probe may have taken a second, in which a person may have resumed the node.
        node = self._node_to_repair(snapshot, action.node)
        if node is None:
            return
        if snapshot.site.returns_by_itself and not (node.is_fail or node.is_drain):
            # Slurm would put it into service in the middle, as soon as its slurmd registers.
            self._client.set_node([node.name], state="fail", reason=node.reason)
        # A slurmctld that answers after ten seconds: the node may have come back meanwhile.
        is_outdated = self._clock.monotonic() - looked > LAST_LOOK_SECONDS
        if is_outdated and self._lives(snapshot, incident, node):
            return
        agent = snapshot.agents.get(action.node)
        before = MachineIdentity(agent.boot_id, agent.instance) if agent else incident.before
        name = self._replacers.name_of(incident.action)
        words = self._settings.program if name == PROGRAM else (name,)
        verb = ACTIONS.get(incident.action, ACTIONS[REPLACE])[0]
        command = " ".join([*words, verb, node.name])
        facts = IncidentFacts(attempts=incident.attempts + 1, before=before, is_flap=False)
        # The journal first: a run that exists is found again by its directory.
        incident = self._reporter.report(
            ActOutcome(incident.id, NodeEvent.REPLACING, command, facts)
        )
        try:
            self._replacers.start(self._order(incident), incident.action, node, self._clock.now())
        except RunExists:
            log.info(
                "the run of incident %d, attempt %d was started before",
                incident.id,
                incident.attempts,
            )
        self._journal.note_carried_out(incident.id)

    def go_on(self, snapshot: ClusterSnapshot, action: ContinueReplacement) -> None:
        """Do the next act of a repair, unless anything has changed at the node meanwhile."""
        node, seen = self._client.node(action.node), snapshot.nodes[action.node]
        if (node.reason, node.reason_at, node.state) != (seen.reason, seen.reason_at, seen.state):
            log.info("%s is %s now (%s): its repair waits", node.name, node.state, node.reason)
            return
        self._reporter.event("repairing", action.what, node=node.name, incident=action.incident)
        order = self._order(snapshot.incidents[action.node])
        self._replacers.go_on(order, node, self._clock.now())

    def _order(self, incident: Incident) -> RepairOrder:
        return repair_order(self._state_dir, incident, self._settings.timeout)

    def _node_to_repair(self, snapshot: ClusterSnapshot, name: str) -> Node | None:
        """Return the node as Slurm shows it now; None: work has come to it, or a person's word."""
        node, seen = self._client.node(name), snapshot.nodes[name]
        is_same = (node.reason, node.reason_at) == (seen.reason, seen.reason_at)
        has_work = node.has_work or seen.has_suspended_job
        if has_work or not node.requested_action or not is_same:
            log.info("%s is %s now (%s): its replacement waits", node.name, node.state, node.reason)
            return None
        return node

    def _lives(self, snapshot: ClusterSnapshot, incident: Incident, node: Node) -> bool:
        """Tell whether the node lives again, and no person's request stands all the same."""
        is_asked = is_still_asked_for(snapshot, self._config, incident)
        by_slurm = "Slurm reboots it" if node.is_being_rebooted else ""
        news = "" if is_asked else by_slurm or self._sign_of_life(snapshot, node)
        if news:
            log.info("%s: %s: its replacement waits", node.name, news)
        return bool(news)

    def _sign_of_life(self, snapshot: ClusterSnapshot, node: Node) -> str:
        """Look at the node's life once more, in the second before its replacement starts.

        Returns:
            The news that speaks against it; empty: none.
        """
        present = self._present(snapshot, node.name)
        if is_speaking(present, self._config.detect, node.name):
            return "" if open_findings(present, node.name) else "its sresd beats"
        newest = self._last_probe(node.name)
        if newest is None or self._clock.monotonic() - newest.ended > LAST_LOOK_SECONDS:
            answer = self._prober.look(node.name, node.address, node.port)
        else:
            answer = newest.answer
        if answer is None:
            return "slurmd's port could not be tried"
        return "slurmd's port answers" if answer == "answered" else ""

    def lives_again(self, snapshot: ClusterSnapshot, name: str) -> str:
        """Return the sign of life that a node has given since it was observed; empty: none."""
        if is_speaking(self._present(snapshot, name), self._config.detect, name):
            return "its sresd beats"
        newest = self._last_probe(name)
        if newest is None or newest.ended < snapshot.moment or newest.answer != "answered":
            return ""
        return "slurmd's port answers"

    def _last_probe(self, name: str) -> ProbeResult | None:
        return next(iter(reversed(self._prober.results().get(name, ()))), None)

    def _present(self, snapshot: ClusterSnapshot, name: str) -> ClusterSnapshot:
        """Return the snapshot with what one node's sresd has said meanwhile."""
        agent = self._registry.agent(name)
        agents = {name: agent} if agent is not None else {}
        return msgspec.structs.replace(snapshot, agents=agents)

    def _earlier_run(self, incident: Incident, node: Node) -> Path | None:
        """Return a run for this node that has not ended: a person stopped it, or took the node."""
        now = self._clock.now()
        for known in self._journal.incidents_of(incident.node, EARLIER_INCIDENTS):
            for attempt in range(1, known.attempts + 1):
                order = self._order(msgspec.structs.replace(known, attempts=attempt))
                if self._replacers.is_unfinished(order, node, now):
                    return order.directory
        return None

    def stop(self, incident: Incident) -> None:
        """Have the incident's repair stopped."""
        self._replacers.stop(self._order(incident))

    def give_back(self, snapshot: ClusterSnapshot, action: ReturnNode) -> None:
        """Give the node back to Slurm, unless it is in service already or a person keeps it."""
        node = self._client.node(action.node)
        text = "Slurm shows it in service already"
        if not (node.is_available or node.is_only_reserved):
            known = snapshot.incidents[action.node]
            if is_kept_instead(node, known.action, snapshot.site.slurm_users):
                log.info("%s is kept out meanwhile: %s: not resumed", node.name, node.reason)
                return
            present = self._present(snapshot, node.name)
            found = open_findings(present, node.name)
            if found:
                log.info("%s has %s meanwhile: not resumed", node.name, found[0].text)
                return
            agent = present.agents.get(node.name)
            if agent is not None and agent.is_heard and not agent.vouches:
                log.info("%s has a new sresd that looks at it still: not resumed", node.name)
                return
            text = "state=resume"
            self._reporter.event("resuming", text, node=node.name, incident=action.incident)
            self._client.set_node([node.name], state="resume")
        facts = IncidentFacts(reason_at=node.reason_at)
        self._reporter.report(ActOutcome(action.incident, NodeEvent.RESUMED, text, facts))
