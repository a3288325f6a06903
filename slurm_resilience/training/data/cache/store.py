"""Batches that were fetched, by number and share: in files that outlive the process, or in memory.

A file is written under another name and renamed when it is whole, so a reader sees all of it or
nothing. Who writes holds a lock on the unfinished file; one without a lock was left by a process
that died, and is removed. Nothing is ever changed in place and nothing is truncated: a mapping
stays readable after its file was removed. Batches come out as private (copy-on-write) mappings, so
writing into a tensor changes it for no other process, nor for the next reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from slurm_resilience.training.data.cache.codec import Packed, Unpacked, unpack
from slurm_resilience.training.data.warn_once import WarnOnce

_TMP = ".tmp"
_NUMBER = 12


class BatchKey(NamedTuple):
    """One rank's part of one batch."""

    number: int
    share: str

    def __str__(self) -> str:
        return f"{self.number:0{_NUMBER}d}.{self.share}"


class Window(NamedTuple):
    """The batches that are worth keeping: ``keep … end``, of one share."""

    keep: int
    """The first one that a rewind or a peer could still ask for (lookback included)."""
    committed: int
    """The first one that is not consumed yet."""
    next: int
    """The next one to be given to the training."""
    end: int
    """The first one that is too far ahead to be fetched now."""
    share: str


class BatchEntry(NamedTuple):
    key: BatchKey
    size: int


def victims(
    entries: Iterable[BatchEntry], new: BatchEntry, room: int, window: Window
) -> list[BatchEntry] | None:
    """Choose the entries that leave so that a new one fits. Pure.

    Those behind ``keep`` always leave. For room: first what is outside of the window or of another
    share, then the lookback, oldest first. What was given out since the last commit, and what lies
    ahead, leaves only for the batch that the training waits for.

    Args:
        room: bytes that all entries together may take.

    Returns:
        None: it does not fit, and no entry leaves for it.
    """
    others = [entry for entry in entries if entry.key != new.key]
    leaving = [entry for entry in others if entry.key.number < window.keep]
    staying = [entry for entry in others if entry.key.number >= window.keep]
    needed = new.key.number == window.next

    def order(entry: BatchEntry) -> tuple[int, int]:
        number = entry.key.number
        if entry.key.share != window.share or number >= window.end:
            return 0, -number
        if number < window.committed:
            return 1, number
        if number > new.key.number:
            return 2, -number
        return 3, number

    used = sum(entry.size for entry in staying)
    for entry in sorted(staying, key=order):
        if used + new.size <= room:
            break
        if order(entry)[0] >= 2 and not needed:
            break
        leaving.append(entry)
        used -= entry.size
    return leaving if used + new.size <= room else None


class BatchStore(Protocol):
    """A place for batches."""

    def get(self, key: BatchKey) -> Unpacked | None:
        """Return a copy of a kept batch that is the caller's own; None: it is not here."""

    def has(self, key: BatchKey) -> bool:
        """Tell whether something is kept for this key; it may still turn out to be broken."""

    def put(self, key: BatchKey, packed: Packed, window: Window) -> bool:
        """Keep a batch; False: there is no room for it."""

    def beyond(self, key: BatchKey) -> bool:
        """Tell whether a later batch of the same share is here."""


