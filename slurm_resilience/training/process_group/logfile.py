"""One file that many processes append to: whole records, in one order, and a wait for more."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import time
from pathlib import Path

import torch.distributed as dist

from slurm_resilience.training.process_group import inotify

_libc = ctypes.CDLL(None, use_errno=True)
_NAME = "log"
_CHUNK = 1 << 16
_LOCAL = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0xF2F52010,  # f2fs
        0x2FC12FC1,  # zfs
        0x01021994,  # tmpfs
        0x794C7630,  # overlay
    }
)
"""File systems of one machine: appends are atomic, and inotify tells of all of them."""
_NFS = 0x6969

_LOST_WAKE = 0.01
"""Seconds between two looks in spite of inotify: another thread may have taken the event."""


class LogFile:
    """The log of one directory.

    Args:
        directory: made with mode 0700 where it is missing.

    Raises:
        OSError: the directory or the file cannot be made or opened.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = directory / _NAME
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = self._cancel = self._news = self._watch = -1
        self._file = os.open(self.path, flags, 0o600)
        self._type = file_system(directory)
        self.local = self._type in _LOCAL
        self.settle = 0.02 if self.local else 1.0
        """Seconds after which half a record with whole ones behind it counts as left behind."""
        self._cancel = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.cancelled = False
        self._poll = select.poll()
        self._poll.register(self._cancel, select.POLLIN)
        if self.local:
            self._news, self._watch = inotify.watch(self.path)
        if self._news >= 0:
            self._poll.register(self._news, select.POLLIN)

    def __del__(self) -> None:
        if self._news >= 0:
            inotify.unwatch(self._news, self._watch)
        for fd in (self._file, self._cancel):
            if fd >= 0:
                os.close(fd)

    def cancel(self) -> None:
        """Wake everybody who waits in `pause`, now and from now on."""
        self.cancelled = True
        os.eventfd_write(self._cancel, 1)

    def read(self, start: int) -> bytes:
        """Everything from byte ``start`` on."""
        # A file is opened anew to see what other machines wrote: close-to-open consistency.
        fd = self._file if self.local else os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = piece = os.pread(fd, _CHUNK, start)
            while len(piece) == _CHUNK:
                piece = os.pread(fd, _CHUNK, start + len(data))
                data += piece
            return data
        finally:
            if fd != self._file:
                os.close(fd)

    def append(self, data: bytes, limit: float) -> None:
        """Add ``data`` at the end, in one piece.

        Args:
            data: what to add.
            limit: seconds to wait for the file lock, where one is needed.

        Raises:
            OSError: the disk is full, or the lock was not to be had.
        """
        if self.local:
            self._write(data)
            return
        locked = self._take_lock(limit)
        try:
            self._write(data)
            os.fsync(self._file)
        finally:
            if locked:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def pause(self, waited: float, left: float) -> None:
        """Wait for an append, but not long.

        Args:
            waited: seconds that the caller has waited so far; the longer, the longer the pause.
            left: seconds that it may still wait.
        """
        pause = _LOST_WAKE if self._news >= 0 else min(0.1, max(0.0002, waited / 20))
        ready = self._poll.poll(max(0.0, min(pause, left)) * 1000)
        if any(fd == self._news for fd, _ in ready):
            inotify.drain(self._news)

    def _write(self, data: bytes) -> None:
        if os.write(self._file, data) < len(data):
            raise OSError(0, "the file system took half a record; is the disk full?")

    def _take_lock(self, limit: float) -> bool:
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited >= limit:
                    raise OSError(0, f"the file was locked for {limit:g} s") from None
                if self.cancelled:
                    raise dist.DistStoreError(f"{self.path}: cancelled") from None
                self._poll.poll(max(0.2, waited * 50))
            except OSError:
                # Without locks appends overwrite each other on NFS, and nowhere else.
                if self._type == _NFS:
                    raise
                return False


def file_system(path: Path) -> int:
    """The number in linux/magic.h of the file system that holds a path; 0: not to be known.

    From statfs(2). Reading the table of mounts instead takes longer than all the rest of a store.
    """
    room = (ctypes.c_long * 32)()  # struct statfs: 120 bytes, of which the type is the first word
    return room[0] & 0xFFFFFFFF if _libc.statfs(os.fsencode(path), room) == 0 else 0
