"""`sres node`: the group of commands on nodes."""

from __future__ import annotations

import click

from slurm_resilience.cli.change import cancel, reboot, replace
from slurm_resilience.cli.node_read import check, history, list_nodes, logs, show_nodes
from slurm_resilience.cli.node_watch import watch


@click.group()
def node() -> None:
    """List, replace, reboot and watch nodes. HOSTLIST is Slurm's: n1 or n[1-3,7]."""


for _command in (list_nodes, show_nodes, history, logs, check, replace, reboot, cancel, watch):
    node.add_command(_command)
