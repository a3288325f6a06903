"""`sres check`: is what was written right?"""

from __future__ import annotations

import os

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster


@click.group()
def check() -> None:
    """Check the configuration."""


@check.command("config")
@click.argument("file", required=False)
@pass_cluster
def check_config(cluster: ClusterView, file: str | None) -> None:
    """Read the configuration FILE, or the one in use, and say `ok` or what is wrong in it."""
    from slurm_resilience.config import DEFAULT_PATH, load

    path = file or cluster.config_path
    load(path)
    named = path or os.environ.get("SRES_CONFIG")
    if named or DEFAULT_PATH.exists():
        click.echo(f"{named or DEFAULT_PATH}: ok")
    else:
        click.echo(f"ok: there is no {DEFAULT_PATH}, so every default holds")
