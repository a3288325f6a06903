"""The log of sresctld and sresd: one format on standard error, with the time in front."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Sequence

KEPT_LINES, KEPT_LINE_CHARACTERS = 1000, 1000
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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_Coloured if coloured else _Harmless)(LINE, TIME))
    recent = RecentLines()
    logging.basicConfig(level=level.upper(), handlers=[handler, recent])
    return recent
