"""Print warnings of a training process on stderr: one line each, with its seat.

Lines are written in the middle of a recovery, and by the mesh's threads. A full disk, a closed pipe
or a program's own handler that raises costs a line; it must not cost the state of a training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

ROOTS = ("sres", "slurm_resilience")
"""Loggers below which all of ours are."""
STDERR = 2


class LogLines(logging.Handler):
    """Prints warnings, until the program has set up a logging of its own; then that gets all lines.

    Args:
        seat: this process's.
    """

    def __init__(self, seat: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"sres: seat {seat}: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print it: in one piece, for many processes write there."""
        root = logging.getLogger()
        if root.handlers:
            with contextlib.suppress(Exception):
                root.callHandlers(record)
        elif record.levelno >= logging.WARNING:
            write(self.format(record) + "\n")


def write(text: str) -> None:
    """Write on stderr, if that can be done.

    Args:
        text: whole lines.
    """
    try:
        sys.stderr.write(text)
    except Exception:  # closed, or an object of the program's own: the file may be there yet
        with contextlib.suppress(OSError):
            os.write(STDERR, text.encode(errors="replace"))
    with contextlib.suppress(Exception):
        sys.stderr.flush()


def write_out() -> None:
    """Write out what was printed, if that can be done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def speak(seat: int) -> None:
    """Print our warnings with the seat in front. What the program does with logging comes first."""
    for name in ROOTS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(LogLines(seat))
            # The handler hands lines on: what the program's handlers raise ends there.
            logger.propagate = False
