"""`sres lifecycle`: run the scripts of nodes that do not join once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import msgspec

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.shared_options import config_option, format_option, hostlist_argument
from slurm_resilience.cli.tables import plain, print_json
from slurm_resilience.errors import NotPermitted, SresError, UsageError
from slurm_resilience.model import Node
from slurm_resilience.wire.frames import UNREADABLE
from slurm_resilience.wire.messages import LifecycleEnd, RunLifecycle

ANSWER_SECONDS = 560.0
AT_ONCE = 16
"""Nodes that are asked at the same time."""


@click.group()
def lifecycle() -> None:
    """Run the scripts that a node runs before it joins."""


@lifecycle.command("run")
@hostlist_argument
@format_option
@config_option
@pass_cluster
def run_scripts(cluster: ClusterView, hostlist: str, form: str) -> None:
    """Run all scripts of nodes again, and start slurmd where they end well.

    The nodes must be out of service and without jobs. Only root and SlurmUser may. Exit with 1 if a
    script fails.
    """
    if not cluster.is_privileged:
        raise NotPermitted("only root and SlurmUser may run a node's scripts; nothing was run")
    nodes = cluster.named(hostlist)
    refuse_in_service(nodes)
    status, _ = cluster.try_status()
    seen: dict[str, Any] = (status or {}).get("nodes", {})
    ends: dict[str, LifecycleEnd] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, end in zip(nodes, pool.map(lambda name: _ask(cluster, name), nodes), strict=True):
            ends[name] = end
            if form == "table":
                for line in in_words(name, end, bool(seen.get(name, {}).get("gave_up"))):
                    click.echo(line)
    if form == "json":
        print_json({name: msgspec.to_builtins(end) for name, end in ends.items()})
    if not all(end.is_well for end in ends.values()):
        raise click.exceptions.Exit(1)


def refuse_in_service(nodes: Mapping[str, Node]) -> None:
    """Refuse nodes that have jobs, or may get one at any moment.

    Raises:
        UsageError: some do; the first one is named.
    """
    for node in nodes.values():
        if node.has_work:
            raise UsageError(f"{node.name} has jobs: drain it, and wait for their end. Nothing ran")
        if node.is_available:
            raise UsageError(f"{node.name} is in service: drain it first. Nothing was run")


def in_words(name: str, end: LifecycleEnd, is_left: bool) -> Iterator[str]:
    """Say how a run ended, for people.

    Args:
        name: the node.
        end: sresd's answer.
        is_left: sresctld has left the node to a person, who must give it back.
    """
    for script in end.scripts:
        how = "skipped" if script.rc is None else f"exit code {script.rc}, {script.seconds:.1f} s"
        yield plain(f"{name}: {script.name}: {how}")
    if not end.is_well:
        yield from (plain(f"{name}: | {line}") for line in end.output)
        yield plain(f"{name}: {end.text or 'failed'}")
        return
    seconds = sum(script.seconds for script in end.scripts)
    yield f"{name}: {len(end.scripts)} scripts ran well in {seconds:.1f} s, slurmd is started"
    if is_left:
        yield f"{name}: it was given up, so it waits for you: sres node cancel {name}"


def _ask(cluster: ClusterView, name: str) -> LifecycleEnd:
    try:
        body = cluster.ask_node(name, RunLifecycle.kind, RunLifecycle(), ANSWER_SECONDS)
        return msgspec.msgpack.decode(body, type=LifecycleEnd)
    except UNREADABLE as error:
        return LifecycleEnd(False, f"sresd's answer cannot be read: {error}")
    except SresError as error:
        return LifecycleEnd(False, str(error))
