"""Act on a node's repair: start and stop the replacement program, and give the node back."""

from __future__ import annotations

import logging
from pathlib import Path

from slurm_resilience.config import ReplaceSettings
from slurm_resilience.controller.act.reporting import Reporter
from slurm_resilience.controller.actions import ActOutcome, ReturnNode, StartReplacement
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent
from slurm_resilience.controller.diagnose import is_kept_instead
from slurm_resilience.controller.journal import Incident, IncidentFacts, MachineIdentity
from slurm_resilience.controller.observe import ClusterSnapshot, run_directory
from slurm_resilience.model import REBOOT
from slurm_resilience.replace import program
from slurm_resilience.replace.program import THIS_HOST, RunHost
from slurm_resilience.slurm.client import SlurmClient

log = logging.getLogger("sresctld")


class RepairActs:
    """The acts that have a node replaced or rebooted, and give it back."""

    def __init__(
        self,
        client: SlurmClient,
        reporter: Reporter,
        settings: ReplaceSettings,
        state_dir: Path,
        host: RunHost = THIS_HOST,
    ) -> None:
        self._client = client
        self._reporter = reporter
        self._settings = settings
        self._state_dir = state_dir
        self._host = host

    def start(self, snapshot: ClusterSnapshot, action: StartReplacement) -> None:
        """Start the replacement program, unless work has come to the node."""
        incident = snapshot.incidents[action.node]
        node = self._client.node(action.node)
        if node.has_work or not node.requested_action:
            log.info("%s is %s now: its replacement waits", node.name, node.state)
            return
        agent = snapshot.agents.get(action.node)
        before = MachineIdentity(agent.boot_id, agent.instance) if agent else incident.before
        verb = "reboot" if incident.action == REBOOT else "replace"
        command = " ".join([*self._settings.program, verb, node.name])
        facts = IncidentFacts(attempts=incident.attempts + 1, before=before)
        # The journal first: a run that exists is found again by its directory.
        incident = self._reporter.report(
            ActOutcome(incident.id, NodeEvent.REPLACING, command, facts)
        )
        try:
            program.start(
                run_directory(self._state_dir, incident),
                self._settings.program,
                verb,
                node.name,
                self._settings.timeout,
                self._host,
            )
        except program.RunExists:
            log.info(
                "the run of incident %d, attempt %d was started before",
                incident.id,
                incident.attempts,
            )

    def stop(self, incident: Incident) -> None:
        """Ask the incident's running program to end."""
        program.stop(run_directory(self._state_dir, incident), self._host)

    def give_back(self, snapshot: ClusterSnapshot, action: ReturnNode) -> None:
        """Give the node back to Slurm, unless it is in service already or a person keeps it."""
        node = self._client.node(action.node)
        text = "Slurm shows it in service already"
        if not node.is_available:
            if is_kept_instead(node, snapshot.incidents[action.node].action):
                log.info("%s is kept out meanwhile: %s: not resumed", node.name, node.reason)
                return
            text = "state=resume"
            self._reporter.event("resuming", text, node=node.name, incident=action.incident)
            self._client.set_node([node.name], state="resume")
        facts = IncidentFacts(reason_at=node.reason_at)
        self._reporter.report(ActOutcome(action.incident, NodeEvent.RESUMED, text, facts))
