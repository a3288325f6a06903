"""Many simulated sruns."""

from __future__ import annotations

import traceback

import msgspec

from slurm_resilience.simulate.campaign import Campaign, SeedFailure
from slurm_resilience.simulate.resume.elastic.elastic_run import ELASTIC_SEED
from slurm_resilience.simulate.resume.preemption.preemption_draw import PREEMPTED_SEED
from slurm_resilience.simulate.resume.resume_rules import BrokenResumeRule
from slurm_resilience.simulate.resume.resume_simulation import (
    COMPANION_SEED,
    PAIR_SEED,
    SHARED_SEED,
    simulate_resume,
)
from slurm_resilience.simulate.schedule import StandsStill

COMPANION_SHARE = 5
"""One in so many runs is of a job that needs a second allocation."""
PAIR_SHARE = 3 * COMPANION_SHARE
"""One in so many is of one that needs such an allocation of two nodes."""

SHARED_SHARE = 10
"""One in so many is of several sruns in one job."""
ELASTIC_SHARE, ELASTIC_REST = 10, 3
"""One in so many, with this rest, is of an elastic step."""
PREEMPTED_SHARE, PREEMPTED_REST = 10, 7
"""One in so many, with this rest, is of a job that Slurm preempts."""


class ResumeFigures(msgspec.Struct):
    """The figures of all runs so far."""

    resume_seed: int
    """Seed of the first run; the next one has the next number."""
    resume_runs: int = 0
    resume_violations: int = 0
    resume_attempts: int = 0
    resume_joins: int = 0
    """Join steps of trainings that live on without a lost node."""
    resume_companions: int = 0
    """Second allocations that got their nodes."""
    resume_grown: int = 0
    """Growths of elastic steps: ranks on lent nodes that stepped with the others."""
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


def run_sruns(seed: int, runs: int) -> ResumeFigures:
    """Run so many supervised sruns, from a seed on."""
    figures = ResumeFigures(seed, resume_kinds={}, resume_failures=[])
    for number in range(seed, seed + runs):
        figures.resume_runs += 1
        # Else few jobs lose a node and can have a second allocation for it.
        if number % COMPANION_SHARE == 0 and number < COMPANION_SEED:
            number += PAIR_SEED if number % PAIR_SHARE == 0 else COMPANION_SEED
        elif number % SHARED_SHARE == 1 and number < COMPANION_SEED:
            number += SHARED_SEED
        elif number % ELASTIC_SHARE == ELASTIC_REST and number < COMPANION_SEED:
            number += ELASTIC_SEED
        elif number % PREEMPTED_SHARE == PREEMPTED_REST and number < COMPANION_SEED:
            number += PREEMPTED_SEED
        try:
            run = simulate_resume(number)
        except (BrokenResumeRule, StandsStill) as error:
            text = str(error)
        except Exception:
            # A supervisor that fails is as bad as one that does the wrong thing.
            text = traceback.format_exc(limit=-3)
        else:
            figures.resume_attempts += run.attempts
            figures.resume_joins += run.joins
            figures.resume_companions += run.companions
            figures.resume_grown += run.grown
            figures.resume_job_runs += run.job_runs
            figures.resume_ended_well += run.code == 0
            figures.resume_events += run.events
            for fault in run.faults:
                figures.resume_kinds[fault] = figures.resume_kinds.get(fault, 0) + 1
            continue
        figures.resume_violations += 1
        figures.resume_failures.append(SeedFailure(number, text))
    return figures


RESUME_CAMPAIGN = Campaign(
    ResumeFigures,
    run_sruns,
    together=200,
    seed="resume_seed",
    runs="resume_runs",
    seconds="resume_seconds",
)
