"""Inodes on the watched mount points: a disk full of small files says ENOSPC with space to spare.

Watched, never acted on, as for space; default 95 %.
"""

from __future__ import annotations

import os

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.health.checks.storage.disk import Usage, fullness, usage
from slurm_resilience.model import Severity


def probe(context: CheckContext) -> tuple[Usage, ...]:
    def inodes(mount: str, stat: os.statvfs_result) -> Usage:
        # btrfs and some network file systems make inodes as they go, and count none.
        return Usage(mount, stat.f_files, stat.f_favail)

    return usage(context, inodes)


def judge(seen: tuple[Usage, ...], context: CheckContext) -> Judgement:
    limit = context.settings.inodes_full_percent
    return fullness(seen, limit, CHECK.name, "inodes", context.now)


CHECK = Check(
    "inodes",
    probe,
    judge,
    source="statvfs of checks.mounts",
    threshold="inodes_full_percent (95)",
    asks_for=(Severity.MONITOR,),
)
