"""Room on sresctld's disk: a run is begun only where all that it writes has its place.

Without it a try would be counted in which the program never ran, and after a few of them the node
would be left to a person.
"""

from __future__ import annotations

import os
from pathlib import Path

LEAST_FREE_BYTES = 4 << 20
"""The journal's newest part grows to so much before it is written into the journal itself."""
LEAST_FREE_FILES = 50


def lack_of_room(directory: Path) -> str:
    """Return what is missing where a directory lies, in words; empty: nothing, or it is unknown."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return ""  # the journal is written there, and says more
    return lack_of(found)


def lack_of(found: os.statvfs_result) -> str:
    """Return what a file system lacks, in words. One without bounds tells 0 of 0."""
    if found.f_flag & os.ST_RDONLY:
        return "it is mounted read-only"
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < LEAST_FREE_BYTES:
        return f"{free >> 10} KiB are free, {LEAST_FREE_BYTES >> 10} KiB are needed"
    if found.f_files and found.f_favail < LEAST_FREE_FILES:
        return f"{found.f_favail} files can be made, {LEAST_FREE_FILES} are needed"
    return ""
