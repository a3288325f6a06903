"""Many simulated trainings."""

from __future__ import annotations

import traceback

import msgspec

from slurm_resilience.simulate.campaign import Campaign, SeedFailure
from slurm_resilience.simulate.invariants import InvariantBroken
from slurm_resilience.simulate.mesh_simulation import simulate
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


MESH_CAMPAIGN = Campaign(
    CampaignFigures, run_chunk, together=100, seed="seed", runs="mesh_runs", seconds="seconds"
)
