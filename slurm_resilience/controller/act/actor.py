"""Act: do what was decided, one action at a time, journaled before and after.

Every act that changes Slurm looks at the node or job once more first; if the cluster has moved on,
it does nothing and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.controller import actions
from slurm_resilience.controller.act.evidence_collector import Ask, EvidenceCollector
from slurm_resilience.controller.act.jobs import JobActs, Notifier
from slurm_resilience.controller.act.left_over_acts import LeftOverActs
from slurm_resilience.controller.act.nodes import NodeActs
from slurm_resilience.controller.act.notes import NoteWriter
from slurm_resilience.controller.act.repair import RepairActs
from slurm_resilience.controller.act.reporting import Reporter, user_of
from slurm_resilience.controller.act.spare_acts import SpareActs
from slurm_resilience.controller.alarms import SHOWN_AFTER_SECONDS
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.probe import Prober
from slurm_resilience.controller.registry import Registry
from slurm_resilience.errors import SresError
from slurm_resilience.replace.replacers import Replacers, program_only
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.reservations import ReservationClient

log = logging.getLogger("sresctld")

REPEAT_SECONDS = 60.0
"""Until the same failure is reported again."""


def _never() -> bool:
    return False


class Actor:
    """Executes decisions. ``dry_run``: says what it would do, and does nothing."""

    def __init__(
        self,
        client: SlurmClient,
        journal: Journal,
        registry: Registry,
        prober: Prober,
        clock: Clock,
        config: Config,
        state_dir: Path,
        dry_run: bool = False,
        replacers: Replacers | None = None,
        ask: Ask | None = None,
        reservations: ReservationClient | None = None,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._dry_run = dry_run
        self._reporter = Reporter(journal, clock)
        self._alarms: set[str] = set()
        self._raised_before = journal.alarms(clock.now() - SHOWN_AFTER_SECONDS)
        self._failed_at: dict[str, float] = {}
        self.is_halted: Callable[[], bool] = _never
        """Asked between two acts: whether a person or SIGTERM stops the rest of them."""
        self._notes = NoteWriter(journal, registry, clock)
        notifier = Notifier(registry)
        jobs = JobActs(client, journal, self._reporter, notifier, clock)
        self._evidence = EvidenceCollector(
            ask,
            journal,
            self._reporter,
            clock,
            state_dir,
            config.replace,
            registry.wake.set,
        )
        repair = RepairActs(
            client,
            journal,
            self._reporter,
            registry,
            prober,
            clock,
            config,
            state_dir,
            self._evidence,
            replacers or program_only(config.replace),
        )
        nodes = NodeActs(client, journal, self._reporter, prober, notifier, jobs, repair, clock)
        spares = SpareActs(reservations, journal, clock)
        left_over = LeftOverActs(client, self._reporter, clock, ask, registry.wake.set)
        self._handlers: dict[type, Callable[[ClusterSnapshot, Any], None]] = {
            actions.ProbeNode: nodes.probe,
            actions.MarkNode: nodes.mark,
            actions.OpenRequested: nodes.open_requested,
            actions.OpenCameBack: nodes.open_came_back,
            actions.Transition: nodes.apply,
            actions.TakeLabelsOff: nodes.take_labels_off,
            actions.RenewLabels: nodes.renew_labels,
            actions.StartReplacement: repair.start,
            actions.ContinueReplacement: repair.go_on,
            actions.ReturnNode: repair.give_back,
            actions.NotifySupervisor: jobs.notify,
            actions.ClearLeftOver: left_over.clear,
            actions.RequeueJob: jobs.requeue,
            actions.EndStrandedJob: jobs.end_stranded,
            actions.RaisePriority: jobs.raise_priority,
            actions.StartPendingJob: jobs.start,
            actions.KeepPendingRequeue: jobs.keep_pending_requeue,
            actions.EndPendingRequeue: jobs.end_pending_requeue,
            actions.AskForPool: spares.ask,
            actions.AskForGift: spares.ask_for_gift,
            actions.RaiseAlarm: self._raise_alarm,
        }

    def act(
        self,
        snapshot: ClusterSnapshot,
        decided: Sequence[actions.Action],
        notes: Sequence[actions.Note] = (),
    ) -> None:
        """Do all actions; one that fails is journaled and does not stop the others.

        Args:
            snapshot: what was decided from.
            decided: the actions.
            notes: what the journal must learn first.
        """
        self.take_note(snapshot, notes)
        self._evidence.settle()
        for action in decided:
            if self._dry_run and not isinstance(action, actions.ProbeNode):
                log.info("dry run, not done: %s", action)
                continue
            if not isinstance(action, actions.ProbeNode) and self.is_halted():
                log.info("stopped between two acts: the next cycle decides anew")
                return
            try:
                self._handlers[type(action)](snapshot, action)
            except (SresError, OSError) as error:
                self._note_failure(action, error)

    def take_note(self, snapshot: ClusterSnapshot, notes: Sequence[actions.Note]) -> None:
        """Write down what the journal must learn before anything is done, in a dry run as well."""
        self._notes.keep_only(snapshot.jobs)
        self.write(notes)

    def write(self, notes: Sequence[actions.Note]) -> None:
        """Write down what was heard."""
        for note in notes:
            self._notes.write(note)

    def _note_failure(self, action: actions.Action, error: Exception) -> None:
        """Report a failure, but not four times a second while it goes on."""
        name, node = type(action).__name__, getattr(action, "node", "")
        key, now = f"{name} {node} {error}", self._clock.monotonic()
        if now - self._failed_at.get(key, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        self._failed_at[key] = now
        log.error("%s failed: %s", name, error)
        self._reporter.event("failed", f"{name}: {error}", node=node)

    def _raise_alarm(self, snapshot: ClusterSnapshot, action: actions.RaiseAlarm) -> None:
        if action.key in self._alarms:
            return
        self._alarms.add(action.key)
        if action.key in self._raised_before:
            return  # in the minutes before a restart of sresctld
        known = snapshot.incidents.get(action.node)
        if action.remember and known is not None and known.alarmed:
            return  # raised before a restart of sresctld
        log.warning("%s%s", f"{action.node}: " if action.node else "", action.text)
        self._reporter.event(
            "alarm",
            action.text,
            node=action.node,
            job=action.job,
            incident=action.incident,
            key=action.key,
            **user_of(snapshot, action.job),
        )
        if action.remember:
            self._journal.note_alarm(action.incident)
