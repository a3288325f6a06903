"""The log of sresctld and sresd: one format on standard error, with the time in front."""

from __future__ import annotations

import logging
import os
import sys

LEVELS = ("debug", "info", "warning", "error")
LINE = "%(asctime)s.%(msecs)03d %(levelname).1s %(name)s: %(message)s"
TIME = "%Y-%m-%dT%H:%M:%S"
_COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[1;31m"}
_PLAIN = "\033[0m"


class _Coloured(logging.Formatter):
    """Yellow warnings and red errors."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        colour = _COLOURS.get(record.levelno, "")
        return f"{colour}{line}{_PLAIN}" if colour else line


def set_up(level: str) -> None:
    """Write the log to standard error; in colour on a terminal, unless NO_COLOR is set.

    Args:
        level: one of `LEVELS`.
    """
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_Coloured if coloured else logging.Formatter)(LINE, TIME))
    logging.basicConfig(level=level.upper(), handlers=[handler])
