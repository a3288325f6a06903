"""The verdicts on a node, and the one that follows from what was found. Pure.

*Unjudged* neither drains a node nor passes it: a check that was skipped, ran out of time or lacked
its tool has not looked.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from slurm_resilience.model import Severity


class HealthVerdict(enum.StrEnum):
    """The answer to "what should be done with this node?". Ordered by `VERDICTS`."""

    HEALTHY = "healthy"
    MONITOR = "monitor"
    UNJUDGED = "unjudged"
    RESTART_JOB = "restart-job"
    RESET = "reset"
    REBOOT = "reboot"
    REPLACE = "replace"


VERDICTS: tuple[HealthVerdict, ...] = tuple(HealthVerdict)
"""From the mildest to the gravest. Something unjudged outweighs something to watch: a node that was
not looked at must not pass for one that was; and a fault that was seen outweighs both."""

_VERDICT_OF = {
    Severity.NONE: HealthVerdict.HEALTHY,
    Severity.MONITOR: HealthVerdict.MONITOR,
    Severity.JOB: HealthVerdict.RESTART_JOB,
    Severity.RESET: HealthVerdict.RESET,
    Severity.REBOOT: HealthVerdict.REBOOT,
    Severity.REPLACE: HealthVerdict.REPLACE,
}


def verdict_of(severity: Severity) -> HealthVerdict:
    """Return the verdict that a finding of this severity amounts to."""
    return _VERDICT_OF[severity]


def gravest(verdicts: Iterable[HealthVerdict]) -> HealthVerdict:
    """Return the gravest of some verdicts; healthy when there is none."""
    return max(verdicts, key=VERDICTS.index, default=HealthVerdict.HEALTHY)
