"""Notice that a supervisor was started by another one's srun: a program of that name called back.

A program called srun, on PATH or named to `sres run`, may itself start the supervisor, which asks
it for its options and starts it: each of them would start one more, without end. So each supervisor
leaves its process number and its time of start in the environment. Tasks inherit them, and may
start a supervisor of their own: they are no children of the first one, but of slurmstepd.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

MARKER = "SRES_SUPERVISOR"
MOST_PARENTS = 1000


def own_marker() -> str:
    """Return what names this process on this machine; empty where /proc does not tell."""
    return next(_names(os.getpid()), "")


def is_called_back(environment: Mapping[str, str]) -> bool:
    """Return whether this process, or one that it comes from, left the marker."""
    marker = environment.get(MARKER, "")
    return bool(marker) and marker in _names(os.getpid())


def _names(pid: int) -> Iterator[str]:
    """Yield a process and those that it comes from: a number is used again, with a later start."""
    for _ in range(MOST_PARENTS):
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            # The name in brackets may hold anything; then: state, parent, … as proc(5) has them.
            fields = text.rpartition(")")[2].split()
            started, parent = fields[19], int(fields[1])
        except (OSError, IndexError, ValueError):
            return
        yield f"{pid}.{started}"
        if parent == 0:
            return
        pid = parent
