"""Many simulated clusters: counted, kept in a file, and gone on with where they stopped."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from slurm_resilience.errors import UsageError
from slurm_resilience.simulate.campaign import SeedFailure, save_beside
from slurm_resilience.simulate.cluster.cluster_faults import FaultKind, PlannedFault, plan
from slurm_resilience.simulate.cluster.cluster_rules import ClusterRule
from slurm_resilience.simulate.cluster.cluster_simulation import (
    FAULTS_AN_HOUR,
    simulate_cluster,
)
from slurm_resilience.simulate.schedule import StandsStill

KINDS = tuple(FaultKind)
RUNS_TOGETHER = 20
"""Runs in one part."""


class ControllerFigures(msgspec.Struct):
    """The figures of all runs so far."""

    controller_seed: int
    """Seed of the first run; the next one has the next number."""
    controller_runs: int = 0
    controller_hours: float = 0.0
    controller_faults: int = 0
    controller_violations: int = 0
    controller_cycles: int = 0
    controller_events: int = 0
    controller_kinds: dict[str, int] = {}
    """Faults by their kind."""
    controller_failures: list[SeedFailure] = []
    controller_seconds: float = 0.0
    """Computing time of all runs."""

    def add(self, other: ControllerFigures) -> None:
        """Count the runs of another part in."""
        self.controller_runs += other.controller_runs
        self.controller_hours += other.controller_hours
        self.controller_faults += other.controller_faults
        self.controller_violations += other.controller_violations
        self.controller_cycles += other.controller_cycles
        self.controller_events += other.controller_events
        self.controller_seconds += other.controller_seconds
        self.controller_failures += other.controller_failures
        for kind, count in other.controller_kinds.items():
            self.controller_kinds[kind] = self.controller_kinds.get(kind, 0) + count


def run_clusters(seed: int, runs: int, kinds: Collection[FaultKind] = KINDS) -> ControllerFigures:
    """Run so many clusters for an hour each, from a seed on."""
    figures = ControllerFigures(seed, controller_kinds={}, controller_failures=[])
    for number in range(seed, seed + runs):
        figures.controller_runs += 1
        try:
            run = simulate_cluster(number, kinds=kinds)
        except StandsStill as error:
            text = str(error)
        except Exception:
            # A simulation that fails has shown nothing.
            text = traceback.format_exc(limit=-3)
        else:
            figures.controller_hours += run.hours
            figures.controller_faults += len(run.faults)
            figures.controller_cycles += run.cycles
            figures.controller_events += run.events
            for fault in run.faults:
                figures.controller_kinds[fault] = figures.controller_kinds.get(fault, 0) + 1
            if not run.broken:
                continue
            text = f"{run.broken[0].rule}: {run.broken[0].text}"
        figures.controller_violations += 1
        figures.controller_failures.append(SeedFailure(number, text))
    return figures


def load(file: Path | None, seed: int) -> ControllerFigures:
    """Read the figures of an earlier call.

    Raises:
        UsageError: the file holds something else, or began with another seed.
    """
    if file is None or not file.exists():
        return ControllerFigures(seed)
    try:
        known = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
        if "controller_seed" not in known:
            return ControllerFigures(seed)
        figures = msgspec.convert(known, ControllerFigures)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{file}: no figures of a simulation: {error}") from None
    if figures.controller_seed != seed:
        began = figures.controller_seed
        raise UsageError(f"{file}: began with seed {began}; say --seed {began}")
    return figures


def run_controller_campaign(
    seed: int,
    runs: int,
    *,
    jobs: int = 1,
    file: Path | None = None,
    clock: Callable[[], float],
    progress: Callable[[ControllerFigures], None] = lambda _: None,
    kinds: Collection[FaultKind] = KINDS,
) -> ControllerFigures:
    """Run clusters until there are so many, and those in the file count.

    Args:
        seed: of the first one.
        runs: in all.
        jobs: processes that run them.
        file: keeps the figures between two calls.
        clock: tells seconds.
        progress: is called after each part.
        kinds: faults that may happen.
    """
    figures = load(file, seed)
    chunks = [
        (seed + begin, min(RUNS_TOGETHER, runs - begin))
        for begin in range(figures.controller_runs, runs, RUNS_TOGETHER)
    ]
    begun = clock()
    for part in _parts(chunks, jobs, kinds):
        now = clock()
        part.controller_seconds, begun = now - begun, now
        figures.add(part)
        save_beside(file, figures)
        progress(figures)
    return figures


def _parts(
    chunks: list[tuple[int, int]], jobs: int, kinds: Collection[FaultKind]
) -> Iterator[ControllerFigures]:
    """Yield the figures of each part, in order: the file then says which seed is next."""
    if jobs == 1:
        for seed, runs in chunks:
            yield run_clusters(seed, runs, kinds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_clusters, seed, runs, kinds) for seed, runs in chunks]
        for future in futures:
            yield future.result()


def shorten(seed: int, kinds: Collection[FaultKind] = KINDS) -> list[PlannedFault]:
    """Leave out the faults of a seed without which its first rule is broken all the same."""
    faults = plan(seed, 1.0, FAULTS_AN_HOUR, kinds)
    rule = _first_broken(seed, faults)
    number = 0
    while rule is not None and number < len(faults):
        fewer = faults[:number] + faults[number + 1 :]
        if _first_broken(seed, fewer) is rule:
            faults = fewer
        else:
            number += 1
    return faults


def _first_broken(seed: int, faults: list[PlannedFault]) -> ClusterRule | None:
    broken = simulate_cluster(seed, faults=faults).broken
    return broken[0].rule if broken else None
