"""What the library costs while nothing fails: the plain loop and the same under it, in turns."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from drive import HERE, WORLD, Job, free_port
from figures import Event

SECONDS = 300.0
MODES = ("plain", "ours")
_SEATS = {"plain": range(WORLD), "ours": range(10, 10 + WORLD)}


def measure(pairs: int) -> list[tuple[float, float]]:
    """Seconds of one block of steps, plain and under the library; which goes first alternates."""
    worker = str(HERE / "workers" / "turns.py")
    with Job(SECONDS) as job:
        port = str(free_port())
        for rank in range(WORLD):
            job.start(
                [sys.executable, worker, "plain"],
                BENCH_MODE="plain",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                RANK=str(rank),
                WORLD_SIZE=str(WORLD),
            )
        argv = [sys.executable, "-m", "slurm_resilience.training.run", "--standalone"]
        argv += ["--nproc-per-node", str(WORLD), "--standby", "0"]
        argv += ["--rdzv-backend", "dir", "--rdzv-endpoint", str(job.directory / "meet")]
        job.start([*argv, worker, "ours"], BENCH_MODE="ours")
        every = [seat for seats in _SEATS.values() for seat in seats]
        job.until(lambda ranks: _said(ranks, every, "ready", 0) or None, "start of both")
        found = []
        # The first turn of both fills caches; it does not count.
        for turn in range(pairs + 1):
            times = {}
            for mode in sorted(MODES, reverse=turn % 2 == 0):
                (job.directory / f"go-{mode}-{turn}").touch()
                seats = _SEATS[mode]
                job.until(lambda r, s=seats, t=turn: _said(r, s, "end", t) or None, "turn")
                times[mode] = took(job.ranks(), seats, turn)
            if turn:
                found.append((times["plain"], times["ours"]))
        return found


def took(ranks: Mapping[int, Iterable[Event]], seats: Iterable[int], turn: int) -> float:
    """From the first rank's begin of a turn to the last one's end."""
    events = [e for seat in seats for e in ranks[seat] if e.step == turn]
    begins = [event.at for event in events if event.name == "begin"]
    return max(event.at for event in events if event.name == "end") - min(begins)


def _said(ranks: Mapping[int, Iterable[Event]], seats: Iterable[int], name: str, turn: int) -> bool:
    return all(any(e.name == name and e.step == turn for e in ranks.get(s, ())) for s in seats)
