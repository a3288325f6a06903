"""The lines that every rank of every benched program leaves behind. Loads nothing, so that a
process can say that it began before it loads torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LIFE_SECONDS = 900.0
"""The starter of this process is gone by then."""


class Events:
    """A rank's own file: ``time event step world pid`` a line, by the machine's common clock."""

    def __init__(self, seat: int) -> None:
        self.directory = Path(os.environ["BENCH_DIR"])
        self.seat = seat
        self._last = time.monotonic() + _LIFE_SECONDS
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(self.directory / f"rank{seat}.events", flags, 0o644)

    def say(self, event: str, step: int = -1, world: int = 0) -> None:
        if time.monotonic() > self._last:
            os._exit(1)
        line = f"{time.monotonic():.6f} {event} {step} {world} {os.getpid()}\n"
        os.write(self._file, line.encode())

    def maybe_raise(self) -> None:
        """Raise once when the driver has asked for it."""
        asked = self.directory / f"raise{self.seat}"
        if not asked.exists():
            return
        asked.unlink()
        self.say("fault")
        raise RuntimeError("the benchmark asked for this")
