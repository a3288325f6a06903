"""Print warnings of a training process on stderr: one line each, with its seat."""

from __future__ import annotations

import logging
import sys

ROOTS = ("sres", "slurm_resilience")
"""Loggers below which all of ours are."""


class LogLines(logging.Handler):
    """Prints warnings, until the program has set up a logging of its own.

    Args:
        seat: this process's.
    """

    def __init__(self, seat: int) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter(f"sres: seat {seat}: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print it: in one piece, for many processes write there."""
        if not logging.getLogger().handlers:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def speak(seat: int) -> None:
    """Print our warnings with the seat in front. What the program does with logging comes first."""
    for name in ROOTS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(LogLines(seat))
