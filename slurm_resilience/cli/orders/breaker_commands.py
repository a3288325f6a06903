"""`sres breaker`: show whether too many nodes failed together, and let sresctld act again."""

from __future__ import annotations

from typing import Any

import click

from slurm_resilience.cli.controller import ClusterView, ask, moment_of, pass_cluster
from slurm_resilience.cli.shared_options import config_option, format_option
from slurm_resilience.cli.tables import clock_time, duration, field, print_json, table
from slurm_resilience.wire.messages import BreakerReset

_SHOWN_FAULTS = 50


@click.group(invoke_without_command=True)
@format_option
@config_option
@pass_cluster
@click.pass_context
def breaker(context: click.Context, cluster: ClusterView, form: str) -> None:
    """Show the breaker, which trips when too many nodes fail together.

    While it is tripped, sresctld marks and replaces no node; it still moves supervised jobs off
    dead nodes, and does what a person asks for.
    """
    if context.invoked_subcommand is not None:
        return
    status = cluster.status()
    state = status.get("breaker", {})
    if form == "json":
        print_json(state)
        return
    now, settings = moment_of(status), cluster.usable_config.breaker
    if state.get("tripped_at"):
        since = duration(now - state["tripped_at"])
        click.echo(field("breaker", f"tripped {since} ago: {state['text']}", alert=True))
        text = (
            f"after {duration(settings.quiet)} without new faults and with at most "
            f"{settings.nodes_at_once} nodes faulty, or by: sres breaker reset"
        )
        click.echo(field("closes", text))
    else:
        click.echo(field("breaker", "closed"))
    faults = sorted(state.get("faults", ()), key=_began, reverse=True)
    if faults:
        nodes = status.get("nodes", {})
        rows = [
            (
                fault["node"],
                clock_time(fault["began"], now),
                _now(fault, nodes.get(fault["node"], {})),
                fault["cause"] or "dead",
            )
            for fault in faults[:_SHOWN_FAULTS]
        ]
        click.echo(table(("NODE", "FAILED", "NOW", "FAULT"), rows, indent=2))


@breaker.command()
@config_option
@pass_cluster
def reset(cluster: ClusterView) -> None:
    """Close the breaker: what failed so far counts no more. Only root and SlurmUser may."""
    before = cluster.status().get("breaker", {})
    with cluster.connect() as connection:
        ask(connection, BreakerReset())
    was = f"was tripped: {before['text']}" if before.get("tripped_at") else "was closed"
    click.echo(f"the breaker is reset ({was}); faulty nodes are marked and replaced again")


def _began(fault: dict[str, Any]) -> float:
    return float(fault["began"])


def _now(fault: dict[str, Any], node: dict[str, Any]) -> str:
    """Return how it stands with a fault: one of a marked node is over for the breaker alone."""
    if not fault["is_over"]:
        return "faulty"
    incident = node.get("incident") or node.get("gave_up")
    return str(incident["state"]) if incident else "over"
