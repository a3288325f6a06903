"""Many simulated trainings."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from slurm_resilience.simulate.campaign import Campaign, SeedFailure
from slurm_resilience.simulate.invariants import InvariantBroken
from slurm_resilience.simulate.mesh_simulation import elastic_has_speakers, simulate
from slurm_resilience.simulate.schedule import StandsStill


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


class SpeakerFigures(msgspec.Struct):
    """The same of trainings in which one rank of each node speaks for the others."""

    speaker_seed: int
    speaker_runs: int = 0
    speaker_violations: int = 0
    speaker_worlds: int = 0
    speaker_steps: int = 0
    speaker_events: int = 0
    speaker_faults: dict[str, int] = {}
    speaker_failures: list[SeedFailure] = []
    speaker_seconds: float = 0.0


class ElasticFigures(msgspec.Struct):
    """The same of trainings of which some ranks come and go with free nodes."""

    elastic_seed: int
    elastic_runs: int = 0
    elastic_violations: int = 0
    elastic_worlds: int = 0
    elastic_steps: int = 0
    elastic_events: int = 0
    elastic_faults: dict[str, int] = {}
    elastic_failures: list[SeedFailure] = []
    elastic_seconds: float = 0.0


def run_chunk(
    seed: int, runs: int, *, speakers: bool = False, elastic: bool = False
) -> CampaignFigures:
    """Run so many trainings, from a seed on."""
    figures = CampaignFigures(seed, sizes={}, faults={}, failures=[])
    for number in range(seed, seed + runs):
        figures.mesh_runs += 1
        try:
            speaks = speakers or (elastic and elastic_has_speakers(number))
            run = simulate(number, speakers=speaks, elastic=elastic)
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


def run_speakers(seed: int, runs: int) -> SpeakerFigures:
    """Run so many trainings with speakers, from a seed on."""
    return SpeakerFigures(seed, *_counts(run_chunk(seed, runs, speakers=True)))


def run_elastic(seed: int, runs: int) -> ElasticFigures:
    """Run so many elastic trainings, from a seed on."""
    return ElasticFigures(seed, *_counts(run_chunk(seed, runs, elastic=True)))


def _counts(figures: CampaignFigures) -> tuple[Any, ...]:
    return (
        figures.mesh_runs,
        figures.mesh_violations,
        figures.worlds,
        figures.steps,
        figures.events,
        figures.faults,
        figures.failures,
    )


SPEAKERS_CAMPAIGN = Campaign(
    SpeakerFigures,
    run_speakers,
    together=100,
    seed="speaker_seed",
    runs="speaker_runs",
    seconds="speaker_seconds",
)
ELASTIC_CAMPAIGN = Campaign(
    ElasticFigures,
    run_elastic,
    together=100,
    seed="elastic_seed",
    runs="elastic_runs",
    seconds="elastic_seconds",
)
MESH_CAMPAIGN = Campaign(
    CampaignFigures, run_chunk, together=100, seed="seed", runs="mesh_runs", seconds="seconds"
)
