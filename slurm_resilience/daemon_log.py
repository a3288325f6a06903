"""The log of sresctld and sresd: one format on standard error, with the time in front."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import TextIO

KEPT_LINES, KEPT_LINE_CHARACTERS = 1000, 1000
MAX_WAITING = 10_000
"""Lines that wait for the reader of the log."""
FLUSH_SECONDS = 1.0
"""At the daemon's end, until lines that are not taken are lost."""
LEVELS = ("debug", "info", "warning", "error")
LINE = "%(asctime)s.%(msecs)03d %(levelname).1s %(name)s: %(message)s"
TIME = "%Y-%m-%dT%H:%M:%S"
_COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[1;31m"}
_PLAIN = "\033[0m"


class _Harmless(logging.Formatter):
    """Lines that play no tricks on a terminal: some have users' own words in them."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return "".join(char if char.isprintable() or char == "\n" else "?" for char in line)


class _Coloured(_Harmless):
    """Yellow warnings and red errors."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        colour = _COLOURS.get(record.levelno, "")
        return f"{colour}{line}{_PLAIN}" if colour else line


class PatientStream(logging.Handler):
    """Writes lines to a stream in a thread of its own: what reads the daemon's log may hang
    (journald on a disk that does), and must hold up no beat. Lines that find no room are
    counted."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._waiting: queue.Queue[str | threading.Event] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until all is written; not for ever."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(written)
            written.wait(FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            said = self._waiting.get()
            if isinstance(said, threading.Event):
                said.set()
                continue
            dropped, self._dropped = self._dropped, 0
            if dropped:
                said = f"{said}\n({dropped} lines found no room: this log was not read)"
            with contextlib.suppress(OSError, ValueError):  # there is none left to tell
                self._stream.write(f"{said}\n")
                self._stream.flush()


class RecentLines(logging.Handler):
    """The last lines of this process's log, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Harmless(LINE, TIME))
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record)[:KEPT_LINE_CHARACTERS])

    def tail(self, lines: int, max_bytes: int) -> tuple[str, ...]:
        """Return the last lines, oldest first: at most so many, and so many bytes of them."""
        return last_lines(self._lines.copy(), lines, max_bytes)


def last_lines(known: Sequence[str], lines: int, max_bytes: int) -> tuple[str, ...]:
    """Return the last of these lines, oldest first: at most so many, and so many bytes of them."""
    taken: list[str] = []
    for line in reversed(known):
        max_bytes -= len(line.encode(errors="replace"))
        if len(taken) >= lines or max_bytes < 0:
            break
        taken.append(line)
    return tuple(reversed(taken))


def set_up(level: str) -> RecentLines:
    """Write the log to standard error; in colour on a terminal, unless NO_COLOR is set.

    Args:
        level: one of `LEVELS`.

    Returns:
        The last lines that are written.
    """
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    handler = PatientStream(sys.stderr)
    handler.setFormatter((_Coloured if coloured else _Harmless)(LINE, TIME))
    recent = RecentLines()
    logging.basicConfig(level=level.upper(), handlers=[handler, recent])
    return recent
