"""Measure the library's cost while nothing fails: the same processes in turns with it and without.

Two jobs side by side would not show one per cent: two plain ones, started apart, differ by 2 %
(standard deviation of 7 starts). In one job everything is equal but what is asked about: the
update's way, the watch, and the mesh's thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from drive import HERE, WORLD, Job
from figures import Event

SECONDS = 300.0


def measure(pairs: int) -> list[tuple[float, float]]:
    """Seconds of one block of steps, without and with the library; which goes first alternates."""
    with Job(SECONDS) as job:
        argv = [sys.executable, "-m", "slurm_resilience.launcher", "--standalone"]
        argv += ["--nproc-per-node", str(WORLD), "--standby", "0"]
        argv += ["--rdzv-backend", "dir", "--rdzv-endpoint", str(job.directory / "meet")]
        # The first turn of both fills caches; it does not count.
        turns = 2 * (pairs + 1)
        job.start([*argv, str(HERE / "workers" / "turns.py")], BENCH_TURNS=str(turns))
        ranks = job.until(lambda r: dict(r) if _over(r) else None, "end of all turns")
        times = [took(ranks, turn) for turn in range(2, turns)]
    found = []
    for number, first in enumerate(times[::2]):
        second = times[2 * number + 1]
        # Turns 2 and 3 are the first that count: with it, without it.
        found.append((first, second) if number % 2 else (second, first))
    return found


def took(ranks: Mapping[int, Iterable[Event]], turn: int) -> float:
    """From the first rank's begin of a turn to the last one's end."""
    events = [event for seat in range(WORLD) for event in ranks[seat] if event.step == turn]
    begins = [event.at for event in events if event.name == "begin"]
    return max(event.at for event in events if event.name == "end") - min(begins)


def _over(ranks: Mapping[int, Iterable[Event]]) -> bool:
    return all(any(e.name == "over" for e in ranks.get(seat, ())) for seat in range(WORLD))
