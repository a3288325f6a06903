"""`sres drill open|close|status`: let injected lines count on a node for a while."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import click
import msgspec

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.shared_options import (
    NumberRange,
    config_option,
    format_option,
    hostlist_argument,
)
from slurm_resilience.cli.tables import heading, print_json
from slurm_resilience.errors import NotPermitted, SresError, WireError
from slurm_resilience.wire.frames import UNREADABLE
from slurm_resilience.wire.messages import ChangeDrill, DrillAnswer

ANSWER_SECONDS = 10.0
AT_ONCE = 16
"""Nodes that are asked at the same time."""
MAX_MINUTES = 60


@click.group()
def drill() -> None:
    """Open, close or show the drill of a node: while one is open, injected faults count there."""


@drill.command("open")
@hostlist_argument
@click.option(
    "--minutes",
    type=NumberRange(0, MAX_MINUTES, min_open=True),
    default=10,
    show_default=True,
    help=f"Length; at most {MAX_MINUTES}. It ends by itself.",
)
@format_option
@config_option
@pass_cluster
def open_drill(cluster: ClusterView, hostlist: str, minutes: float, form: str) -> None:
    """Open a drill on nodes.

    Lines count then that programs write into a node's kernel log.
    """
    _change(cluster, hostlist, ChangeDrill("open", minutes * 60), form)


@drill.command("close")
@hostlist_argument
@format_option
@config_option
@pass_cluster
def close_drill(cluster: ClusterView, hostlist: str, form: str) -> None:
    """End a drill now.

    What was found in it stays until the node boots, or is resumed.
    """
    _change(cluster, hostlist, ChangeDrill("close"), form)


@drill.command("status")
@hostlist_argument
@format_option
@config_option
@pass_cluster
def show_drill(cluster: ClusterView, hostlist: str, form: str) -> None:
    """Show whether a drill is open, and for how long."""
    _change(cluster, hostlist, ChangeDrill(), form)


def _change(cluster: ClusterView, hostlist: str, wanted: ChangeDrill, form: str) -> None:
    """Ask each node, and say what each has answered. One that is away keeps no other from being
    asked, or from being told of: a drill that opened unseen would count."""
    nodes = list(cluster.named(hostlist))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(nodes, pool.map(lambda n: _ask(cluster, n, wanted), nodes), strict=True))
    if form == "json":
        print_json([{"node": node} | _as_data(told) for node, told in answers.items()])
    else:
        for node, told in answers.items():
            said = str(told) if isinstance(told, SresError) else in_words(told)
            click.echo(heading(f"{node}: {said}"))
    troubles = [told for told in answers.values() if isinstance(told, SresError)]
    if troubles:
        raise click.exceptions.Exit(troubles[0].exit_code)


def _ask(cluster: ClusterView, node: str, wanted: ChangeDrill) -> DrillAnswer | SresError:
    try:
        return ask_drill(cluster, node, wanted)
    except NotPermitted:
        raise  # it holds for all nodes
    except SresError as error:
        return error


def _as_data(told: DrillAnswer | SresError) -> dict[str, object]:
    if isinstance(told, SresError):
        return {"seconds_left": None, "is_always": None, "trouble": str(told)}
    return {"seconds_left": told.seconds_left, "is_always": told.is_always, "trouble": ""}


def ask_drill(cluster: ClusterView, node: str, wanted: ChangeDrill) -> DrillAnswer:
    """Have a node's sresd open or close its drill, or tell of it.

    Raises:
        SresError: it does not answer, or refuses.
    """
    body = cluster.ask_node(node, ChangeDrill.kind, wanted, ANSWER_SECONDS)
    try:
        return msgspec.msgpack.decode(body, type=DrillAnswer)
    except UNREADABLE as error:
        raise WireError(f"sresd on {node} answered what cannot be read: {error}") from None


def in_words(told: DrillAnswer) -> str:
    """Return one line for people."""
    always = "; injected lines count without one as well (agent.accept_injected)"
    if told.seconds_left > 0:
        seconds = round(told.seconds_left)
        return f"a drill is open for {seconds // 60}:{seconds % 60:02} minutes"
    return "no drill is open" + (always if told.is_always else "")
