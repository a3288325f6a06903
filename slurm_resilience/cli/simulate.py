"""`sres simulate`: run simulated trainings, clusters and supervised sruns, or replay one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import click
import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import SresError
from slurm_resilience.simulate.campaign import Campaign, SeedFailure
from slurm_resilience.simulate.cluster.cluster_campaign import (
    CONTROLLER_CAMPAIGN,
    ControllerFigures,
    kinds_of,
    shorten,
)
from slurm_resilience.simulate.cluster.cluster_simulation import simulate_cluster
from slurm_resilience.simulate.invariants import InvariantBroken
from slurm_resilience.simulate.mesh_campaign import (
    ELASTIC_CAMPAIGN,
    MESH_CAMPAIGN,
    SPEAKERS_CAMPAIGN,
    CampaignFigures,
    ElasticFigures,
    SpeakerFigures,
)
from slurm_resilience.simulate.mesh_simulation import elastic_has_speakers
from slurm_resilience.simulate.mesh_simulation import simulate as simulate_one
from slurm_resilience.simulate.resume.resume_campaign import RESUME_CAMPAIGN, ResumeFigures
from slurm_resilience.simulate.resume.resume_rules import BrokenResumeRule
from slurm_resilience.simulate.resume.resume_simulation import simulate_resume

REPORT_SECONDS = 10.0
"""Time between two lines of progress."""
Figures = TypeVar("Figures", bound=msgspec.Struct)


class InvariantsBroken(SresError):
    """Some runs did something that must never happen."""


@click.command()
@click.option(
    "--only",
    type=click.Choice(["mesh", "speakers", "elastic", "controller", "resume"]),
    default="mesh",
    show_default=True,
    help="Simulate trainings, those with speakers (one rank for each node), those that grow and "
    "shrink, clusters around the real sresctld, or supervised sruns.",
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
def simulate(only: str, seed: int, runs: int, jobs: int, output: Path | None, trace: bool) -> None:
    """Run trainings, clusters or supervised sruns on a simulated clock under faults, and check
    rules after each event.

    A run is a function of its seed: `sres simulate --seed S --trace` replays it.
    """
    # What simulated processes warn of is none of the reader's trouble.
    logging.getLogger("sres").addHandler(logging.NullHandler())
    if trace:
        _replay_seed(only, seed)
        return
    campaigns = {
        "mesh": _simulate_trainings,
        "speakers": _simulate_speakers,
        "elastic": _simulate_elastic,
        "controller": _simulate_clusters,
        "resume": _simulate_sruns,
    }
    campaigns[only](_Asked(seed, runs, jobs, output))


class _Asked(NamedTuple):
    """The runs that are asked for."""

    seed: int
    runs: int
    jobs: int
    output: Path | None


def _simulate_trainings(asked: _Asked) -> None:
    figures = _go_on(MESH_CAMPAIGN, asked, _line)
    click.echo(report(figures))
    _judge(figures.mesh_runs, figures.failures, "")


def _simulate_speakers(asked: _Asked) -> None:
    figures = _go_on(SPEAKERS_CAMPAIGN, asked, _speakers_line)
    click.echo(speakers_report(figures))
    _judge(figures.speaker_runs, figures.speaker_failures, "--only speakers ")


def _simulate_elastic(asked: _Asked) -> None:
    figures = _go_on(ELASTIC_CAMPAIGN, asked, _elastic_line)
    click.echo(elastic_report(figures))
    _judge(figures.elastic_runs, figures.elastic_failures, "--only elastic ")


def _simulate_clusters(asked: _Asked) -> None:
    figures = _go_on(CONTROLLER_CAMPAIGN, asked, _cluster_line)
    click.echo(cluster_report(figures))
    _judge(figures.controller_runs, figures.controller_failures, "--only controller ")


def _simulate_sruns(asked: _Asked) -> None:
    figures = _go_on(RESUME_CAMPAIGN, asked, _resume_line)
    click.echo(resume_report(figures))
    _judge(figures.resume_runs, figures.resume_failures, "--only resume ")


def _go_on(campaign: Campaign[Figures], asked: _Asked, line: Callable[[Figures], str]) -> Figures:
    """Run what the file does not have yet; return the figures of all."""
    return campaign.go_on(
        asked.seed,
        asked.runs,
        jobs=asked.jobs,
        file=asked.output,
        clock=SYSTEM_CLOCK.monotonic,
        progress=_progress(line),
    )


def _progress(line: Callable[[Figures], str]) -> Callable[[Figures], None]:
    """Print a line from time to time."""
    told_at = SYSTEM_CLOCK.monotonic()

    def progress(figures: Figures) -> None:
        nonlocal told_at
        if SYSTEM_CLOCK.monotonic() - told_at >= REPORT_SECONDS:
            told_at = SYSTEM_CLOCK.monotonic()
            click.echo(line(figures), err=True)

    return progress


def _judge(runs: int, failures: list[SeedFailure], words: str) -> None:
    if failures:
        raise InvariantsBroken(
            f"{len(failures)} of {runs} runs broke a rule; replay one with: "
            f"sres simulate {words}--seed {failures[0].seed} --trace"
        )


def _replay_seed(only: str, seed: int) -> None:
    if only == "controller":
        _replay_cluster(seed)
    elif only == "resume":
        _replay_srun(seed)
    else:
        speaks = only == "speakers" or (only == "elastic" and elastic_has_speakers(seed))
        _replay(seed, speakers=speaks, elastic=only == "elastic")


def _replay(seed: int, *, speakers: bool, elastic: bool) -> None:
    trace: list[str] = []
    try:
        run = simulate_one(seed, trace, speakers=speakers, elastic=elastic)
        last = f"{run.processes} seats, {run.worlds} worlds, {run.steps} steps: no rule was broken"
    except InvariantBroken as error:
        last = f"a rule was broken: {error}"
    click.echo("\n".join([*trace, last]))


def _replay_cluster(seed: int) -> None:
    """Print what happens in a cluster; of a broken rule the shortest story."""
    trace: list[str] = []
    run = simulate_cluster(seed, trace, kinds=kinds_of(seed))
    if run.broken:
        trace.clear()
        run = simulate_cluster(seed, trace, faults=shorten(seed))
    said = [f"a rule was broken: {broken.rule}: {broken.text}" for broken in run.broken]
    last = f"{run.nodes} nodes, {len(run.faults)} faults, {run.cycles} cycles: no rule was broken"
    click.echo("\n".join([*trace, *(said or [last])]))


def _replay_srun(seed: int) -> None:
    trace: list[str] = []
    try:
        run = simulate_resume(seed, trace)
        last = f"{run.attempts} attempts, {run.job_runs} starts of the job: no rule was broken"
    except BrokenResumeRule as error:
        last = f"a rule was broken: {error}"
    click.echo("\n".join([*trace, last]))


def _resume_line(figures: ResumeFigures) -> str:
    return (
        f"{figures.resume_runs} runs, {figures.resume_attempts} attempts, "
        f"{figures.resume_violations} violations"
    )


def resume_report(figures: ResumeFigures) -> str:
    """Return the figures of supervised sruns as a table."""
    rows = [
        ("runs", figures.resume_runs),
        ("violations", figures.resume_violations),
        ("attempts", figures.resume_attempts),
        ("join steps", figures.resume_joins),
        ("second allocations", figures.resume_companions),
        ("growths of elastic steps", figures.resume_grown),
        ("starts of the job", figures.resume_job_runs),
        ("ended well", figures.resume_ended_well),
        ("events", figures.resume_events),
    ]
    kinds = sorted(figures.resume_kinds.items())
    return _table(
        rows + [(f"fault: {name}", count) for name, count in kinds], figures.resume_failures
    )


def _line(figures: CampaignFigures) -> str:
    return f"{figures.mesh_runs} runs, {figures.mesh_violations} violations"


def _speakers_line(figures: SpeakerFigures) -> str:
    return f"{figures.speaker_runs} runs, {figures.speaker_violations} violations"


def _elastic_line(figures: ElasticFigures) -> str:
    return f"{figures.elastic_runs} runs, {figures.elastic_violations} violations"


def speakers_report(figures: SpeakerFigures) -> str:
    """Return the figures of trainings with speakers as a table."""
    counts = (
        figures.speaker_runs,
        figures.speaker_violations,
        figures.speaker_worlds,
        figures.speaker_steps,
        figures.speaker_events,
    )
    return _table(_rows(counts, figures.speaker_faults), figures.speaker_failures)


def elastic_report(figures: ElasticFigures) -> str:
    """Return the figures of elastic trainings as a table."""
    counts = (
        figures.elastic_runs,
        figures.elastic_violations,
        figures.elastic_worlds,
        figures.elastic_steps,
        figures.elastic_events,
    )
    return _table(_rows(counts, figures.elastic_faults), figures.elastic_failures)


def _rows(counts: tuple[int, ...], faults: dict[str, int]) -> list[tuple[str, int]]:
    names = ("runs", "violations", "worlds that stepped", "steps", "events")
    kinds = [(f"fault: {name}", count) for name, count in sorted(faults.items())]
    return [*zip(names, counts, strict=True), *kinds]


def _cluster_line(figures: ControllerFigures) -> str:
    return (
        f"{figures.controller_runs} runs, {figures.controller_faults} faults, "
        f"{figures.controller_violations} violations"
    )


def cluster_report(figures: ControllerFigures) -> str:
    """Return the figures of clusters as a table."""
    rows = [
        ("runs", figures.controller_runs),
        ("simulated hours", round(figures.controller_hours)),
        ("faults", figures.controller_faults),
        ("violations", figures.controller_violations),
        ("cycles of sresctld", figures.controller_cycles),
        ("events", figures.controller_events),
    ]
    kinds = sorted(figures.controller_kinds.items())
    return _table(
        rows + [(f"fault: {name}", count) for name, count in kinds], figures.controller_failures
    )


def report(figures: CampaignFigures) -> str:
    """Return the figures as a table."""
    counts = (
        figures.mesh_runs,
        figures.mesh_violations,
        figures.worlds,
        figures.steps,
        figures.events,
    )
    rows = _rows(counts, figures.faults)
    for low, high in ((1, 4), (5, 8), (9, 16), (17, 32), (33, 64)):
        of_size = sum(n for size, n in figures.sizes.items() if low <= int(size) <= high)
        rows.append((f"runs with {low} to {high} seats", of_size))
    return _table(rows, figures.failures)


def _table(rows: list[tuple[str, int]], failures: list[SeedFailure]) -> str:
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {count:>12,}" for name, count in rows]
    lines += [f"seed {failure.seed}: {failure.text}" for failure in failures[:10]]
    return "\n".join(lines)
