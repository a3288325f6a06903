"""Keep what this node has to report: checks and kernel log fill it, the link empties it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from slurm_resilience.agent.health_log import HealthLog
from slurm_resilience.health.grouping import GroupingChange, heals
from slurm_resilience.model import FAULTY, CheckResult, Finding, Severity
from slurm_resilience.wire.messages import Report

Key = tuple[str, str, str]

MAX_WATCHED = 100
"""Findings of the kernel log that are kept though they ask for nothing; the oldest goes first. A
user's programs bring them about, and what a node has to say must fit into one message. Faults are
all kept: they come from the machine, and name its parts."""


class Outbox:
    """Thread safe. Each entry calls ``wake`` when there is something new to send."""

    def __init__(
        self, wake: Callable[[], None] = lambda: None, health_log: HealthLog | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._wake = wake
        self._health_log = health_log
        self._results: dict[str, CheckResult] = {}
        self._expected: frozenset[str] | None = None
        """The checks of this sresd; None: they are not known yet."""
        self._held: dict[str, tuple[Finding, ...]] = {}
        """Findings of each check's last judged run: an unjudged run does not take them back."""
        self._findings: dict[Key, Finding] = {}
        """The kernel log's: they hold until this boot ends, or until a line cancels them."""
        self._new_results: dict[str, CheckResult] = {}
        self._new_findings: dict[Key, Finding] = {}
        self._notes: list[Finding] = []
        self._cleared: dict[Key, None] = {}

    def expect(self, checks: Iterable[str]) -> None:
        """Take in which checks there are: the node has been looked at once each has a result."""
        with self._lock:
            self._expected = frozenset(checks)
        self._wake()

    def result(self, result: CheckResult) -> bool:
        """Queue a check's result; True when it differs from the one before in more than words."""
        with self._lock:
            before = self._results.get(result.check)
            self._results[result.check] = result
            if result.verdict != "unjudged":
                now = {finding.key for finding in result.findings}
                for finding in self._held.get(result.check, ()):
                    if finding.key not in now:
                        self._cleared[finding.key] = None
                self._held[result.check] = result.findings
            if before is not None and _same(before, result):
                return False
            self._new_results[result.check] = result
            if self._health_log is not None:
                self._health_log.result(result)
        self._wake()
        return True

    def change(self, change: GroupingChange) -> None:
        """Queue what the kernel log's incidents became."""
        with self._lock:
            healed = [k for k, f in self._findings.items() if heals(f, change.recovered)]
            for key in (*change.cleared, *healed):
                if self._findings.pop(key, None):
                    self._new_findings.pop(key, None)
                    self._cleared[key] = None
                    if self._health_log is not None:
                        self._health_log.cleared(key)
            if change.report is not None:
                if self._health_log is not None:
                    self._health_log.finding(change.report)
                self._findings[change.report.key] = change.report
                self._new_findings[change.report.key] = change.report
                self._cleared.pop(change.report.key, None)
                self._forget_watched()
        if change.report is not None or change.cleared or healed:
            self._wake()

    def note(self, finding: Finding) -> None:
        """Queue something that is said once, whenever sresctld can be reached."""
        with self._lock:
            self._notes.append(finding)
            if self._health_log is not None:
                self._health_log.finding(finding)
        self._wake()

    def kernel_findings(self) -> tuple[Finding, ...]:
        """Return the kernel log's findings that hold now."""
        with self._lock:
            return tuple(self._findings.values())

    def holding(self) -> tuple[Finding, ...]:
        """Return all findings that hold now, of the kernel log and of the checks."""
        with self._lock:
            held = tuple(finding for findings in self._held.values() for finding in findings)
            return (*self._findings.values(), *held)

    def awaits_reset(self) -> bool:
        """Tell whether something that holds now asks for a GPU's reset."""
        return any(finding.severity is Severity.RESET for finding in self.holding())

    def results(self) -> tuple[CheckResult, ...]:
        """Return the last result of each check."""
        with self._lock:
            return tuple(self._results.values())

    def take(self) -> Report | None:
        """Return the news since the last call; None when there is none."""
        with self._lock:
            report = Report(
                tuple(self._new_results.values()),
                (*self._new_findings.values(), *self._notes),
                tuple(self._cleared),
                checked=self._is_checked(),
            )
            self._forget_new()
        return report if report.results or report.findings or report.cleared else None

    def take_all(self) -> Report:
        """Return everything that holds, for a sresctld that may know nothing."""
        with self._lock:
            held = tuple(
                finding
                for name, findings in self._held.items()
                if self._results[name].verdict == "unjudged"
                for finding in findings
            )
            report = Report(
                tuple(self._results.values()),
                (*self._findings.values(), *held, *self._notes),
                tuple(self._cleared),
                full=True,
                checked=self._is_checked(),
            )
            self._forget_new()
        return report

    def _is_checked(self) -> bool:
        return self._expected is not None and self._expected <= self._results.keys()

    def _forget_watched(self) -> None:
        watched = [key for key, one in self._findings.items() if one.severity not in FAULTY]
        for key in watched[:-MAX_WATCHED]:
            del self._findings[key]
            self._new_findings.pop(key, None)
            self._cleared[key] = None

    def _forget_new(self) -> None:
        self._new_results.clear()
        self._new_findings.clear()
        self._notes.clear()
        self._cleared.clear()


def _same(a: CheckResult, b: CheckResult) -> bool:
    """Compare verdict, findings and their severities; numbers in the text may move."""
    return a.verdict == b.verdict and {(f.key, f.severity) for f in a.findings} == {
        (f.key, f.severity) for f in b.findings
    }
