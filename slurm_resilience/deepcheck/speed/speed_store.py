"""Keep the last measures of each device, in one SQLite file of the machine that has them taken.

Neither on the nodes, whose peers' measures lie elsewhere, nor in sresctld's journal: a deep check
needs no sresctld. What is lost with the file is measured anew.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from slurm_resilience.deepcheck.speed.speed_judge import SpeedHistory, SpeedKey
from slurm_resilience.deepcheck.step_lines import SpeedTold
from slurm_resilience.errors import UsageError

KEPT = 60
"""Measures of each device."""
FORGOTTEN_SECONDS = 90 * 86400.0
"""A device that was not measured for so long is gone."""
WAIT_SECONDS = 10.0
_TABLE = """
CREATE TABLE IF NOT EXISTS speeds (
    node TEXT, device TEXT, kind TEXT, peers TEXT, at REAL, value REAL, partner TEXT);
CREATE INDEX IF NOT EXISTS speeds_of ON speeds (node, device, kind, at);
"""
_BOUND = """
DELETE FROM speeds WHERE rowid IN (
    SELECT rowid FROM (
        SELECT rowid, row_number() OVER (
            PARTITION BY node, device, kind ORDER BY at DESC, rowid DESC) AS place FROM speeds)
    WHERE place > ?)
"""


class SpeedStore:
    """The file; each call opens it anew."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, measures: Iterable[SpeedTold], at: float) -> None:
        """Add measures, and drop what is too old or too many.

        Args:
            measures: those of one run.
            at: seconds since the epoch.

        Raises:
            UsageError: the file cannot be written.
        """
        rows = [(m.node, m.device, m.kind, m.peers, at, m.value, m.partner) for m in measures]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as database, database:
                database.executemany("INSERT INTO speeds VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
                database.execute("DELETE FROM speeds WHERE at < ?", (at - FORGOTTEN_SECONDS,))
                database.execute(_BOUND, (KEPT,))
        except (OSError, sqlite3.Error) as error:
            raise UsageError(f"{self._path}: speeds cannot be kept: {error}") from None

    def histories(self) -> tuple[SpeedHistory, ...]:
        """Return the measures of each device, the oldest first.

        Raises:
            UsageError: the file cannot be read.
        """
        if not self._path.exists():
            return ()
        try:
            with closing(self._open()) as database:
                rows = database.execute(
                    "SELECT node, device, kind, peers, value, partner FROM speeds"
                    " ORDER BY at, rowid"
                ).fetchall()
        except (OSError, sqlite3.Error) as error:
            raise UsageError(f"{self._path}: speeds cannot be read: {error}") from None
        peers: dict[SpeedKey, str] = {}
        values: dict[SpeedKey, list[float]] = {}
        partners: dict[SpeedKey, list[str]] = {}
        for node, device, kind, group, value, partner in rows:
            key = SpeedKey(node, device, kind)
            peers[key] = group
            values.setdefault(key, []).append(value)
            partners.setdefault(key, []).append(partner)
        return tuple(
            SpeedHistory(key, peers[key], tuple(values[key]), tuple(partners[key]))
            for key in values
        )

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=WAIT_SECONDS)
        database.executescript(_TABLE)
        return database
