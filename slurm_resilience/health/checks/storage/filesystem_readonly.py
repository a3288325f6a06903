"""Local disks that have turned read-only.

The kernel remounts ext4, xfs or btrfs read-only when the disk below it fails
(``errors=remount-ro``); jobs then die one by one without a word about hardware. A reboot runs fsck
and often heals it (gpud and NHC's check_fs_mount_rw treat it alike), so it asks for a reboot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.model import Finding, Severity

LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "jfs", "reiserfs", "bcachefs"})
"""File systems on local disks. squashfs, iso9660 and overlay are read-only by design, and network
file systems say nothing about this node."""


class Mount(NamedTuple):
    device: str
    point: str
    kind: str
    read_only: bool
    failed: bool
    """ext4 since Linux 6.15 stays ``rw`` there and says ``emergency_ro`` after an error."""


class MountsSeen(NamedTuple):
    mounts: tuple[Mount, ...]
    read_write_by_fstab: frozenset[str]
    """Mount points that /etc/fstab mounts read-write, on any kind of file system."""


def probe(context: CheckContext) -> MountsSeen:
    # Process 1 sees the machine's mounts; ours may be read-only by our own unit's sandbox.
    lines = _lines(context, "/proc/1/mounts") or _lines(context, "/proc/self/mounts")
    if not lines:
        raise Unjudged("/proc/self/mounts cannot be read")
    wanted = (m.point for m in _read(_lines(context, "/etc/fstab")) if not m.read_only)
    return MountsSeen(_read(lines), frozenset(wanted))


def judge(seen: MountsSeen, context: CheckContext) -> Judgement:
    first: MountsSeen = context.first or seen
    was_writable = {
        (m.device, m.point) for m in first.mounts if not m.read_only and m.kind in LOCAL
    }
    # Later mounts hide earlier ones on the same point: the last line is what programs see.
    top = {mount.point: mount for mount in seen.mounts}.values()
    local = [m for m in top if m.kind in LOCAL]
    by_fstab = seen.read_write_by_fstab
    bad = [
        m
        for m in local
        if m.failed
        or (m.read_only and ((m.device, m.point) in was_writable or m.point in by_fstab))
    ]
    findings = tuple(
        Finding(
            check=CHECK.name,
            severity=Severity.REBOOT,
            text=f"{m.point} ({m.kind} on {m.device}) has turned read-only",
            at=context.now,
            subject=m.point,
            evidence=" ".join((m.device, m.point, m.kind, "ro")),
        )
        for m in bad
    )
    text = "; ".join(f.text for f in findings)
    return Judgement(text or f"{len(local)} local file systems as mounted", findings)


def _lines(context: CheckContext, path: str) -> list[str]:
    try:
        return context.path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _read(lines: Iterable[str]) -> tuple[Mount, ...]:
    """Lines of /proc/mounts or fstab: device, point, kind, options."""
    mounts = []
    for row in (line.split() for line in lines if not line.lstrip().startswith("#")):
        if len(row) < 4 or "noauto" in (options := row[3].split(",")):
            continue
        failed = "emergency_ro" in options
        mounts.append(Mount(_plain(row[0]), _plain(row[1]), row[2], "ro" in options, failed))
    return tuple(mounts)


def _plain(text: str) -> str:
    r"""Blanks and the like are written ``\040`` there."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


CHECK = Check(
    "filesystem_readonly",
    probe,
    judge,
    source="/proc/1/mounts, /etc/fstab",
    threshold="was writable, or is so in fstab, and is read-only",
    asks_for=(Severity.REBOOT,),
)
