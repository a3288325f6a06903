"""Measure the library's cost while nothing fails: the same processes in turns with it and without.

Two jobs side by side would not show one per cent: two plain ones, started apart, differ by 2 %
(standard deviation of 7 starts). In one job everything is equal but what is asked about: the
update's way, the watch, and the mesh's thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from drive import HERE, WORLD, Job
from figures import Event

SECONDS = 300.0
BLOCK_STEPS = 20
"""The steps of a turn. With the mesh's thread held for so long, no peer counts as silent yet."""

Pairs = list[tuple[float, float]]
"""Figures of turns that belong together, without and with the library."""


class Costs(NamedTuple):
    """The library's cost while nothing fails."""

    seconds: Pairs
    """Seconds of one block of steps."""
    cpu_seconds: dict[str, Pairs]
    """Seconds of one block and one rank: ``all``, and of the threads ``main`` and ``mesh``."""
    update_seconds: list[float]
    """Seconds of the main thread in an update's begin and end, in the middle of steps: the median
    of each rank's steps. It varies far less than the difference of two turns, of which torch's part
    is thirty times as long; and it knows nothing of how much slower, or faster, torch gets."""
    warm_seconds: list[float]
    """Seconds of an update that has nothing in it, one after the other: what the library does for
    a step with the processor's caches warm, whatever else the machine does."""
    digest_shares: list[float]
    """The part of a training's time that comparing replicas takes, of each comparison."""


def measure(pairs: int, *, device: str = "cpu", world: int = WORLD) -> Costs:
    """Measure so many pairs of turns; which goes first alternates.

    Args:
        pairs: of turns.
        device: ``cuda``: a model of 100 million parameters on the GPU.
        world: ranks.
    """
    with Job(SECONDS) as job:
        argv = [sys.executable, "-m", "slurm_resilience.launcher", "--standalone"]
        argv += ["--nproc-per-node", str(world), "--standby", "0"]
        argv += ["--rdzv-backend", "dir", "--rdzv-endpoint", str(job.directory / "meet")]
        # The first turn of both fills caches; it does not count.
        turns = 2 * (pairs + 1)
        more = {"BENCH_TURNS": str(turns), "BENCH_STEPS": str(BLOCK_STEPS)}
        more |= {"BENCH_DEVICE": device, "BENCH_WORLD": str(world)}
        job.start([*argv, str(HERE / "workers" / "turns.py")], **more)
        ranks = job.until(lambda r: dict(r) if _over(r, world) else None, "end of all turns")
        times = [took(ranks, turn, world) for turn in range(2, turns)]
        files = sorted(job.directory.glob("costs*.json"))
        told: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    each = sum(times) / len(times) / BLOCK_STEPS
    return Costs(
        paired(times),
        {
            name: [pair for rank in told for pair in paired(_of(rank["cpu_seconds"], threads))]
            for name, threads in (("all", (0, 1, 2)), ("main", (0,)), ("mesh", (1,)))
        },
        [rank["update_seconds"] for rank in told],
        [rank["warm_seconds"] for rank in told],
        [seconds / (every * each) for rank in told for seconds, every in rank["digests"]],
    )


def _of(turns: list[list[float]], threads: Iterable[int]) -> list[float]:
    """Return the seconds of these threads in each turn that counts."""
    return [sum(turn[thread] for thread in threads) for turn in turns[2:]]


def paired(turns: list[float]) -> Pairs:
    """Lay turns that follow each other side by side, the one without the library first.

    Args:
        turns: from turn 2 on, which is with it; then two without it, two with it, and so on.
    """
    found = []
    for number, first in enumerate(turns[::2]):
        second = turns[2 * number + 1]
        found.append((first, second) if number % 2 else (second, first))
    return found


def took(ranks: Mapping[int, Iterable[Event]], turn: int, world: int = WORLD) -> float:
    """From the first rank's begin of a turn to the last one's end."""
    events = [event for seat in range(world) for event in ranks[seat] if event.step == turn]
    begins = [event.at for event in events if event.name == "begin"]
    return max(event.at for event in events if event.name == "end") - min(begins)


def _over(ranks: Mapping[int, Iterable[Event]], world: int) -> bool:
    return all(any(e.name == "over" for e in ranks.get(seat, ())) for seat in range(world))
