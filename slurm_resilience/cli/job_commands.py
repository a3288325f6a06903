"""`sres job`: show and resize the jobs that auto-resume keeps alive."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from slurm_resilience.cli.controller import ClusterView, moment_of, pass_cluster
from slurm_resilience.cli.node_read import events_table
from slurm_resilience.cli.shared_options import DigitRange, config_option, format_option
from slurm_resilience.cli.tables import (
    clock_time,
    duration,
    field,
    plain,
    print_json,
    table,
    user_name,
)
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import NotFound, NotPermitted, UsageError
from slurm_resilience.model import Job
from slurm_resilience.resume.decide.goodput import in_words
from slurm_resilience.resume.history import PastAttempt, goodput_of, read_all
from slurm_resilience.slurm.hostlists import fold


def _refuse_element(text: str) -> None:
    """Tell the number of its own that an element of an array has.

    Raises:
        UsageError: the text names one as squeue does.
    """
    if text.isascii() and re.fullmatch(r"\d+_\d+", text):
        shows = f"squeue -h -r -j {text} -o %A"
        raise UsageError(f"{text} is in an array: write its own number, which {shows} shows")


class JobNumber(DigitRange):
    """The number of a job, which an element of an array has too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            _refuse_element(value)
        return super().convert(value, param, ctx)


@click.group()
def job() -> None:
    """Show and resize jobs that run under srun --auto-resume=1."""


@job.command("list")
@format_option
@config_option
@pass_cluster
def list_jobs(cluster: ClusterView, form: str) -> None:
    """List supervised jobs: yours, or as root all."""
    status = cluster.status()
    views = [
        view
        for view in job_views(status, cluster.client.jobs())
        if cluster.is_privileged or view["user"] == user_name(cluster.uid)
    ]
    if form == "json":
        print_json(views)
    else:
        click.echo(jobs_table(views, moment_of(status)) if views else "no supervised job")