class FileStore:
    """Batches in files of a private directory, for all processes of a seat or group.

    Args:
        directory: exists, and only this user can write to it.
        max_bytes: bytes that all of its files together may take.
        spare: part of the whole file system that is left free (0 … 1).
        warn: told, once each, why something is not kept.
    """

    def __init__(self, directory: Path, max_bytes: int, spare: float, warn: WarnOnce) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.spare = spare
        self._warn = warn
        self._own: set[BatchKey] = set()

    def _path(self, key: BatchKey) -> Path:
        return self.directory / str(key)

    def has(self, key: BatchKey) -> bool:
        return self._path(key).exists()

    def get(self, key: BatchKey) -> Unpacked | None:
        path = self._path(key)
        # Before it is opened: another thread may put a good one in the place of a broken one.
        verify = key not in self._own
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid():
                self._warn(f"{path} belongs to user {found.st_uid}: it is not trusted")
                return None
            size = found.st_size
            data = mmap.mmap(fd, size, access=mmap.ACCESS_COPY) if size else b""
        finally:
            os.close(fd)
        read = unpack(str(key), data, verify=verify)
        if read is None:
            self._warn(f"{self.directory}: a cached batch was broken; it is fetched again")
            self._own.discard(key)
            with contextlib.suppress(OSError):
                # Another thread may have put a good one there meanwhile.
                if path.lstat().st_ino == found.st_ino:
                    path.unlink()
        return read

    def beyond(self, key: BatchKey) -> bool:
        found = self.entries(sweep=False)
        return any(e.key.share == key.share and e.key.number > key.number for e in found)

    def entries(self, sweep: bool = True) -> list[BatchEntry]:
        """List the entries; ``sweep`` removes unfinished files whose writers have died."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as names:
            for item in names:
                with contextlib.suppress(FileNotFoundError):
                    if item.name.endswith(_TMP):
                        if not (sweep and _abandoned(item.path)):
                            found.append(BatchEntry(BatchKey(-1, item.name), item.stat().st_size))
                        continue
                    number, _, share = item.name.partition(".")
                    if len(number) == _NUMBER and number.isdigit():
                        found.append(BatchEntry(BatchKey(int(number), share), item.stat().st_size))
        return found

    def put(self, key: BatchKey, packed: Packed, window: Window) -> bool:
        try:
            return self._put(key, packed, window)
        except OSError as error:
            # Training goes on without it, whatever is wrong: no room, a limit, a device's error.
            self._warn(f"{self.directory}: a batch could not be kept: {error.strerror or error}")
            return False

    def _put(self, key: BatchKey, packed: Packed, window: Window) -> bool:
        entries = self.entries()
        writing = sum(entry.size for entry in entries if entry.key.number < 0)
        kept = [entry for entry in entries if entry.key.number >= 0]
        new = BatchEntry(key, packed.size)
        leaving = victims(kept, new, self.max_bytes - writing, window)
        for entry in leaving or ():
            self._path(entry.key).unlink(missing_ok=True)
            self._own.discard(entry.key)
        if leaving is None or not self._free(packed.size):
            return False
        try:
            self._write(key, packed)
        except FileNotFoundError:  # swept by another writer before it was locked: once more
            self._write(key, packed)
        self._own.add(key)
        return True

    def _free(self, size: int) -> bool:
        if not self.spare:
            return True
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize - size >= disk.f_blocks * disk.f_frsize * self.spare

    def _write(self, key: BatchKey, packed: Packed) -> None:
        path = self.directory / f"{key}.{os.getpid()}.{id(self):x}{_TMP}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            with open(fd, "wb", closefd=False) as file:
                file.writelines(packed.parts)
            path.rename(self._path(key))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def _abandoned(path: str) -> bool:
    """Remove an unfinished file if no process is writing it; tell whether it was removed."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(path).unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


class MemoryStore:
    """Batches in this process's memory, for a loader without a cache: a rewind needs no source.

    Args:
        max_bytes: bytes that all of them together may take.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: dict[BatchKey, bytes] = {}

    def has(self, key: BatchKey) -> bool:
        return key in self._kept

    def get(self, key: BatchKey) -> Unpacked | None:
        kept = self._kept.get(key)
        return None if kept is None else unpack(str(key), bytearray(kept), verify=False)

    def beyond(self, key: BatchKey) -> bool:
        return any(k.share == key.share and k.number > key.number for k in list(self._kept))

    def entries(self) -> list[BatchEntry]:
        return [BatchEntry(key, len(data)) for key, data in list(self._kept.items())]

    def put(self, key: BatchKey, packed: Packed, window: Window) -> bool:
        leaving = victims(self.entries(), BatchEntry(key, packed.size), self.max_bytes, window)
        for entry in leaving or ():
            self._kept.pop(entry.key, None)
        if leaving is not None:
            self._kept[key] = b"".join(packed.parts)
        return leaving is not None
