"""Many simulated trainings: counted, kept in a file, and gone on with where they stopped."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from slurm_resilience.errors import UsageError
from slurm_resilience.simulate.invariants import InvariantBroken
from slurm_resilience.simulate.mesh_simulation import simulate
from slurm_resilience.simulate.schedule import StandsStill

RUNS_TOGETHER = 100
"""Runs in one part."""


class SeedFailure(msgspec.Struct, frozen=True):
    """A run in which something happened that must never happen."""

    seed: int
    text: str


class CampaignFigures(msgspec.Struct):
    """The figures of all runs so far."""

    seed: int
    """Seed of the first run; the next one has the next number."""
    mesh_runs: int = 0
    mesh_violations: int = 0
    worlds: int = 0
    steps: int = 0
    events: int = 0
    sizes: dict[str, int] = {}
    """Runs by the seats of their training."""
    faults: dict[str, int] = {}
    """Faults by their kind."""
    failures: list[SeedFailure] = []
    seconds: float = 0.0
    """Computing time of all runs."""

    def add(self, other: CampaignFigures) -> None:
        """Count the runs of another part in."""
        self.mesh_runs += other.mesh_runs
        self.mesh_violations += other.mesh_violations
        self.worlds += other.worlds
        self.steps += other.steps
        self.events += other.events
        self.seconds += other.seconds
        self.failures += other.failures
        for own, more in ((self.sizes, other.sizes), (self.faults, other.faults)):
            for key, count in more.items():
                own[key] = own.get(key, 0) + count


def run_chunk(seed: int, runs: int) -> CampaignFigures:
    """Run so many trainings, from a seed on."""
    figures = CampaignFigures(seed, sizes={}, faults={}, failures=[])
    for number in range(seed, seed + runs):
        figures.mesh_runs += 1
        try:
            run = simulate(number)
        except (InvariantBroken, StandsStill) as error:
            text = str(error)
        except Exception:
            # A core that fails is as bad as one that does the wrong thing.
            text = traceback.format_exc(limit=-3)
        else:
            figures.worlds += run.worlds
            figures.steps += run.steps
            figures.events += run.events
            size = str(run.processes)
            figures.sizes[size] = figures.sizes.get(size, 0) + 1
            for fault in run.faults:
                figures.faults[fault] = figures.faults.get(fault, 0) + 1
            continue
        figures.mesh_violations += 1
        figures.failures.append(SeedFailure(number, text))
    return figures


def load(file: Path | None, seed: int) -> CampaignFigures:
    """Read the figures of an earlier call.

    Raises:
        UsageError: the file holds something else, or began with another seed.
    """
    if file is None or not file.exists():
        return CampaignFigures(seed)
    try:
        known = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
        if "seed" not in known:
            return CampaignFigures(seed)
        figures = msgspec.convert(known, CampaignFigures)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{file}: no figures of a simulation: {error}") from None
    if figures.seed != seed:
        raise UsageError(f"{file}: began with seed {figures.seed}; say --seed {figures.seed}")
    return figures


def save_beside(file: Path | None, figures: msgspec.Struct) -> None:
    """Write the figures, whole or not at all; those of another core stay in the file."""
    if file is None:
        return
    known = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    draft = file.with_name(f".{file.name}.new")
    merged = known | msgspec.to_builtins(figures)
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(merged)) + b"\n")
    draft.replace(file)


def run_campaign(
    seed: int,
    runs: int,
    *,
    jobs: int = 1,
    file: Path | None = None,
    clock: Callable[[], float],
    progress: Callable[[CampaignFigures], None] = lambda _: None,
) -> CampaignFigures:
    """Run trainings until there are so many, and those in the file count.

    Args:
        seed: of the first one.
        runs: in all.
        jobs: processes that run them.
        file: keeps the figures between two calls.
        clock: tells seconds.
        progress: is called after each part.
    """
    figures = load(file, seed)
    chunks = [
        (seed + begin, min(RUNS_TOGETHER, runs - begin))
        for begin in range(figures.mesh_runs, runs, RUNS_TOGETHER)
    ]
    begun = clock()
    for part in _parts(chunks, jobs):
        now = clock()
        part.seconds, begun = now - begun, now
        figures.add(part)
        save_beside(file, figures)
        progress(figures)
    return figures


def _parts(chunks: list[tuple[int, int]], jobs: int) -> Iterator[CampaignFigures]:
    """Yield the figures of each part, in order: the file then says which seed is next."""
    if jobs == 1:
        for seed, runs in chunks:
            yield run_chunk(seed, runs)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_chunk, *zip(*chunks, strict=True)) if chunks else ()