def job_views(status: Mapping[str, Any] | None, jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Return supervised jobs, as sresctld and Slurm show them."""
    known = {job.id: job for job in jobs}
    supervised = (status or {}).get("jobs", {})
    return [_view(int(job), seen, known.get(int(job))) for job, seen in supervised.items()]


def jobs_table(views: Iterable[Mapping[str, Any]], now: float, indent: int = 0) -> str:
    """Return a table with one line for each job."""
    rows = [
        (
            v["job"],
            v["user"],
            v["state"],
            v["attempt"],
            fold(v["nodes"]),
            duration(now - v["since"]),
        )
        for v in views
    ]
    return table(("JOB", "USER", "STATE", "ATTEMPT", "NODES", "SINCE"), rows, indent)


@job.command("show")
@click.argument("number", metavar="JOB")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    help="Where its sruns were started: their attempts are kept there.  [default: this one]",
)
@format_option
@config_option
@pass_cluster
def show_job(cluster: ClusterView, number: str, directory: Path, form: str) -> None:
    """Show a job: its attempts and its events.

    The attempts are those of sruns that go on, before and after requeues; of others the journal's
    events tell. A user sees only his own jobs.
    """
    _refuse_element(number)
    if not number.isascii() or not number.isdigit() or len(number) > 10 or not int(number):
        raise UsageError(f"'{plain(number)}' is not a job id; write a number, as squeue shows it")
    found = _find(cluster, int(number))
    status = cluster.status()
    seen = status["jobs"].get(str(int(number)))
    events = [event for event in cluster.history() if event["job"] == int(number)]
    if found is None and not events:
        raise NotFound(
            f"job {number} does not exist, and the journal's last events have none of it"
        )
    sruns = read_all(directory, int(number))
    attempts = [[_attempt_view(past) for past in attempts] for attempts in sruns]
    now = SYSTEM_CLOCK.now()
    view = _view(int(number), seen, found) | {"sruns": attempts, "events": events}
    if form == "json":
        print_json(view)
        return
    where = f" on {fold(view['nodes'])}" if view["nodes"] else ""
    click.echo(
        f"job {view['job']}: {view['state']}{where}" + (f", {view['user']}" if found else "")
    )
    if seen is None:
        click.echo("  no supervisor: no srun --auto-resume=1 runs in it now")
    else:
        age = duration(moment_of(status) - seen["since"])
        click.echo(f"  attempt {seen['attempt']} on {fold(seen['nodes'])}, started {age} ago")
    for past, rows in zip(sruns, attempts, strict=True):
        click.echo(_attempts_table(rows, now))
        click.echo("\n".join(_outlook(past, now)))
    if events:
        click.echo(events_table(events, SYSTEM_CLOCK.now(), indent=2))


@job.command("resize")
@click.argument("number", metavar="JOB", type=JobNumber(1, 2**32 - 1))
@click.argument("nodes", type=DigitRange(1, 10**6))
@format_option
@config_option
@pass_cluster
def resize_job(cluster: ClusterView, number: int, nodes: int, form: str) -> None:
    """Resize an elastic training while it runs.

    It is to have NODES nodes from then on. It grows as Slurm gives them; those that go leave
    between two steps. The job's owner, root and SlurmUser may.
    """
    taken = cluster.resize(number, nodes)
    if form == "json":
        print_json({"job": number, "nodes": taken.nodes, "before": taken.before})
    elif taken.nodes == taken.before:
        click.echo(f"job {number}: {nodes} nodes is its target already")
    else:
        click.echo(f"job {number}: to have {taken.nodes} nodes, was {taken.before}")


def _attempt_view(past: PastAttempt) -> dict[str, Any]:
    ending = past.ending
    return {
        "attempt": past.number,
        "start": past.restarts + 1,
        "nodes": list(past.nodes),
        "started": past.started,
        "ran_for": ending.ran_for if ending else None,
        "code": ending.own_code if ending else None,
        "cause": past.cause,
        "step": past.step,
        "phases": past.phases,
        "next": past.next_way,
        "target": past.target.nodes or None,
        "target_by": past.target.by,
    }


def _outlook(past: Sequence[PastAttempt], now: float) -> Iterator[str]:
    """Yield what the faults have cost so far, and what would follow another one."""
    goodput = goodput_of(past, now)
    if goodput is not None:
        share, lost = in_words(goodput)
        yield field("goodput", share, indent=2)
        yield field("lost", lost, indent=2)
    if past and past[-1].target.by:
        asked = past[-1].target
        yield field("target", f"{asked.nodes} nodes, asked for by {plain(asked.by)}", indent=2)
    if past and past[-1].ending is None and past[-1].next_way:
        yield field("next", f"if a node fails: {past[-1].next_way}", indent=2)


def _back_after(phases: Mapping[str, float]) -> str:
    """Return in words how long the way to an attempt took; empty: not known."""
    running = phases.get("running")
    if running is None:
        return ""
    steps = ", ".join(f"{name} {s:.1f} s" for name, s in phases.items() if name != "running")
    return f"; the next one ran after {running:.1f} s ({steps})"


def _attempts_table(rows: Sequence[Mapping[str, Any]], now: float) -> str:
    cells = [
        (
            row["attempt"],
            row["start"],
            fold(row["nodes"]),
            clock_time(row["started"], now),
            "runs" if row["ran_for"] is None else duration(row["ran_for"]),
            row["step"] if row["step"] >= 0 else "",
            row["cause"] + _back_after(following["phases"] if following else {}),
        )
        for row, following in zip_longest(rows, rows[1:])
    ]
    columns = ("ATTEMPT", "START", "NODES", "STARTED", "RAN", "STEP", "TEXT")
    return table(columns, cells, 2)


def _find(cluster: ClusterView, number: int) -> Job | None:
    """Return the job in Slurm; None when it has ended, which only root may look further into."""
    try:
        found = cluster.client.job(number)
    except NotFound:
        if cluster.is_privileged:
            return None
        raise
    if not cluster.is_privileged and not _is_own(cluster, found):
        raise NotPermitted(f"job {number} is not yours")
    return found


def _is_own(cluster: ClusterView, found: Job | None) -> bool:
    return found is not None and found.uid == cluster.uid


def _view(number: int, seen: dict[str, Any] | None, found: Job | None) -> dict[str, Any]:
    return {
        "job": number,
        "user": user_name(found.uid) if found else "",
        "state": found.state if found else "ended",
        "nodes": (seen or {}).get("nodes") or list(found.nodes if found else ()),
        "supervised": seen is not None,
        "attempt": (seen or {}).get("attempt", 0),
        "since": (seen or {}).get("since", 0.0),
    }
