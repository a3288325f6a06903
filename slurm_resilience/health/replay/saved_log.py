"""Lines of a saved log: their time, their author and their text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from slurm_resilience.health.log_frame import unframe

BACKWARD_SECONDS = 600.0
"""A clock that goes back by more has started anew: the node booted, or the year ended."""


class SavedLine(NamedTuple):
    """One line of a saved log."""

    text: str
    at: float = 0.0
    """Seconds on the log's own clock, which never goes back."""
    facility: int = 0
    program: str = ""
    """The author; empty for the kernel."""
    has_frame: bool = False
    """The line bore a time or an author, as only logs do."""

    @property
    def is_boot(self) -> bool:
        return not self.program and self.text.startswith("Linux version ")


def saved_lines(lines: Iterable[str]) -> Iterator[SavedLine]:
    """Yield the lines with their times; a line without one has that of the line before."""
    now, last_stamp, offset = 0.0, None, 0.0
    for line in lines:
        frame = unframe(line)
        stamp = frame.wall if frame.wall is not None else frame.uptime
        if stamp is not None:
            if last_stamp is not None and stamp < last_stamp - BACKWARD_SECONDS:
                offset = now + BACKWARD_SECONDS - stamp
            last_stamp = stamp
            now = max(now, stamp + offset)
        yield SavedLine(frame.text, now, frame.facility, frame.program, frame.pieces > 0)
