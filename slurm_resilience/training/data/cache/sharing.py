"""A replication group on one node: its members need the same batches, and one of them fetches.

Who fetches holds the lock on ``fetcher.lock``; the kernel drops it when that process dies, and the
next member that misses a batch takes it. Each member says in a locked file of its own which batch
it is at, so that what the slowest one still needs is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
from pathlib import Path
from weakref import WeakValueDictionary

from slurm_resilience.launcher.batch_directory import DirectoryHold, lock

GRACE_SECONDS = 0.5
"""Seconds that a member which is not the leader waits before it takes a free lock: at the start the
leader may just be a little late."""

_MEMBER = "member."
_AT = struct.Struct("<q")
_count = itertools.count()
_mutex = threading.Lock()
_held: WeakValueDictionary[Path, DirectoryHold] = WeakValueDictionary()


class ReplicaGroup:
    """This process's place in a group.

    Args:
        directory: the group's directory on this node.
        leader: takes the lock at once when it is free.
    """

    def __init__(self, directory: Path, leader: bool) -> None:
        self.directory = directory
        self.leader = leader
        self._member: DirectoryHold | None = None
        while self._member is None:  # a member that looks for dead ones may touch a new file first
            self._own = directory / f"{_MEMBER}{os.getpid()}.{next(_count)}"
            self._member = lock(self._own)
        self._lock: DirectoryHold | None = None
        if leader:
            self.fetches(0.0)

    def fetches(self, waited: float) -> bool:
        """Tell whether this process is the one that fetches; it becomes it when there is none.

        Loaders of one process share the role, so one that was abandoned in a fault never stands in
        the way of the next.

        Args:
            waited: seconds for which this member has missed a batch.
        """
        path = self.directory / "fetcher.lock"
        with _mutex:
            if self._lock is None:
                self._lock = _held.get(path)
            if self._lock is None and (self.leader or waited >= GRACE_SECONDS):
                with contextlib.suppress(FileNotFoundError):
                    self._lock = lock(path)
                if self._lock is not None:
                    _held[path] = self._lock
            return self._lock is not None and self._lock.fd >= 0

    def tell(self, number: int) -> None:
        """Say which batch is the first that this member has not consumed."""
        if self._member is not None and self._member.fd >= 0:
            os.pwrite(self._member.fd, _AT.pack(number), 0)

    def lowest(self, number: int) -> int:
        """Return the first batch that any living member, or this one at ``number``, still needs."""
        for path in self.directory.glob(f"{_MEMBER}*"):
            if path == self._own:
                continue
            with contextlib.suppress(FileNotFoundError):
                if (dead := lock(path)) is not None:
                    path.unlink()
                    dead.release()
                    continue
                said = path.read_bytes()
                # Who has said nothing yet has only just come, and may need any of them.
                number = min(number, _AT.unpack(said)[0] if len(said) == _AT.size else 0)
        return number

    def close(self) -> None:
        """Leave the group; the lock goes to the member that misses a batch next."""
        with _mutex:
            self._lock = None
        if self._member is not None:
            self._own.unlink(missing_ok=True)
            self._member.release()
            self._member = None
