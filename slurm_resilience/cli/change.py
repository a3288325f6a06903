"""`sres node replace|reboot|cancel`: pass an administrator's request to Slurm itself.

Slurm decides who may; sresctld reads the node's reason like any other. So these work while
sresctld is away, and do the same as `scontrol update node=… state=fail reason=Action:Replace`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.shared_options import config_option, hostlist_argument, yes_option
from slurm_resilience.cli.tables import user_name
from slurm_resilience.errors import NotPermitted
from slurm_resilience.model import REBOOT, REPLACE

if TYPE_CHECKING:
    from slurm_resilience.cli import mark_plan

_force = click.option("--force", is_flag=True, help="At once: running jobs die (needs --yes).")
_yes = yes_option("Jobs may die, another administrator's reason may be overridden.")


@click.command()
@hostlist_argument
@_force
@_yes
@config_option
@pass_cluster
def replace(cluster: ClusterView, hostlist: str, force: bool, yes: bool) -> None:
    """Have nodes replaced, after their jobs have ended."""
    _mark(cluster, hostlist, REPLACE, force, yes)


@click.command()
@hostlist_argument
@_force
@_yes
@config_option
@pass_cluster
def reboot(cluster: ClusterView, hostlist: str, force: bool, yes: bool) -> None:
    """Have nodes rebooted, after their jobs have ended."""
    _mark(cluster, hostlist, REBOOT, force, yes)


@click.command()
@hostlist_argument
@yes_option("Abort a replacement that runs already.")
@config_option
@pass_cluster
def cancel(cluster: ClusterView, hostlist: str, yes: bool) -> None:
    """Take a request for replacement or reboot back."""
    from slurm_resilience.cli.mark_plan import release

    nodes = cluster.named(hostlist)
    status, _ = cluster.try_status()
    _carry_out(cluster, release(nodes, status, yes=yes))


def _mark(cluster: ClusterView, hostlist: str, action: str, force: bool, yes: bool) -> None:
    from slurm_resilience.cli.mark_plan import mark, what_next

    nodes = cluster.named(hostlist)
    jobs = cluster.client.jobs()
    status, _ = cluster.try_status()
    supervised = frozenset(int(job) for job in (status or {}).get("jobs", {}))
    seen = (status or {}).get("nodes", {})
    gave_up = frozenset(name for name in nodes if seen.get(name, {}).get("gave_up"))
    plan = mark(nodes, jobs, action, force=force, yes=yes, supervised=supervised, gave_up=gave_up)
    _carry_out(cluster, plan)
    if plan.changes:
        click.echo(what_next(action, status, hostlist, nodes))


def _carry_out(cluster: ClusterView, plan: mark_plan.MarkPlan) -> None:
    """Print each line when it has become true: after Slurm took the change."""
    touched = {name for change in plan.changes for name in change.nodes}
    for name, line in plan.lines.items():
        if name not in touched:
            click.echo(f"{name}: {line}")
    for change in plan.changes:
        try:
            if change.renew:
                cluster.client.set_node(change.nodes, reason=f"{change.reason} once more")
            cluster.client.set_node(change.nodes, state=change.state, reason=change.reason)
        except NotPermitted:
            raise NotPermitted(
                f"Slurm does not let {user_name(cluster.uid)} change nodes; that takes root, "
                "SlurmUser or an operator (sacctmgr). Nothing is changed"
            ) from None
        for name in change.nodes:
            click.echo(f"{name}: {plan.lines[name]}")
