"""One round of sresctld: observe → diagnose → decide → act → record."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.controller.act.actor import Actor
from slurm_resilience.controller.actions import RaiseAlarm
from slurm_resilience.controller.alarms import FollowedAlarm, follow
from slurm_resilience.controller.calm.calm_nodes import CalmNodes
from slurm_resilience.controller.decide.decision import Decision, decide
from slurm_resilience.controller.decide.intake import pause_of
from slurm_resilience.controller.decide.recovery_modes import check_names
from slurm_resilience.controller.diagnose import SLURM_USERS, NodeDiagnosis, diagnose
from slurm_resilience.controller.heard import InboxMessage
from slurm_resilience.controller.observe import (
    Blind,
    ClusterSnapshot,
    SiteFacts,
    Sources,
    observe,
)
from slurm_resilience.controller.slurm_settings import SlurmSettings
from slurm_resilience.controller.status import NodeVerdicts, status
from slurm_resilience.errors import ConfigError
from slurm_resilience.model import REBOOT, REPLACE, RESET
from slurm_resilience.wire.messages import PauseRequest

log = logging.getLogger("sresctld")

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
        self._config = self._in_force = config
        self._settings = settings
        self._started = self._sighted_since = sources.clock.monotonic()
        self._alarms: dict[str, FollowedAlarm] = {}
        self._calm = CalmNodes()
        self._blind_since = 0.0
        self._warned_of_modes = ""
        self._unwritten: tuple[InboxMessage, ...] = ()
        """Taken out of the inbox, and not in the journal yet: its disk was full."""
        self.stop = threading.Event()
        """Set to end between two acts."""
        self.failing_sinks: Callable[[], tuple[tuple[str, str], ...]] = tuple
        """Names of sinks that take no events, each with the reason."""
        actor.is_halted = self.is_halted

    def run_once(self) -> str:
        """Do one round; returns its sentence."""
        try:
            return self._round()
        except sqlite3.Error as error:
            # A full disk. Each decision is written down before it is done: so nothing is done, and
            # those who ask are told.
            path = self._sources.state_dir
            return self._blind(f"the journal in {path} cannot be written: {error}")
        except msgspec.DecodeError as error:
            return self._blind(f"the journal in {self._sources.state_dir} cannot be read: {error}")

    def _round(self) -> str:
        snapshot = observe(self._sources, self._site())
        if isinstance(snapshot, Blind):
            self.take_pauses()
            return self._blind(snapshot.reason, self._sources.journal.paused)
        # First: an administrator's pause is taken up as soon as it can be written down.
        messages = self._unwritten = (*self._unwritten, *snapshot.heard.messages)
        if not self._sources.journal.is_in_place:
            # The next sresctld would know of nothing that is done from now on, and runs that are
            # under way look like lost ones.
            return self._blind(
                f"the journal in {self._sources.state_dir} was removed or exchanged under this "
                "sresctld: put it back, or restart sresctld"
            )
        heard = msgspec.structs.replace(
            snapshot.heard, messages=messages, sighted_since=self._sighted_since
        )
        snapshot = msgspec.structs.replace(snapshot, heard=heard)
        config = self._in_force = self._with_modes(snapshot)
        snapshot = self._calm.set_apart(snapshot, config.detect.silent_after)
        diagnoses = diagnose(snapshot, config)
        decision = decide(snapshot, diagnoses, config)
        self._actor.take_note(decision.snapshot, decision.notes)
        self._unwritten = ()
        self._actor.act(decision.snapshot, decision.actions)
        self._record(decision, diagnoses)
        return decision.sentence

    def is_busy(self) -> bool:
        """Tell whether work is under way that needs more frequent looks than the interval."""
        journal, now = self._sources.journal, self._sources.clock.now()
        try:
            pending, incidents = journal.pending_requeues(), journal.incidents()
            gifts = journal.spares().open_gifts
        except sqlite3.Error:
            return False  # the next round says so
        return bool(pending or gifts) or any(
            incident.state.is_in_repair
            or (
                incident.state.waits_for_repair
                and now - incident.times.marked < RECENTLY_MARKED_SECONDS
            )
            for incident in incidents
        )

    def _with_modes(self, snapshot: ClusterSnapshot) -> Config:
        """Return the configuration with the modes that hold for Slurm's present partitions: when
        one is removed or renamed (`scontrol reconfigure`), the nodes that it had keep its mode."""
        if not self._config.recovery.partitions:
            return self._config
        journal = self._sources.journal
        before = journal.named_modes()
        try:
            checked = check_names(self._config, snapshot.nodes.values(), before)
        except ConfigError:
            return self._config  # sresctld does not start with such a name
        if checked.names != before:
            journal.put_named_modes(checked.names)
        if checked.warning not in ("", self._warned_of_modes):
            log.warning("%s", checked.warning)
        self._warned_of_modes = checked.warning
        return checked.config

    def _site(self) -> SiteFacts:
        slurm = self._settings.now()
        return SiteFacts(
            uptime=self._sources.clock.monotonic() - self._started,
            can_replace=self._sources.replacers.can(REPLACE),
            can_reboot=self._sources.replacers.can(REBOOT),
            can_reset=self._sources.replacers.can(RESET) and self._config.recovery.max_resets > 0,
            permits_expansion=slurm.permits_expansion,
            slurmd_timeout=slurm.slurmd_timeout_seconds,
            slurm_users=SLURM_USERS | slurm.slurm_users,
            returns_by_itself=slurm.returns_by_itself,
            flap_window=self._config.recovery.flap_window,
            recurrence_window=self._config.recovery.recurrence_window,
            domains=self._settings.domains(),
            failing_sinks=self.failing_sinks(),
        )

    def _record(self, decision: Decision, diagnoses: Mapping[str, NodeDiagnosis]) -> None:
        """Publish what the round found and did, for supervisors and `sres`."""
        snapshot, inbox = decision.snapshot, self._sources.inbox
        if not snapshot.paused:
            # A paused round raises none, whatever their causes do.
            raised = [a for a in decision.actions if isinstance(a, RaiseAlarm)]
            self._alarms = follow(self._alarms, raised, snapshot.now)
        incidents = {incident.node: incident for incident in self._sources.journal.incidents()}
        inbox.publish(
            NodeVerdicts(decision, diagnoses, incidents),
            status(decision, diagnoses, self._in_force, incidents, self._alarms),
        )
        self._blind_since = 0.0

    def is_halted(self) -> bool:
        """Tell whether sresctld ends, or an administrator has paused it since the round began."""
        self.take_pauses()
        return self.stop.is_set() or bool(self._sources.journal.paused)

    def take_pauses(self) -> None:
        """Write an administrator's pauses down: they count at once, and also while blind."""
        self._unwritten = (*self._unwritten, *self._sources.inbox.take_pauses())
        pauses = [
            pause_of(heard, heard.message)
            for heard in self._unwritten
            if isinstance(heard.message, PauseRequest)
        ]
        self._actor.write(pauses)
        self._unwritten = tuple(
            heard for heard in self._unwritten if not isinstance(heard.message, PauseRequest)
        )

    def is_quiet(self) -> bool:
        """Tell whether nothing is under way that is timed by the date."""
        journal = self._sources.journal
        try:
            is_tripped = journal.breaker().is_tripped
            return not (is_tripped or journal.pending_requeues() or journal.incidents())
        except sqlite3.Error:
            return False

    def _blind(self, reason: str, paused: str | None = None) -> str:
        """Do nothing, but say why."""
        self._sighted_since = self._sources.clock.monotonic()
        self._blind_since = self._blind_since or self._sources.clock.now()
        self._sources.inbox.publish_blind(reason, self._blind_since, paused)
        return f"blind, nothing is done: {reason}"
