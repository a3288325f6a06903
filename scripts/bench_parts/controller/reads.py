#!/usr/bin/env python3
"""Measure one listing of all nodes and all jobs, by Slurm's commands and by pyslurm.

Prints one JSON object. pyslurm is left out, with the reason, where it is not installed.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from slurm_resilience.errors import SresError
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.pyslurm import PyslurmClient

READS = 5


def spent() -> float:
    """Return the processor seconds of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measured(read: Callable[[], Any]) -> tuple[float, float]:
    """Return the processor seconds and the seconds of a read: the median of some after the
    first."""
    read()
    costs, times = [], []
    for _ in range(READS):
        before, began = spent(), time.monotonic()
        read()
        costs.append(spent() - before)
        times.append(time.monotonic() - began)
    return statistics.median(costs), statistics.median(times)


def figures(name: str, client: SlurmClient) -> dict[str, Any]:
    """Return what one client's listings cost."""
    found: dict[str, Any] = {}
    for what, read in (("nodes", client.nodes), ("jobs", client.jobs)):
        cost, took = measured(read)
        found |= {f"{name}_{what}_cpu_s": cost, f"{name}_{what}_took_s": took}
    return found


def main() -> None:
    """Measure both clients."""
    commands = CliClient()
    found = figures("commands", commands)
    try:
        found |= figures("pyslurm", PyslurmClient(commands, commands.info().version))
    except SresError as error:
        found["pyslurm_left_out"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
