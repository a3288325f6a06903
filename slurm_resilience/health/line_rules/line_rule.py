"""One kind of kernel line, and what it asks for. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from slurm_resilience.model import FAULTY, Severity

MINUTE_SECONDS = 60.0
HOUR_SECONDS = 3600.0
DAY_SECONDS = 86400.0

BDF = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}"
"""A PCI address without the number of its function."""


class RepeatStep(NamedTuple):
    """From ``times`` such lines on within ``within_seconds``, the line asks for ``severity``."""

    times: int
    within_seconds: float
    severity: Severity


@dataclass(frozen=True)
class LineRule:
    """A kind of line. The first rule that matches a line judges it.

    A rule that can take a node out of service has a pattern that begins with ``^``: users choose
    parts of many kernel lines, but not how they begin.

    The pattern may name groups: ``subject`` and ``part`` (the thing concerned) and ``amount`` (for
    how many events the line stands).
    """

    check: str
    code: str
    hint: str
    """Text that every such line holds: lines without any rule's hint are not looked at."""
    pattern: re.Pattern[str]
    severity: Severity
    """`Severity.NONE`: alone it means nothing."""
    meaning: str
    source: str
    """The reason for this severity, or its origin."""
    repeats: tuple[RepeatStep, ...] = ()
    clears: str = ""
    """The code of the trouble that this line ends, on the same subject."""
    programs: frozenset[str] = frozenset()
    """Programs whose lines in a saved log count as well; elsewhere only the kernel's do."""

    @property
    def is_grave(self) -> bool:
        """It can take the node out of service."""
        return bool(FAULTY & {self.severity, *(step.severity for step in self.repeats)})

    @property
    def threshold(self) -> str:
        """The condition, for people: `any`, or the counts."""
        parts = [] if self.severity is Severity.NONE else ["any"]
        for step in self.repeats:
            hours = step.within_seconds / HOUR_SECONDS
            span = f"{hours:g} h" if hours >= 1 else f"{step.within_seconds / MINUTE_SECONDS:g} min"
            parts.append(f"{step.times} in {span}")
        return "; ".join(parts)


def rule(
    check: str,
    code: str,
    hint: str,
    pattern: str,
    severity: Severity,
    meaning: str,
    source: str,
    *,
    repeats: tuple[RepeatStep, ...] = (),
    clears: str = "",
    programs: frozenset[str] = frozenset(),
) -> LineRule:
    """Return a rule with its pattern compiled."""
    return LineRule(
        check,
        code,
        hint,
        re.compile(pattern),
        severity,
        meaning,
        source,
        repeats,
        clears,
        programs,
    )
