"""`sres review`: compare what sresctld would have done to observed nodes with what people did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.past.pages_of import newest
from slurm_resilience.cli.shared_options import (
    config_option,
    format_option,
    limit_option,
    optional_hostlist_argument,
)
from slurm_resilience.cli.tables import clock_time, count, duration, print_json, table
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.wire.messages import StatusRequest

_WORDS = {
    "would-mark": "mark it",
    "would-replace": "replace it",
    "would-return": "give it back",
    "would-leave": "leave it to a person",
}
_AGREES = {True: "yes", False: "no", None: ""}


@click.command()
@optional_hostlist_argument
@limit_option("faults", 10_000)
@format_option
@config_option
@pass_cluster
def review(cluster: ClusterView, hostlist: str | None, limit: int, form: str) -> None:
    """Compare what sresctld would have done with what people did.

    Lists the faults of nodes whose recovery.mode is observe, oldest first.
    """
    names = set(cluster.named(hostlist)) if hostlist else None
    faults = [
        fault
        for fault in newest(cluster, StatusRequest("review", limit=limit), "faults")
        if names is None or fault["node"] in names
    ]
    if form == "json":
        print_json(faults)
    elif faults:
        now = SYSTEM_CLOCK.now()
        columns = ("NODE", "SINCE", "FOUND", "WOULD", "THEN", "AGREES")
        click.echo(table(columns, [_row(fault, now) for fault in faults]))
        over = [fault for fault in faults if fault["agrees"] is not None]
        agreed = sum(fault["agrees"] for fault in over)
        click.echo(f"{count(len(over), 'fault')} over: people did as sresctld would in {agreed}")
    else:
        click.echo("no fault of an observed node")


def _row(fault: dict[str, Any], now: float) -> list[str]:
    began = fault["began"]
    return [
        fault["node"],
        clock_time(began, now),
        fault["kind"],
        ", ".join(_would(fault)) or "nothing yet",
        "; ".join(_then(fault)) or "nothing yet",
        _AGREES[fault["agrees"]],
    ]


def _would(fault: dict[str, Any]) -> Iterator[str]:
    for remark in fault["would"]:
        words = _WORDS.get(remark["kind"], remark["kind"])
        yield f"{words} after {duration(remark['at'] - fault['began'])}"


def _then(fault: dict[str, Any]) -> Iterator[str]:
    if fault["ended"]:
        yield f"{fault['outcome']} after {duration(fault['ended'] - fault['began'])}"
    for remark in fault["then"]:
        if remark["kind"] in ("seen-set-aside", "seen-slurm"):
            yield remark["text"]
