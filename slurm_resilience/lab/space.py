"""Estimate the disk that a lab takes, and look whether its file system has it."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_resilience.lab.spec import LabSpec

_MIB = 1 << 20
# Measured, with something to spare: six nodes write 1 MiB in their first minute, MariaDB 104.
_LAB_MIB, _NODE_MIB, _DATABASE_MIB = 16, 2, 160


def needed_mib(spec: LabSpec) -> int:
    """Return about how much a lab writes, in MiB."""
    return _LAB_MIB + _NODE_MIB * spec.nodes + (_DATABASE_MIB if spec.slurmdbd else 0)


def mount_point(path: Path) -> Path:
    """Return where the file system of an existing path is mounted."""
    path = path.resolve()
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path


def lack(directory: Path, spec: LabSpec) -> str | None:
    """Return what keeps a lab from fitting into this existing directory; None when it fits."""
    disk = os.statvfs(directory)
    free, needed = disk.f_bavail * disk.f_frsize // _MIB, needed_mib(spec)
    if free >= needed:
        return None
    return (
        f"the file system of {mount_point(directory)} is too full: a lab of {spec.nodes} nodes "
        f"takes about {needed} MiB, {free} are free; choose another --dir"
    )
