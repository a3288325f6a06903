"""Run sresctld, and end it as kill -9 does at boundaries of its journal.

    ended_at_boundary.py FOLDER

A boundary is the moment before a commit and the one after it. They count while FOLDER/counts is
there, and each is a line of FOLDER/boundaries. FOLDER/end_at has a line for each end to come: a
boundary's number, or its side and its last write (`after replacing`). A line is used once.
"""

from __future__ import annotations

import functools
import os
import signal
import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slurm_resilience import config, daemon_log
from slurm_resilience.controller import main as daemon

FOLDER = Path(sys.argv[1])
WRITES = ("INSERT", "UPDATE", "DELETE")
WORDS = 3


class EndingConnection(sqlite3.Connection):
    """The journal's connection."""

    written: tuple[str, ...] = ()
    """The writes of the transaction that is under way."""
    number = 0

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        is_write = sql.startswith(WRITES)
        if is_write:
            # An event by its kind: (when, kind, …).
            what = parameters[1] if "INTO events" in sql else " ".join(sql.split()[:WORDS])
            self.written = (*self.written, what)
        if not (sql.startswith("COMMIT") or (is_write and not self.in_transaction)):
            return super().execute(sql, parameters)
        what, self.written = ", ".join(self.written), ()
        self.come_to(f"before {what}")
        cursor = super().execute(sql, parameters)
        self.come_to(f"after {what}")
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        """Write row by row: outside a transaction, each is a commit."""
        cursor = self.cursor()
        for row in parameters:
            cursor = self.execute(sql, row)
        return cursor

    def come_to(self, boundary: str) -> None:
        """Count a boundary, and end there if it is the one."""
        if not (FOLDER / "counts").exists():
            return
        self.number += 1
        with (FOLDER / "boundaries").open("a", encoding="utf-8") as file:
            file.write(f"{self.number} {boundary}\n")
        ends = (FOLDER / "end_at").read_text(encoding="utf-8").splitlines()
        side, _, writes = boundary.partition(" ")
        here = (str(self.number), f"{side} {writes.rpartition(', ')[2]}")
        found = next((line for line in ends if line in here), None)
        if found is not None:
            ends.remove(found)
            (FOLDER / "end_at").write_text("\n".join(ends), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)


def connect(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, factory=EndingConnection)


daemon.Borders = functools.partial(daemon.Borders, connect=connect)  # type: ignore[assignment,misc]
daemon_log.set_up("info")
daemon.serve(config.load(), once=False, dry_run=False)
