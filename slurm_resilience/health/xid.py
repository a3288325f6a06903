"""Look up the action for an NVIDIA Xid: in ``xid_table.csv``, unless the line itself says it."""

from __future__ import annotations

import csv
import functools
import re
from importlib import resources
from typing import NamedTuple

from slurm_resilience.model import Severity

NVLINK5 = frozenset(range(144, 151))
"""NVLink 5 units: their lines say themselves whether the error was fatal."""

RECOVERY_WORDS = (
    ("reboot", Severity.REBOOT),
    # "Drain P2P" too: peer traffic has to stop first, then the GPU's recovery is asked again.
    ("reset", Severity.RESET),
    ("drain", Severity.RESET),
)
"""Words of the recovery that the driver recommends, in this order, and what they ask for."""

_FATAL = re.compile(r"\bFatal\b")
_RECOVERY = re.compile(r"\bto\s+0x[0-9a-fA-F]+\s*\(([^)]*)\)")


class Xid(NamedTuple):
    """One row of the table."""

    code: int
    meaning: str
    action: Severity
    source: str
    """The source of the action: NVIDIA's catalogue, or a decision and its reason."""
    others: str = ""
    """The choices of other agents, where they differ."""


@functools.cache
def table() -> dict[int, Xid]:
    """Return the table, by code."""
    text = resources.files("slurm_resilience.health").joinpath("xid_table.csv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines())
    return {
        int(row["code"]): Xid(
            int(row["code"]),
            row["meaning"],
            Severity(row["action"]),
            row["source"],
            row["others"],
        )
        for row in rows
    }


def judge(code: int, text: str) -> Xid:
    """Return the row for ``code``, with the action that this line asks for.

    Args:
        code: the Xid number.
        text: what follows the number in the line.

    A code that is not in the table is watched, never acted on: new drivers bring new codes.
    """
    row = table().get(code)
    if row is None:
        return Xid(code, "unknown code", Severity.MONITOR, "not in the table")
    if code == 154:
        return _recovery(row, text)
    if code in NVLINK5 and _FATAL.search(text):
        return row._replace(action=Severity.RESET)
    return row


def _recovery(row: Xid, text: str) -> Xid:
    """Xid 154: the recovery the driver recommends, ``changed from 0x0 (None) to 0x2 (...)``."""
    match = _RECOVERY.search(text)
    if match is None:
        return row._replace(action=Severity.MONITOR)
    meaning, words = f"{row.meaning} to '{match[1]}'", match[1].lower()
    if words == "none":
        return row._replace(action=Severity.NONE, meaning=meaning)
    named = (action for word, action in RECOVERY_WORDS if word in words)
    return row._replace(action=next(named, Severity.MONITOR), meaning=meaning)
