"""Follow the kernel log: sleep in select() until a line is there, never poll."""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from slurm_resilience.agent.agent_link import Wakeup
from slurm_resilience.agent.drill_window import DrillWindow
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import Clock
from slurm_resilience.daemon_log import last_lines
from slurm_resilience.health.kernel_log import Classifier
from slurm_resilience.health.log_frame import record
from slurm_resilience.model import CheckResult

log = logging.getLogger("sresd.kernel_log")

NAME = "kernel_log"
"""The check by which it tells that it follows the log."""
READ_BYTES = 8192
"""/dev/kmsg hands out one record a read, and refuses a smaller buffer with EINVAL."""
RETRY_SECONDS = 5.0
"""Until a kernel log that cannot be opened is tried again."""
KEPT_LINES, KEPT_LINE_CHARACTERS = 1000, 1000
"""Lines that are kept as they were read, for evidence."""
MAX_PARTIAL_BYTES = 65536
"""Bytes of an unfinished FIFO line that are kept."""


class KernelLogSource:
    """An open kernel log: a character device (records) or a FIFO (lines)."""

    def __init__(self, path: Path) -> None:
        mode = path.stat().st_mode
        if not (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "neither a kernel log device nor a FIFO", str(path))
        self.is_device = stat.S_ISCHR(mode)
        # A FIFO opened for both never reports end-of-file when a writer leaves.
        how = os.O_RDONLY if self.is_device else os.O_RDWR
        self._fd = os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC)
        self._partial = b""

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def read(self) -> Iterator[str]:
        """Yield the lines that are there now. Decoding never fails: a log holds any byte."""
        while True:
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                log.warning("the kernel wrote its log faster than sresd reads it: lines were lost")
                continue
            if not data:
                return
            if self.is_device:
                yield data.decode(errors="replace")
                continue
            *lines, self._partial = (self._partial + data).split(b"\n")
            if len(self._partial) > MAX_PARTIAL_BYTES:
                self._partial = b""
            yield from (line.decode(errors="replace") for line in lines)


class KernelLogReader:
    """Brings kernel log lines into the outbox.

    The first read of a device takes this boot's older records, so that a fault which came while
    sresd was away is not lost.
    """

    def __init__(
        self,
        path: Path,
        drill: DrillWindow,
        outbox: Outbox,
        intake: FindingIntake,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        self._path = path
        self._drill = drill
        self._outbox = outbox
        self.intake = intake
        self._clock = clock
        self._stop = stop
        self._classifier = Classifier(drill.is_always)
        self._wakeup = Wakeup()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def tail(self, max_bytes: int) -> tuple[str, ...]:
        """Return the last lines as they were read, oldest first; from any thread."""
        return last_lines(self._lines.copy(), KEPT_LINES, max_bytes)

    def wake(self) -> None:
        """Make `run` look at `stop`."""
        self._wakeup.ring()

    def run(self) -> None:
        """Run the thread."""
        while not self._stop.is_set():
            try:
                source = KernelLogSource(self._path)
            except OSError as error:
                self._put_up("unjudged", f"{self._path} cannot be read: {error.strerror}")
                self._clock.wait(self._stop, RETRY_SECONDS)
                continue
            try:
                self._follow(source)
            except OSError as error:
                self._put_up("unjudged", f"{self._path} cannot be read: {error.strerror}")
                self._clock.wait(self._stop, RETRY_SECONDS)
            finally:
                source.close()

    def _follow(self, source: KernelLogSource) -> None:
        booted = self._clock.now() - self._clock.monotonic() if source.is_device else None
        is_from_before = source.is_device
        while not self._stop.is_set():
            is_just_written = not is_from_before
            for line in source.read():
                if is_just_written:
                    booted, is_just_written = self._booted_by(line, booted), False
                self.feed(line, booted, is_from_before)
                if self._stop.is_set():
                    return
            is_from_before = False
            # Not before: what this boot has logged so far is part of the first look at the node.
            self._put_up("pass", f"following {self._path}")
            select.select([source.fileno(), self._wakeup.fileno()], [], [])

    def _booted_by(self, line: str, booted: float | None) -> float | None:
        """Return when this kernel started, by a line that it has just written.

        The kernel counts by a clock that is never set, and gains or loses a second in a day or so.
        What the driver and DCGM tell of the same trouble has the date of now.

        Args:
            line: as it was read.
            booted: as it was reckoned before; None: lines carry no time of their own.
        """
        uptime = record(line).uptime
        return booted if booted is None or uptime is None else self._clock.now() - uptime

    def feed(self, line: str, booted: float | None = None, is_from_before: bool = False) -> None:
        """Classify one line and put up what it changes.

        Args:
            line: as it was read.
            booted: when this kernel started; records then carry their own time.
            is_from_before: it was there before the log was opened.
        """
        self._lines.append(line[:KEPT_LINE_CHARACTERS])
        is_drill = self._drill.covers(record(line).uptime if is_from_before else None)
        for finding in self._classifier.feed(line, self._clock.now(), booted, is_drill):
            self.intake.from_log(finding)

    def _put_up(self, verdict: str, text: str) -> None:
        result = CheckResult(NAME, "pass" if verdict == "pass" else "unjudged", text)
        if self._outbox.result(result):
            log.log(logging.INFO if verdict == "pass" else logging.WARNING, "%s", text)
