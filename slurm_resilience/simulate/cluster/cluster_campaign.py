"""Many simulated clusters, one hour each."""

from __future__ import annotations

import traceback
from collections.abc import Collection

import msgspec

from slurm_resilience.simulate.campaign import Campaign, SeedFailure
from slurm_resilience.simulate.cluster.cluster_simulation import (
    FAULTS_AN_HOUR,
    simulate_cluster,
)
from slurm_resilience.simulate.cluster.fault_plan import (
    KINDS_WITHOUT_SPARES,
    FaultKind,
    PlannedFault,
    plan,
)
from slurm_resilience.simulate.cluster.rules.rule_names import ClusterRule
from slurm_resilience.simulate.schedule import StandsStill


def kinds_of(seed: int) -> Collection[FaultKind]:
    """Return the faults of a seed: each odd one has a cluster with pools of spares."""
    return tuple(FaultKind) if seed % 2 else KINDS_WITHOUT_SPARES


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


def run_clusters(seed: int, runs: int) -> ControllerFigures:
    """Run so many clusters for an hour each, from a seed on."""
    figures = ControllerFigures(seed, controller_kinds={}, controller_failures=[])
    for number in range(seed, seed + runs):
        figures.controller_runs += 1
        try:
            run = simulate_cluster(number, kinds=kinds_of(number))
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


CONTROLLER_CAMPAIGN = Campaign(
    ControllerFigures,
    run_clusters,
    together=20,
    seed="controller_seed",
    runs="controller_runs",
    seconds="controller_seconds",
)


def shorten(seed: int) -> list[PlannedFault]:
    """Leave out the faults of a seed without which its first rule is broken all the same."""
    faults = plan(seed, 1.0, FAULTS_AN_HOUR, kinds_of(seed))
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
