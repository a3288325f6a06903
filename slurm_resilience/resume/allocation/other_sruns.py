"""Tell which nodes the job's other supervised sruns have, also between two of their attempts.

Slurm shows no step of theirs then. Each keeps its attempts in a file, which names it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from slurm_resilience.resume.history import FOLDER, SUFFIX, read


def nodes_of_others(
    base: Path, uid: int, supervisor: int, run: tuple[int, int], lives: Callable[[int], bool]
) -> frozenset[str]:
    """Return the nodes that the last attempts of other supervisors have, or had.

    Only those are known that were started in the same directory, and on this machine.

    Args:
        base: the directory in which the sruns were started.
        uid: the user.
        supervisor: process number of the one that asks.
        run: the job, and how often Slurm has requeued it.
        lives: tells whether a process runs here: a supervisor that was killed leaves its file.
    """
    job, restarts = run
    name = re.compile(rf"job-{job}-[0-9a-f]{{8}}-(\d{{1,10}}){re.escape(SUFFIX)}")
    nodes: set[str] = set()
    for folder in (base / FOLDER / str(uid), base / f"{FOLDER}-{uid}" / str(uid)):
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                found = name.fullmatch(path.name)
                if found is None or int(found[1]) == supervisor or not lives(int(found[1])):
                    continue
                attempts = read(path)
                if attempts and attempts[-1].restarts == restarts:
                    nodes.update(attempts[-1].nodes)
    return frozenset(nodes)
