"""Keep cached batches on a node: name their directory, hold it while in use, remove it after.

``/dev/shm/sres-data-<uid>-<id>/`` (mode 0700) belongs to one job: ``j<job>`` under Slurm, ``d<…>``
for a training with an ``SRES_DIR``, else ``p<pid of the parent>``. Each loader has a directory in
it, and every process that uses it holds a shared lock on its ``owner.lock``. The kernel drops that
lock when the process dies, however it dies, so an unlocked directory is surely not in use.

The directory outlives processes on purpose; it is removed in four ways:

- a loader that gave its last batch removes its directory when the last process leaves it;
- ``ReplayLoader.close(remove=True)`` does so at any time;
- ``clean()`` removes a job's directory: the launcher calls it at its end, for its own ranks;
- ``stale()`` removes the directories of this user's jobs that were killed with their launcher.
  Every loader with a default directory calls it when it starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import weakref
from pathlib import Path
from typing import ClassVar

from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import UsageError

log = logging.getLogger("sres.data")

LOCK = "owner.lock"
PREFIX = "batches-"
IDLE_SECONDS = 900.0
"""A directory that no process used for so long counts as left behind. While a process is replaced
its directory is unused for moments, while a job is requeued for minutes."""


def default_root() -> Path:
    """Return the directory of the job that this process belongs to."""
    if job := os.environ.get("SLURM_JOB_ID"):
        name = f"j{re.sub(r'[^0-9A-Za-z_+-]', '_', job)}"
    elif home := os.environ.get("SRES_DIR"):
        name = f"d{hashlib.blake2b(home.encode(), digest_size=6).hexdigest()}"
    else:
        return place_of(os.getppid())
    return _shm() / f"{_place_prefix()}{name}"


def place_of(pid: int) -> Path:
    """Return the default directory of a process's children without a job and an SRES_DIR."""
    return _shm() / f"{_place_prefix()}p{pid}"


def _place_prefix() -> str:
    return f"sres-data-{os.geteuid()}-"


def _shm() -> Path:
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def private(path: Path) -> Path:
    """Make a directory that only this user can write to.

    Raises:
        UsageError: it is there already and others could have written into it.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} is not a directory; remove it, or give another cache=")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UsageError(
            f"{path} could have been written by others (owner {found.st_uid}, mode"
            f" {stat.S_IMODE(found.st_mode):o}): its batches are not trusted;"
            " give cache= a directory that only you can write to"
        )
    return path


class DirectoryHold:
    """A lock on a file, kept until ``release`` or the end of this process.

    Children of a fork do not keep it: what lives on in them is closed at once.
    """

    _all: ClassVar[weakref.WeakSet[DirectoryHold]] = weakref.WeakSet()

    def __init__(self, fd: int) -> None:
        self.fd = fd
        DirectoryHold._all.add(self)

    def release(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = release

    @classmethod
    def _forked(cls) -> None:
        for held in list(cls._all):
            held.release()


os.register_at_fork(after_in_child=DirectoryHold._forked)


def lock(path: Path, *, shared: bool = False) -> DirectoryHold | None:
    """Lock a file, making it if need be; None when another holds it.

    Raises:
        FileNotFoundError: its directory is gone.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return DirectoryHold(fd)
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:  # removed between the opening and the locking: make it again
            pass
        os.close(fd)


def hold(path: Path, patience: float = 10.0) -> DirectoryHold:
    """Hold a directory, making it if need be: no process takes it for left behind meanwhile.

    Raises:
        UsageError: others could have written into it, or a process that removes it keeps it locked.
    """
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.monotonic() + patience
    while True:
        private(path.parent)
        private(path)
        with contextlib.suppress(FileNotFoundError):
            if held := lock(path / LOCK, shared=True):
                return held
        if clock.monotonic() > deadline:
            raise UsageError(f"{path} stays locked by a process that removes it; end that process")
        clock.wait(pause, 0.005)


def remove(path: Path) -> bool:
    """Remove a directory that no process holds, and the job's directory if it is then empty."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        held = lock(path / LOCK)
        if held is None:
            return False
        shutil.rmtree(path, ignore_errors=True)
        held.release()
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return True


def clean(root: Path | str | None = None) -> None:
    """Remove every cached batch of a job, also one in use (what is mapped stays readable).

    Args:
        root: the ``cache`` of its loaders; None: this job's default. In the user's own only what
            the loaders made is removed.
    """
    path = Path(root) if root is not None else default_root()
    if not path.is_dir() or path.is_symlink() or path.lstat().st_uid != os.geteuid():
        return
    for leaf in path.glob(f"{PREFIX}*"):
        shutil.rmtree(leaf, ignore_errors=True)
    with contextlib.suppress(OSError):
        (path / LOCK).unlink(missing_ok=True)
        path.rmdir()


def stale(root: Path | str | None = None, idle: float = IDLE_SECONDS) -> list[Path]:
    """Remove the directories of this user's jobs that no process has used for a while.

    Args:
        root: where the directories lie; None: ``/dev/shm``.
        idle: seconds since anything was written there last. A directory that is named after a
            parent process does not wait: it is left behind as soon as that process is gone too.

    Returns:
        The directories that were removed.
    """
    where = Path(root) if root is not None else _shm()
    return [p for p in where.glob(f"{_place_prefix()}*") if _left(p, idle) and _empty(p)]


def _left(place: Path, idle: float) -> bool:
    """Tell whether no process is expected to come back to this directory."""
    with contextlib.suppress(OSError):
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        parent = re.fullmatch(r"p(\d+)", place.name.rsplit("-", 1)[-1])
        if parent and not Path(f"/proc/{parent[1]}").exists() and Path("/proc/self").exists():
            return True
        newest = max(p.stat().st_mtime for p in (place, *place.glob(f"{PREFIX}*")))
        return SystemClock().now() - newest >= idle
    return False


def _empty(place: Path) -> bool:
    """Remove a job's directory unless a process holds any part of it."""
    held = []
    leaves = list(place.glob(f"{PREFIX}*"))
    try:
        for path in (place, *leaves):
            if path != place or (path / LOCK).exists():
                mine = lock(path / LOCK)
                if mine is None:
                    return False
                held.append(mine)
        for leaf in leaves:
            shutil.rmtree(leaf)
        (place / LOCK).unlink(missing_ok=True)
        place.rmdir()
    except OSError:
        return False
    finally:
        for mine in held:
            mine.release()
    log.info("removed %s: no process uses it any more", place)
    return True
