"""The logs of deep checks: one fixed file on each node, and one stream for each run."""

from __future__ import annotations

import contextlib
import sys
from datetime import UTC, datetime
from pathlib import Path

from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.deepcheck.report_forms import log_line
from slurm_resilience.trusted_paths import refuse_users

MAX_LOG_BYTES = 20_000_000
"""A node's log that is larger is put aside as `….1` before the next line."""


def stamp(at: float) -> str:
    """Return a moment (epoch) as the logs write it, in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def result_text(moment: str, result: DeepResult) -> str:
    """Return what the node's log says of one result."""
    is_bad = result.outcome in (DeepOutcome.FAILED, DeepOutcome.UNJUDGED)
    level = "error" if is_bad else "info"
    head = log_line(moment, level, f"{result.check} {result.outcome}: {result.text}")
    parts = [head, result.block, result.output.rstrip()]
    return "\n".join(part for part in parts if part) + "\n"


class NodeLog:
    """A log that results are added to; where it cannot be written, stderr says so once."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: the file; empty: no log.
        """
        self._path = Path(path) if path else None

    def write(self, moment: str, result: DeepResult) -> None:
        """Add one result."""
        self.add(result_text(moment, result))

    def add(self, text: str) -> None:
        """Add whole lines."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # In a user's directory a link would have root write elsewhere, and a pipe hangs it.
            refuse_users(self._path.parent)
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_size > MAX_LOG_BYTES:
                    self._path.replace(f"{self._path}.1")
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            print(f"{self._path} cannot be written: {error.strerror}", file=sys.stderr)
            self._path = None
