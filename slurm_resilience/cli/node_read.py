"""`sres node list|show|history|logs|check`: show what is known of nodes, and ask them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import click
import msgspec

from slurm_resilience.cli.controller import (
    REMOVED,
    ClusterView,
    ask,
    moment_of,
    pass_cluster,
)
from slurm_resilience.cli.shared_options import (
    config_option,
    format_option,
    hostlist_argument,
    limit_option,
    optional_hostlist_argument,
)
from slurm_resilience.cli.tables import (
    clock_time,
    duration,
    field,
    next_in_words,
    plain,
    print_json,
    seconds_since,
    table,
)
from slurm_resilience.cli.view import is_faulty, node_view, node_views
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import SlurmUnreachable, UsageError, WireError
from slurm_resilience.model import CheckResult, Node
from slurm_resilience.slurm.hostlists import expand
from slurm_resilience.slurm.node_labels import HEALTH, IN_SERVICE, labels_of
from slurm_resilience.wire.frames import UNREADABLE
from slurm_resilience.wire.messages import LogTail, RunCheck, SendLog, StatusRequest

T = TypeVar("T")
LOG_SECONDS = 5.0
CHECK_SECONDS = 60.0
"""A check waits for the one that runs, and has a time limit of its own."""


@click.command("list")
@optional_hostlist_argument
@click.option("--faulty", is_flag=True, help="Only nodes that are not simply in service.")
@click.option("--health-status", metavar="LABEL", help="Only nodes with this label.")
@click.option("--deep-check-status", metavar="LABEL", help="Only nodes with this label.")
@click.option("--fault-type", metavar="LABEL", help="Only nodes with this label.")
@format_option
@config_option
@pass_cluster
def list_nodes(
    cluster: ClusterView, /, hostlist: str | None, faulty: bool, form: str, **labels: str | None
) -> None:
    """List nodes: state, health, reason, jobs.

    The labels are those in the nodes' Comment. A node without a health status is schedulable.
    """
    nodes = cluster.named(hostlist) if hostlist else cluster.nodes()
    data, failed = cluster.try_status()
    views = node_views(nodes.values(), cluster.client.jobs(), data)
    views = [view for view in views if is_faulty(view)] if faulty else views
    wanted = {key.replace("_", "-"): value for key, value in labels.items() if value is not None}
    views = [view for view in views if wanted.items() <= view["labels"].items()]
    if form == "json":
        print_json(views)
    elif views or not (faulty or wanted):
        now = moment_of(data)
        columns = ("NODE", "STATE", "HEALTH", "SRESD", "REASON", "JOBS", "SINCE")
        click.echo(table(columns, [_row(view, now) for view in views]))
    else:
        click.echo(_none_with(wanted, nodes.values()) if wanted else "no faulty node")
    if failed is not None:
        raise failed


def _none_with(wanted: Mapping[str, str], nodes: Iterable[Node]) -> str:
    """Say that no node has these labels, and which there are: a misspelled one would look like good
    news."""
    present = [{HEALTH: IN_SERVICE} | labels_of(node.comment) for node in nodes]
    told = []
    for key, value in wanted.items():
        others = sorted({labels[key] for labels in present if key in labels})
        if value not in others:
            has = f"they have {', '.join(others)}" if others else "none has this label"
            told.append(plain(f"no node has {key} {value!r}; {has}"))
    return "\n".join(told) or "no such node"


def _row(view: dict[str, Any], now: float) -> list[str]:
    incident = view["incident"]
    age = now - incident["opened"] if incident else seconds_since(view["reason_at"], now)
    by = f" (by {view['reason_by']})" if view["reason_by"] else ""
    why = view["why"] if view["health"] in ("sick", "dead", "suspect") else ""
    return [
        view["node"],
        view["state"],
        view["health"],
        view["sresd"].removesuffix(" seen"),
        f"{view['reason']}{by}" if view["reason"] else why,
        _few(view["jobs"]),
        duration(age) if age is not None else "",
    ]


def _few(jobs: list[int]) -> str:
    """Return the first and the number of the others: a line has 80 characters."""
    return f"{jobs[0]}{f' +{len(jobs) - 1}' if len(jobs) > 1 else ''}" if jobs else ""


@click.command("show")
@hostlist_argument
@format_option
@config_option
@pass_cluster
def show_nodes(cluster: ClusterView, hostlist: str, form: str) -> None:
    """Show findings, the incident and last events. Of removed nodes, what the journal has."""
    nodes, jobs = cluster.named_or_removed(hostlist), cluster.client.jobs()
    data, failed = cluster.try_status()
    views = [
        node_view(found, jobs, data) | (_unlisted(name, data) if found.base == REMOVED else {})
        for name, found in nodes.items()
    ]
    for view in views:
        view["events"] = cluster.history(view["node"], 10) if failed is None else []
    if form == "json":
        print_json(views)
    else:
        now = moment_of(data)
        click.echo("\n\n".join("\n".join(_sheet(view, now)) for view in views))
    if failed is not None:
        raise failed


def _unlisted(node: str, status: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a node that Slurm knows no more."""
    incidents = [one for one in (status or {}).get("unlisted", []) if one["node"] == node]
    return {"health": "removed", "sresd": "", "incident": incidents[0] if incidents else None}


