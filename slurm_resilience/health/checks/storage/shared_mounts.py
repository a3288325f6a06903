"""File systems of servers that all nodes share: each answers a statvfs.

The probe hangs where the server does not answer, so it runs in a process that can be killed. That
is *unjudged*: a server that does not answer is never a reason to drain a node.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.model import Finding, Severity

SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "weka", "wekafs", "9p"}
)


class SharedMount(NamedTuple):
    point: str
    error: str = ""


def probe(context: CheckContext) -> tuple[SharedMount, ...]:
    try:
        text = context.path("/proc/self/mounts").read_text("utf-8", "replace")
    except OSError:
        raise Unjudged("/proc/self/mounts cannot be read") from None
    found = []
    for row in (line.split() for line in text.splitlines()):
        if len(row) < 4 or row[2] not in SHARED:
            continue
        point = row[1].replace("\\040", " ")
        try:
            os.statvfs(context.path(point))
        except OSError as error:
            found.append(SharedMount(point, error.strerror or str(error)))
        else:
            found.append(SharedMount(point))
    return tuple(found)


def judge(seen: tuple[SharedMount, ...], context: CheckContext) -> Judgement:
    findings = tuple(
        Finding(
            CHECK.name,
            Severity.MONITOR,
            f"{one.point} does not answer: {one.error}",
            context.now,
            subject=one.point,
        )
        for one in seen
        if one.error
    )
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{len(seen)} shared file systems answer", findings)


CHECK = Check(
    "shared_mounts",
    probe,
    judge,
    timeout=20.0,
    period=300.0,
    in_child=True,
    source="statvfs of NFS, Lustre, GPFS, … mounts",
    threshold="an error; unjudged after 20 s without an answer",
    asks_for=(Severity.MONITOR,),
)
