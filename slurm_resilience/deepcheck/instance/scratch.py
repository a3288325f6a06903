"""The directory into which the checks of a node write. It is removed when they end.

A run that was killed outright leaves it; the next one on the node removes it then.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "sres-deepcheck-"
NEW_SECONDS = 60.0
"""A run takes its lock within moments; a directory younger than this may be about to be locked."""


@contextmanager
def scratch_directory(parent: str, now: float) -> Iterator[Path]:
    """Make a directory for a `with`, after those of killed runs were removed.

    Args:
        parent: the directory in which it lies; empty: the system's for temporary files.
        now: seconds since the epoch.

    Raises:
        OSError: it cannot be made.
    """
    _remove_left_behind(Path(parent or tempfile.gettempdir()), now)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent or None) as name:
        # The tools do not inherit it, so the lock is gone with this process, however it ends.
        held = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(held)


def _remove_left_behind(parent: Path, now: float) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        # One that cannot be looked at is another user's, or is being removed by its own run.
        with suppress(OSError):
            if _is_left_behind(path, now):
                shutil.rmtree(path)


def _is_left_behind(path: Path, now: float) -> bool:
    # NOFOLLOW: anyone may put a link into the directory for temporary files.
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        seen = os.fstat(held)
        is_private = seen.st_uid == os.geteuid() and stat.S_IMODE(seen.st_mode) == stat.S_IRWXU
        if not is_private or now - seen.st_ctime < NEW_SECONDS:
            return False
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(held)
    return True
