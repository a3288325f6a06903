"""Take in what the kernel log and the driver tell, and put up what it makes of the incidents."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.health.gpu_event import GpuEvent, event_finding, is_told
from slurm_resilience.health.grouping import FindingGroup, GroupingChange, absorb, heals
from slurm_resilience.model import Finding, Severity

log = logging.getLogger("sresd.kernel_log")

KEPT_XIDS = 256
"""Xids of the kernel log and of events with which others are compared."""
LOOK_SECONDS = 2.0
"""The time for which a finding waits for what follows from it. It is looked for among the processes
and on the disk, and either may hang in the kernel."""
DCGM_SECONDS = 60.0
"""DCGM tells of an Xid within this time after the kernel."""


class FindingIntake:
    """Thread safe: both sources have a thread of their own, and one list of incidents."""

    def __init__(
        self,
        outbox: Outbox,
        suspect: Callable[[Finding], Finding | None] = lambda finding: None,
    ) -> None:
        """
        Args:
            outbox: takes what is to be reported.
            suspect: returns what follows from a finding and those of earlier days.
        """
        self._outbox = outbox
        self._suspect = suspect
        self._lock = threading.Lock()
        self._look: threading.Thread | None = None
        """The last look for what follows; one that hangs is the only one."""
        self._incidents: tuple[FindingGroup, ...] = ()
        self._logged: deque[Finding] = deque(maxlen=KEPT_XIDS)

    def from_log(self, finding: Finding) -> None:
        """Take a finding of the kernel log."""
        with self._lock:
            if finding.check == "xid":
                self._logged.append(finding)
            self._add(finding)

    def from_driver(self, event: GpuEvent, at: float) -> None:
        """Take an event, unless the kernel log has told of it already.

        Args:
            event: what the driver told.
            at: when, seconds since the epoch.
        """
        finding = event_finding(event, at)
        with self._lock:
            is_known = is_told(finding, self._logged)
            self._logged.append(finding)
            if not is_known:
                self._add(finding)

    def from_dcgm(self, finding: Finding) -> None:
        """Take a violation of a policy of DCGM's, unless its Xid is known already."""
        with self._lock:
            if not self._is_known(finding):
                self._add(finding)

    def knows(self, finding: Finding) -> bool:
        """Tell whether the kernel log or the driver has told of an Xid that DCGM tells of."""
        with self._lock:
            return self._is_known(finding)

    def recovered(self, gpu: str) -> None:
        """Take in that a GPU was reset: what a reset heals is healed.

        Args:
            gpu: the subject of its findings.
        """
        with self._lock:
            rest = tuple(one for one in self._incidents if not heals(one.lead, gpu))
            self._incidents = rest
            self._outbox.change(GroupingChange(rest, recovered=gpu))

    def _is_known(self, finding: Finding) -> bool:
        return finding.check == "xid" and any(_is_same_xid(finding, one) for one in self._logged)

    def _add(self, finding: Finding) -> None:
        change = absorb(self._incidents, finding)
        self._incidents = change.incidents
        if change.report is not None:
            told = change.report
            level = logging.INFO if told.severity is Severity.MONITOR else logging.WARNING
            log.log(level, "%s: %s [%s]", told.severity, told.text, told.evidence)
        self._outbox.change(change)
        if finding.check == "xid" and (self._look is None or not self._look.is_alive()):
            look = threading.Thread(
                target=self._look_further, args=(finding,), name="suspect", daemon=True
            )
            try:
                look.start()
            except RuntimeError as error:
                log.warning(
                    "sresd cannot look whether a program or the GPU is at fault for an Xid: %s",
                    error,
                )
                return
            self._look = look
            look.join(LOOK_SECONDS)

    def _look_further(self, finding: Finding) -> None:
        """Put up what follows from a finding, in a thread that nothing waits for."""
        following = self._suspect(finding)
        if following is not None:
            self._outbox.change(GroupingChange((), following))


def _is_same_xid(finding: Finding, known: Finding) -> bool:
    """Tell whether DCGM tells of an Xid that is known; it does not name the GPU. What was injected
    hides nothing that was not."""
    is_recent = abs(finding.at - known.at) <= DCGM_SECONDS
    hides = finding.injected or not known.injected
    return finding.code == known.code and is_recent and hides