def _sheet(view: dict[str, Any], now: float) -> Iterator[str]:
    yield f"{view['node']}: {view['state']}"

    def line(title: str, text: object) -> str:
        return field(title, text, indent=2)

    if view["state"] == REMOVED:
        yield line("slurm", "it is not listed any more; this is what sresctld knows of it")
        if view["incident"]:
            yield line("incident", _incident(view["incident"], now))
        yield "  events"
        yield events_table(view["events"], now, indent=4, with_node=False)
        return
    yield line("health", f"{view['health']}: {view['why']}" if view["why"] else view["health"])
    if view["mode"] not in ("", "automatic"):
        yield line("recovery", f"{view['mode']}: nothing is done to it")
    if view["reason"]:
        age = seconds_since(view["reason_at"], now)
        ago = f", {duration(age)} ago" if age is not None else ""
        yield line("reason", f"{view['reason']} (by {view['reason_by'] or 'unknown'}{ago})")
    machine = "".join(
        f"; {title} {view[key]}"
        for title, key in (("machine", "instance"), ("boot", "boot_id"))
        if view[key]
    )
    yield line("sresd", view["sresd"] + machine)
    yield line("jobs", ", ".join(str(job) for job in view["jobs"]) or "none")
    for title in ("gres", "comment"):
        if view[title]:
            yield line(title, view[title])
    if view["unjudged"]:
        yield line("unjudged", ", ".join(view["unjudged"]))
    for finding in view["findings"]:
        mark = " [injected]" if finding["injected"] else ""
        subject = f" {finding['subject']}" if finding["subject"] else ""
        yield line(
            "finding",
            f"{clock_time(finding['at'], now)} {finding['check']}{subject}: {finding['text']} "
            f"(calls for: {finding['severity']}){mark}",
        )
        if finding["evidence"]:
            yield line("", finding["evidence"])
    if view["incident"]:
        yield line("incident", _incident(view["incident"], now))
    if view["next"]:
        yield line("next", next_in_words({"node": view["node"]} | view["next"], now))
    if view["gave_up"]:
        yield line("gave up", _incident(view["gave_up"], now))
    if view["events"]:
        yield "  events"
        yield events_table(view["events"], now, indent=4, with_node=False)


