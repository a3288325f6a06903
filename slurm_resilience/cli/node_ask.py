"""`sres node logs|check`: ask a node's sresd, through sresctld."""

from __future__ import annotations

from typing import TypeVar

import click
import msgspec

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.shared_options import config_option, format_option
from slurm_resilience.cli.tables import clock_time, plain, print_json
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError, WireError
from slurm_resilience.model import CheckResult
from slurm_resilience.wire.frames import UNREADABLE
from slurm_resilience.wire.messages import LogTail, RunCheck, SendLog

T = TypeVar("T")
LOG_SECONDS = 5.0
CHECK_SECONDS = 60.0
"""A check waits for the one that runs, and has a time limit of its own."""


@click.command()
@click.argument("node")
@click.option("--lines", type=click.IntRange(1, 1000), default=100, show_default=True)
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
