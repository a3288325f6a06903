"""`sres pause` and `sres unpause`: stop sresctld from acting, and let it act again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurm_resilience.cli.controller import ClusterView, ask, pass_cluster
from slurm_resilience.cli.shared_options import config_option
from slurm_resilience.cli.tables import plain, user_name
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.wire.messages import PauseRequest, StatusRequest

if TYPE_CHECKING:
    from slurm_resilience.wire.client import Connection

_TAKEN_UP_SECONDS = 20.0
"""A cycle that gets no answer from slurmctld takes about ten."""
_NOT_YET = "no cycle of sresctld has taken it up yet: it holds once `sres status` shows it"


@click.command()
@click.argument("reason", nargs=-1)
@config_option
@pass_cluster
def pause(cluster: ClusterView, reason: tuple[str, ...]) -> None:
    """Stop sresctld from acting until `sres unpause`.

    It goes on watching. Only root and SlurmUser may.
    """
    # Without a reason the message would mean the opposite.
    text = " ".join(" ".join(reason).split()) or f"by {user_name(cluster.uid)}"
    with cluster.connect() as connection:
        before = _told(connection)
    taken_up = _request(cluster, text)
    click.echo(f"paused: {text}; nodes are watched, nothing is done until `sres unpause`")
    if before not in ("", text):
        # Perhaps by another person, who does not know that one `sres unpause` ends both.
        click.echo(f"it was paused already: {plain(before)}")
    if not taken_up:
        click.echo(_NOT_YET)


@click.command()
@config_option
@pass_cluster
def unpause(cluster: ClusterView) -> None:
    """Let sresctld act again. Only root and SlurmUser may."""
    before = str(cluster.status().get("paused", ""))
    taken_up = _request(cluster, "")
    click.echo(f"sresctld goes on (was paused: {before})" if before else "sresctld was not paused")
    if not taken_up:
        click.echo(_NOT_YET)


def _is_taken_up(told: str, reason: str) -> bool:
    """Tell whether sresctld has a reason, of which it keeps the beginning where it is long."""
    return reason.startswith(told) if told and reason else told == reason


def _told(connection: Connection) -> str:
    return str(ask(connection, StatusRequest("summary")).get("paused", ""))


def _request(cluster: ClusterView, reason: str) -> bool:
    """Ask, and wait until a cycle knows it."""
    deadline = SYSTEM_CLOCK.monotonic() + _TAKEN_UP_SECONDS
    with cluster.connect() as connection:
        ask(connection, PauseRequest(reason))
        while not _is_taken_up(_told(connection), reason):
            if SYSTEM_CLOCK.monotonic() > deadline:
                return False
            connection.receive(0.05)  # says nothing unasked: a pause that notices a lost connection
    return True
