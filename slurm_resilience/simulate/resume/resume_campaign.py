"""Many simulated sruns: counted, kept in a file, and gone on with where they stopped."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from slurm_resilience.errors import UsageError
from slurm_resilience.simulate.campaign import SeedFailure, save_beside
from slurm_resilience.simulate.resume.resume_faults import ResumeFault
from slurm_resilience.simulate.resume.resume_rules import BrokenResumeRule
from slurm_resilience.simulate.resume.resume_simulation import simulate_resume
from slurm_resilience.simulate.schedule import StandsStill

RUNS_TOGETHER = 200
"""Runs in one part."""


class ResumeFigures(msgspec.Struct):
    """The figures of all runs so far."""

    resume_seed: int
    """Seed of the first run; the next one has the next number."""
    resume_runs: int = 0
    resume_violations: int = 0
    resume_attempts: int = 0
    resume_job_runs: int = 0
    """Starts of the job: one, and one for each requeue."""
    resume_ended_well: int = 0
    """Runs in which the supervisor reported success."""
    resume_events: int = 0
    resume_kinds: dict[str, int] = {}
    """Faults by their kind."""
    resume_failures: list[SeedFailure] = []
    resume_seconds: float = 0.0
    """Computing time of all runs."""

    def add(self, other: ResumeFigures) -> None:
        """Count the runs of another part in."""
        self.resume_runs += other.resume_runs
        self.resume_violations += other.resume_violations
        self.resume_attempts += other.resume_attempts
        self.resume_job_runs += other.resume_job_runs
        self.resume_ended_well += other.resume_ended_well
        self.resume_events += other.resume_events
        self.resume_seconds += other.resume_seconds
        self.resume_failures += other.resume_failures
        for kind, count in other.resume_kinds.items():
            self.resume_kinds[kind] = self.resume_kinds.get(kind, 0) + count


def run_sruns(
    seed: int, runs: int, kinds: Collection[ResumeFault] = tuple(ResumeFault)
) -> ResumeFigures:
    """Run so many supervised sruns, from a seed on."""
    figures = ResumeFigures(seed, resume_kinds={}, resume_failures=[])
    for number in range(seed, seed + runs):
        figures.resume_runs += 1
        try:
            run = simulate_resume(number, kinds=kinds)
        except (BrokenResumeRule, StandsStill) as error:
            text = str(error)
        except Exception:
            # A supervisor that fails is as bad as one that does the wrong thing.
            text = traceback.format_exc(limit=-3)
        else:
            figures.resume_attempts += run.attempts
            figures.resume_job_runs += run.job_runs
            figures.resume_ended_well += run.code == 0
            figures.resume_events += run.events
            for fault in run.faults:
                figures.resume_kinds[fault] = figures.resume_kinds.get(fault, 0) + 1
            continue
        figures.resume_violations += 1
        figures.resume_failures.append(SeedFailure(number, text))
    return figures


def load(file: Path | None, seed: int) -> ResumeFigures:
    """Read the figures of an earlier call.

    Raises:
        UsageError: the file holds something else, or began with another seed.
    """
    if file is None or not file.exists():
        return ResumeFigures(seed)
    try:
        known = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
        if "resume_seed" not in known:
            return ResumeFigures(seed)
        figures = msgspec.convert(known, ResumeFigures)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{file}: no figures of a simulation: {error}") from None
    if figures.resume_seed != seed:
        began = figures.resume_seed
        raise UsageError(f"{file}: began with seed {began}; say --seed {began}")
    return figures


def run_resume_campaign(
    seed: int,
    runs: int,
    *,
    jobs: int = 1,
    file: Path | None = None,
    clock: Callable[[], float],
    progress: Callable[[ResumeFigures], None] = lambda _: None,
) -> ResumeFigures:
    """Run sruns until there are so many, and those in the file count.

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
        for begin in range(figures.resume_runs, runs, RUNS_TOGETHER)
    ]
    begun = clock()
    for part in _parts(chunks, jobs):
        now = clock()
        part.resume_seconds, begun = now - begun, now
        figures.add(part)
        save_beside(file, figures)
        progress(figures)
    return figures


def _parts(chunks: list[tuple[int, int]], jobs: int) -> Iterator[ResumeFigures]:
    """Yield the figures of each part, in order: the file then says which seed is next."""
    if jobs == 1:
        for seed, runs in chunks:
            yield run_sruns(seed, runs)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for future in [pool.submit(run_sruns, seed, runs) for seed, runs in chunks]:
            yield future.result()
