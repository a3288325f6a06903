"""`sres spares`: show the pools of spare nodes, and let sresctld go on with those that it holds."""

from __future__ import annotations

from typing import Any

import click

from slurm_resilience.cli.controller import ClusterView, ask, pass_cluster
from slurm_resilience.cli.shared_options import config_option, format_option
from slurm_resilience.cli.tables import item, print_json, table
from slurm_resilience.wire.messages import SparesResume

_COLUMNS = (
    "PARTITION",
    "SIZE",
    "KEPT",
    "COMING",
    "GIVEN",
    "MISSING",
    "STATE",
    "RESERVATION",
    "NODES",
)


@click.group(invoke_without_command=True)
@format_option
@config_option
@pass_cluster
@click.pass_context
def spares(context: click.Context, cluster: ClusterView, form: str) -> None:
    """Show the pools of spare nodes: their size, what is kept, and what is missing and why.

    A pool is kept in a reservation of sresctld's own. Where a person has changed that or deleted
    it, sresctld leaves it alone until `sres spares resume`.
    """
    if context.invoked_subcommand is not None:
        return
    pools = cluster.status().get("spares", [])
    if form == "json":
        print_json(pools)
        return
    if not pools:
        click.echo("no pool of spares is configured ([spares.PARTITION] in sres.toml)")
        return
    click.echo(table(_COLUMNS, [_row(pool) for pool in pools]))
    for pool in pools:
        for gift in pool["given"]:
            click.echo(item(f"{','.join(gift['nodes'])} for job {gift['job']}: {gift['state']}"))
        if pool["why"]:
            click.echo(item(f"{pool['partition']}: {pool['why']}"))


@spares.command()
@config_option
@pass_cluster
def resume(cluster: ClusterView) -> None:
    """Let sresctld go on with held pools.

    It takes a reservation that a person has changed as Slurm shows it now. One that was deleted
    is made anew. Only root and SlurmUser may.
    """
    held = [pool for pool in cluster.status().get("spares", []) if pool["state"] == "held"]
    with cluster.connect() as connection:
        ask(connection, SparesResume())
    if not held:
        click.echo("no pool of spares was held")
    for pool in held:
        click.echo(f"{pool['partition']}: sresctld goes on (was held: {pool['why']})")


def _row(pool: dict[str, Any]) -> tuple[object, ...]:
    from slurm_resilience.slurm.hostlists import fold

    nodes = fold(pool["kept"]) if pool["kept"] else "-"
    given = sum(len(gift["nodes"]) for gift in pool["given"])
    counts = (pool["size"], len(pool["kept"]), len(pool["coming"]), given, pool["missing"])
    return (pool["partition"], *counts, pool["state"], pool["reservation"] or "-", nodes)
