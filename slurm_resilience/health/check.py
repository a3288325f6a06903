"""The parts of a check: a probe that looks and a judge that decides.

The probe does the I/O, below `CheckContext.sysroot`; the judge is pure. Time limits, exceptions,
logging and reporting belong to the runner, so that a check is about forty lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slurm_resilience import config
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Finding, Severity


class Unjudged(Exception):
    """Raised by a probe or a judge that cannot tell, with the reason. Neither pass nor fail."""


class Judgement(NamedTuple):
    """The answer of a judge: one line, and a finding for each trouble. No findings: pass."""

    text: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Expected:
    """The hardware that Slurm says this node has; None where that is unknown."""

    memory: int | None = None
    """RealMemory, MiB."""
    gpus: int | None = None
    profile: NodeProfile = field(default_factory=NodeProfile)
    """The hardware of this node's type, where checks.profile names one."""


@dataclass(frozen=True)
class CheckContext:
    """The settings and facts that every probe and judge is given."""

    sysroot: Path = Path("/")
    settings: config.CheckSettings = field(default_factory=config.CheckSettings)
    expected: Expected = field(default_factory=Expected)
    now: float = 0.0
    """Seconds since the epoch."""
    is_drill: bool = False
    """A drill is open on this node: a tool may tell of a fault that was injected into it."""
    first: Any = None
    """The reading of this check's first probe; None while that is now."""
    earlier: tuple[Any, ...] = ()
    """The readings before this one, the latest last; as many as `Check.remembers`."""

    def path(self, absolute: str) -> Path:
        """Return a path of the machine below the sysroot."""
        return self.sysroot / absolute.lstrip("/")


@dataclass(frozen=True)
class Check:
    """One check. A module defines one as ``CHECK``; a site's own comes by the entry point group
    ``slurm_resilience.checks``."""

    name: str
    probe: Callable[[CheckContext], Any]
    judge: Callable[[Any, CheckContext], Judgement]
    timeout: float = 10.0
    """Seconds for one run."""
    period: float | None = None
    """Seconds between two runs; None: agent.check_interval. checks.periods overrides it."""
    in_child: bool = False
    """The probe may hang in the kernel or in a driver: it runs in a process that can be killed. The
    type that the probe says it returns is what the judge is given."""
    absent: Callable[[CheckContext], str] | None = None
    """Returns why this node has nothing to look at, so that the check passes and no process is
    started; empty: look."""
    is_slow: bool = False
    """It takes many seconds on a sound node, so a step that has failed does not wait for it."""
    remembers: int = 0
    """Earlier readings that the judge is given."""
    source: str = ""
    """The thing that is read, for the table of checks."""
    threshold: str = ""
    asks_for: tuple[Severity, ...] = ()
