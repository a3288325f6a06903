"""`sres events`: list the journal's events, by what is looked for."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import datetime

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.node_read import events_table
from slurm_resilience.cli.past.pages_of import check_known, newest
from slurm_resilience.cli.shared_options import (
    ID,
    config_option,
    format_option,
    limit_option,
    optional_hostlist_argument,
)
from slurm_resilience.cli.tables import plain, print_json
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError
from slurm_resilience.wire.messages import StatusRequest

_AGO = re.compile(r"(\d{1,9})([smhd])")
MAX_SHOWN = 50
"""Characters of a kind that there is not."""
_LOOKED_THROUGH = 1000
"""Events from which the kinds are taken that may have been meant."""
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@click.command()
@optional_hostlist_argument
@click.option(
    "--kind", "kinds", multiple=True, metavar="EVENT", help="Only of this kind; repeatable."
)
@click.option("--job", type=ID, help="Only of this job.")
@click.option("--incident", type=ID, help="Only of this incident.")
@click.option(
    "--since", metavar="TIME", help="Only since then: 30m, 2h or 3d ago, or 2026-01-31T12:00."
)
@limit_option("events", 100_000)
@format_option
@config_option
@pass_cluster
def events(
    cluster: ClusterView,
    hostlist: str | None,
    kinds: tuple[str, ...],
    job: int | None,
    incident: int | None,
    since: str | None,
    limit: int,
    form: str,
) -> None:
    """List the newest events of the journal, oldest first."""
    now = SYSTEM_CLOCK.now()
    request = StatusRequest(
        "events",
        hostlist or "",
        limit,
        kinds=kinds,
        job=job or 0,
        incident=incident or 0,
        since=moment(since, now) if since is not None else 0.0,
    )
    found = newest(cluster, request, "events")
    if not found:
        check_known(cluster, hostlist)
    if form == "json":
        print_json(found)
    elif found or not kinds:
        click.echo(events_table(found, now) if found else "no event")
    else:
        newest_of_all = newest(cluster, StatusRequest("events", limit=_LOOKED_THROUGH), "events")
        click.echo(no_event_of(kinds, {event["kind"] for event in newest_of_all}))


def no_event_of(kinds: Collection[str], known: Collection[str]) -> str:
    """Say that there is no event of these kinds: a misspelled one would look like good news.

    Args:
        kinds: that were asked for.
        known: of the newest events of all.
    """
    asked = ", ".join(kind[:MAX_SHOWN] or "''" for kind in kinds)
    others = f"; the newest events are of: {', '.join(sorted(known))}" if known else ""
    return plain(f"no event of kind {asked}{others} (docs/administrator.md lists all kinds)")


def moment(text: str, now: float) -> float:
    """Return a moment (epoch), written as a time or as how long ago.

    Raises:
        UsageError: it is neither.
    """
    if ago := _AGO.fullmatch(text):
        return now - float(ago[1]) * _UNIT_SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {text!r}: write how long ago (30m, 2h, 3d) or a time (2026-01-31T12:00)"
        ) from None
