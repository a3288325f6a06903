"""`sres incident list|show`: show the incidents of nodes, from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
from slurm_resilience.cli.tables import clock_time, duration, field, print_json, table
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.wire.messages import StatusRequest

_SHOWN_EVENTS = 1000


@click.group()
def incident() -> None:
    """List incidents, or show one from end to end."""


@incident.command("list")
@optional_hostlist_argument
@click.option("--open", "is_open", is_flag=True, help="Only those that are under way.")
@limit_option("incidents", 100_000)
@format_option
@config_option
@pass_cluster
def list_incidents(
    cluster: ClusterView, hostlist: str | None, is_open: bool, limit: int, form: str
) -> None:
    """List the newest incidents, oldest first."""
    request = StatusRequest("incidents", hostlist or "", limit, is_open=is_open)
    found = newest(cluster, request, "incidents")
    if not found:
        check_known(cluster, hostlist)
    if form == "json":
        print_json(found)
    elif found:
        now = SYSTEM_CLOCK.now()
        columns = ("ID", "NODE", "OPENED", "LASTED", "STATE", "KIND", "ACTION", "TRIES", "REASON")
        click.echo(table(columns, [_row(one, now) for one in found]))
    else:
        click.echo("no incident")


@incident.command("show")
@click.argument("number", metavar="ID", type=ID)
@format_option
@config_option
@pass_cluster
def show_incident(cluster: ClusterView, number: int, form: str) -> None:
    """Show an incident: its times, evidence and events."""
    (found,) = newest(cluster, StatusRequest("incidents", incident=number), "incidents")
    request = StatusRequest("events", limit=_SHOWN_EVENTS, incident=number)
    found["events"] = newest(cluster, request, "events")
    if form == "json":
        print_json(found)
    else:
        click.echo("\n".join(_sheet(found, SYSTEM_CLOCK.now())))


def _row(one: dict[str, Any], now: float) -> list[object]:
    return [
        one["id"],
        one["node"],
        clock_time(one["opened"], now),
        _lasted(one, now),
        one["state"],
        one["kind"],
        one["action"],
        one["attempts"],
        one["reason"],
    ]


def _lasted(one: dict[str, Any], now: float) -> str:
    return duration((one["closed"] or now) - one["opened"])


def _sheet(one: dict[str, Any], now: float) -> Iterator[str]:
    yield f"incident {one['id']} of {one['node']}: {one['state']}"

    def line(title: str, text: object) -> str:
        return field(title, text, indent=2)

    yield line("fault", f"{one['kind']}: {one['reason']}")
    yield line(
        "action", f"{one['action']}, {one['attempts']} {'try' if one['attempts'] == 1 else 'tries'}"
    )
    end = f", ended {clock_time(one['closed'], now)} ({one['ended_by']})" if one["closed"] else ""
    yield line("times", f"opened {clock_time(one['opened'], now)}{end}; {_lasted(one, now)}")
    before = [one[key] for key in ("instance_before", "boot_id_before") if one.get(key)]
    if before:
        yield line("machine", f"{', boot '.join(before)} (before)")
    yield line("evidence", one["evidence"] or "none yet")
    yield "  events"
    yield events_table(one["events"], now, indent=4, with_node=False)
