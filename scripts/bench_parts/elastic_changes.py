"""Measure changes of a living training's size, and the same fault where a checkpoint must help.

Four ranks on this machine. One gets a SIGKILL, three go on, and a new process joins them. Then the
same job again, without recovery in the process: all ranks are replaced by warm standbys, and read
the checkpoint of the last step. Then once more, undisturbed, for its bits.

Each standstill is the time without a step, less the time that a step takes.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "training"))

from drive import HERE, VICTIM, WORLD, Job
from figures import Event, downtime

STEPS = 600
RUN_SECONDS = 120.0
STEADY_STEPS = 10
"""For the length of a step."""
SURVIVORS = tuple(rank for rank in range(WORLD) if rank != VICTIM)


class Told(NamedTuple):
    """The lines of a training, of all its ranks."""

    lost: int
    """Samples that no committed step has."""
    repeated: int
    digests: tuple[str, ...]


def told(lines: Iterable[tuple[int, Mapping[str, Any]]], samples: int) -> Told:
    """Count the samples of committed steps. Pure.

    Args:
        lines: rank, and what it wrote, in order.
        samples: of the whole training.
    """
    committed: dict[int, int] = {}
    ids: dict[tuple[int, int, int], Sequence[int]] = {}
    digests = []
    for rank, line in lines:
        if "committed" in line:
            step = line["committed"]
            committed[step] = max(committed.get(step, 0), line["generation"])
        elif "ids" in line:
            ids[line["step"], line["generation"], rank] = line["ids"]
        else:
            digests.append(line["digest"])
    seen = Counter(
        index
        for (step, generation, _), share in ids.items()
        if committed.get(step) == generation
        for index in share
    )
    return Told(samples - len(seen), seen.total() - len(seen), tuple(digests))


def joined(ranks: Mapping[int, Sequence[Event]], fault: float) -> float | None:
    """Return how long survivors stood still when the lost rank came back; None: it has not. Pure.

    From the last step of any survivor in the smaller world to the last one's next step.
    """
    before, after = [], []
    for rank in SURVIVORS:
        steps = [event for event in ranks[rank] if event.name == "step" and event.at > fault]
        small = [event.at for event in steps if event.world < WORLD]
        full = [
            event.at for event in steps if event.world == WORLD and small and event.at > small[-1]
        ]
        if not small or not full:
            return None
        before.append(small[-1])
        after.append(full[0])
    return max(after) - max(before)


def usual_step(ranks: Mapping[int, Sequence[Event]], until: float) -> float:
    """Return the median seconds of survivors' last steps before a moment. Pure."""
    gaps = []
    for rank in SURVIVORS:
        times = [event.at for event in ranks[rank] if event.name == "step" and event.at < until]
        gaps += [after - before for before, after in pairwise(times[-STEADY_STEPS:])]
    return statistics.median(gaps)


def _start(job: Job, standbys: int, **environment: str) -> None:
    argv = [sys.executable, "-m", "slurm_resilience.launcher", "--standalone"]
    argv += ["--nproc-per-node", str(WORLD), "--standby", str(standbys)]
    argv += ["--rdzv-backend", "dir", "--rdzv-endpoint", str(job.directory / "meet")]
    argv += ["--standby-import", "job", "--standby-import", "warmed"]
    more = {"BENCH_STEPS": str(STEPS), **environment}
    job.start([*argv, str(HERE / "workers" / "resized.py")], **more)
    job.warm()
    if standbys:
        warm = lambda _: len(list(job.directory.glob("standby*"))) >= standbys or None  # noqa: E731
        job.until(warm, "warm standbys")
    (job.directory / "go").touch()


def _end(job: Job) -> Told:
    def over(ranks: Mapping[int, list[Event]]) -> bool | None:
        done = [any(e.name == "over" for e in ranks.get(rank, ())) for rank in range(WORLD)]
        return all(done) or None

    job.until(over, "end")
    lines = [
        (int(file.name[4:].split(".")[0]), json.loads(line))
        for file in sorted(job.directory.glob("told*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return told(lines, STEPS * 32)


class Change(NamedTuple):
    """Seconds of one training whose size changed, and what it told."""

    step: float
    shrink: float
    grow: float
    told: Told


def _resized() -> Change:
    with Job(RUN_SECONDS) as job:
        # A warm standby would be there before the next step, and no world smaller.
        _start(job, 0)
        at = job.kill(VICTIM)
        shrunk = job.until(lambda ranks: downtime(ranks, at, SURVIVORS), "survivors' step")
        grown = job.until(lambda ranks: joined(ranks, at), "joining")
        step = usual_step(job.ranks(), at)
        return Change(step, shrunk - step, grown - step, _end(job))


def _restarted() -> float:
    with Job(RUN_SECONDS) as job:
        place = str(job.directory / "checkpoints")
        _start(job, WORLD, BENCH_CHECKPOINT=place, SRES_PARTS="data,rootless")
        at = job.kill(VICTIM)
        restarted = job.until(lambda r: downtime(r, at, range(WORLD), WORLD), "restart")
        return restarted - usual_step(job.ranks(), at)


def measure(rounds: int) -> dict[str, Any]:
    """Run an undisturbed training once, and the other two in turn; return the figures.

    Args:
        rounds: of which the medians are taken.
    """
    with Job(RUN_SECONDS) as job:
        _start(job, 0)
        fixed = _end(job)
    changes: list[Change] = []
    restarts: list[float] = []
    for _ in range(rounds):
        changes.append(_resized())
        restarts.append(_restarted())
    shrunk = statistics.median(change.shrink for change in changes)
    grown = statistics.median(change.grow for change in changes)
    restarted = statistics.median(restarts)
    digests = {digest for change in changes for digest in change.told.digests}
    return {
        "rounds": rounds,
        "step_s": statistics.median(change.step for change in changes),
        "bit_equal": len({*fixed.digests, *digests}) == 1,
        "samples_lost": sum(change.told.lost for change in changes),
        "samples_repeated": sum(change.told.repeated for change in changes),
        "shrink_s": shrunk,
        "grow_s": grown,
        "checkpoint_restart_s": restarted,
        "speedup_over_checkpoint_restart": restarted / (shrunk + grown),
    }
