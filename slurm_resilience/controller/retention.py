"""The end of what is too old, in the journal and on the disk, once the date has proven itself.

Only the machine's date tells how old a row is, and a date can be set to anything: set a year ahead,
it would make the whole journal too old at once. So nothing is dropped before the date has gone on
at the pace of the monotonic clock for a week, restarts of sresctld included.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from pathlib import Path

from slurm_resilience.clock import SteadyClock
from slurm_resilience.config import ControllerSettings
from slurm_resilience.controller.act.evidence_collector import prune_evidence
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import ProvenDate
from slurm_resilience.replace import program
from slurm_resilience.replace.program import RunHost

log = logging.getLogger("sresctld")

LOOK_SECONDS = 3600.0
"""Between two looks for what has become too old."""
PROVEN_AFTER_SECONDS = 7 * 86400.0
"""A date that was set wrong is noticed within this time."""
STEP_SECONDS = 86400.0
"""The date was set where it is off by more than this. Less does not matter beside a journal of
months, and so long may sresctld be away."""


class Retention:
    """Looks every hour, and drops what is older than `controller.keep`."""

    def __init__(
        self, journal: Journal, clock: SteadyClock, settings: ControllerSettings, host: RunHost
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._settings = settings
        self._host = host
        self._looked_at = clock.monotonic()
        self._date = journal.proven_date()
        self._look(0.0)

    def look(self) -> None:
        """Look, if it is time to."""
        passed = self._clock.monotonic() - self._looked_at
        if passed >= LOOK_SECONDS:
            self._looked_at += passed
            self._look(passed)

    def _look(self, passed: float) -> None:
        date, keep = self._clock.machines(), self._settings.keep
        before = self._date
        self._date = observe_date(before, date, passed, keep)
        if before is not None and self._date.steady < before.steady:
            log.warning(
                "the machine's date was set, or sresctld was away for long: nothing old is dropped "
                "before %.0f days have passed",
                _proven_after(keep) / 86400.0,
            )
        with contextlib.suppress(sqlite3.Error):  # a full disk; the next cycle says so
            self._journal.put_proven_date(self._date)
            if is_proven(self._date, keep):
                self._drop(min(date, self._clock.now()) - keep)

    def _drop(self, before: float) -> None:
        journal, state_dir = self._journal, Path(self._settings.state_dir)
        journal.prune(before)
        program.prune(state_dir / "runs", before, journal.has_incident, self._host)
        prune_evidence(state_dir, before, journal.has_incident)


def observe_date(known: ProvenDate | None, date: float, passed: float, keep: float) -> ProvenDate:
    """Return how long the date has gone on by itself.

    Args:
        known: by the last look; None: there was none.
        date: the machine's, now (epoch).
        passed: seconds of the monotonic clock since the last look; 0: by the last sresctld, so that
            the date may be later by the time in which none ran.
        keep: `controller.keep`.
    """
    if known is None:
        return ProvenDate(date, 0.0)
    is_set = abs(date - known.seen - passed) > min(STEP_SECONDS, keep / 10.0)
    return ProvenDate(date, 0.0 if is_set else known.steady + passed)


def is_proven(date: ProvenDate, keep: float) -> bool:
    """Tell whether the age of rows can be told by the date."""
    return date.steady >= _proven_after(keep)


def _proven_after(keep: float) -> float:
    return min(PROVEN_AFTER_SECONDS, keep)