def _incident(incident: dict[str, Any], now: float) -> str:
    opened = incident["opened"]
    times = [
        f"{word} +{incident[key] - opened:.1f} s"
        for word, key in (
            ("marked", "marked"),
            ("replacement started", "run_started"),
            ("ended", "run_ended"),
            ("node resumed", "resumed"),
        )
        if incident[key]
    ]
    times.insert(0, f"opened {clock_time(opened, now)}")
    waits = incident["next_try"] - now
    if waits > 0:
        times.append(f"next try in {duration(waits)}")
    attempts = f", attempt {incident['attempts']}" if incident["attempts"] else ""
    return (
        f"{incident['id']} {incident['state']}{attempts}: {incident['kind']}, {incident['action']} "
        f"({incident['reason']}); {', '.join(times)}"
    )


def events_table(
    events: list[dict[str, Any]], now: float, *, indent: int = 0, with_node: bool = True
) -> str:
    """Return a table of the journal's events, oldest first."""
    columns = ("TIME", *(("NODE",) if with_node else ()), "EVENT", "TEXT")
    rows = [
        [
            clock_time(event["at"], now),
            *([event["node"]] if with_node else []),
            event["kind"],
            event["text"],
        ]
        for event in events
    ]
    return table(columns, rows, indent)


@click.command("history")
@hostlist_argument
@limit_option("events of each node", 1000)
@format_option
@config_option
@pass_cluster
def history(cluster: ClusterView, hostlist: str, limit: int, form: str) -> None:
    """Show the journal's events, oldest first."""
    events: list[dict[str, Any]] = []
    try:
        names = list(cluster.named_or_removed(hostlist))
    except SlurmUnreachable:
        names = list(expand(hostlist))  # the journal can be read all the same
    with cluster.connect() as connection:
        for name in names:
            events += ask(connection, StatusRequest("history", name, limit))["events"]
    events = sorted(events, key=lambda event: event["id"])[-limit:]
    if form == "json":
        print_json(events)
    elif events:
        click.echo(events_table(events, SYSTEM_CLOCK.now(), with_node=len(names) > 1))
    else:
        click.echo("the journal has nothing on them" if len(names) > 1 else "no event")


@click.command()
@click.argument("node")
@click.option(
    "--lines",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="Show so many lines of the log.",
)
@format_option
@config_option
@pass_cluster
def logs(cluster: ClusterView, node: str, lines: int, form: str) -> None:
    """Show the end of sresd's log, and the kernel log's findings.

    Only root and SlurmUser may.
    """
    name = _one(cluster, node)
    body = cluster.ask_node(name, SendLog.kind, SendLog(lines), LOG_SECONDS)
    tail = _decoded(body, LogTail)
    if form == "json":
        print_json(msgspec.to_builtins(tail))
        return
    now = SYSTEM_CLOCK.now()
    for line in tail.lines:
        click.echo(plain(line))
    click.echo("kernel log:" if tail.findings else "kernel log: nothing found")
    for finding in tail.findings:
        text = f"{clock_time(finding.at, now)}  {finding.severity}  {finding.text}"
        click.echo(f"  {plain(text)}")


@click.command()
@click.argument("node")
@click.argument("name")
@format_option
@config_option
@pass_cluster
def check(cluster: ClusterView, node: str, name: str, form: str) -> None:
    """Run one check on a node now; exit with 1 if it fails.

    NAME is one of docs/health-checks.md. Only root and SlurmUser may.
    """
    node_name = _one(cluster, node)
    body = cluster.ask_node(node_name, RunCheck.kind, RunCheck(name), CHECK_SECONDS)
    result = _decoded(body, CheckResult)
    if form == "json":
        print_json(msgspec.to_builtins(result))
    else:
        click.echo(f"{node_name}: {result.check}: {result.verdict}: {plain(result.text)}")
    if result.verdict == "fail":
        raise click.exceptions.Exit(1)


def _one(cluster: ClusterView, node: str) -> str:
    names = list(cluster.named(node))
    if len(names) != 1:
        raise UsageError(f"'{node}' names {len(names)} nodes; ask one")
    return names[0]


def _decoded(body: msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNREADABLE as error:
        raise WireError(
            f"sresd's answer cannot be read: {error}; is it of the same version?"
        ) from None
