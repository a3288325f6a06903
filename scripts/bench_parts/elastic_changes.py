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
RUN_SECONDS = 300.0
STEADY_STEPS = 10
"""For the length of a step."""
EARLY_SECONDS = 0.2
"""A rank may leave its world so long before the last one's step is over."""
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
    after = []
    for rank in SURVIVORS:
        steps = [event for event in ranks[rank] if event.name == "step" and event.at > fault]
        small = [event.at for event in steps if event.world < WORLD]
        full = [
            event.at for event in steps if event.world == WORLD and small and event.at > small[-1]
        ]
        if not full:
            return None
        after.append(full[0])
    return max(after) - last_small_step(ranks, fault)


def last_small_step(ranks: Mapping[int, Sequence[Event]], fault: float) -> float:
    """Return when the last survivor made its last step in the smaller world. Pure."""
    return max(
        event.at
        for rank in SURVIVORS
        for event in ranks[rank]
        if event.name == "step" and event.at > fault and event.world < WORLD
    )


PARTS = ("left", "met", "formed", "form", "step")
"""Events at which a part of a change is over: its world is left, the next one is agreed on, its
process group is formed, the state is healed, the first step is made."""


def parts(
    ranks: Mapping[int, Sequence[Event]], since: float, counted: Iterable[int], world: int
) -> dict[str, float]:
    """Return the seconds of each part of a change of size; a rank that is late counts. Pure.

    Args:
        since: monotonic seconds: the fault, or the end of the last step before.
        counted: ranks that were there before.
        world: ranks after it.
    """
    last: dict[str, float] = {}
    for rank in counted:
        events = [event for event in ranks[rank] if event.at > since - EARLY_SECONDS]
        stop = next(n for n, e in enumerate(events) if e.name == "step" and _new(events[:n], world))
        for name in PARTS:
            at = max(event.at for event in events[: stop + 1] if event.name == name)
            last[name] = max(last.get(name, since), at)
    ends = [since, *(last[name] for name in PARTS)]
    return {
        name: after - before for name, (before, after) in zip(PARTS, pairwise(ends), strict=True)
    }


def _new(events: Sequence[Event], world: int) -> bool:
    """Tell whether a rank has formed a group of this size, by what came before."""
    return any(event.name == "form" and event.world == world for event in events)


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
    shrink_parts: dict[str, float]
    grow_parts: dict[str, float]


def _resized() -> Change:
    with Job(RUN_SECONDS) as job:
        # A warm standby would be there before the next step, and no world smaller.
        _start(job, 0)
        at = job.kill(VICTIM)
        shrunk = job.until(lambda ranks: downtime(ranks, at, SURVIVORS), "survivors' step")
        grown = job.until(lambda ranks: joined(ranks, at), "joining")
        ranks = job.ranks()
        step = usual_step(ranks, at)
        small = last_small_step(ranks, at)
        return Change(
            step,
            shrunk - step,
            grown - step,
            _end(job),
            parts(ranks, at, SURVIVORS, WORLD - 1),
            parts(ranks, small, SURVIVORS, WORLD),
        )


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
    each = {
        name: {part: statistics.median(of[part] for of in found) for part in PARTS}
        for name, found in (
            ("shrink_parts_s", [change.shrink_parts for change in changes]),
            ("grow_parts_s", [change.grow_parts for change in changes]),
        )
    }
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
        "each_shrink_s": [change.shrink for change in changes],
        "each_grow_s": [change.grow for change in changes],
        "each_checkpoint_restart_s": restarts,
        **each,
        "speedup_over_checkpoint_restart": restarted / (shrunk + grown),
    }
