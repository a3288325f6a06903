"""Write the node's health log: a line of JSON for each change, bounded and rotated.

A thread of its own writes it. A disk that hangs or is full costs lines of this log, which are
counted, and nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import queue
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.config import AgentSettings
from slurm_resilience.model import CheckResult, Finding
from slurm_resilience.trusted_paths import refuse_users

log = logging.getLogger("sresd.health_log")

FILE_NAME = "health.jsonl"
KEPT_FILES = 4
"""Files beside the one that is written."""
MAX_WAITING = 1000
"""Lines that wait for the disk; later ones are dropped and counted."""
FILE_MODE = 0o640
"""Not for all to read: it quotes the kernel log."""


def log_path(settings: AgentSettings, environ: dict[str, str]) -> Path | None:
    """Return the file; None where none is written.

    Args:
        settings: agent.health_log, and agent.health_log_bytes, which switches it off with 0.
        environ: systemd names the directory of its logs there.
    """
    if not settings.health_log_bytes:
        return None
    if settings.health_log:
        return Path(settings.health_log)
    folder = environ.get("LOGS_DIRECTORY", "").partition(":")[0]
    return Path(folder) / FILE_NAME if folder else None


class HealthLog:
    """Takes entries from any thread without waiting; `run` writes them."""

    def __init__(self, path: Path, max_bytes: int, node: str, boot_id: str, clock: Clock) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._head = {"node": node, "boot_id": boot_id}
        self._clock = clock
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._dropped = 0

    def result(self, result: CheckResult) -> None:
        """Add a check's result that differs from the one before."""
        self._add("result", msgspec.to_builtins(result))

    def finding(self, finding: Finding) -> None:
        """Add a finding of the kernel log, of the driver's events, or of sresd itself."""
        self._add("finding", msgspec.to_builtins(finding))

    def cleared(self, key: tuple[str, str, str]) -> None:
        """Add that a finding of the kernel log holds no more."""
        self._add("cleared", dict(zip(("check", "subject", "code"), key, strict=True)))

    def close(self) -> None:
        """Let `run` return once all is written."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _add(self, kind: str, what: dict[str, Any]) -> None:
        now = datetime.datetime.fromtimestamp(self._clock.now(), datetime.UTC)
        time = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        try:
            self._waiting.put_nowait({"time": time, "kind": kind, **self._head, **what})
        except queue.Full:
            with self._lock:
                self._dropped += 1

    def run(self) -> None:
        """Run the thread."""
        lines = RotatedLines(self._path, self._max_bytes)
        while (entry := self._waiting.get()) is not None:
            with self._lock:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                entry["dropped_before"] = dropped
            if not lines.write(msgspec.json.encode(entry)):
                with self._lock:
                    self._dropped += dropped + 1


class RotatedLines:
    """A file and its older ones. Opened for each line, so that another program may rotate it too.

    Not logging's handler: at the daemon's end logging waits for each of its handlers, and a disk
    may hang.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._failing = False

    def write(self, line: bytes) -> bool:
        """Append a line; False when the disk did not take it, which is told once."""
        try:
            self._append(line + b"\n")
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._failing = True
        else:
            self._failing = False
        return not self._failing

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        refuse_users(self._path.parent)
        if self._size() + len(line) > self._max_bytes:
            self._rotate()
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, how, FILE_MODE)
        try:
            size = os.fstat(file).st_size
            if os.write(file, line) < len(line):
                os.ftruncate(file, size)  # no half a line for the next reader
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _rotate(self) -> None:
        files = [self._path, *(Path(f"{self._path}.{n}") for n in range(1, KEPT_FILES + 1))]
        for newer, older in reversed(list(pairwise(files))):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
