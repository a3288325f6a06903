"""`sres deepcheck run|list`: load nodes, and the links between them, as Slurm jobs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.deepcheck.deepcheck_options import (
    limit_option,
    log_options,
    only_option,
    profile_option,
    seconds_option,
    set_aside_option,
)
from slurm_resilience.cli.deepcheck.ended_in_order import ended_in_order
from slurm_resilience.cli.deepcheck.pacing_commands import (
    check_here,
    request_deep_check,
    sweep_reservations,
    watch_deep_checks,
)
from slurm_resilience.cli.deepcheck.speed_command import measure_node_speeds
from slurm_resilience.cli.shared_options import (
    NumberRange,
    config_option,
    format_option,
    hostlist_argument,
)
from slurm_resilience.cli.tables import print_json, table, tell, user_name
from slurm_resilience.errors import UsageError

if TYPE_CHECKING:
    from slurm_resilience.deepcheck.deep_run import DeepReport

REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")


@click.group()
def deepcheck() -> None:
    """Load nodes and the links between them, and judge what they do."""


@deepcheck.command("list")
@format_option
def list_deep_checks(form: str) -> None:
    """List the checks of the instance level."""
    from slurm_resilience.deepcheck.instance.instance_checks import INSTANCE_CHECKS

    if form == "json":
        listed = ((one.name, one.by_default, one.about) for one in INSTANCE_CHECKS)
        print_json([{"check": n, "by_default": d, "about": a} for n, d, a in listed])
        return
    rows = [
        (one.name, "always" if one.by_default else "by name", one.about) for one in INSTANCE_CHECKS
    ]
    click.echo(table(("CHECK", "RUNS", "TEXT"), rows))


@deepcheck.command("run")
@hostlist_argument
@click.option(
    "--level",
    type=click.Choice(["instance", "cluster"]),
    default="instance",
    show_default=True,
    help="Each node by itself, or the links between them.",
)
@only_option
@seconds_option
@click.option(
    "--wait",
    "wait_minutes",
    type=NumberRange(0, 10080),
    default=0,
    show_default=True,
    help="Minutes to wait for the jobs on busy nodes.",
)
@limit_option(240)
@profile_option
@click.option(
    "--threshold",
    type=NumberRange(0, min_open=True),
    metavar="GB/S",
    help="Bus bandwidth that nodes have to reach together.",
)
@click.option(
    "--largest",
    "largest_bytes",
    type=click.IntRange(4),
    metavar="BYTES",
    help="Largest message of the cluster level.",
)
@set_aside_option
@log_options
@format_option
@config_option
@pass_cluster
def run_deep_checks(
    cluster: ClusterView,
    /,
    hostlist: str,
    level: str,
    only: tuple[str, ...],
    log_dir: str,
    form: str,
    wait_minutes: float,
    **asked: Any,
) -> int:
    """Run deep checks on nodes. HOSTLIST is Slurm's: n1 or n[1-3,7].

    They run as jobs in a reservation, which is removed at the end. Nodes that run jobs are waited
    for (--wait) or left out; nodes that are down, drained or reserved are left out. No job is
    ended, and no node's state is changed without --set-aside. It needs an operator's rights in
    Slurm, not sresctld.
    """
    from slurm_resilience.clock import SystemClock
    from slurm_resilience.deepcheck.deep_run import DeepRun
    from slurm_resilience.deepcheck.run_options import DeepRunOptions
    from slurm_resilience.health.profile_files import load_profile
    from slurm_resilience.slurm.maintenance import MaintenanceClient

    if only and level == "cluster":
        raise UsageError("--only names checks of the instance level; leave it out")
    # The cluster level needs the type's name alone, which may be one without a profile.
    asked["profile"] = asked["profile"] or cluster.config.checks.profile
    if asked["profile"] and level == "instance":
        load_profile(asked["profile"])
    nodes = list(cluster.named(hostlist))
    region = next((os.environ[one] for one in REGION_VARIABLES if os.environ.get(one)), "unknown")
    options = DeepRunOptions(
        only=only,
        wait_seconds=60.0 * wait_minutes,
        region=region,
        **asked,
    )
    clock = SystemClock()
    folder = (
        Path(log_dir)
        / "deepcheck"
        / time.strftime(f"%Y%m%dT%H%M%S-{os.getpid()}", time.localtime(clock.now()))
    )
    client = MaintenanceClient(cluster.config.slurm_bin)
    run = DeepRun(client, clock, options, folder, tell)
    with ended_in_order():
        report = run.run(level, nodes, user_name(cluster.uid))
    _show(report, form)
    return report.exit_code


deepcheck.add_command(watch_deep_checks)
deepcheck.add_command(request_deep_check)
deepcheck.add_command(sweep_reservations)
deepcheck.add_command(check_here)
deepcheck.add_command(measure_node_speeds)


def _show(report: DeepReport, form: str) -> None:
    from slurm_resilience.deepcheck.report_forms import collective_table

    if form == "json":
        data = msgspec.to_builtins(report)
        for node, one in zip(data["nodes"], report.nodes, strict=True):
            node["action"] = one.action.value
        print_json({**data, "exit_code": report.exit_code})
        return
    for sweep in report.sweeps:
        click.echo(collective_table(sweep))
    for line in report.lines:
        click.echo(line)
    rows = [
        (one.node, one.state.value, one.action.value, one.reason or _passed(one))
        for one in report.nodes
    ]
    click.echo(table(("NODE", "STATE", "ACTION", "TEXT"), rows))
    if report.logs:
        click.echo(f"logs: {report.logs}")


def _passed(node: Any) -> str:
    return ", ".join(one.check for one in node.results if one.outcome == "passed")
