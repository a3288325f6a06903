"""One round of sresctld: observe → diagnose → decide → act → record."""

from __future__ import annotations

import sqlite3

from slurm_resilience.config import Config
from slurm_resilience.controller.act.actor import Actor
from slurm_resilience.controller.actions import RaiseAlarm
from slurm_resilience.controller.alarms import FollowedAlarm, follow
from slurm_resilience.controller.decide.decision import Decision, decide
from slurm_resilience.controller.decide.intake import pause_of
from slurm_resilience.controller.diagnose import SLURM_USERS, NodeDiagnosis, diagnose
from slurm_resilience.controller.observe import Blind, SiteFacts, Sources, observe
from slurm_resilience.controller.slurm_settings import SlurmSettings
from slurm_resilience.controller.status import for_supervisors, status
from slurm_resilience.wire.messages import PauseRequest

RECENTLY_MARKED_SECONDS = 60.0
"""A node that was marked within this time may be empty at any moment."""


class Cycle:
    """The five calls. The only way back from a round into the next one is the journal."""

    def __init__(
        self,
        sources: Sources,
        actor: Actor,
        config: Config,
        settings: SlurmSettings,
    ) -> None:
        self._sources = sources
        self._actor = actor
        self._config = config
        self._settings = settings
        self._started = sources.clock.monotonic()
        self._alarms: dict[str, FollowedAlarm] = {}
        self._blind_since = 0.0

    def run_once(self) -> str:
        """Do one round; returns its sentence."""
        try:
            return self._round()
        except sqlite3.Error as error:
            # A full disk. Each decision is written down before it is done: so nothing is done, and
            # those who ask are told.
            path = self._sources.state_dir
            return self._blind(f"the journal in {path} cannot be written: {error}")

    def _round(self) -> str:
        snapshot = observe(self._sources, self._site())
        if isinstance(snapshot, Blind):
            return self._blind(snapshot.reason, hear_pauses=True)
        diagnoses = diagnose(snapshot, self._config)
        decision = decide(snapshot, diagnoses, self._config)
        self._actor.act(decision.snapshot, decision.actions, decision.notes)
        self._record(decision, diagnoses)
        return decision.sentence

    def is_busy(self) -> bool:
        """Tell whether work is under way that needs more frequent looks than the interval."""
        journal, now = self._sources.journal, self._sources.clock.now()
        try:
            pending, incidents = journal.pending_requeues(), journal.incidents()
        except sqlite3.Error:
            return False  # the next round says so
        return bool(pending) or any(
            incident.state.is_in_repair
            or (
                incident.state.waits_for_repair
                and now - incident.times.marked < RECENTLY_MARKED_SECONDS
            )
            for incident in incidents
        )

    def _site(self) -> SiteFacts:
        slurm = self._settings.now()
        return SiteFacts(
            uptime=self._sources.clock.monotonic() - self._started,
            can_replace=bool(self._config.replace.program),
            permits_expansion=slurm.permits_expansion,
            slurmd_timeout=slurm.slurmd_timeout_seconds,
            slurm_users=SLURM_USERS | slurm.slurm_users,
            returns_by_itself=slurm.returns_by_itself,
            flap_window=self._config.recovery.flap_window,
        )

    def _record(self, decision: Decision, diagnoses: dict[str, NodeDiagnosis]) -> None:
        """Publish what the round found and did, for supervisors and `sres`."""
        snapshot, inbox = decision.snapshot, self._sources.inbox
        if not snapshot.paused:
            # A paused round raises none, whatever their causes do.
            raised = [a for a in decision.actions if isinstance(a, RaiseAlarm)]
            self._alarms = follow(self._alarms, raised, snapshot.now)
        incidents = {incident.node: incident for incident in self._sources.journal.incidents()}
        inbox.publish(
            {
                name: for_supervisors(
                    diagnosis, snapshot.nodes[name], incidents.get(name), name in decision.left
                )
                for name, diagnosis in diagnoses.items()
            },
            status(decision, diagnoses, self._config, incidents, self._alarms),
        )
        self._blind_since = 0.0

    def _blind(self, reason: str, hear_pauses: bool = False) -> str:
        """Do nothing, but say why; an administrator's pause counts all the same."""
        if hear_pauses:
            self._actor.write(
                [
                    pause_of(heard, heard.message)
                    for heard in self._sources.inbox.take_pauses()
                    if isinstance(heard.message, PauseRequest)
                ]
            )
        self._blind_since = self._blind_since or self._sources.clock.now()
        self._sources.inbox.publish_blind(reason, self._blind_since)
        return f"blind, nothing is done: {reason}"
