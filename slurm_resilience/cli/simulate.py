"""`sres simulate`: run simulated trainings, or replay one of them."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import SresError
from slurm_resilience.simulate.campaign import CampaignFigures, run_campaign
from slurm_resilience.simulate.invariants import InvariantBroken
from slurm_resilience.simulate.mesh_simulation import simulate as simulate_one

REPORT_SECONDS = 10.0
"""Time between two lines of progress."""


class InvariantsBroken(SresError):
    """Some runs did something that must never happen."""


@click.command()
@click.option(
    "--only",
    type=click.Choice(["mesh"]),
    default="mesh",
    expose_value=False,  # there is one so far
    help="The core to simulate.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the first run.")
@click.option("--runs", default=1000, show_default=True, type=click.IntRange(1), help="Runs.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Processes.")
@click.option(
    "--json",
    "output",
    type=click.Path(path_type=Path),
    help="Keep the figures here; a second call goes on where the first one stopped.",
)
@click.option("--trace", is_flag=True, help="Replay one seed, and print all that happens.")
def simulate(seed: int, runs: int, jobs: int, output: Path | None, trace: bool) -> None:
    """Run trainings on a simulated clock under faults, and check rules after each event.

    A run is a function of its seed: `sres simulate --seed S --trace` replays it.
    """
    if trace:
        _replay(seed)
        return
    told_at = SYSTEM_CLOCK.monotonic()

    def progress(figures: CampaignFigures) -> None:
        nonlocal told_at
        if SYSTEM_CLOCK.monotonic() - told_at >= REPORT_SECONDS:
            told_at = SYSTEM_CLOCK.monotonic()
            click.echo(_line(figures), err=True)

    figures = run_campaign(
        seed, runs, jobs=jobs, file=output, clock=SYSTEM_CLOCK.monotonic, progress=progress
    )
    click.echo(report(figures))
    if figures.mesh_violations:
        raise InvariantsBroken(
            f"{figures.mesh_violations} of {figures.mesh_runs} runs broke a rule; replay one with: "
            f"sres simulate --seed {figures.failures[0].seed} --trace"
        )


def _replay(seed: int) -> None:
    trace: list[str] = []
    try:
        run = simulate_one(seed, trace)
        last = f"{run.processes} seats, {run.worlds} worlds, {run.steps} steps: no rule was broken"
    except InvariantBroken as error:
        last = f"a rule was broken: {error}"
    click.echo("\n".join([*trace, last]))


def _line(figures: CampaignFigures) -> str:
    return f"{figures.mesh_runs} runs, {figures.mesh_violations} violations"


def report(figures: CampaignFigures) -> str:
    """Return the figures as a table."""
    rows = [
        ("runs", figures.mesh_runs),
        ("violations", figures.mesh_violations),
        ("worlds that stepped", figures.worlds),
        ("steps", figures.steps),
        ("events", figures.events),
    ]
    rows += [(f"fault: {name}", count) for name, count in sorted(figures.faults.items())]
    for low, high in ((1, 4), (5, 8), (9, 16), (17, 32), (33, 64)):
        of_size = sum(n for size, n in figures.sizes.items() if low <= int(size) <= high)
        rows.append((f"runs with {low} to {high} seats", of_size))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {count:>12,}" for name, count in rows]
    lines += [f"seed {failure.seed}: {failure.text}" for failure in figures.failures[:10]]
    return "\n".join(lines)
