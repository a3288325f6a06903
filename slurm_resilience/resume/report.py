"""What a researcher reads in the job's log: one block for each failure, one line for the rest.

Everything goes to standard error, prefixed like srun's own messages; standard output belongs to
the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec


class RecoveryBlock(msgspec.Struct, frozen=True):
    """What happened between two attempts. Times are seconds since the epoch; 0: did not happen."""

    what: str
    nodes: tuple[str, ...]
    done: str
    attempt: int
    step_ended: float
    nodes_ready: float
    relaunched: float
    noticed: float
    from_step: int = -1


def say(text: str) -> None:
    """One line, with the time of day, by which it is found in the daemons' own logs."""
    _write(f"{time.strftime('%H:%M:%S')} {text}")


def _write(text: str) -> None:
    """Nobody may be reading: that is no reason to fail, as it is none for srun."""
    with contextlib.suppress(OSError):
        os.write(2, f"sres: {text}\n".encode(errors="surrogateescape"))


def block(recovery: RecoveryBlock) -> None:
    """The block after a failure."""
    took = recovery.relaunched - recovery.noticed
    ended = recovery.step_ended - recovery.noticed
    ready = recovery.nodes_ready - recovery.step_ended
    where = (
        f"from step {recovery.from_step} (the last one reported)"
        if recovery.from_step >= 0
        else "from the program's own last checkpoint"
    )
    long = f"{took:.1f} s (step ended {max(0, ended):.1f} s, nodes ready {max(0, ready):.1f} s)"
    _say_block(
        f"recovered: attempt {recovery.attempt}", recovery.what, recovery.done, long, f" {where}"
    )


class HealingLine(msgspec.Struct, frozen=True):
    """Seats of a living step that were lost and filled again. Seconds since the epoch; 0: never."""

    what: str
    done: str
    seats: tuple[int, ...]
    noticed: float
    went_on: float
    nodes_ready: float
    started: float
    joined: float
    step: int = -1
    before: int = -1
    """The newest step before the loss."""


def healed(healing: HealingLine) -> None:
    """The block after seats were filled again."""
    seats = ",".join(map(str, healing.seats))
    others = (
        f"survivors went on after {healing.went_on - healing.noticed:.1f} s"
        if healing.went_on
        else "nobody went on without them"
    )
    ready = max(0.0, healing.nodes_ready - healing.noticed)
    started = max(0.0, healing.started - healing.noticed)
    long = (
        f"{others}; joined after {healing.joined - healing.noticed:.1f} s "
        f"(node ready {ready:.1f} s, step started {started:.1f} s)"
    )
    _say_block(f"healed: seats {seats}", healing.what, healing.done, long, _where(healing))


def _where(healing: HealingLine) -> str:
    at = f" at step {healing.step}" if healing.step >= 0 else ""
    if healing.step < healing.before:
        # From the disk, or from nothing: the ranks have said which.
        return f"{at}; it had been at step {healing.before}"
    return f"{at}, from memory" if at else ""


def _say_block(title: str, what: str, done: str, long: str, where: str) -> None:
    at = time.strftime("%H:%M:%S")
    _write(f"──── {title}, {at} ".ljust(72, "─"))
    _write(f"what failed   {what}")
    _write(f"what was done {done}")
    _write(f"how long      {long}")
    _write(f"training      goes on{where}")
    _write("─" * 72)


class EventLog:
    """The supervisor's own account in `$SRES_EVENTS`, one JSON object a line (for the demo)."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    def write(self, event: str, **data: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"at": time.time(), "event": event} | data)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            say(f"{self._path} cannot be written: {error}")
            self._path = None
