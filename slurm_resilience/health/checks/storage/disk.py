"""Space on the watched mount points.

A full disk is watched, never acted on: a job or a log filled it, and a new machine would fill it
again. Default 95 % (gcm warns at 80 and calls 85 critical; gpud at 80/95).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.model import Finding, Severity


class Usage(NamedTuple):
    """The usage of one mount point, as a plain user's program meets it."""

    mount: str
    total: int
    """Bytes or inodes; 0 where the file system does not count them."""
    free: int

    @property
    def percent(self) -> float:
        return 100.0 * (1 - self.free / self.total) if self.total else 0.0


def usage(
    context: CheckContext, of: Callable[[str, os.statvfs_result], Usage]
) -> tuple[Usage, ...]:
    """One entry for each watched mount point that is there, file systems counted once."""
    seen: dict[int, Usage] = {}
    for mount in context.settings.mounts:
        path = context.path(mount)
        try:
            seen.setdefault(path.stat().st_dev, of(mount, os.statvfs(path)))
        except FileNotFoundError:
            continue
    if not seen:
        raise Unjudged("none of checks.mounts exists here")
    return tuple(seen.values())


def fullness(seen: tuple[Usage, ...], limit: float, check: str, what: str, now: float) -> Judgement:
    """Return a finding for each mount point that is fuller than ``limit`` percent."""
    findings = tuple(
        Finding(
            check=check,
            severity=Severity.MONITOR,
            text=f"{one.mount} has {one.percent:.1f} % of its {what} in use (limit {limit:g} %)",
            at=now,
            subject=one.mount,
            evidence=f"free {one.free} of {one.total}",
        )
        for one in seen
        if one.percent > limit
    )
    used = ", ".join(f"{one.mount} {one.percent:.0f} %" for one in seen)
    return Judgement("; ".join(f.text for f in findings) or f"{what} in use: {used}", findings)


def probe(context: CheckContext) -> tuple[Usage, ...]:
    def space(mount: str, stat: os.statvfs_result) -> Usage:
        # Root's reserve (f_bfree - f_bavail) is not there for jobs: df leaves it out, so do we.
        usable = stat.f_blocks - (stat.f_bfree - stat.f_bavail)
        return Usage(mount, usable * stat.f_frsize, stat.f_bavail * stat.f_frsize)

    return usage(context, space)


def judge(seen: tuple[Usage, ...], context: CheckContext) -> Judgement:
    return fullness(seen, context.settings.disk_full_percent, CHECK.name, "space", context.now)


CHECK = Check(
    "disk",
    probe,
    judge,
    source="statvfs of checks.mounts",
    threshold="disk_full_percent (95)",
    asks_for=(Severity.MONITOR,),
)
