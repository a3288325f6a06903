"""Keep files that programs load as they start in the page cache of a node that is idle.

A job that goes on on this node, as on its spare, waits for them otherwise: torch's libraries, read
from a disk, cost six seconds more than from memory.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import psutil

from slurm_resilience.clock import Clock

log = logging.getLogger("sresd.read_ahead")

INTERVAL_SECONDS = 300.0
"""Between two rounds: a job that ran here may have pushed the files out."""
FIRST_SECONDS = 20.0
"""After the start, so that a node which boots is in service first."""
PIECE_BYTES = 8 << 20
LOOK_SECONDS = 1.0
"""Between two looks whether a job begins: each one reads the process table."""
MOST_FILES = 20_000
MEMORY_SHARE = 0.25
"""The most of the memory that is available: more would push out what others need."""


class ReadFiles(NamedTuple):
    """One round."""

    files: int
    bytes: int
    is_whole: bool
    """Neither a job nor the limit ended it."""


class ReadAhead:
    """Reads while no job runs here; `run` is a thread's body."""

    def __init__(
        self,
        patterns: Sequence[str],
        is_busy: Callable[[], bool],
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            patterns: of files, with ``*`` and ``**``.
            is_busy: tells whether a job's tasks run here.
            clock: for the pauses.
            stop: ends the thread.
        """
        self._patterns = patterns
        self._is_busy = is_busy
        self._clock = clock
        self._stop = stop
        self._told: ReadFiles | None = None
        self._next_look = 0.0

    def run(self) -> None:
        """Read until `stop` is set."""
        pause = FIRST_SECONDS
        while not self._clock.wait(self._stop, pause):
            pause = INTERVAL_SECONDS
            if not self._is_busy():
                self._tell(self.read())

    def read(self) -> ReadFiles:
        """Have the kernel read all files that are not in memory yet, as long as no job runs."""
        left = most = int(psutil.virtual_memory().available * MEMORY_SHARE)
        count = 0
        for path in itertools.islice(self._paths(), MOST_FILES):
            if self._must_end():
                return ReadFiles(count, most - left, is_whole=False)
            got = self._read_file(path, left)
            if got is None:
                continue  # it is gone, or root may not read it on this file system
            left -= got
            count += 1
            if left <= 0:
                return ReadFiles(count, most, is_whole=False)
        return ReadFiles(count, most - left, is_whole=True)

    def _must_end(self) -> bool:
        now = self._clock.monotonic()
        if self._stop.is_set():
            return True
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        return self._is_busy()

    def _paths(self) -> Iterator[str]:
        for pattern in self._patterns:
            # Not Path.glob: it takes no absolute pattern.
            yield from glob.iglob(pattern, recursive=True)  # noqa: PTH207

    def _read_file(self, path: str, most: int) -> int | None:
        """Have a file read; return how many bytes of it; None: it is none that can be read."""
        try:
            # A pattern may meet a pipe or a device.
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                return None
            size, done = min(found.st_size, most), 0
            while done < size and not (done and self._must_end()):
                piece = min(PIECE_BYTES, size - done)
                os.posix_fadvise(number, done, piece, os.POSIX_FADV_WILLNEED)
                done += piece
            return done
        except OSError:
            return None
        finally:
            os.close(number)

    def _tell(self, found: ReadFiles) -> None:
        if found == self._told:
            return
        self._told = found
        if not found.files:
            if not found.is_whole:
                return  # a job began before the first one
            log.warning("agent.read_ahead: no file can be read by %s", ", ".join(self._patterns))
            return
        rest = "" if found.is_whole else "; more was left out"
        log.info("%d file(s), %d MB, are kept in memory%s", found.files, found.bytes >> 20, rest)
