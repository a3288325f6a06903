"""Save a node's evidence before it is given away: its logs and findings, once for each incident.

sresd is asked as soon as the node is marked, so that nothing waits for the answer later. A node
that cannot answer delays its replacement by `replace.evidence_timeout` at most.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.config import ReplaceSettings
from slurm_resilience.controller.act.reporting import Reporter
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.errors import SresError
from slurm_resilience.model import REBOOT, RESET
from slurm_resilience.wire.evidence_files import evidence_files, evidence_in_words
from slurm_resilience.wire.frames import UNREADABLE
from slurm_resilience.wire.messages import (
    AwaitBugReport,
    BugReportTold,
    NodeAnswer,
    NodeEvidence,
    SendEvidence,
)

log = logging.getLogger("sresctld")

GRACE_SECONDS = 5.0
"""For the answer of a sresd that has waited as long as it was asked to."""

Ask = Callable[[str, str, msgspec.Raw, float, Callable[[NodeAnswer], None]], None]
"""`NodeRequests.ask`."""


def evidence_directory(state_dir: Path, incident: int) -> Path:
    """Return the directory of an incident's evidence."""
    return state_dir / "evidence" / str(incident)


def prune_evidence(state_dir: Path, before: float, is_kept: Callable[[int], bool]) -> None:
    """Remove old evidence of incidents that are gone.

    Args:
        state_dir: sresctld's own directory.
        before: what was last changed before this moment (epoch).
        is_kept: tells whether the journal has an incident.
    """
    for directory in (state_dir / "evidence").glob("*"):
        number = directory.name.partition(".")[0]
        with contextlib.suppress(OSError):
            is_old = number.isdecimal() and directory.stat().st_mtime < before
            if is_old and not is_kept(int(number)):
                shutil.rmtree(directory)


def report_wait(action: str, settings: ReplaceSettings) -> float:
    """Return the seconds that a repair waits for a bug report that is being written. Pure.

    A reboot would cut it off. A machine that is given away takes its disk along, so the wait is for
    the copy alone. What resets a GPU leaves the report be.

    Args:
        action: of the incident.
        settings: the longest wait, and where a copy goes.
    """
    if action == REBOOT or (action != RESET and settings.evidence_directory):
        return settings.bug_report_wait
    return 0.0


class EvidenceCollector:
    """Asks, and keeps the answers. Used by the cycle's thread; answers come in the wire's."""

    def __init__(
        self,
        ask: Ask | None,
        journal: Journal,
        reporter: Reporter,
        clock: Clock,
        state_dir: Path,
        settings: ReplaceSettings,
        wake: Callable[[], None],
    ) -> None:
        """
        Args:
            ask: asks a node's sresd; None: nothing is collected.
            journal: knows the incidents.
            reporter: is told where the evidence is, or why there is none.
            clock: its monotonic time counts.
            state_dir: sresctld's own directory.
            settings: how long a node that has not answered is waited for, and its bug report.
            wake: begins the next cycle.
        """
        self._ask = ask
        self._journal = journal
        self._reporter = reporter
        self._clock = clock
        self._state_dir = state_dir
        self._settings = settings
        self._seconds = settings.evidence_timeout
        self._wake = wake
        self._asked_at: dict[int, float] = {}
        """Incidents of which no answer has come yet, since when (monotonic)."""
        self._report_asked_at: dict[int, float] = {}
        """Incidents whose bug report is being written, since when it was asked for."""
        self._answers: queue.SimpleQueue[tuple[Incident, NodeAnswer]] = queue.SimpleQueue()

    def begin(self, incident: Incident) -> None:
        """Ask the node of an incident, once."""
        if self._ask is None or not self._seconds or incident.id in self._asked_at:
            return
        if incident.evidence or incident.attempts:
            return
        self._asked_at[incident.id] = self._clock.monotonic()

        def answered(answer: NodeAnswer) -> None:
            self._answers.put((incident, answer))
            self._wake()

        body = msgspec.Raw(msgspec.msgpack.encode(SendEvidence()))
        try:
            self._ask(incident.node, SendEvidence.kind, body, self._seconds, answered)
        except SresError as error:
            self._answers.put((incident, NodeAnswer(0, refused=str(error))))

    def is_settled(self, incident: Incident) -> bool:
        """Tell whether nothing more is to be waited for; ask, where that was not done yet."""
        if self._ask is None or not self._seconds or incident.attempts:
            return True
        self.begin(incident)
        self.settle()
        now = self._clock.monotonic()
        asked_at = self._asked_at.get(incident.id)
        if asked_at is not None and now - asked_at < self._seconds:
            return False
        report_at = self._report_asked_at.get(incident.id)
        return report_at is None or now - report_at >= report_wait(incident.action, self._settings)

    def settle(self) -> None:
        """Keep the answers that have come."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(*self._answers.get_nowait())

    def _take(self, incident: Incident, answer: NodeAnswer) -> None:
        if incident.id in self._report_asked_at:
            self._take_report(incident, answer)
            return
        self._asked_at.pop(incident.id, None)
        text = f"none: {answer.refused}"
        if not answer.refused:
            try:
                evidence = msgspec.msgpack.decode(answer.body, type=NodeEvidence)
                text = self._save(incident, evidence)
                if evidence.bug_report_runs:
                    self._await_report(incident)
            except UNREADABLE as error:
                text = f"none: sresd's answer cannot be read: {error}"
            except OSError as error:
                text = f"none: it cannot be written: {error}"
        self._note(incident, text)

    def _await_report(self, incident: Incident) -> None:
        """Ask where the bug report lies, once it is there. Only a node that will be rebooted or
        replaced is waited for: see `is_settled`."""
        seconds = self._settings.bug_report_wait
        if not seconds or self._ask is None:
            return
        self._report_asked_at[incident.id] = self._clock.monotonic()

        def answered(answer: NodeAnswer) -> None:
            self._answers.put((incident, answer))
            self._wake()

        body = msgspec.Raw(msgspec.msgpack.encode(AwaitBugReport(seconds)))
        try:
            patience = seconds + GRACE_SECONDS
            self._ask(incident.node, AwaitBugReport.kind, body, patience, answered)
        except SresError as error:
            self._answers.put((incident, NodeAnswer(0, refused=str(error))))

    def _take_report(self, incident: Incident, answer: NodeAnswer) -> None:
        del self._report_asked_at[incident.id]
        text = f"none: {answer.refused}"
        if not answer.refused:
            try:
                text = msgspec.msgpack.decode(answer.body, type=BugReportTold).text
            except UNREADABLE as error:
                text = f"none: sresd's answer cannot be read: {error}"
        known = self._journal.incident(incident.id).evidence
        self._note(incident, f"{known}; bug report: {text}")

    def _note(self, incident: Incident, text: str) -> None:
        self._journal.note_evidence(incident.id, text)
        self._reporter.event("evidence", text, node=incident.node, incident=incident.id)
        log.info("%s: evidence of incident %d: %s", incident.node, incident.id, text)

    def _save(self, incident: Incident, evidence: NodeEvidence) -> str:
        """Write the files; a directory that has the incident's name is complete."""
        directory = evidence_directory(self._state_dir, incident.id)
        unfinished = directory.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True, mode=0o700)
        about = {"node": incident.node, "incident": incident.id, "reason": incident.reason}
        for name, text in evidence_files(evidence, about).items():
            _write(unfinished / name, text)
        unfinished.replace(directory)
        return f"{directory}: {evidence_in_words(evidence)}"


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
