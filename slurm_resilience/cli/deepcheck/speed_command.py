"""`sres deepcheck speed`: measure idle nodes for a second, and name the slow ones."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
import msgspec

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.deepcheck.ended_in_order import ended_in_order
from slurm_resilience.cli.shared_options import config_option, format_option, hostlist_argument
from slurm_resilience.cli.tables import print_json, table, tell, user_name

STORE = "speeds.sqlite"


@click.command("speed")
@hostlist_argument
@click.option(
    "--store",
    metavar="FILE",
    help="The file that keeps the measures.  [default: in checks.state_dir]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 20),
    default=1,
    show_default=True,
    help="Measure so many times, each time with other pairs of nodes.",
)
@format_option
@config_option
@pass_cluster
def measure_node_speeds(
    cluster: ClusterView, hostlist: str, store: str | None, rounds: int, form: str
) -> None:
    """Measure idle nodes for about a second, and name the slow ones.

    Processors, memory, GPUs and one link of each node are measured. What is slower than it was, and
    than its peers have become, is worth watching: the node gets the label slow=…, and stays in
    service.
    """
    from slurm_resilience.clock import SystemClock
    from slurm_resilience.deepcheck.speed.speed_run import measure_speeds
    from slurm_resilience.deepcheck.speed.speed_store import SpeedStore
    from slurm_resilience.slurm.maintenance import MaintenanceClient

    path = Path(store or Path(cluster.config.checks.state_dir) / STORE)
    client = MaintenanceClient(cluster.config.slurm_bin)
    names = list(cluster.named(hostlist))
    with ended_in_order():
        report = measure_speeds(
            client,
            SystemClock(),
            SpeedStore(path),
            names,
            user_name(cluster.uid),
            rounds,
            tell,
        )
    if form == "json":
        slow = [{**one.key._asdict(), "loss": one.loss, "text": one.text} for one in report.slow]
        print_json({**msgspec.to_builtins(report), "slow": slow, "verdict": "monitor"})
        return
    rows = [(one.key.node, "monitor", one.text) for one in report.slow]
    rows += [(name, "skipped", reason) for name, reason in report.skipped.items()]
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"{len(report.measured)} nodes measured, {len(report.slow)} slow devices")
        click.echo(table(("NODE", "VERDICT", "TEXT"), rows) if rows else "", nl=bool(rows))
