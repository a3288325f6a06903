"""The place of one loader's batches: a directory, the lock of the processes in it, its group."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.errors import UsageError
from slurm_resilience.launcher import batch_directory
from slurm_resilience.training.data.cache.sharing import ReplicaGroup
from slurm_resilience.training.data.cache.store import BatchStore, FileStore, MemoryStore
from slurm_resilience.training.data.source import SourceInfo
from slurm_resilience.training.data.warn_once import WarnOnce

FORMAT = 1
SPARE_SHARE = 0.25
"""Part of ``/dev/shm`` that is left free: NCCL lives there as well."""


def identity(words: Sequence[Any]) -> str:
    """16 hex digits that stand for all that determines the batches besides number and share."""
    text = json.dumps([FORMAT, *words]).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def directory_name(identity: str, group: str, rank: int) -> str:
    """Return the directory of a group, or else of this process's seat."""
    if group:
        safe = re.sub(r"[^0-9A-Za-z_.=-]", "_", group)[:64]
        if safe != group:
            safe += "-" + hashlib.blake2b(group.encode(), digest_size=4).hexdigest()
        return f"{batch_directory.PREFIX}{identity}-group-{safe}"
    seat = os.environ.get("SRES_SEAT") or os.environ.get("RANK") or str(rank)
    return f"{batch_directory.PREFIX}{identity}-seat-{re.sub('[^0-9]', '_', seat)}"


class BatchCache:
    """Opens and leaves the place of a loader's batches.

    Args:
        cache: directory of the user's choice; None or True: the job's own; False: memory alone.
        max_bytes: bytes that the batches may take.
    """

    def __init__(
        self, identity: str, cache: Path | str | bool | None, max_bytes: int, warn: WarnOnce
    ) -> None:
        self._identity = identity
        self._cache = cache
        self._max_bytes = max_bytes
        self._warn = warn
        self._held: batch_directory.DirectoryHold | None = None
        self.directory: Path | None = None
        self.group: ReplicaGroup | None = None
        self.store: BatchStore = MemoryStore(max_bytes)
        self.spent = False
        """The run is over: nothing of this is needed again."""

    def settle(self, group: str, rank: int, leader: bool) -> None:
        """Move into the directory of a group, or of this seat.

        Raises:
            UsageError: the user's own directory is not private.
        """
        self.leave(remove=False)
        if self._cache is False:
            if group:
                raise UsageError("a group shares its batches in the cache; leave cache=False out")
            return
        default = self._cache is None or self._cache is True
        name = directory_name(self._identity, group, rank)
        try:
            if default:
                batch_directory.stale()
            root = batch_directory.default_root() if default else Path(str(self._cache)).absolute()
            self._held = batch_directory.hold(root / name)
        except (OSError, UsageError) as error:
            if not default:
                raise UsageError(f"cache {self._cache}: {error}") from error
            self._warn(f"batches are kept in memory alone: {error}")
            return
        self.directory = root / name
        self.store = FileStore(
            self.directory, self._max_bytes, SPARE_SHARE if default else 0.0, self._warn
        )
        self.group = ReplicaGroup(self.directory, leader) if group else None

    def about(self, look: Callable[[], SourceInfo]) -> SourceInfo:
        """Return what is known of a source that is not open yet; else ``look`` opens it."""
        if self.directory is None:
            return look()
        path = self.directory / "about.json"
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=SourceInfo)
        found = look()
        new = path.with_name(f"about.{os.getpid()}")
        new.write_bytes(msgspec.json.encode(found))
        new.rename(path)
        return found

    def leave(self, remove: bool) -> None:
        """Move out; with ``remove``, or after the run, the last one out removes the directory."""
        if self.group is not None:
            self.group.close()
            self.group = None
        if self._held is not None:
            self._held.release()
            self._held = None
        if self.directory is not None and (remove or self.spent):
            batch_directory.remove(self.directory)
        self.directory = None
        self.store = MemoryStore(self._max_bytes)
