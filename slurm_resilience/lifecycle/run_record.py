"""The record of a run, on the node's own disk, and the scripts that are due because of it.

A replacement's empty disk has no record, so that everything runs there. `sresd` reads it too.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_resilience.errors import SresError
from slurm_resilience.lifecycle.script_set import LifecycleScript

RECORD_NAME = "record.json"
VERSION = 1
TIMED_OUT = 124
CANNOT_RUN = 126


class LifecycleError(SresError):
    """A script failed, so the node must not join; or the run could not start."""


class RunOutcome(enum.StrEnum):
    """The way in which a run of the scripts ended."""

    PASSED = "passed"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """It is under way, or was cut off."""


@dataclass(frozen=True)
class ScriptResult:
    """The outcome of one script."""

    name: str
    rc: int | None
    """Its exit code; 128+N: ended by signal N; 124: over the time limit; None: skipped."""
    seconds: float
    text: str = ""
    """The last line that it printed; the reason why it was skipped."""
    digest: str = ""
    boot_id: str = ""
    at: float = 0.0
    """Its end, seconds since the epoch."""

    @property
    def has_failed(self) -> bool:
        return bool(self.rc)

    @property
    def in_words(self) -> str:
        """Say how it ended, for people."""
        if self.rc == TIMED_OUT:
            how = f"took more than its time ({self.seconds:.0f} s)"
        else:
            how = f"failed (exit code {self.rc})"
        return f"{self.name} {how}{f': {self.text}' if self.text else ''}"


@dataclass(frozen=True)
class RunRecord:
    """The last run of each script on this disk."""

    node: str
    boot_id: str
    instance: str
    results: tuple[ScriptResult, ...] = ()
    """The last one of each script, in the scripts' order."""
    ended: float = 0.0
    """Seconds since the epoch; 0: the run has not ended."""

    @property
    def failed(self) -> ScriptResult | None:
        return next((result for result in self.results if result.has_failed), None)

    @property
    def outcome(self) -> RunOutcome:
        if not self.ended:
            return RunOutcome.UNFINISHED
        return RunOutcome.FAILED if self.failed else RunOutcome.PASSED


def due(
    scripts: Sequence[LifecycleScript],
    record: RunRecord | None,
    boot_id: str,
    instance: str,
) -> int:
    """Return the number of scripts at the front that need not run again. Those behind them all do:
    each may rest on the ones before it.

    Args:
        scripts: the set, in its order.
        record: of the last run on this disk; None: there was none.
        boot_id: of the present boot.
        instance: the present machine's; another one's record (in a copied image) says nothing.
    """
    if record is None or record.instance != instance:
        return 0
    results = {result.name: result for result in record.results}
    for number, script in enumerate(scripts):
        last = results.get(script.name)
        # Three things make one due: its last run did not end well, its content is another one now,
        # or the machine has booted since, unless once for each disk is enough.
        if last is None or last.has_failed or last.digest != script.digest:
            return number
        if not script.runs_once and last.boot_id != boot_id:
            return number
    return len(scripts)


def read_record(state_dir: Path) -> RunRecord | None:
    """Return the record of a disk; None: it has none that can be read."""
    try:
        data: dict[str, Any] = json.loads((state_dir / RECORD_NAME).read_text(encoding="utf-8"))
        if data.pop("version") != VERSION:
            return None
        results = tuple(ScriptResult(**result) for result in data.pop("results"))
        return RunRecord(results=results, **data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_record(state_dir: Path, record: RunRecord) -> None:
    """Write the record as a whole, so that a power cut leaves the old one or the new one."""
    text = json.dumps({"version": VERSION, **asdict(record)}, indent=1)
    new = state_dir / f"{RECORD_NAME}.new"
    with new.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(state_dir / RECORD_NAME)
    with contextlib.suppress(OSError):
        folder = os.open(state_dir, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
